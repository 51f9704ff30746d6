"""A run: training in the background, seen from the notebook."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from verl_lab.errors import DeadlineError
from verl_lab.runtime.messages import rebuild_error

if TYPE_CHECKING:
    import pandas as pd

    from verl_lab.batch.columns import Batch
    from verl_lab.session.session import Session

POLL_S = 0.1


class StoppedWaiting(KeyboardInterrupt):
    """The wait was interrupted; the run was not."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class Run:
    """One call of `Session.train`; it goes on whether anybody waits for it or not.

    It can be awaited (`await run`), which keeps a notebook's other callbacks alive meanwhile.
    """

    def __init__(self, session: Session, number: Future[int]) -> None:
        self.session = session
        self._number = number

    @property
    def status(self) -> str:
        """`starting`, `training`, `paused`, `stopping`, `done`, `stopped` or `failed`."""
        if not self._number.done():
            return "starting"
        if self._number.exception() is not None:
            return "failed"
        status = self.session.status()
        return status["runs"][self._number.result()]["outcome"] or str(status["state"])

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or badly."""
        return self.status in ("done", "stopped", "failed")

    @property
    def step(self) -> int:
        """Steps finished."""
        return int(self.session.status()["step"])

    @property
    def metrics(self) -> pd.DataFrame:
        """A row a step, a column a metric."""
        return self.session.metrics

    def samples(self, step: int) -> Batch:
        """The samples that a step trained on."""
        return self.session.samples(step)

    def pause(self) -> None:
        """Halts at the next step boundary."""
        self._call("pause")

    def resume(self) -> None:
        """Goes on after a pause."""
        self._call("resume")

    def stop(self) -> None:
        """Ends at the next step boundary, with an evaluation and a checkpoint."""
        self._call("stop")

    def wait(self, timeout_s: float | None = None) -> Run:
        """Waits for the end of the run. An interrupt ends the waiting only.

        Raises:
            DeadlineError: it had not ended after `timeout_s` seconds; it goes on.
            LabError: what made the run fail.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not self._has_ended():
                if deadline is not None and time.monotonic() > deadline:
                    raise DeadlineError(
                        f"run {self.session.name}: still {self.status} after {timeout_s:g} s; it "
                        f"goes on"
                    )
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            raise self._stopped_waiting() from None
        return self

    def __await__(self) -> Generator[Any, None, Run]:
        return self._wait().__await__()

    async def _wait(self) -> Run:
        while not self._has_ended():
            await asyncio.sleep(POLL_S)  # polling is what lets a notebook's Interrupt through
        return self

    def _has_ended(self) -> bool:
        if not self._number.done():
            return False
        status = self.session.status()
        run = status["runs"][self._number.result()]
        if run["outcome"] == "failed":
            raise rebuild_error(run["error"], "run")
        return run["outcome"] is not None

    def _call(self, method: str) -> None:
        self._number.result()
        self.session.call(method, timeout_s=30.0)

    def _stopped_waiting(self) -> StoppedWaiting:
        return StoppedWaiting(
            f"stopped waiting; run {self.session.name} goes on (run.stop() ends it)"
        )

    def __repr__(self) -> str:
        return f"Run({self.session.name!r}, {self.status})"
