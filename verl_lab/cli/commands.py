"""The subcommands of `verl-lab`."""

from __future__ import annotations

from typing import Annotated

import typer

from verl_lab import __version__
from verl_lab.cli import check, doctor, export, recipes, runs, sessions, train
from verl_lab.cli.terminal import print_line

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
app.command("recipes")(recipes.recipes)
app.command("ps")(sessions.ps)
app.command("attach")(sessions.attach)
app.command("stop")(sessions.stop)
app.command("runs")(runs.runs)
app.command("export")(export.export)
app.command("doctor")(doctor.doctor)


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
