"""The reward service: scores samples in a process of its own, which the controller may kill.

A function that raises costs the sample its score: the fallback takes its place, and the traceback
is kept. A function that returns something that is no score stops the run with an error that names
the sample, since any number in its place would be a lie.
"""

from __future__ import annotations

import asyncio
import json
import math
import numbers
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import verl_lab
from verl_lab.batch.columns import TOKEN_COLUMNS, Batch
from verl_lab.config.schema import LabConfig
from verl_lab.data.sources import MESSAGES
from verl_lab.data.tasks import make_task
from verl_lab.errors import ConfigError, RewardError
from verl_lab.models.reward import Prompt
from verl_lab.rewards.endpoint import Endpoint, Pace, Unreachable, is_endpoint
from verl_lab.rewards.function import RewardFunction, from_reference

Report = Callable[[dict[str, Any]], None]
BEFORE_THE_USERS = tuple(
    f"{Path(file).parent}{os.sep}" for file in (verl_lab.__file__, asyncio.__file__)
)
"""Folders of the code that calls the user's function."""
NO_FUNCTIONS = {"task", "reward_model"}
"""Parts that are no functions, whatever functions there are."""


class RewardService:
    """One reward worker.

    Args:
        config: the `LabConfig` as plain data.
        functions: pickled reward functions by part.
        rank: this worker's number among the reward workers.
        device: what torch calls the device of this process.
        report: is told of each row before it is scored one by one.
    """

    def __init__(
        self,
        config: dict[str, Any],
        functions: dict[str, bytes],
        rank: int,
        device: str,
        report: Report,
    ) -> None:
        self._config = LabConfig.model_validate(config)
        self.rank, self._report = rank, report
        taken = sorted(NO_FUNCTIONS & functions.keys())
        if taken:
            raise ConfigError(
                f"reward.parts: `{taken[0]}` names a part of the lab's own; give the function "
                f"another name"
            )
        self._functions = {name: RewardFunction.loads(data) for name, data in functions.items()}
        reward = self._config.reward
        self._endpoints: dict[str, Endpoint] = {}
        for part in reward.parts:
            if ":" in part and part not in self._functions and not is_endpoint(part):
                self._functions[part] = from_reference(part)
        self._task = None if self._config.task is None else make_task(self._config.task)

    def check_columns(self, names: list[str]) -> None:
        """Raises a RewardError if a function needs a column that is not among `names`."""
        for function in self._functions.values():
            function.check_columns(names)

    def score(self, batch: Batch, part: str) -> tuple[Batch, dict[str, Any]]:
        """Adds `reward/<part>`.

        Returns:
            The batch, and `errors` (rows whose call raised) with the `traceback` of the first.

        Raises:
            RewardError: a score is missing or no number; names the sample.
        """
        stats: dict[str, Any] = {"errors": 0, "traceback": ""}
        scores = self._scores(batch, part, stats)
        self._report({"is_back": True})  # what follows is not the user's time
        column = f"reward/{part}"
        return batch.with_columns({column: _checked(scores, batch, part)}), stats

    def _scores(self, batch: Batch, part: str, stats: dict[str, Any]) -> list[Any]:
        if part == "task" and self._task is not None:
            score = self._task.score
            rows = _rows(batch.without([*TOKEN_COLUMNS, "prompt_ids"]))
            return self._one_by_one(lambda row: score(row["response"], row), rows, stats)
        if is_endpoint(part):
            return self._ask(part, batch, stats)
        if part not in self._functions:
            known = [*self._functions, *(["task"] if self._task is not None else [])]
            raise ConfigError(
                f"reward.parts: there is no part {part}; there are {', '.join(known)}"
            )
        function = self._functions[part]
        function.check_columns(batch.names)
        if function.style == "batched":
            return self._as_batch(function, batch, stats)
        return self._single(function, batch, stats)

    def _ask(self, part: str, batch: Batch, stats: dict[str, Any]) -> list[Any]:
        """Scores of an endpoint, which keeps its own time: `timeout_s` is for one request."""
        if part not in self._endpoints:
            reward = self._config.reward
            per_s = reward.requests_per_s
            pace = Pace(None if per_s is None else per_s / reward.num_reward_workers)
            self._endpoints[part] = Endpoint(part, timeout_s=reward.timeout_s, pace=pace)
        rows = _rows(batch.without([*TOKEN_COLUMNS, "prompt_ids"]))
        found = self._endpoints[part].score(
            batch["prompt"],
            batch["response"],
            rows,
            on_move=lambda done: self._report({"done": done, "is_back": True}),
        )
        return [
            self._failed(score, stats) if isinstance(score, Unreachable) else score
            for score in found
        ]

    def _single(self, function: RewardFunction, batch: Batch, stats: dict[str, Any]) -> list[Any]:
        names = [*function.own, *function.arguments(batch.names)]
        rows = _rows(batch.select(names))
        if not function.is_async:
            return self._one_by_one(lambda row: function(**row), rows, stats)

        async def all_at_once() -> list[Any]:
            return await asyncio.gather(*(function(**row) for row in rows), return_exceptions=True)

        self._report({"call": function.name})
        results = asyncio.run(all_at_once())
        return [
            self._failed(result, stats) if isinstance(result, Exception) else result
            for result in results
        ]

    def _as_batch(self, function: RewardFunction, batch: Batch, stats: dict[str, Any]) -> list[Any]:
        own = {"prompts": batch["prompt"], "responses": batch["response"]}
        columns = {name: batch[name] for name in function.arguments(batch.names)}
        arguments = {**columns, **{name: own[name] for name in function.own}}
        try:
            self._report({"call": function.name})
            result = function(**arguments)
            if function.is_async:
                result = asyncio.run(result)
        except Exception as error:  # the user's function: its samples get the fallback
            fallback = self._failed(error, stats)
            stats["errors"] = len(batch)
            return [fallback] * len(batch)
        if not hasattr(result, "__iter__") or isinstance(result, str | dict):
            raise RewardError(
                f"reward {function.name}: returned {result!r} for {len(batch)} responses; return a "
                f"list with one score a response, in their order"
            )
        scores = list(result)
        if len(scores) != len(batch):
            raise RewardError(
                f"reward {function.name}: returned {len(scores)} scores for {len(batch)} "
                f"responses; return one a response, in their order"
            )
        return scores

    def _one_by_one(
        self,
        score: Callable[[dict[str, Any]], Any],
        rows: list[dict[str, Any]],
        stats: dict[str, Any],
    ) -> list[Any]:
        scores = []
        for number, row in enumerate(rows):
            self._report({"row": number})
            try:
                scores.append(score(row))
            except Exception as error:  # the user's function: this sample gets the fallback
                scores.append(self._failed(error, stats))
        return scores

    def _failed(self, error: Exception, stats: dict[str, Any]) -> float:
        stats["errors"] += 1
        stats["traceback"] = stats["traceback"] or _traceback(error)
        return self._config.reward.fallback


def _traceback(error: Exception) -> str:
    """The traceback from the user's own frames on, or the message of an endpoint's error."""
    if isinstance(error, Unreachable):
        return str(error)
    frame = error.__traceback__
    while frame and frame.tb_frame.f_code.co_filename.startswith(BEFORE_THE_USERS):
        frame = frame.tb_next
    # Where no frame is the user's, as in a task's own verifier, all of them tell more than none.
    return "".join(traceback.format_exception(error.with_traceback(frame or error.__traceback__)))


def _rows(batch: Batch) -> list[dict[str, Any]]:
    return batch.table.to_pylist()  # type: ignore[no-any-return]


def prompts_of(batch: Batch) -> list[Prompt]:
    """What the reward model reads: chat messages where the prompt was given as such."""
    texts: list[Prompt] = batch["prompt"]
    if MESSAGES not in batch:
        return texts
    pairs = zip(texts, batch[MESSAGES], strict=True)
    return [text if messages is None else json.loads(messages) for text, messages in pairs]


def _checked(scores: list[Any], batch: Batch, part: str) -> np.ndarray[Any, Any]:
    for row, score in enumerate(scores):
        # A number of numpy or torch, but no array of several.
        value = score.item() if getattr(score, "shape", None) == () else score
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            where = ", ".join(
                f"{name} {batch[name][row]}" for name in ("group_id", "sample_id") if name in batch
            )
            raise RewardError(
                f"reward {part}: gave {score!r} to the sample at row {row} ({where}); return a "
                f"finite number, or raise to give it reward.fallback"
            )
    return np.array([float(score) for score in scores])
