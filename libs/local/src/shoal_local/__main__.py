"""`python -m shoal_local` is `shoal`."""

import sys

from shoal_local.cli import main

if __name__ == "__main__":
    sys.exit(main())
