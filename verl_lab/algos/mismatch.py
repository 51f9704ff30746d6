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
    sum rho²) of importance weights.

    Args:
        old_logprobs: [T] by the trainer.
        rollout_logprobs: [T] as sampled.
        loss_mask: [T] bool. Other positions may hold anything, inf and nan included.

    Returns:
        Detached scalars; 0, 1 and 1 where nothing is unmasked.
    """
    require_flat(old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs, loss_mask=loss_mask)
    old, rollout = old_logprobs.detach()[loss_mask], rollout_logprobs.detach()[loss_mask]
    if not old.numel():
        return {
            "mismatch_kl": old.new_zeros(()),
            "mismatch_max": old.new_ones(()),
            "ess": old.new_ones(()),
        }
    log_rho = (old - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    rho = log_rho.double().exp()
    return {
        "mismatch_kl": kl(rollout, old, "k3").mean(),
        "mismatch_max": torch.exp(log_rho.abs().max()),
        "ess": rho.sum().square() / (rho.numel() * rho.square().sum()),
    }
