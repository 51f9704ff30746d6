"""The built-in rollout engine: continuous batching over slots, for Hugging Face causal models.

A prompt goes through the model once, and its keys and values are copied into the slots of its
group's samples as these start. Then each forward pass takes one token of every sample in flight.
A sample that ends frees its slot at once, and the next one that waits takes it.

On a CPU a sample is the same to the last bit whatever the number of slots. On a GPU it is the same
up to rounding: a token may differ where two are as good as equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from verl_lab.batch.columns import Batch
from verl_lab.engines.rollout.base import Report, Sampling
from verl_lab.engines.rollout.generation import Generation
from verl_lab.engines.rollout.policy import Policy
from verl_lab.engines.rollout.sampling import sample_key
from verl_lab.engines.rollout.schedule import Sample
from verl_lab.engines.weights import load_into
from verl_lab.errors import DataError, ShapeError, StateError


class NativeEngine:
    """See `RolloutEngine`.

    Args:
        model: a causal language model, on the device where it shall run.
        tokenizer: the model's own.
    """

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        self.policy = Policy(model)
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids(model, tokenizer)
        self.weights_version = -1
        self._is_whole = True

    @torch.inference_mode()
    def generate(
        self, prompts: Batch, sampling: Sampling, *, step: int, slots: int, report: Report
    ) -> Batch:
        """See `RolloutEngine.generate`.

        Raises:
            DataError: a prompt is empty or has ids outside the vocabulary.
            ConfigError: prompt and response can be longer than the model allows.
            ShapeError: two prompts have one `group_id`.
            StateError: the policy gives no finite probabilities.
        """
        if slots < 1 or not len(prompts):
            raise StateError(
                f"generate: got {len(prompts)} prompts and {slots} slots; give at least one of each"
            )
        if not self._is_whole:
            raise StateError(
                "generate: the last load of weights failed half-way; load whole ones first"
            )
        ids = [row.tolist() for row in prompts.lists("prompt_ids")]
        self._check(ids, prompts["group_id"], sampling.max_new_tokens)
        samples = [
            Sample(
                row=row,
                group_id=group_id,
                sample_id=sample_id,
                key=sample_key(sampling.seed, step, group_id, sample_id),
                prompt_length=len(ids[row]),
            )
            for row, group_id in enumerate(prompts["group_id"])
            for sample_id in range(sampling.group_size)
        ]
        Generation(
            self.policy,
            ids,
            samples,
            sampling,
            stop_ids=self.stop_ids,
            num_slots=min(slots, len(samples)),
            report=report,
        ).run()
        return self._collect(prompts, samples, sampling.group_size)

    def load_weights(self, folder: Path) -> dict[str, Any]:
        """See `RolloutEngine.load_weights`."""
        self._is_whole = False  # a load that fails leaves weights of two versions
        held = load_into(self.policy.model, folder)
        self._is_whole = True
        self.weights_version = held["version"]
        return held

    def _check(self, prompts: list[list[int]], group_ids: list[int], max_new_tokens: int) -> None:
        if len(set(group_ids)) < len(group_ids):
            twice = next(g for g in group_ids if group_ids.count(g) > 1)
            raise ShapeError(
                f"group_id: {twice} occurs twice, so its samples would be the same; give every "
                f"prompt a number of its own, and ask for more with rollout.group_size"
            )
        for ids, group_id in zip(prompts, group_ids, strict=True):
            if not ids:
                raise DataError(
                    f"prompt_ids: the prompt of group {group_id} is empty; leave it out, or begin "
                    f"it with a token such as the tokenizer's bos_token"
                )
            if not 0 <= min(ids) <= max(ids) < self.policy.vocab_size:
                raise DataError(
                    f"prompt_ids: the prompt of group {group_id} has ids from {min(ids)} to "
                    f"{max(ids)}, the model's vocabulary has {self.policy.vocab_size}; use the "
                    f"model's own tokenizer"
                )
        self.policy.check_length(max(map(len, prompts)), max_new_tokens)

    def _collect(self, prompts: Batch, samples: list[Sample], group_size: int) -> Batch:
        responses = [s.response_ids for s in samples]
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in responses]
        return prompts.repeat(group_size).with_columns(
            {
                "sample_id": [s.sample_id for s in samples],
                "response": texts,
                "response_ids": responses,
                "response_mask": [[True] * len(ids) for ids in responses],
                "rollout_logprobs": [np.array(s.logprobs, dtype=np.float32) for s in samples],
                "finish_reason": [s.finish_reason for s in samples],
                "weights_version": [self.weights_version] * len(samples),
            }
        )


def stop_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end a response: those of the generation config, and the tokenizer's own."""
    generation: Any = getattr(model, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    listed = found if isinstance(found, list) else [found]
    return frozenset(int(i) for i in [*listed, tokenizer.eos_token_id] if i is not None)
