"""From a batch to packed tensors and back: the only place where a batch becomes tensors.

Shapes: B samples, S prompt and response tokens of all samples one after the other, T response
tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_lab.batch.columns import TOKEN_COLUMNS, Batch
from verl_lab.errors import ShapeError


@dataclass(frozen=True)
class Packed:
    """Samples without padding, in one row."""

    input_ids: Tensor
    """[1, S] int64: prompt then response, sample after sample."""
    position_ids: Tensor
    """[1, S] int64: from 0 in each sample."""
    cu_seqlens: Tensor
    """[B + 1] int32: where each sample begins in S."""
    max_seqlen: int
    """The longest sample, in tokens."""
    prediction_index: Tensor
    """[T] int64: the position in S whose hidden state predicts each response token."""
    target_ids: Tensor
    """[T] int64: the response tokens."""
    sample_index: Tensor
    """[T] int64: the row each response token belongs to."""
    tokens: dict[str, Tensor] = field(default_factory=dict)
    """[T] each: the token columns asked for, float32 or bool."""


def pack(batch: Batch, device: str | torch.device, columns: Sequence[str] = ()) -> Packed:
    """Packs all rows of a batch, with the token columns named.

    Raises:
        ShapeError: there is no row, a prompt or a response is empty, or a column is no token
            column.
    """
    if not len(batch):
        raise ShapeError("batch: has no rows; pack at least one")
    prompts, responses = batch.lists("prompt_ids"), batch.lists("response_ids")
    prompt_lengths, response_lengths = _lengths(prompts), _lengths(responses)
    for name, lengths in (("prompt_ids", prompt_lengths), ("response_ids", response_lengths)):
        if (lengths == 0).any():
            raise ShapeError(f"{name}: row {int(np.argmin(lengths))} is empty; leave such rows out")
    lengths = prompt_lengths + response_lengths
    starts = np.concatenate([[0], np.cumsum(lengths)])
    first = starts[:-1] + prompt_lengths - 1  # this hidden state predicts the first response token
    sample_index = np.repeat(np.arange(len(batch)), response_lengths)

    def tensor(values: Any, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)

    ids = [part for pair in zip(prompts, responses, strict=True) for part in pair]
    return Packed(
        input_ids=tensor(np.concatenate(ids), torch.int64)[None],
        position_ids=tensor(_ranges(lengths), torch.int64)[None],
        cu_seqlens=tensor(starts, torch.int32),
        max_seqlen=int(lengths.max()),
        prediction_index=tensor(
            np.repeat(first, response_lengths) + _ranges(response_lengths), torch.int64
        ),
        target_ids=tensor(np.concatenate(responses), torch.int64),
        sample_index=tensor(sample_index, torch.int64),
        tokens={name: _token_column(batch, name, tensor) for name in columns},
    )


def unpack(values: Tensor, batch: Batch) -> list[np.ndarray[Any, Any]]:
    """Gives one value a response token back to the rows it came from.

    Args:
        values: [T].
        batch: the batch that was packed.
    """
    lengths = _lengths(batch.lists("response_ids"))
    if values.shape != (lengths.sum(),):
        raise ShapeError(
            f"values must be [T] for the {lengths.sum()} response tokens of the batch, "
            f"got {tuple(values.shape)}"
        )
    return np.split(values.detach().cpu().numpy(), np.cumsum(lengths)[:-1])


def _token_column(batch: Batch, name: str, tensor: Any) -> Tensor:
    if name not in TOKEN_COLUMNS:
        raise ShapeError(f"{name}: no token column; those are {', '.join(TOKEN_COLUMNS)}")
    values = np.concatenate(batch.lists(name))
    return tensor(values, torch.bool if values.dtype == bool else torch.float32)  # type: ignore[no-any-return]


def _lengths(rows: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return np.array([len(row) for row in rows], dtype=np.int64)


def _ranges(lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """0, 1, …, n - 1 for each n, one after the other."""
    starts = np.cumsum(lengths) - lengths
    return np.asarray(np.arange(lengths.sum()) - np.repeat(starts, lengths))
