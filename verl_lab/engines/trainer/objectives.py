"""What a trainer minimises: one class an objective, each a sum over micro-batches.

An objective knows the whole update (its rows give the normalisers) and is then called with one
micro-batch after the other. Its losses add up to the loss of the update, and so do its metrics,
except those named `…_max`. Shapes: T response tokens, B samples of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from verl_lab.algos.aggregate import normalisers, token_weights
from verl_lab.algos.arguments import call_options
from verl_lab.algos.correction import correction_weights
from verl_lab.algos.kl import kl
from verl_lab.algos.values import value_loss
from verl_lab.batch.columns import Batch
from verl_lab.batch.pack import Packed, pack
from verl_lab.engines.trainer.base import UpdateSettings
from verl_lab.engines.trainer.policy import PackedPolicy, PackedScorer, head_values

MASKS = ("response_mask", "loss_mask")


@dataclass(frozen=True)
class Part:
    """What an objective says of a micro-batch."""

    loss: Tensor
    metrics: dict[str, Tensor]
    tokens: dict[str, Tensor] = field(default_factory=dict)
    """Columns that it found, [T] each."""


class Objective(Protocol):
    """What a trainer minimises."""

    columns: list[str]
    """The token columns that it needs packed."""

    def __call__(self, packed: Packed, rows: Batch) -> Part:
        """The micro-batch's part of the loss, and of the metrics."""


class TokenObjective:
    """What objectives over tokens share: the mask, and the weights of an update.

    Args:
        batch: the rows of one update.
        settings: the numbers.
        aggregation: in place of that of the settings.
    """

    def __init__(
        self, batch: Batch, settings: UpdateSettings, aggregation: Any | None = None
    ) -> None:
        self.settings = settings
        self.columns = [name for name in MASKS if name in batch]
        self._aggregation = aggregation or settings.loss_aggregation
        whole = pack(batch, "cpu", self.columns)
        self.num_tokens, self.num_sequences = normalisers(token_mask(whole), whole.sample_index)

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """The micro-batch's part of a mean over the tokens that train."""
        return torch.where(mask, values.detach(), 0.0).sum() / max(self.num_tokens, 1)

    def weights(self, packed: Packed, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The mask and the weights of the tokens, [T] each."""
        mask = token_mask(packed)
        weights = token_weights(
            mask,
            packed.sample_index,
            mode=self._aggregation,
            num_tokens=self.num_tokens,
            num_sequences=self.num_sequences,
            max_tokens=self.settings.max_new_tokens,
        )
        return mask, weights.to(dtype)


class PolicyObjective(TokenObjective):
    """A policy loss, with the entropy bonus, the KL term and the off-policy correction.

    Args:
        policy: what is trained.
        loss: called like the losses of `algos.losses`.
        batch: the rows of one update.
        settings: the numbers.
    """

    def __init__(
        self,
        policy: PackedPolicy,
        loss: Callable[..., Any],
        batch: Batch,
        settings: UpdateSettings,
    ) -> None:
        super().__init__(batch, settings)
        self._policy, self._loss = policy, loss
        self.columns = [*self.columns, "advantages", *self._optional(batch, settings)]
        self._options = call_options(
            loss,
            settings.loss_options,
            {"clip_low": settings.clip_low, "clip_high": settings.clip_high},
            "algorithm.loss_options",
        )

    def __call__(self, packed: Packed, rows: Batch, states: Tensor | None = None) -> Part:
        """See `Objective`."""
        settings = self.settings
        logprobs, entropy = self._policy.logprobs(
            packed, settings.temperature, entropy_grad=settings.entropy_coef > 0, states=states
        )
        old = packed.tokens.get("old_logprobs", logprobs.detach())
        mask, weights = self.weights(packed, logprobs.dtype)
        found = self._loss(
            logprobs,
            old,
            packed.tokens["advantages"].to(logprobs.dtype),
            mask,
            weights * self._correction(packed, old, mask),
            num_tokens=self.num_tokens,
            sample_index=packed.sample_index,
            **self._options,
        )
        loss, own = found if isinstance(found, tuple) else (found, {})
        metrics = {f"policy/{name}": value for name, value in own.items()}
        metrics["loss/policy"] = loss.detach()
        metrics["policy/entropy"] = self.mean(entropy, mask)
        if settings.entropy_coef > 0:
            loss = loss - settings.entropy_coef * (weights * torch.where(mask, entropy, 0.0)).sum()
        if settings.kl_coef > 0:
            reference = packed.tokens["ref_logprobs"].to(logprobs.dtype)
            divergence = kl(
                torch.where(mask, logprobs, 0.0),
                torch.where(mask, reference, 0.0),
                settings.kl_estimator,
            )
            loss = loss + settings.kl_coef * (weights * divergence).sum()
            metrics["policy/kl_ref"] = self.mean(divergence, mask)
        return Part(loss, metrics, {"old_logprobs": old})

    def _correction(self, packed: Packed, old: Tensor, mask: Tensor) -> Tensor | float:
        if self.settings.correction == "none":
            return 1.0
        low, high = self.settings.correction_bounds
        return correction_weights(
            old,
            packed.tokens["rollout_logprobs"].to(old.dtype),
            mask,
            packed.sample_index,
            mode=self.settings.correction,  # type: ignore[arg-type]
            low=low,
            high=high,
        )

    @staticmethod
    def _optional(batch: Batch, settings: UpdateSettings) -> list[str]:
        has_old = settings.updates_per_step > 1 or settings.bypass
        wanted = {
            "old_logprobs": has_old,
            "rollout_logprobs": settings.correction != "none",
            "ref_logprobs": settings.kl_coef > 0,
        }
        return [name for name, is_wanted in wanted.items() if is_wanted]


class SftObjective(TokenObjective):
    """The negative log-likelihood of given responses."""

    def __init__(self, policy: PackedPolicy, batch: Batch, settings: UpdateSettings) -> None:
        super().__init__(batch, settings)
        self._policy = policy

    def __call__(self, packed: Packed, rows: Batch) -> Part:
        """See `Objective`."""
        logprobs, entropy = self._policy.logprobs(packed, 1.0)
        mask, weights = self.weights(packed, logprobs.dtype)
        loss = -(weights * torch.where(mask, logprobs, 0.0)).sum()
        metrics = {
            "loss/sft": loss.detach(),
            "policy/nll": -self.mean(logprobs, mask),
            "policy/entropy": self.mean(entropy, mask),
        }
        return Part(loss, metrics)


class ValueObjective(TokenObjective):
    """The squared error of a critic's values, clipped around the old ones.

    Args:
        values: what gives the values of packed samples, [T].
        batch: the rows of one update.
        settings: the numbers.
    """

    def __init__(
        self, values: Callable[[Packed], Tensor], batch: Batch, settings: UpdateSettings
    ) -> None:
        super().__init__(batch, settings, "token-mean")
        self._values = values
        self.columns = [*self.columns, "values", "returns"]

    @classmethod
    def of(cls, critic: PackedScorer, batch: Batch, settings: UpdateSettings) -> ValueObjective:
        """For a critic with a model of its own."""
        return cls(critic.values, batch, settings)

    def __call__(self, packed: Packed, rows: Batch) -> Part:
        """See `Objective`."""
        return self.of_values(self._values(packed), packed)

    def of_values(self, values: Tensor, packed: Packed) -> Part:
        """The loss of values that are known."""
        mask, weights = self.weights(packed, values.dtype)
        loss, found = value_loss(
            values,
            packed.tokens["values"].to(values.dtype),
            packed.tokens["returns"].to(values.dtype),
            mask,
            weights,
            num_tokens=self.num_tokens,
            clip=self.settings.value_clip,
        )
        metrics = {f"critic/{name}": value for name, value in found.items()}
        return Part(loss, {**metrics, "loss/critic": loss.detach()})


class SharedObjective:
    """Policy and values from one pass through one trunk.

    Args:
        policy: the packed policy.
        head: from its hidden states to values.
        policy_part: the policy's objective.
        value_part: that of the values.
    """

    def __init__(
        self,
        policy: PackedPolicy,
        head: nn.Module,
        policy_part: PolicyObjective,
        value_part: ValueObjective,
    ) -> None:
        self._policy, self._head = policy, head
        self._policy_part, self._value_part = policy_part, value_part
        self.columns = list(dict.fromkeys([*policy_part.columns, *value_part.columns]))

    def __call__(self, packed: Packed, rows: Batch) -> Part:
        """See `Objective`; while the critic warms up only its head has a gradient."""
        settings = self._policy_part.settings
        with torch.set_grad_enabled(settings.trains_policy):
            states = self._policy.predicting(packed)
            policy = self._policy_part(packed, rows, states)
        value = self._value_part.of_values(head_values(self._head, states), packed)
        loss = settings.value_coef * value.loss
        if settings.trains_policy:
            loss = loss + policy.loss
        return Part(loss, {**policy.metrics, **value.metrics}, policy.tokens)


def token_mask(packed: Packed) -> Tensor:
    """[T] bool, True on the tokens that train."""
    mask = torch.ones_like(packed.target_ids, dtype=torch.bool)
    for name in MASKS:
        if name in packed.tokens:
            mask = mask & packed.tokens[name]
    return mask


def pair_rows(rows: Batch) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The rows of the chosen and of the rejected sample of each group, [P] each."""
    chosen = np.asarray(rows["is_chosen"], dtype=bool)
    pairs = [
        (next(r for r in found if chosen[r]), next(r for r in found if not chosen[r]))
        for found in rows.groups().values()
    ]
    first, second = zip(*pairs, strict=True)
    return np.array(first), np.array(second)
