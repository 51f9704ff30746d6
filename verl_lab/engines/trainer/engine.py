"""The trainer engine of one process: the policy, its optimizer, and the frozen reference."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from verl_lab.algos.aggregate import normalisers, token_weights
from verl_lab.algos.kl import kl
from verl_lab.algos.losses import ppo_policy_loss
from verl_lab.algos.mismatch import mismatch
from verl_lab.batch.balance import micro_batches
from verl_lab.batch.columns import Batch
from verl_lab.batch.pack import Packed, pack, unpack
from verl_lab.engines.trainer.base import Report, UpdateSettings
from verl_lab.engines.trainer.optimizer import Optimizer
from verl_lab.engines.trainer.policy import PackedPolicy, sample_lengths
from verl_lab.engines.weights import distinct_tensors, publish
from verl_lab.errors import ShapeError, StateError


class PolicyTrainer:
    """See `TrainerEngine`.

    Args:
        model: a transformers causal language model; its parameters are the master weights.
        make_reference: loads the model that the policy began as.
        compute_dtype: the precision of forward passes and of published weights.
        betas: of AdamW.
        offload_optimizer: keep the optimizer's state in host memory between updates.
    """

    def __init__(
        self,
        model: nn.Module,
        make_reference: Callable[[], nn.Module],
        compute_dtype: torch.dtype,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        offload_optimizer: bool = False,
    ) -> None:
        self.model = model
        self._policy = PackedPolicy(model, compute_dtype)
        self._optimizer = Optimizer(model, betas, offload=offload_optimizer)
        self._make_reference = make_reference
        self._reference: PackedPolicy | None = None
        self._compute_dtype = compute_dtype

    # --- log-probabilities

    def logprobs(self, batch: Batch, temperature: float, micro_batch_tokens: int) -> Batch:
        """Adds `old_logprobs`: the policy's, of the sampled tokens, now."""
        found = self._policy.score(batch, temperature, micro_batch_tokens)
        return batch.with_columns({"old_logprobs": found})

    def load_reference(self) -> None:
        """Loads the reference, if it is not there yet."""
        if self._reference is None:
            self._reference = PackedPolicy(self._make_reference(), self._compute_dtype)

    def ref_logprobs(self, batch: Batch, temperature: float, micro_batch_tokens: int) -> Batch:
        """Adds `ref_logprobs`: the reference's."""
        self.load_reference()
        assert self._reference is not None
        found = self._reference.score(batch, temperature, micro_batch_tokens)
        return batch.with_columns({"ref_logprobs": found})

    # --- training

    def update(
        self, batch: Batch, settings: UpdateSettings, report: Report
    ) -> tuple[Batch, dict[str, float]]:
        """Trains on a batch; returns it with `old_logprobs`, and metrics.

        With one update a step the policy that begins the update is the old one, so its
        log-probabilities come from the training pass itself; with several they are computed first.
        """
        self._check(batch, settings)
        if settings.updates_per_step > 1:
            batch = self.logprobs(batch, settings.temperature, settings.micro_batch_tokens)
        shares = _shares(batch, settings.updates_per_step)
        plans = [
            micro_batches(sample_lengths(batch.take(share)), settings.micro_batch_tokens)
            for share in shares
        ]
        total, done = sum(map(len, plans)), 0

        def advance() -> None:
            nonlocal done
            done += 1
            report({"done": done, "total": total})

        old: list[Any] = [None] * len(batch)
        history = []
        for share, plan in zip(shares, plans, strict=True):
            found, metrics = self._update_once(batch.take(share), plan, settings, advance)
            history.append(metrics)
            for row, values in zip(share, found, strict=True):
                old[row] = values
        if "old_logprobs" not in batch or settings.updates_per_step == 1:
            batch = batch.with_columns({"old_logprobs": old})
        return batch, {
            **_merged(history),
            **self._mismatch(batch),
            "trainer/tokens": float(sum(sample_lengths(batch))),
        }

    def _update_once(
        self,
        batch: Batch,
        plan: list[list[int]],
        settings: UpdateSettings,
        advance: Callable[[], None],
    ) -> tuple[list[np.ndarray[Any, Any]], dict[str, float]]:
        """One optimizer update; returns the old log-probabilities by row, and metrics."""
        columns = _token_columns(batch, settings)
        whole = pack(batch, "cpu", columns)
        num_tokens, num_sequences = normalisers(_mask(whole), whole.sample_index)
        sums: dict[str, float] = {}
        old: list[Any] = [None] * len(batch)
        for rows in plan:
            part = batch.take(rows)
            packed = pack(part, self._policy.device, columns)
            logprobs, entropy = self._policy.logprobs(packed, settings.temperature)
            before = packed.tokens.get("old_logprobs", logprobs.detach())
            loss, metrics = _loss(
                packed,
                logprobs,
                before,
                settings,
                num_tokens=num_tokens,
                num_sequences=num_sequences,
            )
            loss.backward()  # type: ignore[no-untyped-call]
            mask = _mask(packed)
            metrics["policy/entropy"] = torch.where(mask, entropy, 0.0).sum() / max(num_tokens, 1)
            _add(sums, metrics)
            for row, values in zip(rows, unpack(before, part), strict=True):
                old[row] = values
            advance()
        step = self._optimizer.step(settings)
        return old, {**sums, **{f"policy/{name}": value for name, value in step.items()}}

    def _check(self, batch: Batch, settings: UpdateSettings) -> None:
        needed = ["prompt_ids", "response_ids", "rollout_logprobs", "advantages"]
        needed += ["ref_logprobs"] * (settings.kl_coef > 0)
        missing = [name for name in needed if name not in batch]
        if missing:
            raise ShapeError(
                f"update: the batch lacks {', '.join(missing)}; it has {', '.join(batch.names)}. "
                f"Run rollout, score, reference_logprobs (with a KL term) and advantages first"
            )

    def _mismatch(self, batch: Batch) -> dict[str, float]:
        packed = pack(batch, "cpu", ["old_logprobs", "rollout_logprobs", *_mask_columns(batch)])
        old, rollout = packed.tokens["old_logprobs"], packed.tokens["rollout_logprobs"]
        found = mismatch(old, rollout, _mask(packed))
        return {f"policy/{name}": float(value) for name, value in found.items()}

    # --- weights and state

    def publish(self, folder: Path, version: int) -> dict[str, Any]:
        """Writes the weights for the rollout workers; returns `version`, `bytes` and `hash`."""
        return publish(
            distinct_tensors(self.model).items(), folder, version, dtype=self._compute_dtype
        )

    def save(self, folder: Path) -> None:
        """Writes all that `load` needs to go on bit for bit."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(_contiguous(distinct_tensors(self.model)), folder / "model.safetensors")
        save_file(self._optimizer.tensors(), folder / "optimizer.safetensors")
        save_file({"cpu": torch.get_rng_state()}, folder / "rng.safetensors")
        counters = {"num_updates": self._optimizer.num_updates}
        (folder / "trainer.json").write_text(json.dumps(counters))

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Goes back to what `save` wrote."""
        saved = load_file(folder / "model.safetensors")
        mine = distinct_tensors(self.model)
        if saved.keys() != mine.keys():
            raise StateError(
                f"{folder}: holds another model ({len(saved)} tensors for {len(mine)}); "
                f"model.name_or_path must be the one it was trained from"
            )
        for name, tensor in mine.items():
            tensor.copy_(saved[name])
        self._optimizer.load_tensors(load_file(folder / "optimizer.safetensors"))
        torch.set_rng_state(load_file(folder / "rng.safetensors")["cpu"])
        counters = json.loads((folder / "trainer.json").read_text())
        self._optimizer.num_updates = counters["num_updates"]


def _loss(
    packed: Packed,
    logprobs: Tensor,
    before: Tensor,
    settings: UpdateSettings,
    *,
    num_tokens: int,
    num_sequences: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's part of the update's loss, and of its metrics."""
    mask = _mask(packed)
    weights = token_weights(
        mask,
        packed.sample_index,
        mode=settings.loss_aggregation,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        max_tokens=settings.max_new_tokens,
    ).to(logprobs.dtype)
    loss, found = ppo_policy_loss(
        logprobs,
        before,
        packed.tokens["advantages"].to(logprobs.dtype),
        mask,
        weights,
        num_tokens=num_tokens,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
    )
    metrics = {f"policy/{name}": value for name, value in found.items()}
    metrics["loss/policy"] = loss.detach()
    if settings.kl_coef > 0:
        reference = torch.where(mask, packed.tokens["ref_logprobs"].to(logprobs.dtype), 0.0)
        divergence = kl(torch.where(mask, logprobs, 0.0), reference, settings.kl_estimator)
        loss = loss + settings.kl_coef * (weights * divergence).sum()
        metrics["policy/kl_ref"] = divergence.detach().sum() / max(num_tokens, 1)
    return loss, metrics


def _shares(batch: Batch, parts: int) -> list[list[int]]:
    """The rows of each update: equal shares of the groups, in order."""
    if parts == 1:
        return [list(range(len(batch)))]
    groups = list(batch.groups().values())
    if len(groups) % parts:
        raise ShapeError(
            f"trainer.updates_per_step={parts} does not divide the {len(groups)} groups of the "
            f"batch"
        )
    size = len(groups) // parts
    shares = (groups[i * size : (i + 1) * size] for i in range(parts))
    return [list(itertools.chain.from_iterable(share)) for share in shares]


def _mask_columns(batch: Batch) -> list[str]:
    return [name for name in ("response_mask", "loss_mask") if name in batch]


def _token_columns(batch: Batch, settings: UpdateSettings) -> list[str]:
    columns = ["advantages", *_mask_columns(batch)]
    if settings.updates_per_step > 1:
        columns.append("old_logprobs")
    return columns + ["ref_logprobs"] * (settings.kl_coef > 0)


def _mask(packed: Packed) -> Tensor:
    """[T] bool, True on the tokens that train."""
    masks = [packed.tokens[n] for n in ("response_mask", "loss_mask") if n in packed.tokens]
    mask = torch.ones_like(packed.target_ids, dtype=torch.bool)
    for each in masks:
        mask = mask & each
    return mask


def _add(sums: dict[str, float], metrics: dict[str, Tensor]) -> None:
    for name, value in metrics.items():
        number = float(value)
        sums[name] = (
            max(sums.get(name, 0.0), number)
            if name.endswith("_max")
            else sums.get(name, 0.0) + number
        )


def _merged(history: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of a step from those of its updates: the mean, or the largest, or how many were
    skipped."""
    merged = {}
    for name in history[0]:
        values = [metrics[name] for metrics in history]
        if name.endswith("_max"):
            merged[name] = max(values)
        elif name == "policy/skipped_updates":
            merged[name] = sum(values)
        else:
            merged[name] = sum(values) / len(values)
    return merged


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
