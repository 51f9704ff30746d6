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
from verl_lab.errors import WorkerError
from verl_lab.store.database import Reader

if TYPE_CHECKING:
    from verl_lab.config.schema import LabConfig
    from verl_lab.store.folder import RunFolder

POLL_S = 0.2
REMARKABLE = ("data", "reward_error", "recovery", "worker_died", "snapshot")
"""Kinds of events that a person wants to see at once."""
LIFE = ("begin", "done", "stopped", "failed")
"""Kinds of events that say whether the run is over."""


class Followed(Protocol):
    """A session, as far as it is followed."""

    config: LabConfig
    folder: RunFolder

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
    news: News | None = None,
    poll_s: float = POLL_S,
) -> None:
    """Shows the run until it ends, or until nobody looks any more.

    Args:
        session: what to follow.
        view: is told of every step once, in order.
        is_over: whether the run has ended.
        is_left: whether to stop looking.
        news: knows what not to show; by default everything is new.
        poll_s: seconds between two looks.
    """
    news = news or News()
    num_samples = session.config.trainer.train_batch_size
    while True:
        was_over = is_over()  # asked first, so that the last look sees all that was recorded
        status = session.status()
        view.stand(status)
        with Reader(session.folder) as reader:
            for text in news.remarks(reader):
                view.remark(text)
            if was_over or news.may_have_come(status):
                for step, metrics in news.metrics(reader):
                    view.measured(step, metrics, num_samples=num_samples)
        if was_over or is_left():
            return
        time.sleep(poll_s)


def end_on_record(folder: RunFolder) -> str:
    """How a run whose session is gone has ended by its record: `done`, `stopped` or nothing.

    Raises:
        WorkerError: it failed.
    """
    with Reader(folder) as reader:
        events = reader.events()
    life = events[events["kind"].isin(LIFE)]
    kind, text = ("begin", "") if life.empty else life[["kind", "text"]].iloc[-1]
    if kind == "failed":
        raise WorkerError("run", "failed", text)
    return "" if kind == "begin" else str(kind)


class News:
    """Tells what in a run's record was not shown yet.

    An evaluation may come later than the rest of its step, and a run may go back to an earlier one.
    """

    def __init__(self, after_step: int = -1, since: float = 0.0) -> None:
        """Takes as shown all up to `after_step`, and events before `since` (epoch seconds)."""
        self._step, self._eval = after_step, after_step
        self._since = since
        self._event_id = 0
        self._reward_errors: set[str] = set()
        self._num_attempts: int | None = None
        self._seen: tuple[int, dict[str, float]] = (after_step, {})

    def may_have_come(self, status: Mapping[str, Any]) -> bool:
        """Whether there may be metrics since the last look; cheaper than reading them."""
        seen = (status["step"], dict(status.get("last") or {}))
        is_new = seen != self._seen
        self._seen = seen
        return is_new

    def metrics(self, reader: Reader) -> list[tuple[int, dict[str, float]]]:
        """`(step, metrics)` not handed out before, in the order of the steps."""
        self._go_back(reader)
        found = []
        # From the step last shown on: its evaluation may have come meanwhile.
        for step, row in reader.metrics(after_step=self._step - 1).iterrows():
            number = int(str(step))
            known = {str(name): float(value) for name, value in row.dropna().items()}
            evals = {k: v for k, v in known.items() if _is_eval(k) and number > self._eval}
            rest = {k: v for k, v in known.items() if not _is_eval(k) and number > self._step}
            self._eval = number if evals else self._eval
            self._step = number if rest else self._step
            if rest or evals:
                found.append((number, rest | evals))
        return found

    def remarks(self, reader: Reader) -> list[str]:
        """Remarkable events not handed out before."""
        events = reader.events(self._event_id)
        if len(events):
            self._event_id = int(events["id"].iloc[-1])
        shown = events[(events["time"] >= self._since) & events["kind"].isin(REMARKABLE)]
        return [
            f"[{kind.replace('_', ' ').capitalize()}] {text.rstrip()}"
            for kind, text in zip(shown["kind"], shown["text"], strict=True)
            if not self._is_known(kind, text)
        ]

    def _is_known(self, kind: str, text: str) -> bool:
        """Whether it is told otherwise: the step's reward line counts what fails again."""
        if kind == "worker_died":
            return text.startswith("reward-")
        head = text.partition("\n")[0]
        is_known = kind == "reward_error" and head in self._reward_errors
        self._reward_errors.add(head)
        return is_known

    def _go_back(self, reader: Reader) -> None:
        """Takes as not shown what the run does again: each attempt begins from some step."""
        begins = reader.attempts()["from_step"]
        if self._num_attempts is not None and len(begins) > self._num_attempts:
            step = int(begins.iloc[self._num_attempts :].min())
            self._step, self._eval = min(self._step, step), min(self._eval, step)
        self._num_attempts = len(begins)


def _is_eval(name: str) -> bool:
    return name.startswith("eval/") or name == "time/eval_s"
