"""Responses that come with the data: single ones for SFT and KTO, pairs for preferences.

A row of data is one prompt with a list of responses: one, or the chosen and the rejected. Drawn, it
becomes a sample for each. What is read here:

    SFT           prompt, response or completion; or messages
    pairs         prompt, chosen, rejected, perhaps a number `margin`
    KTO           prompt, response or completion, label

Each response is a text, or the chat messages that end with it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from verl_lab.batch.columns import COLUMNS, Batch
from verl_lab.config.schema import DataConfig, LabConfig
from verl_lab.data.chat import Messages
from verl_lab.data.preferences import slip
from verl_lab.data.sources import CHOSEN, Row, clean_messages, with_prompt
from verl_lab.errors import DataError

ANSWERS = ("response", "completion")
"""Columns that a single response may be in; the first that is there counts."""


@dataclass(frozen=True)
class Kind:
    """What the rows have beside their prompt."""

    has_pairs: bool = False
    """Whether a row has `chosen` and `rejected`; else it has one response."""
    has_label: bool = False
    """Whether a column `label` says if the response is a good one."""


def kind_of(config: LabConfig) -> Kind:
    """What the rows must have for what is learned."""
    if config.samples_per_prompt == 2:
        return Kind(has_pairs=True)
    return Kind(has_label=config.objective == "preference")


def examples(rows: list[Row], kind: Kind, data: DataConfig, key: str) -> list[Row]:
    """Rows as read, with `prompt` and a list `response`, and perhaps a list `is_chosen`.

    Where some pairs have a `margin`, the others get 0, the loss's own default.

    Args:
        rows: of the dataset.
        kind: what they must have.
        data: names the prompt's column.
        key: the config key that named the dataset, for errors.

    Raises:
        DataError: a row lacks a response, a label or a prompt, or has one that is none; names the
            row and its columns. Or a column has a name that the lab would write over.
    """
    read = [_read(row, kind, data.prompt_column, f"{key}: row {i}") for i, row in enumerate(rows)]
    rest = with_prompt([row for row, _ in read], data, key)
    found = [{**row, **own} for row, (_, own) in zip(rest, read, strict=True)]
    if any("margin" in own for _, own in read):
        found = [{"margin": 0.0, **row} for row in found]
    return found


def task_examples(rows: list[Row], kind: Kind, config: LabConfig) -> list[Row]:
    """The problems of a task with their answers as responses; the worse ones are made up.

    Raises:
        DataError: a problem has no answer, or nothing knows what goes wrong in such a task.
    """
    assert config.task is not None
    source = random.Random(f"examples/{config.seed}")
    needs_worse = kind.has_pairs or kind.has_label
    if needs_worse and config.task.name != "add_compare":
        raise DataError(
            f"task.name: {config.task.name} has right answers only, and recipe "
            f"{config.recipe} needs worse ones too; name a dataset as data.path"
        )
    found = []
    for number, row in enumerate(rows):
        if row.get("answer") is None:
            raise DataError(
                f"task.name: {config.task.name} gives no answer to problem {number}; name a "
                f"dataset with responses as data.path"
            )
        own: Row = {"response": [row["answer"]]}
        if needs_worse:
            worse = slip(row["prompt"], row["answer"], source)
            if kind.has_pairs:
                own = {"response": [row["answer"], worse], CHOSEN: [True, False]}
            else:
                is_good = source.random() < 0.5
                own = {"response": [row["answer"] if is_good else worse], CHOSEN: [is_good]}
        found.append({**row, **own})
    return found


def as_prompts(batch: Batch) -> Batch:
    """One row a prompt, without what belongs to a response: from samples back to what to answer."""
    first = batch.take([rows[0] for rows in batch.groups().values()])
    own = {*COLUMNS, CHOSEN, "greedy_reward"} - {"group_id", "prompt", "prompt_ids", "step"}
    own |= {"margin"} if CHOSEN in batch else set()  # else it is a column of the dataset's own
    return first.without([*own, *(name for name in first.names if name.startswith("reward/"))])


def _read(row: Row, kind: Kind, prompt_column: str, place: str) -> tuple[Row, Row]:
    """A row without the columns of its responses; and what they hold, under the lab's names."""
    names = _answer_columns(row, kind, place)
    conversations = [_conversation(row[name], name, place) for name in names]
    rest = {k: v for k, v in row.items() if k not in names}
    if not kind.has_pairs:  # table files give all rows the same columns
        rest = {k: v for k, v in rest.items() if k not in ANSWERS or v is not None}
    before = [turns for turns, _ in conversations]
    if any(before):
        if before[0] != before[-1]:
            raise DataError(
                f"{place} has conversations that differ in more than their last message; give the "
                f"two answers to one prompt"
            )
        rest[prompt_column] = _prompt(row.get(prompt_column), before[0], place)
    own: Row = {"response": [text for _, text in conversations]}
    if kind.has_pairs:
        own |= {CHOSEN: [True, False], **_margin(rest.pop("margin", None), place)}
    elif kind.has_label:
        own[CHOSEN] = [_label(rest.pop("label", None), place)]
    return rest, own


def _answer_columns(row: Row, kind: Kind, place: str) -> list[str]:
    """The columns that hold the responses of a row."""
    wanted = [("chosen",), ("rejected",)] if kind.has_pairs else [(*ANSWERS, "messages")]
    found = []
    for names in wanted:
        there = [name for name in names if row.get(name) is not None]
        if not there:
            raise DataError(
                f"{place} has no {' or '.join(names)}; its columns are {', '.join(row)}"
            )
        found.append(there[0])
    return found


def _conversation(given: Any, name: str, place: str) -> tuple[Messages, str]:
    """The messages in front of a response, if it was given with them, and its text.

    What `messages` hold after their last answer belongs to no answer, and is left aside.
    """
    if isinstance(given, str):  # an empty one is a response too: its end is what is learned
        return [], given
    turns = clean_messages(given, place) if isinstance(given, list) else []
    if name == "messages":
        while turns and turns[-1]["role"] != "assistant":
            turns.pop()
    answer = turns[-1] if turns else {}
    if answer.get("role") != "assistant" or not isinstance(answer.get("content"), str):
        raise DataError(
            f"{place} has no answer in {name!r}; give a text, or chat messages of which the last "
            f"is an assistant's"
        )
    return turns[:-1], answer["content"]


def _prompt(given: Any, turns: Messages, place: str) -> str | Messages:
    """The messages before the answer; a prompt given beside them must be among them."""
    if isinstance(given, list) and given:
        is_same = clean_messages(given, place) == turns
    else:
        is_same = not given or given in [turn.get("content") for turn in turns]
    if not is_same:
        raise DataError(
            f"{place} has a prompt that its conversation does not hold; leave one of them out"
        )
    return given if isinstance(given, str) and given and len(turns) == 1 else turns


def _label(given: Any, place: str) -> bool:
    if not isinstance(given, bool):
        raise DataError(
            f"{place} has the label {given!r}; give true for a good response and false for a bad "
            f"one"
        )
    return given


def _margin(given: Any, place: str) -> dict[str, float]:
    if given is None:
        return {}
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise DataError(f"{place} has the margin {given!r}; give a number, or leave it out")
    return {"margin": float(given)}
