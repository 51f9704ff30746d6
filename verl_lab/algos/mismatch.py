"""How far the process that sampled and the one that trains disagree about the same weights."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_lab.algos.arguments import require_flat
from verl_lab.algos.kl import MAX_LOG_RATIO, kl


def mismatch(
    old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor
) -> dict[str, Tensor]:
    """Differences between the trainer's and the rollout's log-probabilities.

    Means over the tokens given, so these do not add up over micro-batches: call it once on all.
    With rho = exp(old - rollout): `mismatch_kl` is the mean k3 estimate of KL(rollout || trainer),
    `mismatch_max` the largest of rho and 1/rho, `ess` the effective sample size (sum rho)² / (n
    sum rho²) of importance weights, `chi2` the estimate mean(rho²) - 1 of chi²(trainer || rollout),
    `ppl_ratio` exp(mean(rollout - old)), the trainer's perplexity of these tokens over the
    rollout's own.

    Args:
        old_logprobs: [T] by the trainer.
        rollout_logprobs: [T] as sampled.
        loss_mask: [T] bool. Other positions may hold anything, inf and nan included.

    Returns:
        Detached scalars, those of two that agree where nothing is unmasked: 0 for `mismatch_kl` and
        `chi2`, else 1.
    """
    require_flat(old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs, loss_mask=loss_mask)
    old, rollout = old_logprobs.detach()[loss_mask], rollout_logprobs.detach()[loss_mask]
    if not old.numel():
        return {
            "mismatch_kl": old.new_zeros(()),
            "mismatch_max": old.new_ones(()),
            "ess": old.new_ones(()),
            "chi2": old.new_zeros(()),
            "ppl_ratio": old.new_ones(()),
        }
    log_rho = (old - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    rho = log_rho.double().exp()
    return {
        "mismatch_kl": kl(rollout, old, "k3").mean(),
        "mismatch_max": torch.exp(log_rho.abs().max()),
        "ess": rho.sum().square() / (rho.numel() * rho.square().sum()),
        # Each rho² - 1 from its logarithm: the small ones would be lost beside the 1.
        "chi2": (2 * log_rho.double()).expm1().mean(),
        "ppl_ratio": (-log_rho).mean().exp(),
    }
