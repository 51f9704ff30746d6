"""The trainer engine of a reward model: pairs in, a scorer that ranks them out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from verl_lab.batch.columns import Batch
from verl_lab.batch.pack import pack
from verl_lab.engines.trainer.base import Report, UpdateSettings
from verl_lab.engines.trainer.comparisons import RewardModelObjective
from verl_lab.engines.trainer.learner import (
    Learner,
    Progress,
    add,
    merged,
    plan_micro_batches,
    update_shares,
)
from verl_lab.engines.trainer.policy import PackedScorer, sample_lengths
from verl_lab.errors import ShapeError


class ScorerTrainer:
    """`update`, `evaluate`, `save` and `load` of `TrainerEngine`, for a reward model.

    Args:
        learner: holds a transformers sequence classifier with one label.
        head: its last layer.
        compute_dtype: the precision of forward passes.
    """

    def __init__(self, learner: Learner, head: nn.Module, compute_dtype: torch.dtype) -> None:
        self._learner = learner
        self._scorer = PackedScorer(learner.model, head, compute_dtype)

    def update(
        self, batch: Batch, settings: UpdateSettings, report: Report
    ) -> tuple[Batch, dict[str, float]]:
        """Trains on pairs; returns them with `reward`, the scores after it, and metrics."""
        _require_pairs(batch)
        shares = [batch.take(rows) for rows in update_shares(batch, settings.updates_per_step)]
        plans = [
            plan_micro_batches(share, settings.micro_batch_tokens, whole_groups=True)
            for share in shares
        ]
        advance = Progress(sum(map(len, plans)), report)
        history = []
        for share, plan in zip(shares, plans, strict=True):
            objective = RewardModelObjective(self._scorer, share, settings)
            _, metrics = self._learner.accumulate(share, plan, objective, advance)
            step = self._learner.optimizer.step(settings)
            history.append(metrics | {f"policy/{name}": value for name, value in step.items()})
        tokens = float(sum(sample_lengths(batch)))
        return self.score(batch, settings.micro_batch_tokens), {
            **merged(history),
            "trainer/tokens": tokens,
        }

    @torch.no_grad()
    def evaluate(self, batch: Batch, settings: UpdateSettings) -> dict[str, float]:
        """Loss and accuracy on pairs that are not trained on."""
        _require_pairs(batch)
        objective = RewardModelObjective(self._scorer, batch, settings)
        sums: dict[str, float] = {}
        for rows in plan_micro_batches(batch, settings.micro_batch_tokens, whole_groups=True):
            part = batch.take(rows)
            add(sums, objective(pack(part, self._scorer.device), part).metrics)
        return sums

    @torch.no_grad()
    def score(self, batch: Batch, micro_batch_tokens: int) -> Batch:
        """Adds `reward`: the score of each sample now."""
        scores = np.empty(len(batch))
        for rows in plan_micro_batches(batch, micro_batch_tokens, whole_groups=False):
            found = self._scorer.scores(pack(batch.take(rows), self._scorer.device))
            scores[rows] = found.double().cpu().numpy()
        return batch.with_columns({"reward": scores})

    def save(self, folder: Path) -> None:
        """Writes all that `load` needs to go on bit for bit."""
        self._learner.save(folder)
        save_file({"cpu": torch.get_rng_state()}, folder / "rng.safetensors")

    def load(self, folder: Path) -> None:
        """Goes back to what `save` wrote."""
        self._learner.load(folder)
        torch.set_rng_state(load_file(folder / "rng.safetensors")["cpu"])


def _require_pairs(batch: Batch) -> None:
    if "is_chosen" not in batch:
        raise ShapeError(
            f"update: the batch lacks is_chosen; it has {', '.join(batch.names)}. A reward model "
            f"learns from pairs: give data with `chosen` and `rejected`"
        )
