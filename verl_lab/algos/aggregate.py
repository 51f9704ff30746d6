"""How token losses become one number, as a weight a token.

Shapes: T response tokens of a micro-batch, one after the other. A weighted sum over tokens is
linear, so the parts of any split into micro-batches add up to the whole, if all use the same
normalisers: those of the whole update.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from verl_lab.algos.arguments import require_choice, require_flat

Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]


def normalisers(loss_mask: Tensor, sample_index: Tensor) -> tuple[int, int]:
    """The number of tokens that train and of samples that have one.

    Args:
        loss_mask: [T] bool.
        sample_index: [T] int64, the sample of each token.
    """
    require_flat(loss_mask=loss_mask, sample_index=sample_index)
    return int(loss_mask.sum()), int(torch.unique(sample_index[loss_mask]).numel())


def token_weights(
    loss_mask: Tensor,
    sample_index: Tensor,
    *,
    mode: Aggregation,
    num_tokens: int,
    num_sequences: int,
    max_tokens: int,
) -> Tensor:
    """Weights such that the loss is `sum(weights * token_losses)`.

    - `token-mean`: 1 / N
    - `seq-mean-token-mean`: 1 / (B T_i), GRPO as published (arXiv:2402.03300, eq. 3)
    - `seq-mean-token-sum`: 1 / B
    - `seq-mean-token-sum-norm`: 1 / (B L), Dr.GRPO (arXiv:2503.20783, sec. 3.2); L is a constant,
      so that padding and the other samples change nothing

    Args:
        loss_mask: [T] bool, True on the tokens that train; a sample's tokens must all be here.
        sample_index: [T] int64, the sample of each token.
        mode: one of the above.
        num_tokens: N, over the whole update.
        num_sequences: B, samples with at least one token that trains, over the whole update.
        max_tokens: L, the longest response allowed.

    Returns:
        [T] float64, 0 where masked.
    """
    require_flat(loss_mask=loss_mask, sample_index=sample_index)
    require_choice("mode", mode, get_args(Aggregation))
    mask = loss_mask.double()
    if mode == "token-mean":
        return mask / max(num_tokens, 1)
    weights = mask / max(num_sequences, 1)
    if mode == "seq-mean-token-sum":
        return weights
    if mode == "seq-mean-token-sum-norm":
        return weights / max_tokens
    num_samples = int(sample_index.max()) + 1 if sample_index.numel() else 0
    lengths = torch.zeros(num_samples, dtype=torch.float64, device=mask.device)
    lengths.index_add_(0, sample_index, mask)
    return weights / lengths.clamp(min=1)[sample_index]
