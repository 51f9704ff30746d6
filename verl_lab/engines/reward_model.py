"""The reward model as a worker process serves it, on a device of its own or beside the rollout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import torch

from verl_lab.batch.columns import Batch
from verl_lab.config.schema import LabConfig
from verl_lab.engines.reward import prompts_of
from verl_lab.errors import ConfigError
from verl_lab.models.load import load_tokenizer
from verl_lab.models.reward import RewardModel

COLUMN = "reward/reward_model"


class RewardModelService:
    """The reward model's worker.

    Args:
        config: the `LabConfig` as plain data.
        rank: this worker's number.
        device: what torch calls the device of this process.
        report: takes `{"row": n}`, the rows scored so far.
    """

    def __init__(
        self,
        config: dict[str, Any],
        rank: int,
        device: str,
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        settings = LabConfig.model_validate(config)
        if settings.reward_model is None:
            raise ConfigError("reward_model: is not set; name its model")
        self.rank, self._report = rank, report
        self._model = RewardModel(settings.reward_model.name_or_path, device)
        self._reads_ids = self._model.reads_ids and self._model.speaks_like(
            load_tokenizer(settings.model)
        )

    def score(self, batch: Batch) -> Batch:
        """Adds `reward/reward_model`."""
        if self._reads_ids:
            pairs = zip(batch["prompt_ids"], batch["response_ids"], strict=True)
            scores = self._model.score_ids([prompt + response for prompt, response in pairs])
        else:
            scores = self._model.score(prompts_of(batch), batch["response"])
        self._report({"row": len(batch)})
        return batch.with_columns({COLUMN: scores})

    def memory(self) -> dict[str, int]:
        """Bytes this process holds: `rss_bytes`, `weights_bytes`, on a GPU `device_bytes`."""
        held = {
            "rss_bytes": psutil.Process().memory_info().rss,
            "weights_bytes": self._model.weights_bytes,
        }
        if torch.cuda.is_available():
            held["device_bytes"] = torch.cuda.memory_reserved()
        return held
