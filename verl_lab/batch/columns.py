"""The batch: one Arrow table, a row a sample, token columns as ragged lists. No torch.

The same table is the message between processes (Arrow IPC), the record on disk (Parquet) and the
view in the notebook (`to_pandas`). Nothing is padded. A batch is immutable: what changes it
returns a new one that shares the columns that stay.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from verl_lab.errors import ShapeError

if TYPE_CHECKING:
    import pandas as pd

TOKEN_COLUMNS: dict[str, pa.DataType] = {
    "response_ids": pa.list_(pa.int32()),
    "response_mask": pa.list_(pa.bool_()),
    "loss_mask": pa.list_(pa.bool_()),
    "rollout_logprobs": pa.list_(pa.float32()),
    "old_logprobs": pa.list_(pa.float32()),
    "ref_logprobs": pa.list_(pa.float32()),
    "values": pa.list_(pa.float32()),
    "returns": pa.list_(pa.float32()),
    "advantages": pa.list_(pa.float32()),
}
"""One value a response token; in a row all have the length of `response_ids`."""

COLUMNS: dict[str, pa.DataType] = {
    "step": pa.int64(),
    "group_id": pa.int64(),
    "sample_id": pa.int32(),
    "prompt": pa.string(),
    "prompt_ids": pa.list_(pa.int32()),
    "response": pa.string(),
    "finish_reason": pa.string(),
    "weights_version": pa.int64(),
    "reward": pa.float64(),
    **TOKEN_COLUMNS,
}
"""The columns that the lab knows, and their types; a dataset's own keep the types they came
with."""


class Batch:
    """Samples as an Arrow table.

    Args:
        table: a row a sample.
    """

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    # --- making one

    @classmethod
    def from_dict(cls, columns: Mapping[str, Any]) -> Batch:
        """A batch of columns given as lists or arrays."""
        return cls(pa.table({})).with_columns(columns)

    @classmethod
    def from_pandas(cls, frame: pd.DataFrame) -> Batch:
        """A batch of a DataFrame's columns; its index is left out."""
        return cls.from_dict({str(name): list(frame[name]) for name in frame})

    @classmethod
    def concat(cls, batches: Sequence[Batch]) -> Batch:
        """The rows of all, in order."""
        if not batches:
            raise ShapeError("Batch.concat: got no batch; give at least one")
        try:
            return cls(pa.concat_tables([b.table for b in batches], promote_options="default"))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ShapeError(
                f"Batch.concat: {error}; give the column one type in all batches"
            ) from error

    @classmethod
    def from_ipc(cls, buffer: Any) -> Batch:
        """A batch of what `to_ipc` made, without copying it."""
        return cls(pa.ipc.open_stream(pa.py_buffer(buffer)).read_all())

    @classmethod
    def open_ipc(cls, path: Path) -> Batch:
        """Maps a file that `write_ipc` made; memory is used as columns are touched."""
        with pa.memory_map(str(path)) as source:
            return cls(pa.ipc.open_stream(source).read_all())

    # --- sending one

    def to_ipc(self) -> pa.Buffer:
        """The Arrow IPC stream of the table."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.table.schema) as writer:
            writer.write_table(self.table)
        return sink.getvalue()

    def write_ipc(self, path: Path) -> None:
        """Writes the Arrow IPC stream to a file."""
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, self.table.schema) as w:
            w.write_table(self.table)

    # --- looking at it

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __contains__(self, name: object) -> bool:
        return name in self.table.column_names

    def __getitem__(self, name: str) -> list[Any]:
        return self._column(name).to_pylist()  # type: ignore[no-any-return]

    @property
    def names(self) -> list[str]:
        """The columns."""
        return list(self.table.column_names)

    def numpy(self, name: str) -> np.ndarray[Any, Any]:
        """A column of one value a row, as a 1-D array."""
        return self._column(name).to_numpy()  # type: ignore[no-any-return]

    def lists(self, name: str) -> list[np.ndarray[Any, Any]]:
        """A ragged column: a 1-D array a row, without copying numbers."""
        column = self._column(name).combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks) if column.num_chunks else column
        if not pa.types.is_list(column.type):
            raise ShapeError(f"{name}: is {column.type}, not a list a row")
        if column.null_count:
            raise ShapeError(f"{name}: row {column.is_null().to_pylist().index(True)} has none")
        if column.flatten().null_count:
            raise ShapeError(f"{name}: a value is missing within a row; give each token one")
        offsets = column.offsets.to_numpy()
        flat = column.values.to_numpy(zero_copy_only=False)
        return [flat[a:b] for a, b in itertools.pairwise(offsets)]

    def groups(self) -> dict[int, list[int]]:
        """The rows of each `group_id`, in order of first appearance."""
        found: dict[int, list[int]] = {}
        for row, group in enumerate(self["group_id"]):
            found.setdefault(group, []).append(row)
        return found

    def to_pandas(self) -> pd.DataFrame:
        """A DataFrame; list columns hold an array a row."""
        frame: pd.DataFrame = self.table.to_pandas()
        return frame

    # --- changing it

    def with_columns(self, columns: Mapping[str, Any]) -> Batch:
        """Adds columns, or replaces those of the same name.

        Raises:
            ShapeError: a column has not a value a row, or a token column not a value a token.
        """
        table = self.table
        is_new = table.num_columns == 0
        for name, values in columns.items():
            array = _array(name, values)
            if not is_new and len(array) != table.num_rows:
                raise ShapeError(f"{name}: has {len(array)} values for {table.num_rows} rows")
            if name in table.column_names:
                table = table.set_column(table.column_names.index(name), name, array)
            else:
                table = table.append_column(name, array) if not is_new else pa.table({name: array})
            is_new = False
        changed = Batch(table)
        changed._check_tokens(columns)
        return changed

    def without(self, names: Iterable[str]) -> Batch:
        """Leaves columns out; those that are not there are no error."""
        return Batch(self.table.drop_columns([name for name in names if name in self]))

    def select(self, names: Sequence[str]) -> Batch:
        """These columns only, in this order."""
        for name in names:
            self._column(name)
        return Batch(self.table.select(list(names)))

    def take(self, rows: Any) -> Batch:
        """These rows, in this order."""
        return Batch(self.table.take(pa.array(np.asarray(rows, dtype=np.int64))))

    def filter(self, mask: Any) -> Batch:
        """The rows where `mask` is true."""
        keep = np.asarray(mask, dtype=bool)
        if keep.shape != (len(self),):
            raise ShapeError(f"mask: has shape {keep.shape} for {len(self)} rows; give one a row")
        return Batch(self.table.filter(pa.array(keep)))

    def slice(self, start: int, length: int) -> Batch:
        """Up to `length` rows from `start` on."""
        return Batch(self.table.slice(start, length))

    def repeat(self, times: int) -> Batch:
        """Each row `times` times, next to each other."""
        return self.take(np.repeat(np.arange(len(self)), times))

    # --- inner workings

    def _column(self, name: str) -> pa.ChunkedArray:
        if name not in self:
            raise ShapeError(f"{name}: no such column; there are {', '.join(self.names)}")
        return self.table.column(name)

    def _check_tokens(self, changed: Iterable[str]) -> None:
        names = [name for name in changed if name in TOKEN_COLUMNS]
        if not names or "response_ids" not in self:
            return
        if "response_ids" in names:
            names = [name for name in self.names if name in TOKEN_COLUMNS]
        expected = _row_lengths(self._column("response_ids"))
        for name in names:
            lengths = _row_lengths(self._column(name))
            wrong = np.flatnonzero(lengths != expected)
            if len(wrong):
                row = int(wrong[0])
                found = "no" if lengths[row] < 0 else lengths[row]
                raise ShapeError(
                    f"{name}: row {row} has {found} values for the {expected[row]} tokens of "
                    "response_ids; a token column has one value a response token"
                )

    def __repr__(self) -> str:
        return f"Batch({len(self)} rows: {', '.join(self.names)})"

    def _repr_html_(self) -> str:
        shown = self.slice(0, 10)
        head = "".join(f"<th>{escape(name)}</th>" for name in self.names)
        rows = "".join(
            "<tr>"
            + "".join(f"<td>{escape(_short(row[name]))}</td>" for name in self.names)
            + "</tr>"
            for row in shown.table.to_pylist()
        )
        return f"<p>{len(self)} samples</p><table><tr>{head}</tr>{rows}</table>"


def _array(name: str, values: Any) -> pa.Array | pa.ChunkedArray:
    kind = COLUMNS.get(name, pa.float64() if name.startswith("reward/") else None)
    try:
        if isinstance(values, pa.Array | pa.ChunkedArray):
            return values if kind is None else values.cast(kind)
        return pa.array(values, type=kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise ShapeError(f"{name}: cannot be a column of {kind or 'one type'}: {error}") from error


def _row_lengths(column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """Values in each row; -1 where a row is missing."""
    lengths = pa.compute.fill_null(pa.compute.list_value_length(column), -1)
    return lengths.to_numpy()  # type: ignore[no-any-return]


def _short(value: Any) -> str:
    text = (
        f"[{', '.join(f'{v:.3g}' if isinstance(v, float) else str(v) for v in value[:6])}"
        f"{', …' if len(value) > 6 else ''}]"
        if isinstance(value, list)
        else f"{value:.4g}"
        if isinstance(value, float)
        else str(value)
    )
    return text if len(text) <= 80 else text[:79] + "…"
