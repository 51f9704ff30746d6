"""The `verl-lab` command: which subcommands there are, and how errors end it.

Exit codes: 0 well, 1 a run or call failed, 2 wrong usage, config, data or devices, 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from verl_lab import __version__
from verl_lab.cli import check, doctor, runs, sessions, train
from verl_lab.cli.terminal import print_error, print_line
from verl_lab.errors import ConfigError, DataError, DeviceError, LabError

app = typer.Typer(
    name="verl-lab",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Reinforcement learning of language models, on the devices you choose.",
    epilog="Example: verl-lab train --config configs/quickstart.yaml trainer.learning_rate=1e-5",
)
app.command("train")(train.train)
app.command("check")(check.check)
app.command("ps")(sessions.ps)
app.command("attach")(sessions.attach)
app.command("stop")(sessions.stop)
app.command("runs")(runs.runs)
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Runs the command line; an error of ours is one message and an exit code, no traceback."""
    try:
        app(prog_name="verl-lab")
    except LabError as error:
        print_error(str(error))
        sys.exit(exit_code(error))


def exit_code(error: LabError) -> int:
    """2 for what the user has to change before anything can start, else 1."""
    return 2 if isinstance(error, ConfigError | DeviceError | DataError) else 1


def _show_version(asked: bool) -> None:
    if asked:
        print_line(f"verl-lab {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Reinforcement learning of language models, on the devices you choose."""
