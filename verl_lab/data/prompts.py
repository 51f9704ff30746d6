"""Prompts as a run draws them: shuffled by epoch, resumable exactly, with a held-out set apart."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl_lab.batch.columns import Batch
from verl_lab.config.schema import LabConfig, TaskConfig
from verl_lab.data.examples import examples, kind_of, task_examples
from verl_lab.data.samples import prompt_batch, sample_batch
from verl_lab.data.sources import CHOSEN, Row, read_rows, with_prompt
from verl_lab.data.tasks import make_task
from verl_lab.errors import DataError

HELDOUT_PART = 5
"""At most one in so many prompts of a dataset is held out."""


class PromptSource:
    """Draws prompts without end, in an order that the seed fixes.

    Args:
        rows: all prompts, a row each; or the samples that came with them, `per_prompt` rows each.
        per_prompt: rows of one prompt, next to each other.
        seed: fixes the order of each epoch.
        shuffle: whether there is another order each epoch; else it is that of the rows.
    """

    def __init__(self, rows: Batch, *, seed: int, shuffle: bool, per_prompt: int = 1) -> None:
        self._per_prompt = per_prompt
        self._rows, self._seed, self._shuffle = rows, seed, shuffle
        self._drawn = 0
        self._epoch: tuple[int, np.ndarray[Any, Any]] = (-1, np.arange(0))
        self.fingerprint = _fingerprint(rows)

    def __len__(self) -> int:
        return len(self._rows) // self._per_prompt

    def next(self, n: int) -> Batch:
        """The next `n` prompts; `group_id` counts the prompts drawn in the run."""
        batch = self.peek(n)
        self._drawn += n
        return batch

    def peek(self, n: int) -> Batch:
        """What `next` would give, without drawing it."""
        places = np.arange(self._drawn, self._drawn + n)
        drawn = [self._order(place // len(self))[place % len(self)] for place in places.tolist()]
        k = self._per_prompt
        rows = [first * k + number for first in drawn for number in range(k)]
        return self._rows.take(rows).with_columns({"group_id": np.repeat(places, k)})

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
    """Prompts left out because they, or a response given with them, are too long."""
    num_overlapping: int = 0
    """Training prompts left out because they are in `data.heldout_path` too."""

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
    to_train, to_hold_out = _rows(config)
    to_train, num_overlapping = _without_heldout(to_train, to_hold_out)
    if not to_train:
        raise DataError(
            "data.heldout_path: holds every prompt of data.path, so none is left to train on; give "
            "other prompts"
        )
    tokenise = prompt_batch if config.samples_policy else sample_batch
    train, train_too_long = tokenise(to_train, config, tokenizer)
    heldout, heldout_too_long = tokenise(to_hold_out, config, tokenizer)
    if not len(train):
        raise DataError(
            f"data.max_prompt_tokens: all {train_too_long} prompts are longer than "
            f"{config.data.max_prompt_tokens}, or have a response longer than "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}; raise them"
        )
    k = 1 if config.samples_policy else config.samples_per_prompt
    source = PromptSource(train, seed=config.seed, shuffle=config.data.shuffle, per_prompt=k)
    heldout = heldout.with_columns({"group_id": np.arange(len(heldout)) // k})
    return PromptSet(source, heldout, train_too_long + heldout_too_long, num_overlapping)


def _rows(config: LabConfig) -> tuple[list[Row], list[Row]]:
    data = config.data
    if config.task is not None and data.path is None:
        found = _from_task(config.task, data.heldout_size, config.seed)
        if config.samples_policy:
            return found
        kind = kind_of(config)
        return task_examples(found[0], kind, config), task_examples(found[1], kind, config)
    if data.prompts is not None:
        if not config.samples_policy:
            raise DataError(
                f"data.prompts: have no responses, and recipe {config.recipe} learns from them; "
                f"name a dataset with responses as data.path"
            )
        given = [{data.prompt_column: prompt} for prompt in data.prompts]
        rows = with_prompt(given, data, "data.prompts")
    elif data.path is not None:
        rows = _from_file(data.path, config, "data.path")
    else:
        raise DataError("task: there are no prompts; set task, data.path or data.prompts")
    if data.heldout_path is not None:
        return rows, _from_file(data.heldout_path, config, "data.heldout_path")
    return _split(rows, data.heldout_size, config.seed)


def _from_file(path: str, config: LabConfig, key: str) -> list[Row]:
    rows = read_rows(Path(path), key)
    if config.samples_policy:
        return with_prompt(rows, config.data, key)
    return examples(rows, kind_of(config), config.data, key)


def _without_heldout(train: list[Row], heldout: list[Row]) -> tuple[list[Row], int]:
    """The training rows whose prompt is not held out, and how many others there were."""
    apart = {_identity(row) for row in heldout}
    kept = [row for row in train if _identity(row) not in apart]
    return kept, len(train) - len(kept)


def _from_task(config: TaskConfig, heldout_size: int, seed: int) -> tuple[list[Row], list[Row]]:
    task = make_task(config)
    heldout = [dict(row) for row in task.problems("heldout", heldout_size, seed)]
    known = {row["prompt"] for row in heldout}
    train = [
        dict(row) for row in task.problems("train", task.size, seed) if row["prompt"] not in known
    ]
    if not train:
        raise DataError(
            f"task.size: the {len(known)} held-out problems of {config.name} are all that its "
            f"{task.size} training problems hold; raise task.size, lower data.heldout_size, or "
            f"give the task options with more variety"
        )
    return train, heldout


def _split(rows: list[Row], heldout_size: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Sets prompts aside, each with all of its rows: a prompt may be in the data twice."""
    texts = [_identity(row) for row in rows]
    distinct = list(dict.fromkeys(texts))
    order = np.random.default_rng([abs(seed), 1]).permutation(len(distinct))
    count = min(heldout_size, len(distinct) // HELDOUT_PART)
    apart = {distinct[i] for i in order[:count]}
    return (
        [row for row, text in zip(rows, texts, strict=True) if text not in apart],
        [row for row, text in zip(rows, texts, strict=True) if text in apart],
    )


def _identity(row: Row) -> str:
    """What two rows of the same prompt have in common; a text is what a user says in a chat."""
    prompt = row["prompt"]
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return json.dumps(turns, sort_keys=True)


def _fingerprint(rows: Batch) -> str:
    digest = hashlib.sha256()
    for name in ("prompt_ids", "response_ids"):
        for ids in rows.lists(name) if name in rows else ():
            digest.update(ids.tobytes() + b"|")
    if CHOSEN in rows:
        digest.update(rows.numpy(CHOSEN).tobytes())
    return digest.hexdigest()[:16]
