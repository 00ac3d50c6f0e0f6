"""`python -m raymoe` is the `raymoe` command."""

import sys

from raymoe.cli import main

if __name__ == "__main__":
    sys.exit(main())
