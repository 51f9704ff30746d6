"""The keys and values of attention, for prompts and for the sequences in flight.

Both caches implement what transformers' own forward passes ask of a `Cache`, so the model needs no
changes. `PromptCache` keeps what one forward pass over whole prompts computed. `SlotCache` is an
arena with a row a slot; sequences of different lengths live in its rows.

Letters: `H` key/value heads, `D` head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

LENGTH_STEP = 64
"""The arena's length is a multiple of this many tokens."""
GROWTH = 1.5
"""How much longer the arena becomes when it is too short, at least."""


class PromptCache(Cache):
    """Keys and values of prompts [prompts, H, length, D] a layer, as computed."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keeps what a layer computed and hands it back."""
        self.keys[layer_idx], self.values[layer_idx] = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before those of the forward pass: none."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Tokens attended to, and the position of the first."""
        return query_length, 0


class SlotCache(Cache):
    """An arena [rows, H, length, D] a layer; the rows in use are the first ones.

    A forward pass takes one token a row. `aim` says where it goes; `update` then writes it there
    and hands out views of the rows and the length needed, nothing more.
    """

    def __init__(self, rows: int, length: int, max_length: int) -> None:
        super().__init__(layers=[])
        self._rows, self._max_length = rows, max_length
        self._length = min(_rounded(length), _rounded(max_length))
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._aim: tuple[Tensor, Tensor, int] | None = None

    @property
    def length(self) -> int:
        """Tokens a row has room for at present."""
        return self._length

    def load(self, slots: Sequence[int], prompts: PromptCache, row: int, length: int) -> None:
        """Copies the first `length` tokens of one prompt into slots."""
        for layer, keys in prompts.keys.items():
            values = prompts.values[layer]
            if layer not in self._keys:
                self._keys[layer] = self._arena(keys)
                self._values[layer] = self._arena(values)
            for slot in slots:
                self._keys[layer][slot, :, :length] = keys[row, :, :length]
                self._values[layer][slot, :, :length] = values[row, :, :length]

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of one slot to another."""
        for arenas in (self._keys, self._values):
            for arena in arenas.values():
                arena[target, :, :length] = arena[source, :, :length]

    def make_room(self, length: int) -> None:
        """Grows the arena where it is shorter than `length`, layer by layer."""
        if length <= self._length:
            return
        longer = max(length, int(self._length * GROWTH))
        self._length = min(_rounded(longer), _rounded(self._max_length))
        for arenas in (self._keys, self._values):
            for layer, old in arenas.items():
                arenas[layer] = self._arena(old)
                arenas[layer][:, :, : old.shape[2]] = old

    def aim(self, positions: Tensor, length: int) -> None:
        """Says where the next forward pass writes and what it sees.

        Args:
            positions: [n] int64, the position of each row's token; rows 0 to n - 1 take part.
            length: tokens attended to, over all rows.
        """
        rows = torch.arange(len(positions), device=positions.device)
        self._aim = (rows, positions, length)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes one token's keys and values [n, H, 1, D]; returns views of what is attended to."""
        assert self._aim is not None, "aim before a forward pass"
        rows, positions, length = self._aim
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[rows, :, positions] = key_states[:, :, 0]
        values[rows, :, positions] = value_states[:, :, 0]
        return keys[: len(rows), :, :length], values[: len(rows), :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the one of the forward pass, in the longest row."""
        return 0 if self._aim is None else self._aim[2] - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Tokens attended to, and the position of the first."""
        return self.get_seq_length(layer_idx) + query_length, 0

    def _arena(self, like: Tensor) -> Tensor:
        # Zeros: what is masked out still is multiplied, and 0 * nan of fresh memory would be nan.
        return like.new_zeros(self._rows, like.shape[1], self._length, like.shape[3])


def _rounded(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP
