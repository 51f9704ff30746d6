"""Following a run from a terminal: polls where it stands, feeds a view, and takes Ctrl-C.

Only this process is interrupted; the run lives in processes of its own, and goes on if this one
dies.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from verl_lab.cli.progress import Lines, LiveLine, View
from verl_lab.cli.terminal import OUT
from verl_lab.config.schema import LabConfig

if TYPE_CHECKING:
    import pandas as pd

POLL_S = 0.2


class Followed(Protocol):
    """A session, as far as it is followed."""

    config: LabConfig

    @property
    def metrics(self) -> pd.DataFrame:
        """A row a step, a column a metric."""

    def status(self) -> dict[str, Any]:
        """Where it stands."""


class Interrupts:
    """Counts Ctrl-C instead of raising, while it is entered."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._one_more)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _one_more(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1


def view_for_terminal() -> View:
    """A line that changes in place on a terminal, stage lines elsewhere."""
    return LiveLine() if OUT.is_terminal else Lines()


def follow(
    session: Followed,
    view: View,
    *,
    is_over: Callable[[], bool],
    is_left: Callable[[], bool],
    after_step: int = -1,
    poll_s: float = POLL_S,
) -> None:
    """Shows the run until it ends, or until nobody looks any more.

    Args:
        session: what to follow.
        view: is told of every step once, in order.
        is_over: whether the run has ended.
        is_left: whether to stop looking.
        after_step: steps up to this one are not shown.
        poll_s: seconds between two looks.
    """
    news = News(after_step)
    num_samples = session.config.trainer.train_batch_size
    while True:
        was_over = is_over()  # asked first, so that the last look sees all that was recorded
        status = session.status()
        view.stand(status)
        if was_over or news.may_have_come(status):
            for step, metrics in news.of(session.metrics):
                view.measured(step, metrics, num_samples=num_samples)
        if was_over or is_left():
            return
        time.sleep(poll_s)


class News:
    """Tells which metrics were not shown yet; an evaluation may come later than its step."""

    def __init__(self, after_step: int = -1) -> None:
        self._step, self._eval = after_step, after_step
        self._seen: tuple[int, dict[str, float]] = (after_step, {})

    def may_have_come(self, status: Mapping[str, Any]) -> bool:
        """Whether the record may hold more than at the last look; cheaper than reading it."""
        step, last = status["step"], dict(status.get("last") or {})
        if step < self._seen[0]:  # the run went back: what comes now is new
            self._step, self._eval = min(self._step, step), min(self._eval, step)
        is_new = (step, last) != self._seen
        self._seen = (step, last)
        return is_new

    def of(self, frame: pd.DataFrame) -> list[tuple[int, dict[str, float]]]:
        """`(step, metrics)` not handed out before, in the order of the steps."""
        found = []
        for step in frame.index[frame.index > min(self._step, self._eval)]:
            row = {str(name): float(value) for name, value in frame.loc[step].dropna().items()}
            fresh: dict[str, float] = {}
            if step > self._step and (rest := {k: v for k, v in row.items() if not _is_eval(k)}):
                self._step = int(step)
                fresh |= rest
            if step > self._eval and (evals := {k: v for k, v in row.items() if _is_eval(k)}):
                self._eval = int(step)
                fresh |= evals
            if fresh:
                found.append((int(step), fresh))
        return found


def _is_eval(name: str) -> bool:
    return name.startswith("eval/") or name == "time/eval_s"
