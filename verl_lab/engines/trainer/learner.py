"""One model and its optimizer: gradients by micro-batch, steps, and both on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from verl_lab.batch.balance import micro_batches
from verl_lab.batch.columns import Batch
from verl_lab.batch.pack import pack, unpack
from verl_lab.engines.trainer.objectives import Objective
from verl_lab.engines.trainer.optimizer import Optimizer
from verl_lab.engines.trainer.policy import sample_lengths
from verl_lab.engines.weights import distinct_tensors
from verl_lab.errors import ShapeError, StateError
from verl_lab.models.lora import adapter_tensors, has_adapters

WEIGHTS, OPTIMIZER, COUNTERS = "model.safetensors", "optimizer.safetensors", "learner.json"
TRAINED = "trained.safetensors"
"""What adapters and new heads hold: all of a model that changes where it has adapters."""
Columns = dict[str, list[np.ndarray[Any, Any]]]


class Learner:
    """Trains a model by an objective.

    Args:
        model: its trainable parameters are the master weights.
        betas: of AdamW.
        offload_optimizer: keep the optimizer's state in host memory between updates.
        write_files: writes what a reader of the folder needs beside the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        betas: tuple[float, float],
        *,
        offload_optimizer: bool,
        write_files: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        self.model = model
        self.optimizer = Optimizer(model, betas, offload=offload_optimizer)
        self._write_files = write_files

    def accumulate(
        self,
        batch: Batch,
        plan: list[list[int]],
        objective: Objective,
        advance: Callable[[], None],
    ) -> tuple[Columns, dict[str, float]]:
        """Gradients of a batch, in place of any that were left; returns columns and metrics.

        Args:
            batch: the rows of one update.
            plan: the rows of each micro-batch.
            objective: what is minimised.
            advance: called after each micro-batch.
        """
        self.optimizer.zero_grad()
        device = next(self.model.parameters()).device
        sums: dict[str, float] = {}
        columns: dict[str, list[Any]] = {}
        for rows in plan:
            part = batch.take(rows)
            found = objective(pack(part, device, objective.columns), part)
            if found.loss.requires_grad:
                found.loss.backward()  # type: ignore[no-untyped-call]
            add(sums, found.metrics)
            for name, values in found.tokens.items():
                column = columns.setdefault(name, [None] * len(batch))
                for row, value in zip(rows, unpack(values, part), strict=True):
                    column[row] = value
            advance()
        return columns, sums

    # --- on disk

    def save(self, folder: Path) -> None:
        """Writes weights and optimizer so that `load` goes on bit for bit."""
        folder.mkdir(parents=True, exist_ok=True)
        self._write_files(folder)
        name, tensors = self._state()
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / name)
        save_file(self.optimizer.tensors(), folder / OPTIMIZER)
        counters = {"num_updates": self.optimizer.num_updates}
        (folder / COUNTERS).write_text(json.dumps(counters))

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Goes back to what `save` wrote."""
        name, mine = self._state()
        if not (folder / name).exists():
            raise StateError(
                f"{folder}: has no {name}; `lora` and `critic` must be as they were when it was "
                f"saved"
            )
        saved = load_file(folder / name)
        if saved.keys() != mine.keys():
            raise StateError(
                f"{folder}: holds another model ({len(saved)} tensors for {len(mine)}); "
                f"model.name_or_path must be the one it was trained from"
            )
        for key, tensor in mine.items():
            tensor.copy_(saved[key])
        self.optimizer.load_tensors(load_file(folder / OPTIMIZER))
        counters = json.loads((folder / COUNTERS).read_text())
        self.optimizer.num_updates = counters["num_updates"]

    def _state(self) -> tuple[str, dict[str, Tensor]]:
        if not has_adapters(self.model):
            return WEIGHTS, distinct_tensors(self.model)
        trained = {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}
        return TRAINED, {**adapter_tensors(self.model), **trained}


def plan_micro_batches(batch: Batch, max_tokens: int, *, whole_groups: bool) -> list[list[int]]:
    """The rows of each micro-batch; with `whole_groups` the samples of a group stay together."""
    lengths = sample_lengths(batch)
    if not whole_groups:
        return micro_batches(lengths, max_tokens)
    groups = list(batch.groups().values())
    bins = micro_batches([sum(lengths[r] for r in rows) for rows in groups], max_tokens)
    return [sorted(row for group in chosen for row in groups[group]) for chosen in bins]


def update_shares(batch: Batch, parts: int) -> list[list[int]]:
    """The rows of each update: about equal shares of the groups, in order.

    Raises:
        ShapeError: there are fewer groups than updates.
    """
    if parts == 1:
        return [list(range(len(batch)))]
    groups = list(batch.groups().values())
    if len(groups) < parts:
        raise ShapeError(
            f"trainer.updates_per_step={parts}: the batch has only {len(groups)} groups; lower it, "
            f"or train on more"
        )
    shares = np.array_split(np.arange(len(groups)), parts)
    return [[row for group in share for row in groups[group]] for share in shares]


def add(sums: dict[str, float], metrics: dict[str, Tensor]) -> None:
    """Adds the metrics of a micro-batch, or keeps the largest of those named `…_max`."""
    for name, value in metrics.items():
        number = float(value)
        before = sums.get(name, 0.0)
        sums[name] = max(before, number) if name.endswith("_max") else before + number


def merged(history: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of a step from those of its updates: the mean, or the largest, or how many were
    skipped."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in history for name in metrics):
        values = [metrics[name] for metrics in history if name in metrics]
        if name.endswith("_max"):
            found[name] = max(values)
        elif name.endswith("skipped_updates"):
            found[name] = sum(values)
        else:
            found[name] = sum(values) / len(values)
    return found


class Progress:
    """Counts micro-batches for a report."""

    def __init__(self, total: int, report: Callable[[dict[str, Any]], None]) -> None:
        self._done, self._total, self._report = 0, total, report

    def __call__(self) -> None:
        """One more is done."""
        self._done += 1
        self._report({"done": self._done, "total": self._total})
