"""The workers that score: reward functions in processes that may be killed, and a reward model in
one of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_lab.batch.columns import Batch
from verl_lab.config.schema import LabConfig
from verl_lab.controller.groups import MAX_RETRIES, SILENCE_S, Group, Progress, Rows, Spans, Timed
from verl_lab.errors import DeadlineError, WorkerError
from verl_lab.runtime.peer import gather
from verl_lab.runtime.supervisor import Supervisor

MAX_DEATHS = 3
"""As many deaths of workers within one call mean that the reward is broken."""


@dataclass
class ScoreCounts:
    """What went wrong while scoring."""

    timeouts: int = 0
    errors: int = 0
    traceback: str = ""


class _ScoreJob:
    """One part's scores as they come in from several workers."""

    def __init__(
        self,
        batch: Batch,
        part: str,
        config: LabConfig,
        workers: int,
        *,
        progress: Progress,
        span: Spans,
    ) -> None:
        self.batch, self.part, self.config = batch, part, config
        self.scores = np.full(len(batch), config.reward.fallback)
        self.counts = ScoreCounts()
        self.span, self._progress = span, progress
        self._done = [0] * workers
        self._num_deaths = 0

    def at(self, worker: int, row: int) -> None:
        """Notes how far a worker is."""
        self._done[worker] = row
        self._progress(sum(self._done), len(self.batch))

    def fill(self, rows: Rows, scored: Batch, stats: dict[str, Any]) -> None:
        """Takes the scores of some rows."""
        self.scores[rows] = scored.numpy(f"reward/{self.part}")
        self.counts.errors += stats["errors"]
        self.counts.traceback = self.counts.traceback or stats["traceback"]

    def count_death(self, row: int | None, error: WorkerError) -> None:
        """Notes that a worker died; raises if that goes on, and a run would but limp."""
        self._num_deaths += 1
        if self._num_deaths >= MAX_DEATHS:
            where = "a batch" if row is None else f"row {row}"
            raise WorkerError(
                error.worker,
                f"{error.reason} while reward part {self.part} scored {where}, death "
                f"{self._num_deaths} of workers in one call; the function ends its own process, so "
                f"run it by hand on that response",
                error.log_tail,
            ) from error

    def set_aside(self, rows: Rows, current: int | None, error: Exception) -> Rows:
        """Counts the row under way as failed, or all where it is not known; returns the others."""
        lost = len(rows) if current is None else 1
        if isinstance(error, DeadlineError):
            self.counts.timeouts += lost
        else:
            self.counts.errors += lost
        self.counts.traceback = self.counts.traceback or str(error)
        return rows[:0] if current is None else np.delete(rows, current)


class RewardGroup(Group):
    """Scores responses, in processes that may be killed."""

    def __init__(self, devices: list[str], supervisor: Supervisor) -> None:
        super().__init__("reward", "verl_lab.engines.reward:RewardService", devices, supervisor)

    async def replace_functions(self, arguments: dict[str, Any]) -> None:
        """Starts all workers anew with other functions."""
        await gather(
            *(
                self.supervisor.restart(name, {**arguments, "rank": rank})
                for rank, name in enumerate(self.names)
            )
        )

    async def check_columns(self, names: list[str]) -> None:
        """Raises if a reward function needs a column that is not among `names`."""
        await self.peers[0].call("check_columns", names, deadline_s=SILENCE_S)

    async def score(
        self, batch: Batch, part: str, config: LabConfig, *, progress: Progress, span: Spans
    ) -> tuple[np.ndarray[Any, Any], ScoreCounts]:
        """The scores of one part, in the order of the rows, with the fallback where it failed."""
        workers = len(self.names)
        job = _ScoreJob(batch, part, config, workers, progress=progress, span=span)
        shares = np.array_split(np.arange(len(batch)), len(self.names))
        await gather(
            *(
                self._share(i, name, share, job)
                for i, (name, share) in enumerate(zip(self.names, shares, strict=True))
                if len(share)
            )
        )
        return job.scores, job.counts

    async def _share(self, number: int, name: str, rows: Rows, job: _ScoreJob) -> None:
        """Scores some rows on one worker. One that hangs or dies twice is set aside."""
        left, suspect = rows, None
        while len(left):
            current: int | None = None

            def on_report(report: dict[str, Any], before: int = len(rows) - len(left)) -> None:
                nonlocal current
                if "row" in report:
                    current = int(report["row"])
                if (done := report.get("done", report.get("row"))) is not None:
                    job.at(number, before + int(done))

            peer = self.supervisor.peers[name]
            if not peer.is_alive:
                peer = await self.revive(name)
            try:
                with Timed(job.span, peer, "score"):
                    scored, stats = await peer.call(
                        "score",
                        job.batch.take(left),
                        job.part,
                        deadline_s=job.config.reward.timeout_s,
                        grace_s=SILENCE_S,  # the user's time begins with the first report
                        on_report=on_report,
                    )
            except (WorkerError, DeadlineError) as error:
                if peer.is_alive and isinstance(error, WorkerError):
                    raise  # the service itself failed, not the user's function
                await self.revive(name)
                if isinstance(error, WorkerError):
                    row = None if current is None else int(left[current])
                    job.count_death(row, error)
                    if suspect != (row, "died"):
                        suspect = (row, "died")  # perhaps it was killed from outside: once more
                        continue
                left = job.set_aside(left, current, error)
                continue
            job.fill(left, scored, stats)
            return


class RewardModelGroup(Group):
    """Scores responses with a model; a worker that dies or hangs holds nothing that is lost."""

    def __init__(self, devices: list[str], supervisor: Supervisor) -> None:
        service = "verl_lab.engines.reward_model:RewardModelService"
        super().__init__("reward_model", service, devices, supervisor)

    async def score(
        self, batch: Batch, part: str, config: LabConfig, *, progress: Progress, span: Spans
    ) -> tuple[np.ndarray[Any, Any], ScoreCounts]:
        """The model's scores, in the order of the rows."""

        def on_report(report: dict[str, Any]) -> None:
            if "row" in report:
                progress(report["row"], len(batch))

        name = self.names[0]
        for attempt in range(MAX_RETRIES + 1):
            peer = self.supervisor.peers[name]
            if not peer.is_alive:
                peer = await self.revive(name)
            try:
                with Timed(span, peer, "score"):
                    scored = await peer.call(
                        "score", batch, deadline_s=SILENCE_S, on_report=on_report
                    )
                return scored.numpy(f"reward/{part}"), ScoreCounts()
            except (WorkerError, DeadlineError) as error:
                is_its_own = peer.is_alive and isinstance(error, WorkerError)
                if is_its_own or attempt == MAX_RETRIES:
                    raise
                await self.revive(name)
        raise AssertionError("unreachable")
