"""What a trainer engine is: scored samples in, a better policy out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from verl_lab.algos.aggregate import Aggregation
from verl_lab.algos.kl import Estimator
from verl_lab.batch.columns import Batch
from verl_lab.config.schema import LabConfig

Report = Callable[[dict[str, Any]], None]
"""Takes progress: `{"done": n, "total": m}` in micro-batches."""


@dataclass(frozen=True)
class UpdateSettings:
    """The numbers of one step's updates; they may differ from step to step."""

    learning_rate: float
    total_updates: int
    """Updates of the whole run; the schedule ends there."""
    warmup_updates: int
    lr_schedule: Literal["constant", "linear", "cosine"]
    weight_decay: float
    max_grad_norm: float
    micro_batch_tokens: int
    updates_per_step: int
    temperature: float
    loss_aggregation: Aggregation
    clip_low: float
    clip_high: float
    kl_coef: float
    kl_estimator: Estimator
    max_new_tokens: int
    """The constant length of `seq-mean-token-sum-norm`."""

    @classmethod
    def from_config(cls, config: LabConfig) -> Self:
        """What the config says now."""
        trainer, algorithm = config.trainer, config.algorithm
        return cls(
            learning_rate=trainer.learning_rate,
            total_updates=config.total_updates,
            warmup_updates=trainer.warmup_steps * trainer.updates_per_step,
            lr_schedule=trainer.lr_schedule,
            weight_decay=trainer.weight_decay,
            max_grad_norm=trainer.max_grad_norm,
            micro_batch_tokens=trainer.micro_batch_tokens,
            updates_per_step=trainer.updates_per_step,
            temperature=config.rollout.temperature,
            loss_aggregation=algorithm.loss_aggregation,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            kl_coef=algorithm.kl_coef,
            kl_estimator=algorithm.kl_estimator,
            max_new_tokens=config.rollout.max_new_tokens,
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for a message; `UpdateSettings(**data)` is the inverse."""
        return asdict(self)


class TrainerEngine(Protocol):
    """Holds the policy, its optimizer and a frozen reference."""

    def logprobs(self, batch: Batch, temperature: float, micro_batch_tokens: int) -> Batch:
        """Adds `old_logprobs`: the policy's, of the sampled tokens, now."""

    def ref_logprobs(self, batch: Batch, temperature: float, micro_batch_tokens: int) -> Batch:
        """Adds `ref_logprobs`: the reference's."""

    def update(
        self, batch: Batch, settings: UpdateSettings, report: Report
    ) -> tuple[Batch, dict[str, float]]:
        """Trains on a batch; returns it with `old_logprobs`, and metrics.

        Args:
            batch: with `prompt_ids`, `response_ids`, `rollout_logprobs`, `advantages`;
                `ref_logprobs` where there is a KL term, and optionally `loss_mask`.
            settings: the numbers.
            report: called after each micro-batch.
        """

    def publish(self, folder: Path, version: int) -> dict[str, Any]:
        """Writes the weights for the rollout workers; returns `version`, `bytes` and `hash`."""

    def save(self, folder: Path) -> None:
        """Writes all that `load` needs to go on bit for bit."""

    def load(self, folder: Path) -> None:
        """Goes back to what `save` wrote."""
