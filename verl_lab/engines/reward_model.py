"""The reward model as a worker process serves it, on a device of its own or beside the rollout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch

from verl_lab.batch.columns import Batch
from verl_lab.config.schema import LabConfig
from verl_lab.engines.reward import prompts_of
from verl_lab.errors import ConfigError
from verl_lab.models.load import load_tokenizer
from verl_lab.models.reward import BATCH_SIZE, RewardModel

COLUMN = "reward/reward_model"
REPORT_EVERY_ROWS = 2 * BATCH_SIZE
Scores = np.ndarray[Any, Any]


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
        self.rank, self._device, self._report = rank, torch.device(device), report
        self._model = RewardModel(settings.reward_model.name_or_path, device)
        self._reads_ids = self._model.reads_ids and self._model.speaks_like(
            load_tokenizer(settings.model)
        )

    def score(self, batch: Batch) -> Batch:
        """Adds `reward/reward_model`."""
        score_rows, lengths = self._reader(batch)
        order = np.argsort(lengths, kind="stable")
        scores = np.empty(len(batch))
        for start in range(0, len(batch), REPORT_EVERY_ROWS):
            rows = order[start : start + REPORT_EVERY_ROWS]
            scores[rows] = score_rows(rows.tolist())
            self._report({"row": start + len(rows)})
        return batch.with_columns({COLUMN: scores})

    def _reader(self, batch: Batch) -> tuple[Callable[[list[int]], Scores], list[int]]:
        """What scores some rows by what the model reads, and how long each of them is."""
        if self._reads_ids:
            pairs = zip(batch["prompt_ids"], batch["response_ids"], strict=True)
            ids = [prompt + response for prompt, response in pairs]
            return lambda rows: self._model.score_ids([ids[i] for i in rows]), [*map(len, ids)]
        prompts, responses = prompts_of(batch), batch["response"]
        lengths = [len(p) + len(r) for p, r in zip(batch["prompt"], responses, strict=True)]

        def score_texts(rows: list[int]) -> Scores:
            return self._model.score([prompts[i] for i in rows], [responses[i] for i in rows])

        return score_texts, lengths

    def memory(self) -> dict[str, int]:
        """Bytes this process holds: `rss_bytes`, `weights_bytes`, on a GPU `device_bytes`."""
        held = {
            "rss_bytes": psutil.Process().memory_info().rss,
            "weights_bytes": self._model.weights_bytes,
        }
        if self._device.type == "cuda":
            held["device_bytes"] = torch.cuda.memory_reserved(self._device)
        return held
