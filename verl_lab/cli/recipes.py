"""`verl-lab recipes`: what can be learned, and what each recipe sets."""

from __future__ import annotations

import difflib
from typing import Annotated

import typer

from verl_lab.cli.terminal import print_line
from verl_lab.config.presets import PRESETS, describe_preset
from verl_lab.errors import ConfigError


def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="One of them, for all that it sets.")
    ] = None,
) -> None:
    """List the recipes, or show the keys that one sets.

    Example: verl-lab recipes dapo
    """
    if name is None:
        width = max(map(len, PRESETS))
        for known, preset in PRESETS.items():
            print_line(f"{known:{width}}  {preset.summary}")
        return
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(PRESETS)}"
        raise ConfigError(f"recipe: there is no {name!r}; {hint}")
    print_line(describe_preset(name))
