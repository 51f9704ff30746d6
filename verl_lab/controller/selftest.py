"""The self-test before the first step: rollout and trainer must mean the same by a log-probability.

A wrong temperature, a stale weight, a missing EOS or a packing slip shows here as a difference,
before it costs a day. The sampled tokens of a few prompts are scored by the trainer: on the same
weights the ratio must be 1, and the KL divergence to the reference 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from verl_lab.batch.columns import Batch
from verl_lab.errors import StateError

if TYPE_CHECKING:
    from verl_lab.controller.lab import Lab

NUM_PROMPTS = 4
TOLERANCE = {"float32": 1e-4, "float16": 5e-2, "bfloat16": 0.25}
"""Largest difference of a token's log-probability, by the precision of the forward pass."""


async def self_test(lab: Lab, prompts: Batch) -> dict[str, float]:
    """Compares rollout, trainer and reference on the same weights.

    Args:
        prompts: a few are used; none is counted as drawn.

    Returns:
        `selftest/max_logprob_difference` and, with a reference, `selftest/max_kl_ref`.

    Raises:
        StateError: they differ by more than rounding.
    """
    batch = await lab.rollout(prompts.slice(0, NUM_PROMPTS))
    batch = await lab.old_logprobs(batch)
    precision = lab.config.model.torch_dtype
    limit = TOLERANCE[precision]
    difference = _largest_difference(batch, "old_logprobs", "rollout_logprobs")
    found = {"selftest/max_logprob_difference": difference}
    if difference > limit:
        raise StateError(
            f"self-test: trainer and rollout give the same tokens log-probabilities that differ "
            f"by up to "
            f"{difference:.2e}, more than {limit:g} ({precision}); the run would learn from wrong "
            f"ratios. "
            f"Check rollout.temperature, rollout.top_p, rollout.top_k and model.torch_dtype"
        )
    if lab.config.algorithm.kl_coef > 0:
        batch = await lab.reference_logprobs(batch)
        found["selftest/max_kl_ref"] = _largest_difference(batch, "old_logprobs", "ref_logprobs")
        if found["selftest/max_kl_ref"] > limit:
            raise StateError(
                f"self-test: before any training the reference differs from the policy by up to "
                f"{found['selftest/max_kl_ref']:.2e} in a log-probability, more than {limit:g} "
                f"({precision}); "
                f"check that model.name_or_path has not changed on disk"
            )
    return found


def _largest_difference(batch: Batch, one: str, other: str) -> float:
    pairs = zip(batch.lists(one), batch.lists(other), strict=True)
    return max(float(np.abs(a - b).max(initial=0.0)) for a, b in pairs)
