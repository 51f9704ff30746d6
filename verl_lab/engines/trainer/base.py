"""What a trainer engine is: scored samples in, a better policy out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from verl_lab.algos.aggregate import Aggregation
from verl_lab.algos.kl import Estimator
from verl_lab.batch.columns import Batch
from verl_lab.config.presets import Objective
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
    """Of the KL term in the loss."""
    kl_estimator: Estimator
    max_new_tokens: int
    """The constant length of `seq-mean-token-sum-norm`."""
    objective: Objective = "policy"
    policy_loss: str = "ppo"
    loss_options: dict[str, Any] = field(default_factory=dict)
    entropy_coef: float = 0.0
    correction: str = "none"
    correction_bounds: tuple[float, float] = (0.5, 2.0)
    bypass: bool = False
    trains_policy: bool = True
    """False while the critic warms up."""
    critic_learning_rate: float = 1e-5
    value_clip: float | None = None
    value_coef: float = 0.5
    preference_loss: str = "dpo"
    beta: float = 0.1
    preference_options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: LabConfig, *, step: int = 1, kl_coef: float | None = None) -> Self:
        """What the config says now.

        Args:
            config: the settings.
            step: the step that it is for, counted from 1.
            kl_coef: in place of the config's, where it adapts.
        """
        trainer, algorithm, preference = config.trainer, config.algorithm, config.preference
        in_loss = algorithm.kl_in == "loss"
        more: dict[str, Any] = {}
        if config.critic is not None:
            more = {
                "trains_policy": step > config.critic.warmup_steps,
                "critic_learning_rate": config.critic.learning_rate,
                "value_clip": config.critic.value_clip,
                "value_coef": config.critic.value_coef,
            }
        return cls(
            learning_rate=trainer.learning_rate,
            total_updates=config.total_updates,
            warmup_updates=trainer.warmup_steps * trainer.updates_per_step,
            lr_schedule=trainer.lr_schedule,
            weight_decay=trainer.weight_decay,
            max_grad_norm=trainer.max_grad_norm,
            micro_batch_tokens=trainer.micro_batch_tokens,
            updates_per_step=trainer.updates_per_step,
            temperature=config.rollout.temperature if config.objective == "policy" else 1.0,
            loss_aggregation=algorithm.loss_aggregation,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            kl_coef=(algorithm.kl_coef if kl_coef is None else kl_coef) if in_loss else 0.0,
            kl_estimator=algorithm.kl_estimator,
            max_new_tokens=config.rollout.max_new_tokens,
            objective=config.objective,
            policy_loss=algorithm.policy_loss,
            loss_options=algorithm.loss_options,
            entropy_coef=algorithm.entropy_coef,
            correction=config.correction,
            correction_bounds=algorithm.correction_bounds,
            bypass=algorithm.bypass,
            preference_loss=preference.loss,
            beta=preference.beta,
            preference_options=preference.options,
            **more,
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for a message; `UpdateSettings(**data)` is the inverse."""
        return asdict(self)


class TrainerEngine(Protocol):
    """Holds what is trained, its optimizer, and what it is compared with.

    The first three methods are those of a policy; a reward model has none of them.
    """

    def logprobs(self, batch: Batch, temperature: float, micro_batch_tokens: int) -> Batch:
        """Adds `old_logprobs`: the policy's, of the sampled tokens, now."""

    def ref_logprobs(self, batch: Batch, temperature: float, micro_batch_tokens: int) -> Batch:
        """Adds `ref_logprobs`: the reference's."""

    def values(self, batch: Batch, micro_batch_tokens: int) -> Batch:
        """Adds `values`: the critic's, of the state before each sampled token."""

    def update(
        self, batch: Batch, settings: UpdateSettings, report: Report
    ) -> tuple[Batch, dict[str, float]]:
        """Trains on a batch; returns it with what the update found, and metrics.

        Args:
            batch: with `prompt_ids`, `response_ids`, and what the objective needs: a policy
                `rollout_logprobs` and `advantages` (`ref_logprobs` where there is a KL term,
                `values` and `returns` where there is a critic), preferences `is_chosen` and
                `ref_logprobs`, a reward model `is_chosen`. `loss_mask` is optional.
            settings: the numbers.
            report: called after each micro-batch.
        """

    def evaluate(self, batch: Batch, settings: UpdateSettings) -> dict[str, float]:
        """The objective's metrics on a batch that is not trained on."""

    def publish(self, folder: Path, version: int) -> dict[str, Any]:
        """Writes the weights for the rollout workers; returns `version`, `bytes` and `hash`."""

    def save(self, folder: Path) -> None:
        """Writes all that `load` needs to go on bit for bit."""

    def load(self, folder: Path) -> None:
        """Goes back to what `save` wrote."""
