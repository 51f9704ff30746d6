"""Entries of reasoning-gym as text that gives back the very same entry.

JSON alone turns tuples into lists and number keys into text. A verifier that compares then marks a
right answer wrong: of `arc_agi`, `rearc` and `graph_color` among others.
"""

from __future__ import annotations

import json
from typing import Any

from verl_lab.errors import DataError

TUPLE = "__tuple__"
PAIRS = "__pairs__"


def encode(entry: Any) -> str:
    """An entry as JSON, with tuples and dicts of other keys than text marked as such.

    Raises:
        DataError: it holds something that would not come back.
    """
    return json.dumps(_marked(entry), ensure_ascii=False, default=_number)


def decode(text: str) -> Any:
    """The inverse of `encode`."""
    return json.loads(text, object_hook=_unmarked)


def _marked(value: Any) -> Any:
    if isinstance(value, tuple):
        return {TUPLE: [_marked(item) for item in value]}
    if isinstance(value, list):
        return [_marked(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _marked(item) for key, item in value.items()}
        return {PAIRS: [[_marked(key), _marked(item)] for key, item in value.items()]}
    return value


def _number(value: Any) -> Any:
    if getattr(value, "shape", None) == ():  # of numpy, which this file need not import
        return value.item()
    raise DataError(
        f"task: a problem holds {value!r}, a {type(value).__name__}, which cannot be kept beside "
        f"it; choose another task"
    )


def _unmarked(found: dict[str, Any]) -> Any:
    if found.keys() == {TUPLE}:
        return tuple(found[TUPLE])
    if found.keys() == {PAIRS}:
        return dict(found[PAIRS])
    return found
