"""Recipes: the order of a step's stages, as ordinary functions.

A recipe takes prompts to a batch that has been trained on. It knows the stages of a `Lab` and
nothing of processes, devices or records, so a copy with one line changed is a recipe too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from verl_lab.batch.columns import Batch
from verl_lab.config.schema import LabConfig


class Stages(Protocol):
    """What a recipe may call. Each stage returns its batch with columns added."""

    config: LabConfig

    async def rollout(self, prompts: Batch) -> Batch:
        """Samples a group of responses per prompt."""

    async def score(self, batch: Batch) -> Batch:
        """Adds `reward` and its parts."""

    async def reference_logprobs(self, batch: Batch) -> Batch:
        """Adds `ref_logprobs`."""

    def advantages(self, batch: Batch) -> Batch:
        """Adds `advantages`."""

    async def update(self, batch: Batch) -> Batch:
        """Trains on the batch; adds `old_logprobs`."""

    async def sync_weights(self) -> int:
        """Brings the rollout workers to the new weights; returns their version."""


Recipe = Callable[[Stages, Batch], Awaitable[Batch]]


async def grpo(lab: Stages, prompts: Batch) -> Batch:
    """Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300).

    With other `algorithm` knobs the same order is Dr.GRPO (arXiv:2503.20783) or RLOO
    (arXiv:2402.14740).
    """
    batch = await lab.rollout(prompts)
    batch = await lab.score(batch)
    if lab.config.algorithm.kl_coef > 0:
        batch = await lab.reference_logprobs(batch)
    batch = lab.advantages(batch)
    batch = await lab.update(batch)
    await lab.sync_weights()
    return batch


RECIPES: dict[str, Recipe] = {"grpo": grpo}
"""By the name that `recipe` gives in the config."""
