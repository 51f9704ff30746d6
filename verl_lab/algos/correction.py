"""Weights that correct for samples of another policy than the one that trains: of an engine that
rounds differently, or of older weights.

Shapes: T response tokens, sample after sample. Everywhere rho = exp(old_logprobs -
rollout_logprobs). Multiply the weights of a loss by these; where the old log-probabilities are the
rollout's own there is nothing left to correct.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from verl_lab.algos.arguments import require_choice, require_flat
from verl_lab.algos.kl import MAX_LOG_RATIO
from verl_lab.algos.preference import sample_means, sample_sums
from verl_lab.errors import ConfigError

Correction = Literal["tis", "mis", "sequence_tis", "sequence_mis", "geometric_filter"]


def correction_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    sample_index: Tensor,
    *,
    mode: Correction,
    low: float,
    high: float,
) -> Tensor:
    """Bounded importance weights.

    - `tis`: min(rho, high), truncated importance sampling (Yao et al. 2025,
      fengyao.notion.site/off-policy-rl)
    - `mis`: rho where low <= rho <= high, else 0; IcePop (Ling Team 2025, arXiv:2510.18855)
    - `sequence_tis`: min(product of the sample's rho, high), on all its tokens
    - `sequence_mis`: that product where low <= product <= high, else 0
    - `geometric_filter`: 1 where low <= geometric mean of the sample's rho <= high, else 0; it
      leaves out samples, and is no importance weight

    Products are unbiased but vanish or explode with the length; single tokens' are not, and stay
    near 1.

    Args:
        old_logprobs: [T] by the trainer.
        rollout_logprobs: [T] as sampled.
        loss_mask: [T] bool. Other positions may hold anything, inf and nan included.
        sample_index: [T] int64, the sample of each token; a sample's tokens must all be here.
        mode: one of the above.
        low: the least ratio that counts; the `tis` modes have none.
        high: the greatest.

    Returns:
        [T] without gradient, 0 where masked. A ratio is clamped to exp(±20).

    Raises:
        ConfigError: `low` is above `high`.
    """
    require_choice("mode", mode, get_args(Correction))
    _require_bounds(low, high)
    ratio = _ratio(old_logprobs, rollout_logprobs, loss_mask, sample_index, mode)
    if mode in ("tis", "sequence_tis"):
        weights = ratio.clamp(max=high)
    else:
        kept = torch.ones_like(ratio) if mode == "geometric_filter" else ratio
        weights = kept.masked_fill((ratio < low) | (ratio > high), 0.0)
    return torch.where(loss_mask, weights, 0.0)


def correction_metrics(
    weights: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    sample_index: Tensor,
    *,
    low: float,
    high: float,
) -> dict[str, Tensor]:
    """What the correction did to the ratios.

    Means over the tokens given, so these do not add up over micro-batches: call it once on all.
    `correction_ess` is the effective sample size (sum w)² / (n sum w²) of the weights,
    `truncated_fraction` the share of tokens whose weight is 0, or held at `high` and so neither the
    ratio of the token nor the product of its sample; `correction_mean` the mean weight.

    Args:
        weights: [T] of `correction_weights`, any mode.
        old_logprobs: [T] as given to it, like the rest.
        rollout_logprobs: [T].
        loss_mask: [T] bool.
        sample_index: [T] int64.
        low: the least ratio that counts.
        high: the greatest.

    Returns:
        Detached scalars; 1, 0 and 1 where nothing is unmasked. Where all weights are 0, `ess` is 0.
    """
    _require_bounds(low, high)
    require_flat(weights=weights, loss_mask=loss_mask)
    inputs = (old_logprobs, rollout_logprobs, loss_mask, sample_index)
    ratio = _ratio(*inputs, "tis")[loss_mask]
    product = _ratio(*inputs, "sequence_tis")[loss_mask]
    used = weights.detach()[loss_mask].to(ratio.dtype)
    if not len(used):
        one = used.new_ones(())
        return {"correction_ess": one, "truncated_fraction": 1 - one, "correction_mean": one}
    whole = torch.isclose(used, ratio) | torch.isclose(used, product)
    # Not all that differ: what passed the filter weighs 1. `high` was rounded with the weights.
    held = ~whole & (used > high * (1 - 1e-6))
    total, squares = used.double().sum(), used.double().square().sum()
    return {
        "correction_ess": total.square() / (len(used) * squares).clamp(min=1e-300),
        "truncated_fraction": ((used == 0) | held).double().mean(),
        "correction_mean": total / len(used),
    }


@torch.no_grad()
def _ratio(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    sample_index: Tensor,
    mode: Correction,
) -> Tensor:
    """[T] rho, its product or its geometric mean over the sample; 1 where masked."""
    require_flat(
        old_logprobs=old_logprobs,
        rollout_logprobs=rollout_logprobs,
        loss_mask=loss_mask,
        sample_index=sample_index,
    )
    log_ratio = torch.where(loss_mask, old_logprobs - rollout_logprobs, 0.0)
    if mode not in ("tis", "mis"):
        per_sample = sample_means if mode == "geometric_filter" else sample_sums
        num_samples = int(sample_index.max()) + 1 if len(sample_index) else 0
        log_ratio = per_sample(log_ratio, loss_mask, sample_index, num_samples)[sample_index]
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _require_bounds(low: float, high: float) -> None:
    """Nothing lies between bounds the wrong way round, so nothing would train."""
    if not low <= high:
        raise ConfigError(f"low, high: low must be at most high, got {low} and {high}; swap them")
