"""Prompts as a run draws them: shuffled by epoch, resumable exactly, with a held-out set apart."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl_lab.batch.columns import Batch
from verl_lab.config.schema import LabConfig
from verl_lab.data.chat import render, wants_chat
from verl_lab.data.sources import Row, read_rows, with_prompt
from verl_lab.data.tasks import make_task
from verl_lab.errors import DataError

HELDOUT_PART = 5
"""At most one in so many rows of a dataset is held out."""


class PromptSource:
    """Draws prompts without end, in an order that the seed fixes.

    Args:
        rows: all prompts, a row each.
        seed: fixes the order of each epoch.
        shuffle: whether there is another order each epoch; else it is that of the rows.
    """

    def __init__(self, rows: Batch, *, seed: int, shuffle: bool) -> None:
        self._rows, self._seed, self._shuffle = rows, seed, shuffle
        self._drawn = 0
        self._epoch: tuple[int, np.ndarray[Any, Any]] = (-1, np.arange(0))
        self.fingerprint = _fingerprint(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def next(self, n: int) -> Batch:
        """The next `n` prompts; `group_id` counts the prompts drawn in the run."""
        batch = self.peek(n)
        self._drawn += n
        return batch

    def peek(self, n: int) -> Batch:
        """What `next` would give, without drawing it."""
        places = np.arange(self._drawn, self._drawn + n)
        rows = [self._order(place // len(self))[place % len(self)] for place in places.tolist()]
        return self._rows.take(rows).with_columns({"group_id": places})

    def state(self) -> dict[str, Any]:
        """Where the run is in the data, as plain data."""
        return {"drawn": self._drawn, "fingerprint": self.fingerprint}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a state.

        Raises:
            DataError: the prompts are not those that the state belongs to.
        """
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                "data: the prompts have changed since this run was saved; bring the old ones back, "
                "or begin a new run"
            )
        self._drawn = state["drawn"]

    def _order(self, epoch: int) -> np.ndarray[Any, Any]:
        if not self._shuffle:
            return np.arange(len(self))
        if self._epoch[0] != epoch:
            order = np.random.default_rng([abs(self._seed), epoch]).permutation(len(self))
            self._epoch = (epoch, order)
        return self._epoch[1]


@dataclass(frozen=True)
class PromptSet:
    """What a run trains on and what it is judged by."""

    train: PromptSource
    heldout: Batch
    """May be empty."""
    num_too_long: int
    """Prompts left out because they are longer than `data.max_prompt_tokens`."""

    @property
    def start(self) -> dict[str, Any]:
        """The state of `train` before anything was drawn."""
        return {"drawn": 0, "fingerprint": self.train.fingerprint}


def load_prompts(config: LabConfig, tokenizer: Any) -> PromptSet:
    """Reads and tokenises the prompts that the config names.

    Args:
        config: the settings.
        tokenizer: the policy's, of transformers.

    Raises:
        DataError: there are none, or they cannot be read.
    """
    train, heldout = _rows(config)
    batches, num_too_long = [], 0
    for rows in (train, heldout):
        batch, left_out = _tokenised(rows, config, tokenizer)
        batches.append(batch)
        num_too_long += left_out
    if not len(batches[0]):
        raise DataError(
            f"data.max_prompt_tokens: all {num_too_long} prompts are longer than "
            f"{config.data.max_prompt_tokens}; raise it"
        )
    source = PromptSource(batches[0], seed=config.seed, shuffle=config.data.shuffle)
    held = batches[1].with_columns({"group_id": np.arange(len(batches[1]))})
    return PromptSet(source, held, num_too_long)


def _rows(config: LabConfig) -> tuple[list[Row], list[Row]]:
    data = config.data
    if config.task is not None:
        task = make_task(config.task)
        heldout: list[Row] = list(task.problems("heldout", data.heldout_size, config.seed))
        known = {row["prompt"] for row in heldout}
        train = [
            r for r in task.problems("train", task.size, config.seed) if r["prompt"] not in known
        ]
        return list(train), heldout
    if data.prompts is not None:
        rows, key = (
            with_prompt([{data.prompt_column: p} for p in data.prompts], data, "data.prompts"),
            "",
        )
    elif data.path is not None:
        rows = with_prompt(read_rows(Path(data.path), "data.path"), data, "data.path")
    else:
        raise DataError("task: there are no prompts; set task, data.path or data.prompts")
    if data.heldout_path is not None:
        key = "data.heldout_path"
        return rows, with_prompt(read_rows(Path(data.heldout_path), key), data, key)
    order = np.random.default_rng([abs(config.seed), 1]).permutation(len(rows))
    count = min(data.heldout_size, len(rows) // HELDOUT_PART)
    apart = set(order[:count].tolist())
    return (
        [row for i, row in enumerate(rows) if i not in apart],
        [rows[i] for i in sorted(apart)],
    )


def _tokenised(rows: list[Row], config: LabConfig, tokenizer: Any) -> tuple[Batch, int]:
    """The rows that are short enough, with `prompt_ids`; and how many are not."""
    data = config.data
    chat = wants_chat(data.chat, tokenizer)
    kept, ids = [], []
    for row in rows:
        tokens = render(row["prompt"], tokenizer, chat=chat, system=data.system_prompt)
        if not tokens:
            raise DataError(f"data: the prompt {row['prompt']!r} has no tokens; leave it out")
        if len(tokens) <= data.max_prompt_tokens:
            kept.append(row)
            ids.append(tokens)
    names = list(dict.fromkeys(name for row in kept for name in row)) or ["prompt"]
    columns: dict[str, Any] = {name: [_plain(row.get(name)) for row in kept] for name in names}
    return Batch.from_dict({**columns, "prompt_ids": ids}), len(rows) - len(kept)


def _plain(value: Any) -> Any:
    """A value as a column can hold it; chat messages and other nested data as JSON."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def _fingerprint(rows: Batch) -> str:
    digest = hashlib.sha256()
    for ids in rows.lists("prompt_ids"):
        digest.update(ids.tobytes() + b"|")
    return digest.hexdigest()[:16]
