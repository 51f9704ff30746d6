"""Where the `verl-lab` command begins: the end of every error is a message and an exit code.

It imports nothing at its top, so that Ctrl-C shows no traceback however early it comes.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; an error of ours is one message and an exit code, no traceback."""
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(130)


def _run() -> None:
    from verl_lab.cli.commands import app
    from verl_lab.cli.exits import exit_code
    from verl_lab.cli.terminal import print_error
    from verl_lab.errors import LabError

    try:
        app(prog_name="verl-lab")
    except LabError as error:
        print_error(str(error))
        sys.exit(exit_code(error))
