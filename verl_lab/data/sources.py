"""Rows of prompts from a file, a folder or a list; the dataset's own columns come along."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_lab.batch.columns import COLUMNS
from verl_lab.config.schema import DataConfig
from verl_lab.data.chat import Messages
from verl_lab.errors import DataError

Row = dict[str, Any]
MESSAGES = "prompt_messages"
"""The column that keeps a prompt's chat messages, as JSON, where a prompt was given as such."""
CHOSEN = "is_chosen"
"""The column that says whether a response is the better one of its pair, or a good one."""


def read_rows(path: Path, key: str) -> list[Row]:
    """The rows of a `.jsonl` or `.parquet` file, or of a folder that `datasets` wrote.

    Args:
        path: the file or folder.
        key: the config key that named it, for errors.

    Raises:
        DataError: it is none of these, or a line is broken; names the line.
    """
    if not path.exists():
        raise DataError(f"{key}: {path} does not exist")
    if path.is_dir():
        return _from_datasets(path, key)
    if path.suffix in (".jsonl", ".json"):
        return _from_jsonl(path, key)
    if path.suffix == ".parquet":
        return _from_parquet(path, key)
    raise DataError(f"{key}: {path} is no .jsonl, no .parquet and no dataset folder")


def with_prompt(rows: list[Row], config: DataConfig, key: str) -> list[Row]:
    """The rows with their prompt under `prompt`, whatever its column was called.

    Raises:
        DataError: a row has no prompt; says which columns there are. Or a column has a name that
            the lab would write over.
    """
    column = config.prompt_column
    for number, row in enumerate(rows):
        if not isinstance(row.get(column), str | list) or not row[column]:
            raise DataError(
                f"data.prompt_column: row {number} of {key} has no prompt in {column!r}; its "
                f"columns are {', '.join(row)}"
            )
    if not rows:
        raise DataError(f"{key}: has no rows; give at least one prompt")
    taken = _columns_of(rows, column) & {*COLUMNS, MESSAGES, CHOSEN}
    taken |= {name for name in _columns_of(rows, column) if name.startswith("reward/")}
    if taken:
        raise DataError(
            f"{key}: the lab has columns of its own called {', '.join(sorted(taken))}; rename "
            f"those of the data, or leave them out"
        )
    return [
        {
            **{k: v for k, v in row.items() if k != column},
            "prompt": _prompt(row[column], f"row {number} of {key}"),
        }
        for number, row in enumerate(rows)
    ]


def clean_messages(given: list[Any], place: str) -> Messages:
    """Chat messages without the empty keys that table files give them.

    Args:
        given: the messages.
        place: where they are, for errors: the config key and the row.

    Raises:
        DataError: one of them is no message.
    """
    for message in given:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(
                f"{place} has the chat message {message!r}; a message has a `role` and a `content`"
            )
    return [{k: v for k, v in message.items() if v is not None} for message in given]


def _columns_of(rows: list[Row], prompt_column: str) -> set[str]:
    return {name for row in rows for name in row} - {prompt_column}


def _prompt(given: Any, place: str) -> str | Messages:
    """A text as it is, or chat messages as `clean_messages` leaves them."""
    if isinstance(given, str):
        return given
    return clean_messages(given, f"data.prompt_column: {place}")


def _from_parquet(path: Path, key: str) -> list[Row]:
    try:
        return pq.read_table(path).to_pylist()  # type: ignore[no-any-return]
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{key}: {path} cannot be read as Parquet ({error})") from error


def _from_jsonl(path: Path, key: str) -> list[Row]:
    rows = []
    # Split at line feeds alone: a JSON text may hold U+2028 and other separators as they are.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{key}: {path}:{number} is no JSON ({error})") from error
        if not isinstance(row, dict):
            raise DataError(f"{key}: {path}:{number} is {type(row).__name__}, not an object")
        rows.append(row)
    return rows


def _from_datasets(path: Path, key: str) -> list[Row]:
    import datasets

    try:
        found = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise DataError(f"{key}: {path} is no folder that datasets.save_to_disk wrote") from error
    if isinstance(found, datasets.DatasetDict):
        names = ", ".join(found)
        if "train" not in found:
            raise DataError(
                f"{key}: {path} has the splits {names} and no `train`; name one's folder"
            )
        found = found["train"]
    return found.to_list()  # type: ignore[no-any-return]
