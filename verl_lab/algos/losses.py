"""Policy losses: pure functions of tensors and numbers.

Shapes: T response tokens, sample after sample. Each loss returns a scalar that is a weighted sum
over tokens, with the weights of `algos.aggregate`, and metrics that add up over micro-batches too
(those named `…_max` do not: take the largest). All take the same arguments before their own
numbers; only `ppo_policy_loss` explains them. Off-policy correction is not here: multiply the
weights by those of `algos.correction`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from verl_lab.algos.preference import sample_means
from verl_lab.algos.ratio import masked_tokens, share, token_metrics
from verl_lab.errors import ConfigError

PolicyLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""`loss(logprobs, old_logprobs, advantages, loss_mask, weights, *, num_tokens, sample_index, …)`,
where `…` are the loss's own numbers, each with a default."""

MAX_SEQUENCE_LOG_RATIO = 10.0
MAX_DPPO_RATIO = 20.0


def ppo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    weights: Tensor,
    *,
    num_tokens: int,
    sample_index: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate loss of PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

        loss = -sum weights * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)
        r    = exp(logprobs - old_logprobs)

    `clip_high > clip_low` is DAPO's clip-higher (Yu et al. 2025, arXiv:2503.14476, sec. 3.1).
    `dual_clip` holds the loss of a token with A < 0 at -dual_clip * A (Ye et al. 2020,
    arXiv:1912.09729).

    Args:
        logprobs: [T] of the policy being trained; the only input that gets a gradient.
        old_logprobs: [T] of the policy as it was when this step began.
        advantages: [T].
        loss_mask: [T] bool, True on the tokens that train. Other positions may hold anything, inf
            and nan included.
        weights: [T] of `token_weights`, 0 where masked.
        num_tokens: tokens that train in the whole update; the metrics are means over them.
        sample_index: [T] int64, the sample of each token; not used by losses of single tokens.
        clip_low: how far below 1 the ratio may go before its gradient stops.
        clip_high: how far above 1.
        dual_clip: the ratio above which a token with A < 0 has no gradient, above 1; none by
            default.

    Returns:
        The scalar loss, and detached scalars: `clip_fraction`, `approx_kl` (Schulman's k3 estimate
        of KL(old || new), joschu.net/blog/kl-approx.html) and `ratio_max`, the largest of r and
        1/r; with `dual_clip` also `dual_clip_fraction`, the tokens that it stopped.

    Raises:
        ConfigError: `dual_clip` is not above 1.
    """
    if dual_clip is not None and not dual_clip > 1:
        raise ConfigError(
            f"dual_clip: must be above 1, got {dual_clip}; 3 is usual, and None switches it off"
        )
    tokens = masked_tokens(logprobs, old_logprobs, advantages, loss_mask, weights)
    losses, stopped = _clipped(tokens.log_ratio.exp(), tokens.advantages, clip_low, clip_high)
    metrics = token_metrics(tokens, num_tokens, stopped)
    if dual_clip is not None:
        bound = -dual_clip * tokens.advantages
        too_high = (tokens.advantages < 0) & (losses.detach() > bound)
        losses = torch.where(too_high, bound, losses)
        metrics["dual_clip_fraction"] = share(too_high, num_tokens)
    return (weights * losses).sum(), metrics


def gspo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    weights: Tensor,
    *,
    num_tokens: int,
    sample_index: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of GSPO, a ratio for each sample (Zheng et al. 2025, arXiv:2507.18071, sec. 4.3).

        loss     = -sum weights * min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A)
        log s_it = sg(mean_i (logprobs - old_logprobs)) + logprobs - sg(logprobs)

    The mean is over the tokens of the sample that train, and log s is held at 10. The loss of the
    paper has the weights `seq-mean-token-mean`. The bounds are small because the mean is: those of
    PPO would never be reached.

    Args:
        logprobs, old_logprobs, advantages, loss_mask, weights, num_tokens: see `ppo_policy_loss`.
        sample_index: [T] int64, the sample of each token; a sample's tokens must all be here.
        clip_low: how far below 1 the sample's ratio may go before its gradient stops.
        clip_high: how far above 1.

    Returns:
        As of `ppo_policy_loss`. `approx_kl` and `ratio_max` are those of the single tokens.
    """
    tokens = masked_tokens(
        logprobs, old_logprobs, advantages, loss_mask, weights, sample_index=sample_index
    )
    num_samples = int(sample_index.max()) + 1 if sample_index.numel() else 0
    # Of the differences as they are: bounds of single tokens would move the mean.
    difference = tokens.logprobs.detach() - tokens.old_logprobs
    mean = sample_means(difference, loss_mask, sample_index, num_samples)
    log_ratio = mean[sample_index] + tokens.logprobs - tokens.logprobs.detach()
    ratio = log_ratio.clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()
    losses, stopped = _clipped(ratio, tokens.advantages, clip_low, clip_high)
    return (weights * losses).sum(), token_metrics(tokens, num_tokens, stopped)


def cispo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    weights: Tensor,
    *,
    num_tokens: int,
    sample_index: Tensor | None = None,
    ratio_min: float = 0.0,
    ratio_max: float = 5.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of CISPO: the ratio is a bounded weight (MiniMax 2025, arXiv:2506.13585, sec. 3.1).

        loss = -sum weights * sg(clip(r, ratio_min, ratio_max)) * A * logprobs

    Every token keeps a gradient. The bounds are of the ratio itself, not distances from 1, and the
    value cannot be compared with that of PPO.

    Args:
        logprobs, old_logprobs, advantages, loss_mask, weights, num_tokens, sample_index: see
            `ppo_policy_loss`.
        ratio_min: the least weight.
        ratio_max: the greatest.

    Returns:
        As of `ppo_policy_loss`; `clip_fraction` counts the tokens whose ratio is out of bounds.
    """
    tokens = masked_tokens(logprobs, old_logprobs, advantages, loss_mask, weights)
    ratio = tokens.log_ratio.detach().exp()
    held = ratio.clamp(ratio_min, ratio_max)
    losses = -held * tokens.advantages * tokens.logprobs
    return (weights * losses).sum(), token_metrics(tokens, num_tokens, (held != ratio) & loss_mask)


def sapo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    weights: Tensor,
    *,
    num_tokens: int,
    sample_index: Tensor | None = None,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of SAPO: a soft gate instead of a clip (Gao et al. 2025, arXiv:2511.20347).

        loss = -sum weights * 4 / tau * sigmoid(tau * (r - 1)) * A
        tau  = tau_positive where A > 0, else tau_negative

    The gate's slope is 1 at r = 1 and falls on both sides.

    Args:
        logprobs, old_logprobs, advantages, loss_mask, weights, num_tokens, sample_index: see
            `ppo_policy_loss`.
        tau_positive: how fast the gate closes for good tokens, above 0.
        tau_negative: for bad ones.

    Returns:
        As of `ppo_policy_loss`, without `clip_fraction`: nothing is clipped.
    """
    tokens = masked_tokens(logprobs, old_logprobs, advantages, loss_mask, weights)
    ratio = tokens.log_ratio.exp()
    tau = torch.full_like(ratio, tau_negative).masked_fill(tokens.advantages > 0, tau_positive)
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return -(weights * gate * tokens.advantages).sum(), token_metrics(tokens, num_tokens)


def reinforce_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    weights: Tensor,
    *,
    num_tokens: int,
    sample_index: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss whose gradient is REINFORCE (Williams 1992, doi:10.1007/BF00992696).

        loss = -sum weights * A * logprobs

    Args:
        logprobs, old_logprobs, advantages, loss_mask, weights, num_tokens, sample_index: see
            `ppo_policy_loss`; the old log-probabilities serve the metrics only.

    Returns:
        As of `ppo_policy_loss`, without `clip_fraction`: nothing is clipped.
    """
    tokens = masked_tokens(logprobs, old_logprobs, advantages, loss_mask, weights)
    losses = -tokens.advantages * tokens.logprobs
    return (weights * losses).sum(), token_metrics(tokens, num_tokens)


def dppo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    weights: Tensor,
    *,
    num_tokens: int,
    sample_index: Tensor | None = None,
    delta: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of DPPO with total variation (Qi et al. 2026, arXiv:2602.04879).

        loss = -sum_kept weights * sg(min(r, 20)) * A * logprobs

    Dropped are tokens that already moved as A asks, and more than `delta`: with A > 0 where
    exp(logprobs) - exp(old_logprobs) > delta, with A < 0 where it is < -delta. Unlike a bound of
    the ratio, this one leaves rare tokens room and holds frequent ones.

    Args:
        logprobs, old_logprobs, advantages, loss_mask, weights, num_tokens, sample_index: see
            `ppo_policy_loss`. The paper compares with the policy that sampled: pass
            `rollout_logprobs` as the old ones for that.
        delta: how far a token's probability may move.

    Returns:
        As of `ppo_policy_loss`; `clip_fraction` counts the tokens that are dropped or whose ratio
        is held.
    """
    tokens = masked_tokens(logprobs, old_logprobs, advantages, loss_mask, weights)
    with torch.no_grad():
        ratio = tokens.log_ratio.exp()
        moved = tokens.logprobs.exp() - tokens.old_logprobs.exp()
        dropped = moved * tokens.advantages.sign() > delta
        held = ratio.clamp(max=MAX_DPPO_RATIO).masked_fill(dropped, 0.0)
    losses = -held * tokens.advantages * tokens.logprobs
    return (weights * losses).sum(), token_metrics(tokens, num_tokens, (held != ratio) & loss_mask)


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": ppo_policy_loss,
    "gspo": gspo_policy_loss,
    "cispo": cispo_policy_loss,
    "sapo": sapo_policy_loss,
    "reinforce": reinforce_policy_loss,
    "dppo": dppo_policy_loss,
}


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """PPO's token losses, and where the bound stopped the gradient."""
    surrogate = ratio * advantages
    held = ratio.clamp(1 - low, 1 + high) * advantages
    return -torch.minimum(surrogate, held), held.detach() < surrogate.detach()
