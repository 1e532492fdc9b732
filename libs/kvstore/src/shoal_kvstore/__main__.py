"""One ``lmcache server`` with our plugins: ``python -m shoal_kvstore``.

This process becomes the server: signals reach it, and its exit code is the server's own.
"""

import os
import sys
from typing import NoReturn

from shoal_kvstore.command import ENVIRON, NO_PROXY, lmcache_argv
from shoal_kvstore.settings import KvStoreSettings
from shoal_runtime.servers import ServerUnavailable


def main() -> NoReturn:
    """Does not return: SystemExit with a sentence when the server cannot be started."""
    settings = KvStoreSettings.load("kvstore")
    spec = settings.spec
    try:
        argv = lmcache_argv(spec)
        spec.shared_directory.mkdir(parents=True, exist_ok=True)
    except ServerUnavailable as exc:
        sys.exit(str(exc))
    except OSError as exc:
        sys.exit(f"SHOAL_KVSTORE_FOLDER={settings.folder} cannot be used: {exc.strerror}")
    sys.stdout.flush()
    os.execve(argv[0], argv, {**ENVIRON, **os.environ, **NO_PROXY})


if __name__ == "__main__":
    main()
