"""The trainer engine of one process: the policy, its critic, and the frozen reference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from verl_lab.algos.losses import POLICY_LOSSES
from verl_lab.algos.values import explained_variance
from verl_lab.batch.columns import Batch
from verl_lab.batch.pack import pack
from verl_lab.config.functions import lookup
from verl_lab.engines.trainer.base import Report, UpdateSettings
from verl_lab.engines.trainer.comparisons import KtoObjective, PairObjective
from verl_lab.engines.trainer.diagnosis import (
    mean_divergence,
    mismatch_metrics,
    with_other_responses,
)
from verl_lab.engines.trainer.learner import (
    Columns,
    Learner,
    Progress,
    add,
    merged,
    plan_micro_batches,
    update_shares,
)
from verl_lab.engines.trainer.objectives import (
    MASKS,
    Objective,
    PolicyObjective,
    SftObjective,
    SharedObjective,
    ValueObjective,
    token_mask,
)
from verl_lab.engines.trainer.policy import (
    PackedPolicy,
    PackedScorer,
    head_values,
    sample_lengths,
)
from verl_lab.engines.weights import distinct_tensors, publish
from verl_lab.errors import ShapeError, StateError
from verl_lab.models.lora import adapter_tensors, adapters_off, has_adapters


class PolicyTrainer:
    """See `TrainerEngine`.

    Args:
        policy: holds a transformers causal language model.
        make_reference: loads the model that the policy began as; a policy with adapters needs
            none, since its reference is itself without them.
        compute_dtype: the precision of forward passes and of published weights.
        critic: holds a sequence classifier with one label, or a head alone that goes on the
            policy's trunk.
        critic_head: the last layer of the critic, if it has a model of its own.
    """

    def __init__(
        self,
        policy: Learner,
        make_reference: Callable[[], nn.Module],
        compute_dtype: torch.dtype,
        *,
        critic: Learner | None = None,
        critic_head: nn.Module | None = None,
    ) -> None:
        self._learner, self._critic = policy, critic
        self._policy = PackedPolicy(policy.model, compute_dtype)
        self._scorer = None
        if critic is not None and critic_head is not None:
            self._scorer = PackedScorer(critic.model, critic_head, compute_dtype)
        self._make_reference = make_reference
        self._reference: PackedPolicy | None = None
        self._compute_dtype = compute_dtype

    # --- what models say of samples

    def logprobs(self, batch: Batch, temperature: float, micro_batch_tokens: int) -> Batch:
        """Adds `old_logprobs`: the policy's, of the sampled tokens, now."""
        found = self._policy.score(batch, temperature, micro_batch_tokens)
        return batch.with_columns({"old_logprobs": found})

    def load_reference(self) -> None:
        """Loads the reference, if it is not there yet."""
        if self._reference is None and not has_adapters(self._policy.model):
            self._reference = PackedPolicy(self._make_reference(), self._compute_dtype)

    def ref_logprobs(self, batch: Batch, temperature: float, micro_batch_tokens: int) -> Batch:
        """Adds `ref_logprobs`: the reference's."""
        with self._as_reference() as reference:
            found = reference.score(batch, temperature, micro_batch_tokens)
        return batch.with_columns({"ref_logprobs": found})

    def values(self, batch: Batch, micro_batch_tokens: int) -> Batch:
        """Adds `values`: the critic's, of the state before each sampled token."""
        if self._critic is None:
            raise StateError("values: there is no critic; add a `critic:` section to the config")
        head = self._critic.model
        policy = self._policy
        of_packed = (
            self._scorer.values
            if self._scorer is not None
            else lambda packed: head_values(head, policy.predicting(packed))
        )
        found = policy.by_row(batch, micro_batch_tokens, of_packed)
        return batch.with_columns({"values": found})

    # --- training

    def update(
        self, batch: Batch, settings: UpdateSettings, report: Report
    ) -> tuple[Batch, dict[str, float]]:
        """Trains on a batch; returns it with `old_logprobs`, and metrics.

        With one update a step the policy that begins the update is the old one, so its
        log-probabilities come from the training pass itself; with several they are computed first.
        """
        self._check(batch, settings)
        if settings.objective == "policy" and settings.bypass:
            batch = batch.with_columns({"old_logprobs": batch.lists("rollout_logprobs")})
        elif settings.objective == "policy" and settings.updates_per_step > 1:
            batch = self.logprobs(batch, settings.temperature, settings.micro_batch_tokens)
        rows = update_shares(batch, settings.updates_per_step)
        shares = [batch.take(share) for share in rows]
        whole_groups = settings.objective == "preference" and settings.preference_loss != "kto"
        plans = [
            plan_micro_batches(share, settings.micro_batch_tokens, whole_groups=whole_groups)
            for share in shares
        ]
        passes = 2 if self._scorer is not None and settings.trains_policy else 1
        advance = Progress(passes * sum(map(len, plans)), report)
        found, history = [], []
        for share, plan in zip(shares, plans, strict=True):
            columns, metrics = self._update_once(share, plan, settings, advance)
            found.append(share.with_columns(columns) if columns else share)
            history.append(metrics)
        batch = Batch.concat(found).take(np.argsort(np.concatenate(rows)))
        return batch, {
            **merged(history),
            **self._diagnosis(batch, settings),
            "trainer/tokens": float(sum(sample_lengths(batch))),
        }

    def evaluate(self, batch: Batch, settings: UpdateSettings) -> dict[str, float]:
        """The objective's metrics on a batch that is not trained on."""
        if settings.objective == "preference":
            batch = self.ref_logprobs(batch, 1.0, settings.micro_batch_tokens)
        whole_groups = settings.objective == "preference" and settings.preference_loss != "kto"
        plan = plan_micro_batches(batch, settings.micro_batch_tokens, whole_groups=whole_groups)
        objective = self._objective(batch, settings)
        sums: dict[str, float] = {}
        with torch.no_grad():
            for rows in plan:
                part = batch.take(rows)
                add(
                    sums,
                    objective(pack(part, self._policy.device, objective.columns), part).metrics,
                )
        return sums

    def _update_once(
        self,
        batch: Batch,
        plan: list[list[int]],
        settings: UpdateSettings,
        advance: Callable[[], None],
    ) -> tuple[Columns, dict[str, float]]:
        """One optimizer update of each model that trains."""
        columns: Columns = {}
        metrics: dict[str, float] = {}
        critic = self._critic
        if critic is not None and self._scorer is not None:
            objective = ValueObjective.of(self._scorer, batch, settings)
            _, metrics = critic.accumulate(batch, plan, objective, advance)
            metrics |= self._step(critic, settings, "critic", settings.critic_learning_rate)
        if settings.trains_policy or self._scorer is None:
            if critic is not None:
                critic.optimizer.zero_grad()
            columns, found = self._learner.accumulate(
                batch, plan, self._objective(batch, settings), advance
            )
            metrics |= found
            if critic is not None and self._scorer is None:
                metrics |= self._step(critic, settings, "critic", settings.critic_learning_rate)
            if settings.trains_policy:
                metrics |= self._step(self._learner, settings, "policy")
        return columns, metrics

    def _step(
        self, learner: Learner, settings: UpdateSettings, name: str, peak: float | None = None
    ) -> dict[str, float]:
        found = learner.optimizer.step(settings, peak)
        return {f"{name}/{key}": value for key, value in found.items()}

    def _objective(self, batch: Batch, settings: UpdateSettings) -> Objective:
        if settings.objective == "sft":
            return SftObjective(self._policy, batch, settings)
        if settings.objective == "preference" and settings.preference_loss == "kto":
            divergence = self._divergence_elsewhere(batch, settings.micro_batch_tokens)
            return KtoObjective(self._policy, batch, settings, divergence)
        if settings.objective == "preference":
            return PairObjective(self._policy, batch, settings)
        name = settings.policy_loss
        loss = POLICY_LOSSES[name] if name in POLICY_LOSSES else lookup("policy_loss", name)
        policy = PolicyObjective(self._policy, loss, batch, settings)
        if self._critic is None or self._scorer is not None:
            return policy
        head = self._critic.model
        values = ValueObjective(
            lambda packed: head_values(head, self._policy.predicting(packed)), batch, settings
        )
        return SharedObjective(self._policy, head, policy, values)

    def _divergence_elsewhere(self, batch: Batch, micro_batch_tokens: int) -> Tensor:
        """KTO's estimate of KL(policy || reference): on each prompt with the response to another
        (arXiv:2402.01306, sec. 4.1)."""
        swapped = with_other_responses(batch)
        swapped = self.ref_logprobs(swapped, 1.0, micro_batch_tokens)
        return mean_divergence(self.logprobs(swapped, 1.0, micro_batch_tokens))

    def _check(self, batch: Batch, settings: UpdateSettings) -> None:
        needed = ["prompt_ids", "response_ids"]
        if settings.objective == "policy":
            needed += ["rollout_logprobs", "advantages"]
            needed += ["ref_logprobs"] * (settings.kl_coef > 0)
            needed += ["values", "returns"] * (self._critic is not None)
        elif settings.objective == "preference":
            needed += ["is_chosen", "ref_logprobs"]
        missing = [name for name in needed if name not in batch]
        if missing:
            raise ShapeError(
                f"update: the batch lacks {', '.join(missing)}; it has {', '.join(batch.names)}. "
                f"Run the stages before it: rollout and score, then reference_logprobs (with a "
                f"KL term or preferences), values (with a critic) and advantages"
            )

    def _diagnosis(self, batch: Batch, settings: UpdateSettings) -> dict[str, float]:
        if settings.objective != "policy":
            return {}
        found: dict[str, float] = {}
        if "old_logprobs" in batch:
            found = mismatch_metrics(batch, settings)
        if self._critic is not None:
            packed = pack(batch, "cpu", ["values", "returns", *(m for m in MASKS if m in batch)])
            found["critic/explained_variance"] = float(
                explained_variance(
                    packed.tokens["values"], packed.tokens["returns"], token_mask(packed)
                )
            )
        return found

    @contextlib.contextmanager
    def _as_reference(self) -> Any:
        """The reference for as long as the block lasts: a model of its own, or the policy without
        its adapters."""
        self.load_reference()
        if self._reference is not None:
            yield self._reference
            return
        with adapters_off(self._policy.model):
            yield self._policy

    # --- weights and state

    def publish(self, folder: Path, version: int) -> dict[str, Any]:
        """Writes the weights for the rollout workers; returns `version`, `bytes` and `hash`.

        Of a policy with adapters, these alone.
        """
        model = self._policy.model
        is_partial = has_adapters(model)
        tensors: dict[str, Tensor] = (
            adapter_tensors(model) if is_partial else distinct_tensors(model)
        )
        return publish(
            tensors.items(), folder, version, dtype=self._compute_dtype, is_partial=is_partial
        )

    def save(self, folder: Path) -> None:
        """Writes all that `load` needs to go on bit for bit."""
        self._learner.save(folder)
        if self._critic is not None:
            self._critic.save(folder / "critic")
        save_file({"cpu": torch.get_rng_state()}, folder / "rng.safetensors")

    def load(self, folder: Path) -> None:
        """Goes back to what `save` wrote."""
        self._learner.load(folder)
        if self._critic is not None:
            self._critic.load(folder / "critic")
        torch.set_rng_state(load_file(folder / "rng.safetensors")["cpu"])
