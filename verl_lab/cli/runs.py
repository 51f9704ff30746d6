"""`verl-lab runs`: the run folders on disk."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_lab.cli.terminal import print_line, print_table


def runs(
    runs_dir: Annotated[
        Path, typer.Option("--runs-dir", help="The folder that holds the run folders.")
    ] = Path("runs"),
) -> None:
    """List the runs on disk, newest last."""
    from verl_lab.session.registry import runs as runs_on_disk

    frame = runs_on_disk(runs_dir)
    if not len(frame):
        print_line(f"No runs in {runs_dir}.")
        return
    columns = [str(frame.index.name), *map(str, frame.columns)]
    print_table(columns, [[str(name), *map(_cell, row)] for name, *row in frame.itertuples()])


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.3f}"
    return str(value)
