"""Responses that come with the data: single ones for SFT and KTO, pairs for preferences.

A row of data becomes one sample, or two of one group: the chosen response and the rejected one.
Their token ids are those that the policy would read and write, the end of the answer included.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_lab.batch.columns import COLUMNS, Batch
from verl_lab.config.schema import DataConfig, LabConfig
from verl_lab.data.chat import Messages, render, wants_chat
from verl_lab.data.preferences import slip
from verl_lab.data.sources import Row, with_prompt
from verl_lab.errors import DataError

ANSWERS = ("response", "completion")
"""Columns that a single response may be in; the first that is there counts."""
CHOSEN = "is_chosen"


@dataclass(frozen=True)
class Kind:
    """Which columns a row of data has beside its prompt."""

    answers: tuple[tuple[str, ...], ...]
    """For each sample of a row: the columns that its response may be in."""
    has_label: bool = False
    """Whether a column `label` says if the response is a good one."""


def kind_of(config: LabConfig) -> Kind:
    """What the rows must have for what is learned."""
    if config.samples_per_prompt == 2:
        return Kind((("chosen",), ("rejected",)))
    return Kind((ANSWERS,), has_label=config.objective == "preference")


def examples(rows: list[Row], kind: Kind, data: DataConfig, key: str) -> list[Row]:
    """Rows as read, with `prompt` and the responses of each in a list `answers`.

    Chat data may give the whole conversation: `messages` up to the answer, or `chosen` and
    `rejected` with the prompt in front of both.

    Args:
        rows: of the dataset.
        kind: what they must have.
        data: names the prompt's column.
        key: the config key that named the dataset, for errors.

    Raises:
        DataError: a row lacks a response, a label or a prompt; names the row and its columns.
    """
    found = []
    for number, row in enumerate(rows):
        place = f"row {number} of {key}"
        split = _without_conversation(row, data.prompt_column, place)
        answers = [_answer(split, names, place) for names in kind.answers]
        taken = {name for names in kind.answers for name in names} | {"messages"}
        rest: Row = {name: value for name, value in split.items() if name not in taken}
        rest["answers"] = answers
        if kind.has_label and not isinstance(split.get("label"), bool):
            raise DataError(
                f"{key}: {place} has the label {split.get('label')!r}; give true for a good "
                f"response and false for a bad one"
            )
        found.append(rest)
    return with_prompt(found, data, key)


def task_examples(rows: list[Row], kind: Kind, config: LabConfig) -> list[Row]:
    """The problems of a task with their answers as responses; the worse ones are made up.

    Raises:
        DataError: a problem has no answer, or nothing knows what goes wrong in such a task.
    """
    assert config.task is not None
    source = random.Random(f"examples/{config.seed}")
    found = []
    for number, row in enumerate(rows):
        if row.get("answer") is None:
            raise DataError(
                f"task.name: {config.task.name} gives no answer to problem {number}; name a "
                f"dataset with responses as data.path"
            )
        answers, more = [row["answer"]], {}
        if kind.has_label or len(kind.answers) == 2:
            if config.task.name != "add_compare":
                raise DataError(
                    f"task.name: {config.task.name} has right answers only, and recipe "
                    f"{config.recipe} needs worse ones too; name a dataset as data.path"
                )
            worse = slip(row["prompt"], row["answer"], source)
            if kind.has_label:
                more["label"] = source.random() < 0.5
                answers = answers if more["label"] else [worse]
            else:
                answers = [row["answer"], worse]
        found.append({**row, **more, "answers": answers})
    return found


def tokenised(rows: list[Row], config: LabConfig, tokenizer: Any) -> tuple[Batch, int]:
    """Samples, those of a row next to each other; and how many rows were too long.

    A row is left out as a whole if its prompt is longer than `data.max_prompt_tokens` or one of
    its responses longer than `rollout.max_new_tokens`: nothing is cut.
    """
    data = config.data
    chat = wants_chat(data.chat, tokenizer)
    columns: dict[str, list[Any]] = {}
    num_left_out = 0
    samples: list[Row] = []
    for row in rows:
        prompt_ids = render(row["prompt"], tokenizer, chat=chat, system=data.system_prompt)
        answers = [
            answer_ids(row["prompt"], prompt_ids, text, tokenizer, chat=chat, data=data)
            for text in row["answers"]
        ]
        longest = max(map(len, answers))
        if len(prompt_ids) > data.max_prompt_tokens or longest > config.rollout.max_new_tokens:
            num_left_out += 1
            continue
        for number, (text, ids) in enumerate(zip(row["answers"], answers, strict=True)):
            samples.append(_sample(row, number, prompt_ids, text, ids, tokenizer))
    names = list(dict.fromkeys(name for sample in samples for name in sample))
    columns = {name: [sample.get(name) for sample in samples] for name in names}
    return Batch.from_dict(columns), num_left_out


def answer_ids(
    prompt: str | Messages,
    prompt_ids: list[int],
    answer: str,
    tokenizer: Any,
    *,
    chat: bool,
    data: DataConfig,
) -> list[int]:
    """What a policy would write to give an answer, the token that ends it included.

    In a chat it is what the template puts after the prompt, up to its end-of-turn token. Without
    one, or where the template writes prompt and answer differently together, the tokens of the
    answer and the end of the sequence.
    """
    end = tokenizer.eos_token_id
    if chat:
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if data.system_prompt is not None and turns[0].get("role") != "system":
            turns = [{"role": "system", "content": data.system_prompt}, *turns]
        whole = tokenizer.apply_chat_template(
            [*turns, {"role": "assistant", "content": answer}], tokenize=True, return_dict=False
        )
        rest = list(whole[len(prompt_ids) :])
        if list(whole[: len(prompt_ids)]) == prompt_ids and rest:
            return rest[: rest.index(end) + 1] if end in rest else [*rest, end]
    return [*tokenizer(answer, add_special_tokens=False)["input_ids"], end]


def as_prompts(batch: Batch) -> Batch:
    """One row a prompt, without what belongs to a response: from samples back to what to answer."""
    first = batch.take([rows[0] for rows in batch.groups().values()])
    own = {*COLUMNS, CHOSEN, "margin", "greedy_reward"}
    own -= {"group_id", "prompt", "prompt_ids", "step"}
    return first.without([*own, *(name for name in first.names if name.startswith("reward/"))])


def _sample(
    row: Mapping[str, Any],
    number: int,
    prompt_ids: list[int],
    text: str,
    ids: list[int],
    tokenizer: Any,
) -> Row:
    prompt = row["prompt"]
    rest = {k: v for k, v in row.items() if k not in ("answers", "label", "prompt")}
    sample: Row = {
        **rest,
        "prompt": prompt if isinstance(prompt, str) else tokenizer.decode(prompt_ids),
        "prompt_ids": prompt_ids,
        "sample_id": number,
        "response": text,
        "response_ids": ids,
        "response_mask": [True] * len(ids),
    }
    if "label" in row:
        sample[CHOSEN] = row["label"]
    elif len(row["answers"]) == 2:
        sample[CHOSEN] = number == 0
    if sample.get("margin") is not None:
        sample["margin"] = float(sample["margin"])
    return sample


def _answer(row: Mapping[str, Any], names: tuple[str, ...], place: str) -> str:
    name = next((name for name in names if row.get(name) is not None), None)
    found = None if name is None else row[name]
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], dict):
        found = found[0].get("content")
    if not isinstance(found, str):  # an empty one is a response too: its end is what is learned
        raise DataError(
            f"data.path: {place} has no {' or '.join(names)}; its columns are {', '.join(row)}"
        )
    return found


def _without_conversation(row: Row, prompt_column: str, place: str) -> Row:
    """The row with a prompt and answers of their own, where it had whole conversations."""
    if row.get(prompt_column):
        return row
    if isinstance(row.get("messages"), list):
        turns = row["messages"]
        if not turns or turns[-1].get("role") != "assistant" or len(turns) < 2:
            raise DataError(
                f"data.path: {place} has messages that do not end with an assistant's answer"
            )
        return {**row, prompt_column: turns[:-1], ANSWERS[0]: turns[-1]["content"]}
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if isinstance(chosen, list) and isinstance(rejected, list):
        shared = 0
        while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
            shared += 1
        if shared and shared == len(chosen) - 1 == len(rejected) - 1:
            return {
                **row,
                prompt_column: chosen[:shared],
                "chosen": chosen[shared:],
                "rejected": rejected[shared:],
            }
        raise DataError(
            f"data.path: {place} has conversations that differ in more than their last message"
        )
    return row
