"""Worker groups: the rollout, trainer and reward workers, each called as if it were one.

A call splits a batch over the group's workers, runs it everywhere at the same time, and puts the
rows back in order. A rollout or reward worker that dies holds nothing that is lost: it is
replaced, brought to the current weights, and its share is done again. A trainer that dies takes
the policy with it, so its error goes up to the loop, which restores the last checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from verl_lab.batch.balance import split_groups
from verl_lab.batch.columns import Batch
from verl_lab.errors import DeadlineError, WorkerError
from verl_lab.runtime.peer import Peer, gather
from verl_lab.runtime.supervisor import Supervisor

SILENCE_S = 600.0
"""Longest silence of a worker within one call. Progress reports come several times a second."""
MAX_RETRIES = 2
"""How often one share is tried again after its worker died."""

Rows = np.ndarray[Any, Any]
"""Row numbers."""
Progress = Callable[[int, int], None]
"""`(done, total)` of the stage under way."""


class Spans(Protocol):
    """Writes down who did what when."""

    def __call__(self, peer: Peer, kind: str, start: float, end: float) -> None:
        """Times are in seconds since the epoch."""


class Group:
    """The workers of one role."""

    def __init__(self, role: str, service: str, devices: list[str], supervisor: Supervisor) -> None:
        self.role, self.service, self.supervisor = role, service, supervisor
        self.names = [f"{role}-{i}" for i in range(len(devices))]
        self.devices = devices

    @property
    def peers(self) -> list[Peer]:
        """The workers as they are now."""
        return [self.supervisor.peers[name] for name in self.names]

    async def start(self, arguments: dict[str, Any]) -> None:
        """Starts all workers at the same time."""
        await gather(
            *(
                self.supervisor.start(name, device, self.service, {**arguments, "rank": rank})
                for rank, (name, device) in enumerate(zip(self.names, self.devices, strict=True))
            )
        )

    async def revive(self, name: str) -> Peer:
        """A new worker in the place of a dead one, and another if that one dies while it starts."""
        for _ in range(MAX_RETRIES):
            try:
                return await self.supervisor.restart(name)
            except WorkerError:
                continue
        return await self.supervisor.restart(name)


class RolloutGroup(Group):
    """Samples responses."""

    def __init__(self, devices: list[str], supervisor: Supervisor) -> None:
        service = "verl_lab.engines.rollout.service:RolloutService"
        super().__init__("rollout", service, devices, supervisor)
        self.weights: Path | None = None

    async def load_weights(self, folder: Path, span: Spans) -> list[dict[str, Any]]:
        """Brings every worker to the weights published in `folder`."""
        self.weights = folder
        return await gather(*(self._load(name, span) for name in self.names))

    async def generate(
        self,
        prompts: Batch,
        sampling: dict[str, Any],
        *,
        step: int,
        slots: int,
        progress: Progress,
        span: Spans,
    ) -> Batch:
        """`group_size` responses per prompt, in the order of the prompts.

        Args:
            prompts: a row a prompt, with `group_id` and `prompt_ids`.
            sampling: the fields of `engines.rollout.base.Sampling`.
            step: keys the sampling noise.
            slots: sequences in flight over all workers.
        """
        group_size = sampling["group_size"]
        lengths = [len(ids) + sampling["max_new_tokens"] for ids in prompts.lists("prompt_ids")]
        shares = [
            share
            for share in split_groups(lengths, prompts["group_id"], len(self.names))
            if len(share)
        ]
        done = [0] * len(shares)

        def reporter(i: int) -> Callable[[dict[str, Any]], None]:
            def on_report(report: dict[str, Any]) -> None:
                done[i] = report.get("sequences_done", done[i])
                progress(sum(done), len(prompts) * group_size)

            return on_report

        parts = await gather(
            *(
                self._share(
                    name,
                    (prompts.take(share), sampling),
                    {"step": step, "slots": max(1, -(-slots // len(shares)))},
                    reporter(i),
                    span,
                )
                for i, (name, share) in enumerate(zip(self.names, shares, strict=False))
            )
        )
        order = np.concatenate([_rows(share, group_size) for share in shares])
        return Batch.concat(parts).take(np.argsort(order, kind="stable"))

    async def _share(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        on_report: Callable[[dict[str, Any]], None],
        span: Spans,
    ) -> Batch:
        for attempt in range(MAX_RETRIES + 1):
            peer = self.supervisor.peers[name]
            try:
                with Timed(span, peer, "generate"):
                    return await peer.call(  # type: ignore[no-any-return]
                        "generate", *args, **kwargs, deadline_s=SILENCE_S, on_report=on_report
                    )
            except (WorkerError, DeadlineError) as error:
                is_its_own = peer.is_alive and isinstance(error, WorkerError)
                if is_its_own or attempt == MAX_RETRIES:
                    raise
                await self.revive(name)
                if self.weights is not None:
                    await self._load(name, span)
        raise AssertionError("unreachable")

    async def _load(self, name: str, span: Spans) -> dict[str, Any]:
        for attempt in range(MAX_RETRIES + 1):
            peer = self.supervisor.peers[name]
            if not peer.is_alive:
                peer = await self.revive(name)
            try:
                with Timed(span, peer, "load_weights"):
                    return await peer.call(  # type: ignore[no-any-return]
                        "load_weights", self.weights, deadline_s=SILENCE_S
                    )
            except WorkerError:
                if peer.is_alive or attempt == MAX_RETRIES:
                    raise
        raise AssertionError("unreachable")


class TrainerGroup(Group):
    """Holds and updates the policy, and the frozen reference beside it."""

    def __init__(self, devices: list[str], supervisor: Supervisor) -> None:
        service = "verl_lab.engines.trainer.service:TrainerService"
        super().__init__("trainer", service, devices, supervisor)

    async def call(
        self, method: str, *args: Any, span: Spans, progress: Progress | None = None, **kwargs: Any
    ) -> Any:
        """The result of a method of the trainer."""

        def on_report(report: dict[str, Any]) -> None:
            if progress is not None and "total" in report:
                progress(report["done"], report["total"])

        peer = self.peers[0]
        with Timed(span, peer, method):
            return await peer.call(
                method, *args, **kwargs, deadline_s=SILENCE_S, on_report=on_report
            )


class Timed:
    """Records a span around a call, also when it fails."""

    def __init__(self, span: Spans, peer: Peer, kind: str) -> None:
        self._span, self._peer, self._kind = span, peer, kind

    def __enter__(self) -> None:
        self._start = time.time()

    def __exit__(self, *_: object) -> None:
        self._span(self._peer, self._kind, self._start, time.time())


def _rows(share: Iterable[int], group_size: int) -> np.ndarray[Any, Any]:
    first = np.asarray(list(share), dtype=np.int64)[:, None] * group_size
    return (first + np.arange(group_size)).ravel()
