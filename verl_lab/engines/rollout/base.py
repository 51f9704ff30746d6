"""What a rollout engine is: prompts in, sampled responses with their log-probabilities out.

An engine's samples depend on its weights, the prompts and `Sampling` alone: not on how many
sequences are in flight, nor on which engine of several got a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from verl_lab.batch.columns import Batch
from verl_lab.config.schema import LabConfig
from verl_lab.errors import ConfigError

Report = Callable[[dict[str, Any]], None]
"""Takes progress: `{"tokens": n, "sequences_done": k, "sequences_total": m}`."""


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled."""

    max_new_tokens: int
    """Longest response in tokens."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this much probability."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0 is all."""
    group_size: int = 1
    """Responses per prompt."""
    seed: int = 0
    """Keys the noise, together with step, group, sample and position."""

    def __post_init__(self) -> None:
        limits = {
            "max_new_tokens": (self.max_new_tokens >= 1, "1 or more"),
            "temperature": (self.temperature >= 0, "0 or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (self.top_k >= 0, "0 or more"),
            "group_size": (self.group_size >= 1, "1 or more"),
        }
        for name, (is_good, allowed) in limits.items():
            if not is_good:
                raise ConfigError(f"rollout.{name}: is {getattr(self, name)}; set it to {allowed}")

    @classmethod
    def from_config(cls, config: LabConfig) -> Self:
        """What the config says for training steps."""
        rollout = config.rollout
        return cls(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            group_size=rollout.group_size,
            seed=config.seed,
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for a message; `Sampling(**data)` is the inverse."""
        return asdict(self)

    @property
    def logprob_temperature(self) -> float:
        """The temperature at which log-probabilities are recorded: 1 for greedy sampling."""
        return self.temperature or 1.0


class RolloutEngine(Protocol):
    """Samples responses from the weights it holds."""

    weights_version: int
    """Of the weights it holds; -1 for those that `model.name_or_path` names."""

    def generate(
        self, prompts: Batch, sampling: Sampling, *, step: int, slots: int, report: Report
    ) -> Batch:
        """`sampling.group_size` responses per prompt, in the order of the prompts.

        Args:
            prompts: a row a prompt, with `group_id` and `prompt_ids`.
            sampling: how to sample.
            step: keys the noise.
            slots: most sequences in flight.
            report: called at most five times a second, and at the end.

        Returns:
            The columns given, and `sample_id`, `response` (without special tokens), `response_ids`
            (with the end-of-sequence token that stopped it), `response_mask`, `rollout_logprobs`,
            `finish_reason` and `weights_version`. `rollout_logprobs` belong to the whole
            distribution at the temperature, also where `top_p` or `top_k` cut it for sampling.
        """

    def load_weights(self, folder: Path) -> dict[str, Any]:
        """Takes over published weights; returns `version` and `hash` of what it then holds."""
