"""Runs the `raymoe` command for `python -m raymoe`."""

import sys

from raymoe.cli import main

if __name__ == "__main__":
    sys.exit(main())
