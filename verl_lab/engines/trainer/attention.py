"""Causal attention over packed sequences, without a mask over all of them and without mixing any
two.

It is registered with transformers as `verl_lab_packed`, and finds where the sequences are in the
keyword arguments that transformers hands through to its attention. Shapes: S tokens of n sequences
one after the other, H query heads, K key heads, D head size, L the longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from verl_lab.errors import ConfigError

NAME = "verl_lab_packed"


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, and where their tokens are in a padded block."""

    gather: Tensor
    """[n * L] the packed position of each place in the block; padding repeats the last token."""
    tokens: Tensor
    """The places in the block that are no padding, in packed order."""
    num_sequences: int
    max_length: int


@dataclass(frozen=True)
class Layout:
    """Where the tokens of packed sequences are; the block of a bucket is at most half padding."""

    buckets: list[Bucket]
    inverse: Tensor
    """[S] the place of each packed position among the tokens of all buckets."""

    @classmethod
    def of(cls, cu_seqlens: Tensor) -> Layout:
        """From where each sequence begins, [n + 1]."""
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        size_class = [int(length - 1).bit_length() for length in lengths.tolist()]
        buckets, order = [], []
        for size in sorted(set(size_class)):
            rows = torch.tensor([i for i, s in enumerate(size_class) if s == size])
            first, last = starts[rows][:, None], (starts + lengths - 1)[rows][:, None]
            longest = int(lengths[rows].max())
            place = first + torch.arange(longest, device=cu_seqlens.device)
            is_token = (place <= last).flatten()
            gather = torch.minimum(place, last).flatten()
            buckets.append(Bucket(gather, is_token.nonzero()[:, 0], len(rows), longest))
            order.append(gather[is_token])
        return cls(buckets, torch.cat(order).argsort())


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention within each sequence.

    Args:
        module: the attention layer, as transformers calls it.
        query: [1, H, S, D].
        key: [1, K, S, D].
        value: [1, K, S, D].
        attention_mask: unused; the layout says it all.
        layout: where the sequences are.
        scaling: of the scores.
        dropout: must be 0, so that log-probabilities are the same twice.
        sliding_window: how many tokens back a token sees.
        softcap: refused.

    Returns:
        [1, S, H, D], and no attention weights.
    """
    if dropout or softcap is not None:
        raise ConfigError(
            f"model.name_or_path: attention with dropout={dropout} and softcap={softcap} is not "
            f"available in the packed trainer; use a model without"
        )
    packed = [states[0].transpose(0, 1) for states in (query, key, value)]
    parts = []
    for bucket in layout.buckets:
        shape = (bucket.num_sequences, bucket.max_length)
        q, k, v = (
            states.index_select(0, bucket.gather).view(*shape, *states.shape[1:]).transpose(1, 2)
            for states in packed
        )
        mask = _window_mask(bucket.max_length, sliding_window, query.device)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        parts.append(out.transpose(1, 2).flatten(0, 1).index_select(0, bucket.tokens))
    return torch.cat(parts).index_select(0, layout.inverse)[None], None


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """[L, L] True where a token sees another through a sliding window; None where that is all."""
    if window is None or length <= window:
        return None
    row = torch.arange(length, device=device)
    distance = row[:, None] - row
    return (distance >= 0) & (distance < window)


AttentionInterface.register(NAME, packed_attention)
