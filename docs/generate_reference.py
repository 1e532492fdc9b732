"""Write docs/reference from the code that it describes: ``make gen`` runs this, a test compares.

Settings come from every module named ``settings``, metrics from every ``metrics``, errors from the error table and
the comments of its enum, fields of the APIs from the tables of the converters, the OpenAPI document from their
structures. A module that does not import stops the
generation.
docs/decisions/0019-generated-code-is-checked-in.md
"""

import enum
import importlib
import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

from openapi_document import openapi_page
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shoal_contracts.errors import ERRORS, ShoalError
from shoal_contracts.v1 import common_pb2 as pb
from shoal_runtime.metrics import Catalogue
from shoal_runtime.settings import PREFIX, EnvironmentSettings, ServiceSettings

ROOT = Path(__file__).parents[1]
NOTICE = "<!-- Made by `make gen` from the code. Do not edit. -->\n"


def modules(name: str) -> Iterator[tuple[str, ModuleType]]:
    """Every module of this name in our packages, with the name of the package right around it."""
    for path in sorted(ROOT.glob(f"*/*/src/**/{name}.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts[3:]
        yield parts[-2].removeprefix("shoal_"), importlib.import_module(".".join(parts))


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def type_of(field: FieldInfo) -> str:
    """The type and its range, as short as a person would write it."""
    annotation = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        name = " or ".join(f"`{member.value}`" for member in annotation)
    elif typing.get_origin(annotation) is typing.Literal:
        name = " or ".join(f"`{value}`" for value in typing.get_args(annotation))
    else:
        name = annotation.__name__ if isinstance(annotation, type) else re.sub(r"\b\w+\.", "", str(annotation))
    signs = (("gt", "> "), ("ge", "≥ "), ("lt", "< "), ("le", "≤ "), ("multiple_of", "multiple of "))
    bounds = [f"{sign}{getattr(rule, key)}" for rule in field.metadata for key, sign in signs if hasattr(rule, key)]
    return f"{name}, {', '.join(bounds)}" if bounds else name


def default_of(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required" if field.default_factory is None else "made at start"
    if isinstance(field.default, SecretStr):
        return "secret"
    value = getattr(field.default, "value", field.default)
    return "empty" if value in ("", ()) else "none" if value is None else f"`{value}`"


def settings_table(prefix: str, fields: Mapping[str, FieldInfo]) -> str:
    """Fields that are groups have tables of their own."""
    rows = [
        f"| `{prefix}{name.upper()}` | {cell(type_of(field))} | {cell(default_of(field))} "
        f"| {cell(field.description or '')} |\n"
        for name, field in fields.items()
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, EnvironmentSettings))
    ]
    return "| variable | type | default | when to change it |\n| --- | --- | --- | --- |\n" + "".join(rows)


def settings_models(module: ModuleType) -> Iterator[type[EnvironmentSettings]]:
    """Those that a process reads, without the groups in them."""
    kinds = [value for value in vars(module).values() if isinstance(value, type)]
    groups = [group for kind in kinds if issubclass(kind, EnvironmentSettings) for group in kind.groups().values()]
    for value in vars(module).values():
        is_model = isinstance(value, type) and issubclass(value, EnvironmentSettings)
        if is_model and value.__module__ == module.__name__ and value.model_fields and value not in groups:
            yield value


def settings_page() -> str:
    shared = ServiceSettings.model_fields
    parts = [
        NOTICE,
        "# Settings\n\nEnvironment only, read once at start. An unknown variable under a service's prefix stops it.\n",
        "\n## Every service\n\nFor all at once as written here, or for one service with its own prefix "
        f"(`{PREFIX}GATEWAY_LOG_LEVEL`), which wins.\n\n",
        settings_table(PREFIX, shared),
    ]
    for group, module in modules("settings"):
        if group == "runtime":
            continue
        for model in settings_models(module):
            redefined = vars(model).get("__annotations__", {})
            own = {
                name: model.model_fields[name] for name in model.model_fields if name in redefined or name not in shared
            }
            is_unprefixed = not issubclass(model, ServiceSettings) and model.shared_fields >= own.keys()
            table = settings_table(PREFIX if is_unprefixed else f"{PREFIX}{group.upper()}_", own)
            parts.append(f"\n## {group}\n\n{inspect.cleandoc(model.__doc__ or '')}\n\n{table}")
            for name, kind in model.groups().items():
                table = settings_table(f"{PREFIX}{group.upper()}_{name.upper()}_", kind.model_fields)
                parts.append(f"\n## {group}: {name}\n\n{inspect.cleandoc(kind.__doc__ or '')}\n\n{table}")
    return "".join(parts)


def metrics_page() -> str:
    parts = [NOTICE, "# Metrics\n\nOne catalogue a process, at `/metrics`. Every process also shows `shoal_runtime`.\n"]
    for group, module in modules("metrics"):
        for catalogue in (value for value in vars(module).values() if isinstance(value, Catalogue)):
            if catalogue.prefix != f"shoal_{group}":  # imported from elsewhere, shown there
                continue
            parts.append(f"\n## {group}\n\n| name | kind | labels | what it counts | when it moves |\n")
            parts.append("| --- | --- | --- | --- | --- |\n")
            parts += [
                f"| `{entry.name}` | {entry.kind} | {', '.join(entry.labels)} | {cell(entry.help)} "
                f"| {cell(entry.action)} |\n"
                for entry in catalogue.entries
            ]
    return "".join(parts)


def code_comments() -> dict[str, str]:
    """What the enum's comments say about each code; descriptors of installed modules carry no comments."""
    proto = (ROOT / "libs/contracts/proto/shoal_contracts/v1/common.proto").read_text()
    return dict(re.findall(r"^  ([A-Z_]+) = \d+; *// (.*)$", proto, re.MULTILINE))


def errors_page() -> str:
    comments = code_comments()
    parts = [NOTICE, "# Errors\n\nOne code, the same on HTTP, gRPC and NATS (`shoal_contracts.errors`).\n"]
    for branch in ShoalError.__subclasses__():
        doc = branch.__doc__ or ""
        parts.append(f"\n## {branch.__name__}\n\n{doc}\n\n| code | HTTP | gRPC | tried elsewhere | meaning |\n")
        parts.append("| --- | --- | --- | --- | --- |\n")
        parts += [
            f"| `{pb.ErrorCode.Name(code)}` | {entry.http_status} | {entry.grpc_status.name} "
            f"| {'yes' if entry.is_retried else 'no'} | {cell(comments.get(pb.ErrorCode.Name(code), doc))} |\n"
            for code, entry in ERRORS.items()
            if entry.type is branch
        ]
    return "".join(parts)


API_TABLES = {
    "Chat Completions": "chat_fields",
    "Completions": "completions",
    "Responses": "responses_fields",
    "Messages": "messages_fields",
}


def apis_page() -> str:
    """What becomes of each field, from the tables that the converters work by."""
    parts = [
        NOTICE,
        "# The APIs, field by field\n\n"
        "*honoured*: as the API says. *translated*: done in other words. *ignored*: taken, and changes nothing. "
        "*refused*: a 400 that names it. A field that is not here is refused by name. Nested names are paths below "
        "the body.\n",
    ]
    for api, module in API_TABLES.items():
        table = importlib.import_module(f"shoal_tokenizer.codec.requests.{module}").FIELDS
        parts.append(f"\n## {api}\n\n| field | here | how, or why not |\n| --- | --- | --- |\n")
        parts += [f"| `{name}` | {entry.verdict.value} | {cell(entry.note)} |\n" for name, entry in table.items()]
    return "".join(parts)


def pages() -> dict[str, str]:
    """File name under docs/reference -> its text."""
    return {
        "settings.md": settings_page(),
        "metrics.md": metrics_page(),
        "errors.md": errors_page(),
        "apis.md": apis_page(),
        "openapi.json": openapi_page(),
    }


def main() -> None:
    for name, text in pages().items():
        (ROOT / "docs/reference" / name).write_text(text)


if __name__ == "__main__":
    main()
