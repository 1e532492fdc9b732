"""Have the model ready before anything loads it: ``python -m shoal_model``. Ends with 1 and a sentence if it cannot."""

import sys

from shoal_model.prepare import ModelUnavailable, prepare, show_served
from shoal_model.settings import ModelSettings


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    """The exit code."""
    settings = ModelSettings.load("model")
    try:
        prepared = prepare(settings.model, settings.models_dir, _say)
        link = show_served(prepared, settings.models_dir)
    except ModelUnavailable as exc:
        _say(str(exc))
        return 1
    except OSError as exc:
        advice = "let this user in, or make room"
        _say(f"SHOAL_MODELS_DIR={settings.models_dir} cannot be written to ({exc.strerror}): {advice}")
        return 1
    _say(f"model {prepared.served_name} is in {prepared.folder}, and {link} leads there")
    return 0


if __name__ == "__main__":
    sys.exit(main())
