"""The pipelined loop: sampling runs ahead on its devices while the trainer works on its own."""

from __future__ import annotations

import asyncio
from typing import Generic, Protocol, TypeVar

from verl_lab.batch.columns import Batch
from verl_lab.runtime.peer import cancelled

S = TypeVar("S")
"""Samples of a step, and what is known of them."""


class PipelinedSteps(Protocol, Generic[S]):
    """What the loop drives."""

    @property
    def step(self) -> int:
        """Steps finished."""

    @property
    def max_staleness(self) -> int:
        """Steps that sampling may be ahead."""

    async def may_go_on(self) -> bool:
        """Waits while the run is paused; False when it was asked to stop."""

    async def before_step(self) -> None:
        """What is due between steps."""

    async def sample(self, step: int) -> S:
        """Scored samples for a step, by the newest weights there are."""

    async def learn(self, samples: S) -> Batch:
        """Trains on them, and publishes the weights."""

    async def finish_step(self, batch: Batch) -> None:
        """Records the step, evaluates and saves where that is due; `step` is one higher after."""

    def give_back(self) -> None:
        """Takes note that samples which were not trained on are thrown away."""


async def pipelined(lab: PipelinedSteps[S], *, until: int) -> None:
    """Runs steps until `until` are finished or the run is asked to stop.

    A task of its own samples step after step, at most `lab.max_staleness` ahead of the step that
    trains, each by the newest weights published before it begins; so no sample is older. The loop
    waits for the samples of its step, in order, and each finished step lets one more be sampled.
    It ends well at a step boundary. An error of either side ends both, and samples that wait are
    given back: their prompts are drawn again.
    """
    ready: asyncio.Queue[S] = asyncio.Queue()
    may_sample = asyncio.Semaphore(lab.max_staleness + 1)

    async def run_ahead() -> None:
        for step in range(lab.step + 1, until + 1):
            await may_sample.acquire()
            ready.put_nowait(await lab.sample(step))

    sampling = asyncio.create_task(run_ahead(), name="sample ahead")
    try:
        while lab.step < until and await lab.may_go_on():
            await lab.before_step()
            batch = await lab.learn(await _next(ready, sampling))
            await lab.finish_step(batch)
            may_sample.release()
    finally:
        await cancelled(sampling)
        lab.give_back()


async def _next(ready: asyncio.Queue[S], sampling: asyncio.Task[None]) -> S:
    """The samples that come first, or the error that kept them from coming."""
    while ready.empty():
        waiting = asyncio.ensure_future(ready.get())
        await asyncio.wait({waiting, sampling}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        sampling.result()
    return ready.get_nowait()
