"""How far the process that sampled and the one that trains disagree about the same weights."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_lab.algos.kl import kl


def mismatch(
    old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor
) -> dict[str, Tensor]:
    """Differences between the trainer's and the rollout's log-probabilities.

    With rho = exp(old - rollout): `mismatch_kl` is the mean k3 estimate of KL(rollout || trainer),
    `mismatch_max` the largest of rho and 1/rho, `ess` the effective sample size (sum rho)² / (n
    sum rho²) of importance weights.

    Args:
        old_logprobs: [T] by the trainer.
        rollout_logprobs: [T] as sampled.
        loss_mask: [T] bool.

    Returns:
        Detached scalars; 0, 1 and 1 where nothing is unmasked.
    """
    old, rollout = old_logprobs.detach()[loss_mask], rollout_logprobs.detach()[loss_mask]
    if not old.numel():
        return {
            "mismatch_kl": old.new_zeros(()),
            "mismatch_max": old.new_ones(()),
            "ess": old.new_ones(()),
        }
    log_rho = (old - rollout).clamp(-20, 20)
    rho = log_rho.double().exp()
    return {
        "mismatch_kl": kl(rollout, old, "k3").mean(),
        "mismatch_max": torch.exp(log_rho.abs().max()),
        "ess": rho.sum().square() / (rho.numel() * rho.square().sum()),
    }
