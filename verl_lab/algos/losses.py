"""Policy losses: pure functions of tensors and numbers.

Shapes: T response tokens, one after the other. Each loss returns a scalar that is a weighted sum
over tokens, with the weights of `algos.aggregate`, and metrics that add up over micro-batches too
(those named `…_max` do not: take the largest).
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_lab.algos.arguments import require_flat
from verl_lab.algos.kl import MAX_LOG_RATIO


def ppo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    weights: Tensor,
    *,
    num_tokens: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate loss of PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

        loss = -sum weights * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)
        r    = exp(logprobs - old_logprobs)

    `clip_high > clip_low` is DAPO's clip-higher (Yu et al. 2025, arXiv:2503.14476, sec. 3.1).

    Args:
        logprobs: [T] of the policy being trained; the only input that gets a gradient.
        old_logprobs: [T] of the policy as it was when this step began.
        advantages: [T].
        loss_mask: [T] bool, True on the tokens that train. Other positions may hold anything, inf
            and nan included.
        weights: [T] of `token_weights`, 0 where masked.
        num_tokens: tokens that train in the whole update; the metrics are means over them.
        clip_low: how far below 1 the ratio may go before its gradient stops.
        clip_high: how far above 1.

    Returns:
        The scalar loss, and detached scalars: `clip_fraction`, `approx_kl` (Schulman's k3 estimate
        of KL(old || new), joschu.net/blog/kl-approx.html) and `ratio_max`, the largest of r and
        1/r.
    """
    require_flat(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        loss_mask=loss_mask,
        weights=weights,
    )
    # Mask before exp(): a nan in a discarded branch would still reach the gradient.
    difference = torch.where(loss_mask, logprobs, 0.0) - torch.where(
        loss_mask, old_logprobs.detach(), 0.0
    )
    log_ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    adv = torch.where(loss_mask, advantages.detach(), 0.0)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -(weights * torch.minimum(ratio * adv, clipped * adv)).sum()

    with torch.no_grad():
        stopped = (clipped * adv < ratio * adv) & loss_mask
        metrics = {
            "clip_fraction": stopped.sum() / max(num_tokens, 1),
            # 0 where masked; ratio - 1 would lose the small differences that it is about.
            "approx_kl": (log_ratio.expm1() - log_ratio).sum() / max(num_tokens, 1),
            "ratio_max": log_ratio.abs().amax().exp() if log_ratio.numel() else ratio.new_ones(()),
        }
    return loss, metrics
