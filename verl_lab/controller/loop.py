"""The synchronous loop: each step samples from the weights of the step before."""

from __future__ import annotations

from typing import Protocol

from verl_lab.batch.columns import Batch


class Steps(Protocol):
    """What the loop drives."""

    @property
    def step(self) -> int:
        """Steps finished."""

    async def may_go_on(self) -> bool:
        """Waits while the run is paused; False when it was asked to stop."""

    async def before_step(self) -> None:
        """What is due between steps: changed knobs, an evaluation before the first."""

    def next_prompts(self) -> Batch:
        """The prompts of the next step."""

    async def run_recipe(self, prompts: Batch) -> Batch:
        """One step's stages."""

    async def finish_step(self, batch: Batch) -> None:
        """Records the step, evaluates and saves where that is due; `step` is one higher after."""


async def synchronous(lab: Steps, *, until: int) -> None:
    """Runs steps until `until` are finished or the run is asked to stop.

    It consumes prompts in order, waits for one stage after the other, and is woken by their
    results. It ends well at a step boundary only; an error in a stage leaves it at once, and the
    step it was in is not recorded.
    """
    while lab.step < until and await lab.may_go_on():
        await lab.before_step()
        batch = await lab.run_recipe(lab.next_prompts())
        await lab.finish_step(batch)
