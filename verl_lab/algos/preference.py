"""Losses of preferences: which of two responses is better, or whether one is good.

Shapes: T response tokens, sample after sample; B samples; P pairs. The losses are one a pair or a
sample: how they are averaged is the caller's choice.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from verl_lab.algos.arguments import require_choice, require_flat
from verl_lab.errors import ConfigError, ShapeError

PreferenceLoss = Literal["dpo", "ipo", "hinge", "rdpo"]


def preference_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    kind: PreferenceLoss,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """One loss a pair. With h = (chosen - ref_chosen) - (rejected - ref_rejected):

    - `dpo`: -(1 - e) logsigmoid(beta h) - e logsigmoid(-beta h) (Rafailov et al. 2023,
      arXiv:2305.18290, eq. 7); with e > 0 the conservative form (Mitchell 2023,
      ericmitchell.ai/cdpo.pdf)
    - `rdpo`: (-(1 - e) logsigmoid(beta h) + e logsigmoid(-beta h)) / (1 - 2e), unbiased when a
      share e of the labels is flipped (Chowdhury et al. 2024, arXiv:2403.00409)
    - `ipo`: (h - 1 / (2 beta))² (Azar et al. 2023, arXiv:2310.12036, eq. 17)
    - `hinge`: max(0, 1 - beta h) (Liu et al. 2023, arXiv:2309.06657)

    Args:
        chosen: [P] sums of a response's log-probabilities under the policy. For `ipo` pass
            averages over the response's tokens, in all four: its authors confirmed that they mean
            these.
        rejected: [P].
        ref_chosen: [P] under the reference; no gradient.
        ref_rejected: [P].
        kind: one of the above.
        beta: the inverse temperature, above 0.
        label_smoothing: e, the share of labels that are wrong, below 1/2; for `dpo` and `rdpo`.

    Returns:
        [P].

    Raises:
        ConfigError: there is no such `kind`, or it has no such `label_smoothing`.
    """
    require_flat(chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    require_choice("kind", kind, get_args(PreferenceLoss))
    _check_smoothing(kind, label_smoothing)
    h = (chosen - ref_chosen.detach()) - (rejected - ref_rejected.detach())
    if kind == "ipo":
        return (h - 1 / (2 * beta)).square()
    if kind == "hinge":
        return torch.relu(1 - beta * h)
    right, wrong = -logsigmoid(beta * h), -logsigmoid(-beta * h)
    e = label_smoothing
    if kind == "rdpo":
        return ((1 - e) * right - e * wrong) / (1 - 2 * e)
    return (1 - e) * right + e * wrong


def kto_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    is_chosen: Tensor,
    kl: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """One loss a sample, of KTO (Ethayarajh et al. 2024, arXiv:2402.01306, sec. 4).

        good: desirable_weight   * (1 - sigmoid(beta * (h - kl)))
        bad:  undesirable_weight * (1 - sigmoid(beta * (kl - h)))
        h   = logprobs - ref_logprobs

    Args:
        logprobs: [B] sums of a response's log-probabilities under the policy.
        ref_logprobs: [B] under the reference; no gradient.
        is_chosen: [B] bool, True where the response is good.
        kl: scalar estimate of KL(policy || reference), the same for all; no gradient, and held at
            0 from below.
        beta: the inverse temperature, above 0.
        desirable_weight: of good responses.
        undesirable_weight: of bad ones.

    Returns:
        [B].
    """
    require_flat(logprobs=logprobs, ref_logprobs=ref_logprobs, is_chosen=is_chosen)
    if kl.ndim:
        raise ShapeError(f"kl: must be a scalar, got {tuple(kl.shape)}; take the mean")
    above = logprobs - ref_logprobs.detach() - kl.detach().clamp(min=0)
    # 1 - sigmoid(x) = sigmoid(-x), which keeps what is left of it for large x.
    good = desirable_weight * torch.sigmoid(-beta * above)
    bad = undesirable_weight * torch.sigmoid(beta * above)
    return torch.where(is_chosen, good, bad)


def reward_model_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, *, centre_coef: float = 0.0
) -> Tensor:
    """One loss a pair of scores, of the Bradley-Terry model (Ouyang et al. 2022,
    arXiv:2203.02155, eq. 1).

        -logsigmoid(chosen - rejected - margin) + centre_coef * (chosen + rejected)²

    The margin is that of Llama 2 (Touvron et al. 2023, arXiv:2307.09288, eq. 2), the second term
    that of Eisenstein et al. 2023 (arXiv:2312.09244): only differences are learned from pairs, and
    it keeps the scores near 0.

    Args:
        chosen: [P] scores.
        rejected: [P].
        margin: [P] by how much the chosen should be better; 0 by default.
        centre_coef: weight of the second term; 0.01 is usual.

    Returns:
        [P].
    """
    require_flat(chosen=chosen, rejected=rejected)
    difference = chosen - rejected
    if margin is not None:
        require_flat(chosen=chosen, margin=margin)
        difference = difference - margin.detach()
    return -logsigmoid(difference) + centre_coef * (chosen + rejected).square()


def pair_accuracy(chosen: Tensor, rejected: Tensor) -> Tensor:
    """The share of pairs whose chosen score is the higher; a tie counts as half a pair.

    Args:
        chosen: [P].
        rejected: [P].

    Returns:
        A detached scalar; 0 where there are no pairs.
    """
    require_flat(chosen=chosen, rejected=rejected)
    right = (chosen > rejected).sum() + 0.5 * (chosen == rejected).sum()
    return right / max(len(chosen), 1)


def sample_sums(
    token_values: Tensor, mask: Tensor, sample_index: Tensor, num_samples: int
) -> Tensor:
    """The sum over each sample's tokens.

    Args:
        token_values: [T]; gets a gradient. Masked positions may hold anything, inf and nan
            included.
        mask: [T] bool.
        sample_index: [T] int64, the sample of each token.
        num_samples: B.

    Returns:
        [B]; 0 for a sample without an unmasked token.
    """
    require_flat(token_values=token_values, mask=mask, sample_index=sample_index)
    kept = torch.where(mask, token_values, 0.0)
    return kept.new_zeros(num_samples).index_add(0, sample_index, kept)


def sample_means(
    token_values: Tensor, mask: Tensor, sample_index: Tensor, num_samples: int
) -> Tensor:
    """The mean over each sample's tokens; arguments and result as of `sample_sums`."""
    sums = sample_sums(token_values, mask, sample_index, num_samples)
    lengths = sample_sums(mask.to(sums.dtype), mask, sample_index, num_samples)
    return sums / lengths.clamp(min=1)


def _check_smoothing(kind: str, label_smoothing: float) -> None:
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(
            f"label_smoothing: must be at least 0 and below 0.5, got {label_smoothing}; with more "
            f"than half the labels wrong, swap the chosen and the rejected"
        )
    if label_smoothing and kind not in ("dpo", "rdpo"):
        raise ConfigError(
            f"label_smoothing: {kind} has none, got {label_smoothing}; set it to 0 or use dpo or "
            f"rdpo"
        )
