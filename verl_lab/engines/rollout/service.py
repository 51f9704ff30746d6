"""The rollout engine as a worker process serves it: plain data and batches in, the same out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch

from verl_lab.batch.columns import Batch
from verl_lab.config.schema import LabConfig
from verl_lab.engines.rollout.base import Report, Sampling
from verl_lab.engines.rollout.native import NativeEngine
from verl_lab.models.load import load_policy, load_tokenizer
from verl_lab.models.lora import add_lora


class RolloutService:
    """One rollout worker.

    Args:
        config: the `LabConfig` as plain data.
        rank: this worker's number among the rollout workers.
        device: what torch calls the device of this process.
        report: takes the progress of the call under way.
    """

    def __init__(self, config: dict[str, Any], rank: int, device: str, report: Report) -> None:
        settings = LabConfig.model_validate(config)
        self.rank, self.device = rank, torch.device(device)
        self._report = report
        dtype: torch.dtype = getattr(torch, settings.model.torch_dtype)
        model = load_policy(settings.model, self.device, dtype)
        if settings.lora is not None:
            model = add_lora(
                model,
                rank=settings.lora.rank,
                alpha=settings.lora.alpha,
                target_modules=settings.lora.target_modules,
                seed=settings.seed,
            )
        self._engine = NativeEngine(model, load_tokenizer(settings.model))

    def generate(self, prompts: Batch, sampling: dict[str, Any], *, step: int, slots: int) -> Batch:
        """See `RolloutEngine.generate`; `sampling` holds the fields of `Sampling`."""
        return self._engine.generate(
            prompts, Sampling(**sampling), step=step, slots=slots, report=self._report
        )

    def load_weights(self, folder: str | Path) -> dict[str, Any]:
        """See `RolloutEngine.load_weights`."""
        return self._engine.load_weights(Path(folder))

    def memory(self) -> dict[str, int]:
        """Bytes this process holds: `rss_bytes`, `weights_bytes`, on a GPU `device_bytes`."""
        parameters = self._engine.policy.model.parameters()
        held = {
            "rss_bytes": psutil.Process().memory_info().rss,
            "weights_bytes": sum(p.numel() * p.element_size() for p in parameters),
        }
        if self.device.type == "cuda":
            held["device_bytes"] = torch.cuda.memory_reserved(self.device)
        return held
