"""Stages that work on a later step than the one whose turn it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Ahead:
    """A step that is sampled before its turn."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    """What its stages measured."""


_ahead: ContextVar[Ahead | None] = ContextVar("ahead", default=None)


def ahead_of_turn() -> Ahead | None:
    """The step that this task works on, if it is ahead; every other task works on the next."""
    return _ahead.get()


@contextmanager
def working_ahead(step: int) -> Iterator[Ahead]:
    """Lets this task's stages work on a later step, with metrics of its own."""
    ahead = Ahead(step)
    token = _ahead.set(ahead)
    try:
        yield ahead
    finally:
        _ahead.reset(token)
