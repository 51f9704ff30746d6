"""`verl-lab check`: what a config means on this machine, without starting anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_lab.cli.terminal import print_line
from verl_lab.config.load import load_config, start_problems
from verl_lab.config.plan import plan
from verl_lab.errors import ConfigError


def check(
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="A YAML config.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Over the config's keys.")
    ] = None,
) -> None:
    """Check a config, and show the plan: sizes, who runs where.

    Nothing is started.

    Example: verl-lab check --config configs/quickstart.yaml rollout.group_size=16
    """
    from verl_lab.data.tasks import task_problems

    settings = load_config(config, overrides or [])
    problems = [*start_problems(settings), *task_problems(settings.task, is_deep=True)]
    if problems:
        raise ConfigError("\n".join([f"{config}: cannot start:", *(f"  {p}" for p in problems)]))
    print_line(plan(settings).describe())
