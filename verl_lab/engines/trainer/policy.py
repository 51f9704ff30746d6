"""Models as the trainer calls them: packed samples in, log-probabilities or scores out.

Shapes: S packed tokens, T response tokens, B samples, D hidden size, V vocabulary.
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


class PackedTrunk:
    """The hidden states of a model.

    Args:
        model: a transformers model, loaded with packed attention or flash attention.
        compute_dtype: the precision of forward passes; parameters keep theirs.
    """

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype) -> None:
        self.model = model
        self.compute_dtype = compute_dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.model.parameters()).device

    def states(self, packed: Packed, places: Tensor) -> Tensor:
        """The last hidden states at some places in S, [n, D]."""
        base: Any = self.model.base_model
        with self.autocast():
            hidden = base(
                input_ids=packed.input_ids,
                position_ids=packed.position_ids,
                use_cache=False,
                **self._boundaries(packed),
            ).last_hidden_state[0]
            return hidden.index_select(0, places)  # type: ignore[no-any-return]

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The precision of forward passes."""
        if self.compute_dtype in (torch.float32, torch.float64):
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.compute_dtype)

    @torch.no_grad()
    def by_row(
        self, batch: Batch, micro_batch_tokens: int, values: Callable[[Packed], Tensor]
    ) -> list[np.ndarray[Any, Any]]:
        """`values` of every response token of a batch, a row a sample."""
        rows: list[np.ndarray[Any, Any] | None] = [None] * len(batch)
        for indices in micro_batches(sample_lengths(batch), micro_batch_tokens):
            part = batch.take(indices)
            found = values(pack(part, self.device))
            for index, row in zip(indices, unpack(found, part), strict=True):
                rows[index] = row
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


class PackedPolicy(PackedTrunk):
    """Log-probabilities of a causal language model."""

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype) -> None:
        super().__init__(model, compute_dtype)
        self._head = _head(model)

    def predicting(self, packed: Packed) -> Tensor:
        """The hidden state before each response token, [T, D]."""
        return self.states(packed, packed.prediction_index)

    def logprobs(
        self,
        packed: Packed,
        temperature: float,
        *,
        with_entropy: bool = True,
        entropy_grad: bool = False,
        states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the response tokens, [T] each.

        Args:
            packed: the samples.
            temperature: of sampling.
            with_entropy: without it the entropy is 0, and cheaper.
            entropy_grad: whether the entropy has a gradient.
            states: what `predicting` gave, where that is known.
        """
        states = self.predicting(packed) if states is None else states
        with self.autocast():
            return chunked_logprobs(
                states,
                self._head,
                packed.target_ids,
                temperature=temperature,
                chunk_tokens=CHUNK_TOKENS,
                with_entropy=with_entropy,
                entropy_grad=entropy_grad,
            )

    def score(
        self, batch: Batch, temperature: float, micro_batch_tokens: int
    ) -> list[np.ndarray[Any, Any]]:
        """Log-probabilities of every response token of a batch, a row a sample."""
        return self.by_row(
            batch,
            micro_batch_tokens,
            lambda packed: self.logprobs(packed, temperature, with_entropy=False)[0],
        )


class PackedScorer(PackedTrunk):
    """Scores of a sequence classifier with one label: a critic, or a reward model.

    Args:
        model: a transformers sequence classifier.
        head: its last layer, which runs in float32 at least.
        compute_dtype: the precision of its trunk.
    """

    def __init__(self, model: nn.Module, head: nn.Module, compute_dtype: torch.dtype) -> None:
        super().__init__(model, compute_dtype)
        self.head = head

    def values(self, packed: Packed) -> Tensor:
        """The score of the state before each response token, [T]."""
        return head_values(self.head, self.states(packed, packed.prediction_index))

    def scores(self, packed: Packed) -> Tensor:
        """The score of each sample, at its last token, [B]."""
        return head_values(self.head, self.states(packed, packed.cu_seqlens[1:].long() - 1))


def head_values(head: nn.Module, states: Tensor) -> Tensor:
    """One number a state, [n], in the precision of the head's weights."""
    weight = next(head.parameters())
    values: Tensor = head(states.to(weight.dtype))
    return values[:, 0]


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
