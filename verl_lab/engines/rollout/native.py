"""The built-in rollout engine: continuous batching over slots, for Hugging Face causal models.

A prompt goes through the model once, and its keys and values are copied into the slots of its
group's samples as these start. Then each forward pass takes one token of every sample in flight.
A sample that ends frees its slot at once, and the next one that waits takes it.

On a CPU the samples of a float32 or bfloat16 model do not depend on the number of slots to the last
bit; on a GPU they do not up to the rounding of its kernels.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from verl_lab.algos.logprobs import token_logprobs
from verl_lab.batch.columns import Batch
from verl_lab.engines.rollout.base import Report, Sampling
from verl_lab.engines.rollout.cache import PromptCache, SlotCache
from verl_lab.engines.rollout.policy import Policy, rounded
from verl_lab.engines.rollout.sampling import choose, sample_key
from verl_lab.engines.rollout.schedule import Sample, Slots
from verl_lab.engines.weights import load_version
from verl_lab.errors import DataError, StateError

PREFILL_TOKENS = 4096
"""Tokens, padding included, of the prompts that go through the model together."""
FIRST_RESERVE = 128
"""New tokens the arena has room for at first."""
REPORT_EVERY_S = 0.2


class NativeEngine:
    """See `RolloutEngine`.

    Args:
        model: a causal language model, on the device where it shall run.
        tokenizer: the model's own.
    """

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        self.policy = Policy(model)
        self.tokenizer = tokenizer
        self.weights_version = -1
        self.stop_ids = stop_ids(model, tokenizer)

    @torch.inference_mode()
    def generate(
        self, prompts: Batch, sampling: Sampling, *, step: int, slots: int, report: Report
    ) -> Batch:
        """See `RolloutEngine.generate`.

        Raises:
            DataError: a prompt is empty or has ids outside the vocabulary.
            ConfigError: prompt and response can be longer than the model allows.
            StateError: the policy gives no finite probabilities.
        """
        if slots < 1:
            raise StateError(f"slots: is {slots}; at least one sequence must be in flight")
        if not len(prompts):
            raise DataError("prompts: there are none; give at least one row")
        ids = [row.tolist() for row in prompts.lists("prompt_ids")]
        self._check(ids, prompts["group_id"])
        self.policy.check_length(max(map(len, ids)), sampling.max_new_tokens)
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
        generation = Generation(self.policy, sampling, self.stop_ids, report)
        generation.run(ids, samples, num_slots=min(slots, len(samples)))
        return self._collect(prompts, samples, sampling.group_size)

    def load_weights(self, folder: Path) -> dict[str, Any]:
        """See `RolloutEngine.load_weights`."""
        held = load_version(folder, self.policy.model)
        self.weights_version = held["version"]
        return held

    def _check(self, prompts: list[list[int]], group_ids: list[int]) -> None:
        for ids, group_id in zip(prompts, group_ids, strict=True):
            if not ids:
                raise DataError(
                    f"prompt_ids: the prompt of group {group_id} is empty; leave it out, or begin it "
                    f"with a token such as the tokenizer's bos_token"
                )
            if not 0 <= min(ids) <= max(ids) < self.policy.vocab_size:
                raise DataError(
                    f"prompt_ids: the prompt of group {group_id} has ids from {min(ids)} to {max(ids)}, "
                    f"the model's vocabulary has {self.policy.vocab_size}; use the model's own tokenizer"
                )

    def _collect(self, prompts: Batch, samples: list[Sample], group_size: int) -> Batch:
        responses = [s.response_ids for s in samples]
        texts = self.tokenizer.batch_decode(
            responses, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return prompts.repeat(group_size).with_columns(
            {
                "sample_id": [s.sample_id for s in samples],
                "response": texts,
                "response_ids": responses,
                "response_mask": [[True] * len(ids) for ids in responses],
                "rollout_logprobs": [np.float32(s.logprobs) for s in samples],
                "finish_reason": [s.finish_reason for s in samples],
                "weights_version": [self.weights_version] * len(samples),
            }
        )


class Block(NamedTuple):
    """Prompts that went through the model together, until their last sample has started."""

    cache: PromptCache
    logits: Tensor
    """[prompts, V] after the last token of each."""
    place: dict[int, int]
    """Where in the block the prompt of each row is."""
    waiting: deque[Sample]


class Generation:
    """One call of `generate` under way."""

    def __init__(
        self, policy: Policy, sampling: Sampling, stop_ids: frozenset[int], report: Report
    ) -> None:
        self._policy, self._sampling, self._stop_ids = policy, sampling, stop_ids
        self._report = report
        self._reported_at = float("-inf")

    def run(self, prompts: list[list[int]], samples: list[Sample], *, num_slots: int) -> None:
        """Lets every sample grow to its end.

        Args:
            prompts: token ids by row.
            samples: in the order in which they shall start; those of a prompt are neighbours.
            num_slots: most samples in flight.
        """
        self._samples = samples
        longest = max(map(len, prompts))
        new_tokens = self._sampling.max_new_tokens
        slots = Slots(num_slots)
        cache = SlotCache(
            max(num_slots, self._policy.min_rows),
            rounded(longest + min(new_tokens, FIRST_RESERVE)),
            rounded(longest + new_tokens),
        )
        blocks = self._blocks(prompts, samples)
        while self._admit(blocks, slots, cache):
            for source, target, sample in slots.compact():
                cache.move(source, target, sample.length)
            flying = slots.samples
            logits = self._policy.decode(
                cache, [s.response_ids[-1] for s in flying], [s.length for s in flying]
            )
            self._extend(flying, logits)
            slots.release_finished()
            self._progress()
        self._progress(is_last=True)

    def _admit(self, blocks: Blocks, slots: Slots, cache: SlotCache) -> bool:
        """Starts samples until all slots are taken or none waits; returns whether any is in flight."""
        while (free := slots.free) and (block := blocks.current()) is not None:
            starting = [block.waiting.popleft() for _ in free[: len(block.waiting)]]
            places = [block.place[s.row] for s in starting]
            self._extend(starting, block.logits[places])
            lasting = [s for s in starting if not s.finish_reason]
            for slot, sample in zip(free, lasting, strict=False):
                slots.put(slot, sample)
        return bool(slots.samples)
