"""Which sample is where: the queue of those that wait, and the slots of those in flight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Sample:
    """One response while it grows."""

    row: int
    """Its prompt's row in the batch."""
    group_id: int
    sample_id: int
    key: int
    """Of its sampling noise."""
    prompt_length: int
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    """`stop`, `length`, or nothing while it grows."""

    @property
    def length(self) -> int:
        """Tokens whose keys and values are computed: all but the newest."""
        return self.prompt_length + len(self.response_ids) - 1

    def add(
        self, token: int, logprob: float, *, stop_ids: frozenset[int], max_new_tokens: int
    ) -> None:
        """Appends a token, and finishes if it is the last one."""
        self.response_ids.append(token)
        self.logprobs.append(logprob)
        if token in stop_ids:
            self.finish_reason = "stop"
        elif len(self.response_ids) == max_new_tokens:
            self.finish_reason = "length"


class Slots:
    """A fixed number of places. The first ones are in use once `compact` has closed the gaps."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._places: list[Sample | None] = []

    @property
    def samples(self) -> list[Sample]:
        """Those in flight, in the order of their slots."""
        return [sample for sample in self._places if sample is not None]

    @property
    def free(self) -> list[int]:
        """Slots that are not taken, the first ones first."""
        taken = [i for i, sample in enumerate(self._places) if sample is None]
        return taken + list(range(len(self._places), self._num_slots))

    def put(self, slot: int, sample: Sample) -> None:
        """Takes a free slot."""
        if slot >= len(self._places):
            self._places += [None] * (slot + 1 - len(self._places))
        assert self._places[slot] is None, f"slot {slot} is taken"
        self._places[slot] = sample

    def release_finished(self) -> int:
        """Frees the slots of samples that are finished; returns how many."""
        before = len(self.samples)
        self._places = [None if s is None or s.finish_reason else s for s in self._places]
        return before - len(self.samples)

    def compact(self) -> Iterator[tuple[int, int, Sample]]:
        """Closes gaps with the last samples; yields `(from slot, to slot, sample)` of each move."""
        gap = 0
        while True:
            while self._places and self._places[-1] is None:
                self._places.pop()
            while gap < len(self._places) and self._places[gap] is not None:
                gap += 1
            if gap >= len(self._places):
                return
            sample = self._places.pop()
            assert sample is not None
            self._places[gap] = sample
            yield len(self._places), gap, sample
