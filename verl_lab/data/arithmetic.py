"""Our own verifiable task, `add_compare`: add two numbers, or say which is larger. No torch, no
download.

`37+58=` is answered by `95`, and `37?58=` by `<` (or `>`, or `=`). A tenth of all problems, chosen
by a hash of their text, is held out whatever the seed, so no policy has trained on what it is
judged by.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import Any, Literal

from verl_lab.errors import ConfigError

Split = Literal["train", "heldout"]
HELDOUT_SHARE = 10
"""One problem in so many is held out."""


@dataclass(frozen=True)
class AddCompare:
    """The task with its options, the keys of `task` in a config."""

    max_digits: int = 2
    """Longest number."""
    compare_share: float = 0.25
    """Share of problems that compare; the others add."""
    size: int = 4000
    """Distinct problems to train on."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_digits <= 9:
            raise ConfigError(f"task.max_digits: is {self.max_digits}; use 1 to 9")
        if not 0 <= self.compare_share <= 1:
            raise ConfigError(f"task.compare_share: is {self.compare_share}; use 0 to 1")
        most = 100**self.max_digits // 2
        if not 1 <= self.size <= most:
            raise ConfigError(
                f"task.size: is {self.size}; there are enough distinct problems for 1 to {most}"
            )

    def problems(self, split: Split, size: int, seed: int) -> list[dict[str, str]]:
        """`size` distinct problems of a split, each with its `prompt` and `answer`, fixed by the
        seed."""
        drawn: dict[str, str] = {}
        source = random.Random(f"add_compare/{split}/{seed}")
        while len(drawn) < size:
            prompt, answer = self._problem(source)
            if (is_heldout(prompt)) == (split == "heldout"):
                drawn[prompt] = answer
        return [{"prompt": prompt, "answer": answer} for prompt, answer in drawn.items()]

    def score(self, response: str, row: dict[str, Any]) -> float:
        """1 for the exact answer, spaces around it aside; else 0."""
        return float(response.strip() == row["answer"])

    def _problem(self, source: random.Random) -> tuple[str, str]:
        top = 10**self.max_digits - 1
        a, b = source.randint(0, top), source.randint(0, top)
        if source.random() >= self.compare_share:
            return f"{a}+{b}=", str(a + b)
        return f"{a}?{b}=", "<" if a < b else ">" if a > b else "="


def is_heldout(prompt: str) -> bool:
    """Whether a problem belongs to the held-out split."""
    return zlib.crc32(prompt.encode()) % HELDOUT_SHARE == 0
