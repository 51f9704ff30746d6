"""The trainer engine as a worker process serves it: plain data and batches in, the same out."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from verl_lab.batch.columns import Batch
from verl_lab.config.schema import LabConfig, ModelConfig
from verl_lab.engines.trainer.attention import NAME
from verl_lab.engines.trainer.base import Report, UpdateSettings
from verl_lab.engines.trainer.engine import PolicyTrainer
from verl_lab.models.load import load_policy


class TrainerService:
    """The trainer worker.

    Args:
        config: the `LabConfig` as plain data.
        rank: this worker's number among the trainer workers.
        device: what torch calls the device of this process.
        report: takes the progress of the call under way.
    """

    def __init__(self, config: dict[str, Any], rank: int, device: str, report: Report) -> None:
        settings = LabConfig.model_validate(config)
        trainer = settings.trainer
        self.rank, self._report = rank, report
        dtype: torch.dtype = getattr(torch, settings.model.torch_dtype)
        model = _load(settings.model, device, torch.float32)
        if trainer.gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
            model.train()
        self._engine = PolicyTrainer(
            model,
            lambda: _load(settings.model, device, dtype).requires_grad_(False),
            dtype,
            betas=(trainer.adam_beta1, trainer.adam_beta2),
            offload_optimizer=trainer.fsdp_config.cpu_offload,
        )

    def logprobs(self, batch: Batch, temperature: float, micro_batch_tokens: int) -> Batch:
        """See `TrainerEngine.logprobs`."""
        return self._engine.logprobs(batch, temperature, micro_batch_tokens)

    def load_reference(self) -> None:
        """Loads the reference, if it is not there yet."""
        self._engine.load_reference()

    def ref_logprobs(self, batch: Batch, temperature: float, micro_batch_tokens: int) -> Batch:
        """See `TrainerEngine.ref_logprobs`."""
        return self._engine.ref_logprobs(batch, temperature, micro_batch_tokens)

    def update(self, batch: Batch, settings: dict[str, Any]) -> tuple[Batch, dict[str, float]]:
        """See `TrainerEngine.update`; `settings` holds the fields of `UpdateSettings`."""
        batch, metrics = self._engine.update(batch, UpdateSettings(**settings), self._report)
        return batch, {**metrics, "memory/peak_bytes": float(_peak_bytes())}

    def publish(self, folder: str | Path, version: int) -> dict[str, Any]:
        """See `TrainerEngine.publish`."""
        return self._engine.publish(Path(folder), version)

    def save(self, folder: str | Path) -> None:
        """See `TrainerEngine.save`."""
        self._engine.save(Path(folder))

    def load(self, folder: str | Path) -> None:
        """See `TrainerEngine.load`."""
        self._engine.load(Path(folder))

    def memory(self) -> dict[str, int]:
        """Bytes that this process holds: `rss_bytes`, and on a GPU `device_bytes`."""
        held = {"rss_bytes": psutil.Process().memory_info().rss}
        if torch.cuda.is_available():
            held["device_bytes"] = torch.cuda.memory_reserved()
        return held


def _peak_bytes() -> int:
    """The most memory this process has held: of its GPU, or on a CPU of the machine."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _load(config: ModelConfig, device: str, dtype: torch.dtype) -> nn.Module:
    attention = "flash_attention_2" if config.use_flash_attention_2 else NAME
    model = load_policy(config, torch.device(device), dtype, attn_implementation=attention)
    return model.eval()  # no dropout: log-probabilities must be the same twice
