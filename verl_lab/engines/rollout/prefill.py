"""Prompts on their way into slots: each goes through the model once, a few of them together."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from torch import Tensor

from verl_lab.engines.rollout.cache import PromptCache
from verl_lab.engines.rollout.policy import Policy, rounded
from verl_lab.engines.rollout.schedule import Sample

MAX_TOKENS = 4096
"""Tokens, padding included, of the prompts in one forward pass; a longer prompt goes alone."""


class Start(NamedTuple):
    """Samples whose prompts are computed."""

    samples: list[Sample]
    places: list[int]
    """Where in `cache` the prompt of each is."""
    cache: PromptCache
    logits: Tensor
    """[samples, V] for the first token of each."""


class Prefill:
    """The queue of samples that wait to start.

    Prompts of the same padded length go through the model together, the longest first. They are
    kept until the last of their samples has started, and only then the next ones are computed: so
    at most `MAX_TOKENS` tokens of prompts are held, or one prompt.

    Args:
        prompts: token ids by row of the batch.
        samples: those of one prompt next to each other.
    """

    def __init__(self, policy: Policy, prompts: list[list[int]], samples: list[Sample]) -> None:
        self._policy, self._prompts = policy, prompts
        # Equal lengths, not just similar ones: other padding would mean other rounding.
        self._waiting = deque(sorted(samples, key=lambda s: -rounded(s.prompt_length)))
        self._ready: deque[Sample] = deque()
        self._places: dict[int, int] = {}

    def start(self, most: int) -> Start | None:
        """Takes the next samples off the queue, `most` or fewer; None when none is left."""
        if not self._ready and not self._compute():
            return None
        samples = [self._ready.popleft() for _ in range(min(most, len(self._ready)))]
        places = [self._places[s.row] for s in samples]
        return Start(samples, places, self._cache, self._logits[places])

    def _compute(self) -> bool:
        """Sends the next prompts through the model; returns whether there were any."""
        self._places = {}
        while self._waiting and self._fits(self._waiting[0]):
            sample = self._waiting.popleft()
            self._places.setdefault(sample.row, len(self._places))
            self._ready.append(sample)
        if not self._ready:
            return False
        prompts = [self._prompts[row] for row in self._places]
        self._cache, self._logits = self._policy.prefill(prompts)
        return True

    def _fits(self, sample: Sample) -> bool:
        if not self._ready or sample.row in self._places:
            return True
        width = rounded(sample.prompt_length)
        is_same = width == rounded(self._ready[0].prompt_length)
        return is_same and width * (len(self._places) + 1) <= MAX_TOKENS
