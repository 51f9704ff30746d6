"""The critic's loss, and how well it does.

Shapes: T response tokens, one after the other; a value is that of the state before its token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_lab.algos.arguments import require_flat


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    weights: Tensor,
    *,
    num_tokens: int,
    clip: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared error of the critic, clipped as in PPO's first implementation (Engstrom et al. 2020,
    arXiv:2005.12729, sec. 3).

        loss = 1/2 sum weights * max((V - R)², (clip(V, V_old - clip, V_old + clip) - R)²)

    Args:
        values: [T] V of the critic being trained; the only input that gets a gradient.
        old_values: [T] V_old of the critic as it was when this step began.
        returns: [T] R.
        loss_mask: [T] bool, True on the tokens that train. Other positions may hold anything, inf
            and nan included.
        weights: [T] of `token_weights`, 0 where masked.
        num_tokens: tokens that train in the whole update; the metrics are means over them.
        clip: how far a value may move before its gradient stops, in the unit of rewards; None for
            the plain squared error.

    Returns:
        The scalar loss, and detached scalars that add up over micro-batches: `clip_fraction` and
        `mean`, the mean value.
    """
    require_flat(
        values=values,
        old_values=old_values,
        returns=returns,
        loss_mask=loss_mask,
        weights=weights,
    )
    new = torch.where(loss_mask, values, 0.0)
    old = torch.where(loss_mask, old_values.detach(), 0.0)
    target = torch.where(loss_mask, returns.detach(), 0.0)
    errors = (new - target).square()
    stopped = torch.zeros_like(loss_mask)
    if clip is not None:
        held = (old + (new - old).clamp(-clip, clip) - target).square()
        stopped = held.detach() > errors.detach()
        errors = torch.maximum(errors, held)
    metrics = {
        "clip_fraction": stopped.sum() / max(num_tokens, 1),
        "mean": new.detach().sum() / max(num_tokens, 1),
    }
    return 0.5 * (weights * errors).sum(), metrics


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """How much of the returns' variance the critic predicts: 1 - Var(R - V) / Var(R).

    1 is perfect, 0 no better than a constant, below 0 worse. It does not add up over micro-batches:
    call it once on all.

    Args:
        values: [T] V.
        returns: [T] R.
        mask: [T] bool. Other positions may hold anything, inf and nan included.

    Returns:
        A detached scalar; 0 where the returns do not vary, so also with fewer than two of them.
    """
    require_flat(values=values, returns=returns, mask=mask)
    target = returns.detach()[mask].double()
    error = target - values.detach()[mask].double()
    # Rounding gives equal numbers a variance, so the deviation alone does not tell.
    if not len(target) or target.amin() == target.amax():
        return values.new_zeros(())
    explained = 1 - error.var() / target.var()
    return explained.to(values.dtype)
