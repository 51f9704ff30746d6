"""Continuous batching: one call of `generate`, from the first prompt to the last token."""

from __future__ import annotations

import math
import time
from itertools import groupby

from torch import Tensor, tensor

from verl_lab.algos.logprobs import token_logprobs
from verl_lab.engines.rollout.base import Report, Sampling
from verl_lab.engines.rollout.cache import SlotCache
from verl_lab.engines.rollout.policy import Policy, rounded
from verl_lab.engines.rollout.prefill import Prefill, Start
from verl_lab.engines.rollout.sampling import choose
from verl_lab.engines.rollout.schedule import Sample, Slots
from verl_lab.errors import StateError

FIRST_RESERVE = 128
"""New tokens for which slots have room at first; they grow when a response gets longer."""
REPORT_EVERY_S = 0.2


class Generation:
    """Lets samples grow to their ends, `num_slots` of them at a time.

    Args:
        prompts: token ids by row of the batch.
        samples: those of one prompt next to each other; they are filled in.
        stop_ids: tokens that end a response.
    """

    def __init__(
        self,
        policy: Policy,
        prompts: list[list[int]],
        samples: list[Sample],
        sampling: Sampling,
        *,
        stop_ids: frozenset[int],
        num_slots: int,
        report: Report,
    ) -> None:
        self._policy, self._samples, self._sampling = policy, samples, sampling
        self._stop_ids, self._report = stop_ids, report
        self._num_tokens, self._num_done, self._reported_at = 0, 0, float("-inf")
        self._prefill = Prefill(policy, prompts, samples)
        self._slots = Slots(num_slots)
        longest = max(map(len, prompts))
        self._cache = SlotCache(
            rounded(num_slots, policy.row_step),
            length=longest + min(sampling.max_new_tokens, FIRST_RESERVE),
            max_length=longest + sampling.max_new_tokens,
        )

    def run(self) -> None:
        """Turns until no sample is left: fill the free slots, close gaps, one token for each.

        Raises:
            StateError: the policy gives no finite probabilities.
        """
        self._fill()
        while samples := self._slots.samples:
            logits = self._policy.decode(
                self._cache, [s.response_ids[-1] for s in samples], [s.length for s in samples]
            )
            self._extend(samples, logits)
            self._slots.release_finished()
            self._fill()
            for source, target, sample in self._slots.compact():
                self._cache.move(source, target, sample.length)
            self._progress()
        self._progress(is_last=True)

    def _fill(self) -> None:
        """Starts samples in the free slots; one that ends with its first token takes none."""
        while (free := self._slots.free) and (start := self._prefill.start(len(free))):
            self._extend(start.samples, start.logits)
            self._place(start, free)

    def _place(self, start: Start, free: list[int]) -> None:
        growing = [
            (place, sample)
            for place, sample in zip(start.places, start.samples, strict=True)
            if not sample.finish_reason
        ]
        numbered = zip(free, growing, strict=False)
        for place, same_prompt in groupby(numbered, key=lambda item: item[1][0]):
            taken = [(slot, sample) for slot, (_, sample) in same_prompt]
            for slot, sample in taken:
                self._slots.put(slot, sample)
            length = taken[0][1].prompt_length
            self._cache.load([slot for slot, _ in taken], start.cache, place, length)

    def _extend(self, samples: list[Sample], logits: Tensor) -> None:
        """Gives each sample its next token."""
        sampling = self._sampling
        ids = choose(
            logits,
            tensor([s.key for s in samples], device=logits.device),
            tensor([len(s.response_ids) for s in samples], device=logits.device),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
        logprobs, _ = token_logprobs(logits, ids, sampling.logprob_temperature, with_entropy=False)
        for sample, token, logprob in zip(samples, ids.tolist(), logprobs.tolist(), strict=True):
            if not math.isfinite(logprob):
                raise StateError(
                    f"policy: the log-probability of token {len(sample.response_ids)} of sample "
                    f"{sample.sample_id} of group {sample.group_id} is {logprob}; its weights have "
                    f"diverged: go back to an earlier checkpoint, or lower trainer.learning_rate"
                )
            sample.add(
                token,
                logprob,
                stop_ids=self._stop_ids,
                max_new_tokens=sampling.max_new_tokens,
            )
            self._num_done += bool(sample.finish_reason)
        self._num_tokens += len(samples)

    def _progress(self, *, is_last: bool = False) -> None:
        now = time.monotonic()
        if is_last or now - self._reported_at >= REPORT_EVERY_S:
            self._reported_at = now
            self._report(
                {
                    "tokens": self._num_tokens,
                    "sequences_done": self._num_done,
                    "sequences_total": len(self._samples),
                }
            )
