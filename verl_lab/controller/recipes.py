"""Recipes: the order of a step's stages, as ordinary functions.

A recipe takes prompts (or samples that came with the data) to a batch that has been trained on. It
knows the stages of a `Lab` and nothing of processes, devices or records, so a copy with one line
changed is a recipe too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from verl_lab.batch.columns import Batch
from verl_lab.config.functions import lookup
from verl_lab.config.presets import PRESETS
from verl_lab.config.schema import LabConfig


class Stages(Protocol):
    """What a recipe may call. Each stage returns its batch with columns added."""

    config: LabConfig

    async def rollout(self, prompts: Batch) -> Batch:
        """Samples a group of responses per prompt."""

    async def score(self, batch: Batch) -> Batch:
        """Adds `reward` and its parts."""

    async def resample(self, batch: Batch) -> Batch:
        """Replaces groups whose rewards are all equal by groups of other prompts."""

    async def greedy_rewards(self, batch: Batch) -> Batch:
        """Adds `greedy_reward`, of the likeliest response to the same prompt."""

    async def reference_logprobs(self, batch: Batch) -> Batch:
        """Adds `ref_logprobs`."""

    async def values(self, batch: Batch) -> Batch:
        """Adds `values`, of the critic."""

    def advantages(self, batch: Batch) -> Batch:
        """Adds `advantages`, and `returns` where there is a critic."""

    def pairs(self, batch: Batch) -> Batch:
        """The best and the worst sample of each group, with `is_chosen`."""

    async def update(self, batch: Batch) -> Batch:
        """Trains on the batch."""

    async def sync_weights(self) -> int:
        """Brings the rollout workers to the new weights; returns their version."""


Recipe = Callable[[Stages, Batch], Awaitable[Batch]]


async def policy_gradient(lab: Stages, prompts: Batch) -> Batch:
    """GRPO, PPO and all that differ from them by knobs."""
    batch = await sample(lab, prompts)
    batch = await learn(lab, batch)
    await lab.sync_weights()
    return batch


async def sample(lab: Stages, prompts: Batch) -> Batch:
    """The half of a step that needs rollout workers: scored samples."""
    algorithm = lab.config.algorithm
    batch = await lab.rollout(prompts)
    batch = await lab.score(batch)
    if algorithm.dynamic_sampling_rounds:
        batch = await lab.resample(batch)
    if algorithm.baseline == "greedy":
        batch = await lab.greedy_rewards(batch)
    return batch


async def learn(lab: Stages, batch: Batch) -> Batch:
    """The half of a step that needs the trainer: from scored samples to a better policy."""
    if lab.config.algorithm.kl_coef > 0:
        batch = await lab.reference_logprobs(batch)
    if lab.config.critic is not None:
        batch = await lab.values(batch)
    batch = lab.advantages(batch)
    return await lab.update(batch)


async def online_preferences(lab: Stages, prompts: Batch) -> Batch:
    """DPO on the best and the worst of what the policy itself just sampled."""
    batch = await lab.rollout(prompts)
    batch = await lab.score(batch)
    pairs = lab.pairs(batch)
    if len(pairs):
        pairs = await lab.reference_logprobs(pairs)
        await lab.update(pairs)
    await lab.sync_weights()
    return batch


async def offline_preferences(lab: Stages, samples: Batch) -> Batch:
    """DPO, its family and KTO on samples that came with the data."""
    samples = await lab.reference_logprobs(samples)
    return await lab.update(samples)


async def supervised(lab: Stages, samples: Batch) -> Batch:
    """SFT and reward models: samples that came with the data, and nothing else."""
    return await lab.update(samples)


def recipe_of(config: LabConfig) -> Recipe:
    """The function that the config's `recipe` means."""
    preset = PRESETS.get(config.recipe)
    if preset is None:
        return lookup("recipe", config.recipe)
    if preset.objective == "policy":
        return policy_gradient
    if preset.objective == "preference":
        return online_preferences if preset.is_online else offline_preferences
    return supervised
