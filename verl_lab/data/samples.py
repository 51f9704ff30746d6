"""Rows of data as the rows of a batch: with token ids, the dataset's own columns beside them.

Prompts that a policy is to answer become a row each; responses that came with the data become
samples, those of a row of data next to each other.
"""

from __future__ import annotations

import json
from typing import Any

from verl_lab.batch.columns import Batch
from verl_lab.config.schema import LabConfig
from verl_lab.data.chat import answer_ids, render, wants_chat
from verl_lab.data.sources import CHOSEN, MESSAGES, Row
from verl_lab.errors import DataError, ShapeError

PROMPT_COLUMNS = ("prompt", "prompt_ids")
SAMPLE_COLUMNS = (*PROMPT_COLUMNS, "sample_id", "response", "response_ids", "response_mask")


def prompt_batch(rows: list[Row], config: LabConfig, tokenizer: Any) -> tuple[Batch, int]:
    """The rows that are short enough, with `prompt_ids`; and how many are not.

    Raises:
        DataError: a prompt has no tokens, or a column has no one type.
    """
    chat = wants_chat(config.data.chat, tokenizer)
    kept = []
    for row in rows:
        ids = _prompt_ids(row, config, tokenizer, chat)
        if len(ids) <= config.data.max_prompt_tokens:
            kept.append({**_with_text(row, ids, tokenizer), "prompt_ids": ids})
    return _batch(kept, PROMPT_COLUMNS), len(rows) - len(kept)


def sample_batch(rows: list[Row], config: LabConfig, tokenizer: Any) -> tuple[Batch, int]:
    """The samples of the rows that are short enough; and how many rows are not.

    A row is left out as a whole if its prompt is longer than `data.max_prompt_tokens` or one of
    its responses longer than `rollout.max_new_tokens`: nothing is cut.

    Args:
        rows: as `examples` or `task_examples` made them.
        config: the settings.
        tokenizer: the policy's, of transformers.

    Raises:
        DataError: a prompt has no tokens, or a column has no one type.
    """
    data = config.data
    chat = wants_chat(data.chat, tokenizer)
    samples: list[Row] = []
    num_too_long = 0
    for row in rows:
        prompt_ids = _prompt_ids(row, config, tokenizer, chat)
        responses = [
            answer_ids(
                row["prompt"], prompt_ids, text, tokenizer, chat=chat, system=data.system_prompt
            )
            for text in row["response"]
        ]
        longest = max(map(len, responses))
        if len(prompt_ids) > data.max_prompt_tokens or longest > config.rollout.max_new_tokens:
            num_too_long += 1
        else:
            samples += _samples(_with_text(row, prompt_ids, tokenizer), prompt_ids, responses)
    return _batch(samples, SAMPLE_COLUMNS), num_too_long


def _samples(row: Row, prompt_ids: list[int], responses: list[list[int]]) -> list[Row]:
    """A sample for each response of a row, whose `response` and `is_chosen` hold one for each."""
    samples = []
    for number, ids in enumerate(responses):
        own = {
            "prompt_ids": prompt_ids,
            "sample_id": number,
            "response": row["response"][number],
            "response_ids": ids,
            "response_mask": [True] * len(ids),
        }
        if CHOSEN in row:
            own[CHOSEN] = row[CHOSEN][number]
        samples.append({**row, **own})
    return samples


def _prompt_ids(row: Row, config: LabConfig, tokenizer: Any, chat: bool) -> list[int]:
    ids = render(row["prompt"], tokenizer, chat=chat, system=config.data.system_prompt)
    if not ids:
        raise DataError(f"data: the prompt {row['prompt']!r} has no tokens; leave it out")
    return ids


def _with_text(row: Row, ids: list[int], tokenizer: Any) -> Row:
    """The row with a text as its prompt; that of chat messages is what the policy reads."""
    if isinstance(row["prompt"], str):
        return row
    messages = json.dumps(row["prompt"], ensure_ascii=False)
    return {**row, "prompt": tokenizer.decode(ids), MESSAGES: messages}


def _batch(rows: list[Row], columns: tuple[str, ...]) -> Batch:
    """The rows as a batch, which has its columns even where it has no rows."""
    names = dict.fromkeys([name for row in rows for name in row] or columns)
    try:
        return Batch.from_dict({name: [_plain(row.get(name)) for row in rows] for name in names})
    except ShapeError as error:
        raise DataError(
            f"data: the column {error}; give its values one type, or leave it out"
        ) from error


def _plain(value: Any) -> Any:
    """A value as a column can hold it: a list stays one, and what has dicts becomes JSON."""
    return json.dumps(value, ensure_ascii=False, default=str) if _has_dicts(value) else value


def _has_dicts(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_has_dicts, value)))
