"""`python -m fedpact.cli` is the command `fedpact`."""

import sys

from fedpact.cli import main

if __name__ == "__main__":
    sys.exit(main())
