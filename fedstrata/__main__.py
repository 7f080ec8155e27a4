"""``python -m fedstrata``: the command line from a checkout, without an installation."""

import sys

from fedstrata.cli import main

if __name__ == "__main__":
    sys.exit(main())
