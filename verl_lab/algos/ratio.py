"""The ratio of the policy to the old one, token by token, and the metrics that every loss tells.

Shapes: T response tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from verl_lab.algos.arguments import require_flat
from verl_lab.algos.kl import MAX_LOG_RATIO


class MaskedTokens(NamedTuple):
    """What every policy loss starts from; each [T], and 0 where masked."""

    logprobs: Tensor
    old_logprobs: Tensor
    log_ratio: Tensor
    """logprobs - old_logprobs, clamped to ±20, where its gradient stops."""

    advantages: Tensor


def masked_tokens(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    weights: Tensor,
    **more: Tensor,
) -> MaskedTokens:
    """The inputs of a loss with 0 where masked; all but `logprobs` are detached.

    Args:
        logprobs: [T].
        old_logprobs: [T].
        advantages: [T].
        loss_mask: [T] bool.
        weights: [T].
        more: tensors by name that must be as long; they are only checked.

    Raises:
        ShapeError: the tensors are not equally long.
    """
    require_flat(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        loss_mask=loss_mask,
        weights=weights,
        **more,
    )
    # Mask before exp(): a nan in a discarded branch would still reach the gradient.
    new = torch.where(loss_mask, logprobs, 0.0)
    old = torch.where(loss_mask, old_logprobs.detach(), 0.0)
    return MaskedTokens(
        logprobs=new,
        old_logprobs=old,
        log_ratio=(new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
        advantages=torch.where(loss_mask, advantages.detach(), 0.0),
    )


@torch.no_grad()
def token_metrics(
    tokens: MaskedTokens, num_tokens: int, stopped: Tensor | None = None
) -> dict[str, Tensor]:
    """`approx_kl` and `ratio_max`, and `clip_fraction` where a loss says what it `stopped`.

    Args:
        tokens: of `masked_tokens`.
        num_tokens: tokens that train in the whole update.
        stopped: [T] bool, False where masked.
    """
    log_ratio = tokens.log_ratio
    metrics = {
        # 0 where masked; ratio - 1 would lose the small differences that it is about.
        "approx_kl": (log_ratio.expm1() - log_ratio).sum() / max(num_tokens, 1),
        "ratio_max": log_ratio.abs().amax().exp() if len(log_ratio) else log_ratio.new_ones(()),
    }
    if stopped is not None:
        metrics["clip_fraction"] = share(stopped, num_tokens)
    return metrics


def share(chosen: Tensor, num_tokens: int) -> Tensor:
    """The part of the update's tokens that is chosen, of a [T] bool that is False where masked."""
    return chosen.sum() / max(num_tokens, 1)
