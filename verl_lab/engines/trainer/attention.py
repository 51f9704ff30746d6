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
class Layout:
    """Where the tokens of packed sequences are in a padded block."""

    gather: Tensor
    """[n * L] the packed position of each place in the block; padding repeats the last token."""
    scatter: Tensor
    """[S] the place in the block of each packed position."""
    num_sequences: int
    max_length: int

    @classmethod
    def of(cls, cu_seqlens: Tensor, max_length: int) -> Layout:
        """From where each sequence begins, [n + 1]."""
        starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        column = torch.arange(max_length, device=cu_seqlens.device)
        gather = torch.minimum(starts[:, None] + column, ends[:, None] - 1)
        is_token = column < (ends - starts)[:, None]
        return cls(gather.flatten(), is_token.flatten().nonzero()[:, 0], len(starts), max_length)


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
    n, length = layout.num_sequences, layout.max_length

    def block(packed: Tensor) -> Tensor:
        rows = packed[0].transpose(0, 1).index_select(0, layout.gather)
        return rows.view(n, length, *rows.shape[1:]).transpose(1, 2)

    mask = None
    if sliding_window is not None and length > sliding_window:
        row = torch.arange(length, device=query.device)
        distance = row[:, None] - row
        mask = (distance >= 0) & (distance < sliding_window)
    out = F.scaled_dot_product_attention(
        block(query),
        block(key),
        block(value),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    flat = out.transpose(1, 2).flatten(0, 1)
    return flat.index_select(0, layout.scatter)[None], None


AttentionInterface.register(NAME, packed_attention)
