"""A causal language model as the trainer calls it: packed samples in, log-probabilities of their
responses out.

Shapes: S packed tokens, T response tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from verl_lab.algos.logprobs import chunked_logprobs
from verl_lab.batch.balance import micro_batches
from verl_lab.batch.columns import Batch
from verl_lab.batch.pack import Packed, pack, unpack
from verl_lab.engines.trainer.attention import NAME, Layout

CHUNK_TOKENS = 1024
"""Rows of logits held at once."""


class PackedPolicy:
    """Log-probabilities of a model.

    Args:
        model: a transformers causal language model, loaded with packed attention or flash
            attention.
        compute_dtype: the precision of forward passes; parameters keep theirs.
    """

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype) -> None:
        self.model = model
        self.compute_dtype = compute_dtype
        self._head = _head(model)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.model.parameters()).device

    def logprobs(
        self, packed: Packed, temperature: float, *, with_entropy: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the response tokens, [T] each."""
        base: Any = self.model.base_model
        with self._autocast():
            hidden = base(
                input_ids=packed.input_ids,
                position_ids=packed.position_ids,
                use_cache=False,
                **self._boundaries(packed),
            ).last_hidden_state[0]
            return chunked_logprobs(
                hidden.index_select(0, packed.prediction_index),
                self._head,
                packed.target_ids,
                temperature=temperature,
                chunk_tokens=CHUNK_TOKENS,
                with_entropy=with_entropy,
            )

    @torch.no_grad()
    def score(
        self, batch: Batch, temperature: float, micro_batch_tokens: int
    ) -> list[np.ndarray[Any, Any]]:
        """Log-probabilities of every response token of a batch, a row a sample."""
        rows: list[np.ndarray[Any, Any] | None] = [None] * len(batch)
        for indices in micro_batches(sample_lengths(batch), micro_batch_tokens):
            part = batch.take(indices)
            found, _ = self.logprobs(pack(part, self.device), temperature, with_entropy=False)
            for index, values in zip(indices, unpack(found, part), strict=True):
                rows[index] = values
        return rows  # type: ignore[return-value]

    def _boundaries(self, packed: Packed) -> dict[str, Any]:
        """What the model's attention needs to keep samples apart."""
        config: Any = self.model.config
        if config._attn_implementation == NAME:
            return {"layout": Layout.of(packed.cu_seqlens)}
        return {
            "cu_seq_lens_q": packed.cu_seqlens,
            "cu_seq_lens_k": packed.cu_seqlens,
            "max_length_q": packed.max_seqlen,
            "max_length_k": packed.max_seqlen,
        }

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.compute_dtype in (torch.float32, torch.float64):
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.compute_dtype)


def sample_lengths(batch: Batch) -> list[int]:
    """Tokens of each sample, prompt and response."""
    pairs = zip(batch.lists("prompt_ids"), batch.lists("response_ids"), strict=True)
    return [len(prompt) + len(response) for prompt, response in pairs]


def _head(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """From hidden states to logits, with what some models do to them after the output matrix."""
    output: Any = model.get_output_embeddings()  # type: ignore[operator]
    config: Any = model.config
    softcap = getattr(config, "final_logit_softcapping", None)
    factor = getattr(config, "logit_scale", None) or 1.0
    factor /= getattr(config, "logits_scaling", None) or 1.0

    def head(hidden: Tensor) -> Tensor:
        logits: Tensor = output(hidden)
        if factor != 1.0:
            logits = logits * factor
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    return head
