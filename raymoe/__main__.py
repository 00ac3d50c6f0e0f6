"""Runs the `raymoe` command, which is the same as `python -m raymoe`."""

import sys

from raymoe import shell


def main() -> int:
    """Run the command of this process. Its signals are handled before anything slow is imported."""
    try:
        shell.prepare()
        from raymoe.cli import main as run_command
    except shell.Interrupted as interrupted:
        shell.ignore_stops()
        print(interrupted.stopped, file=sys.stderr)
        return interrupted.stopped.exit_code
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
