"""The samples of a run: one Parquet file a step, compacted as they grow many.

`step-000012.a0.parquet` holds step 12 of attempt 0; `steps-000001-000064.a0.parquet` holds a row
group for each of its steps. Steps whose columns differ go to different files, so that each comes
back as it was written. Files appear whole, by renaming. A crash in the middle of compaction leaves
a step in two files; the single file is then the one that is read, and the next compaction takes it
into the newest file, which is read before older ones.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from verl_lab.batch.columns import Batch
from verl_lab.errors import DataError
from verl_lab.store.folder import RunFolder

COMPACT_FILES = 64
SINGLE = re.compile(r"step-(\d+)\.a(\d+)\.parquet")
MANY = re.compile(r"steps-(\d+)-(\d+)\.a(\d+)\.parquet")


class SampleStore:
    """Reads and writes the `samples` folder of a run; one process writes."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.samples

    def write(self, step: int, attempt: int, batch: Batch) -> None:
        """Writes a step's samples, if it has any; compacts when there are many single files of
        the attempt."""
        if not len(batch):
            return
        table = batch.with_columns({"step": [step] * len(batch)}).table
        _write([table], self._single(step, attempt))
        singles = self._singles(attempt)
        if len(singles) >= COMPACT_FILES:
            self._compact(singles, attempt)

    def steps(self, attempt: int) -> list[int]:
        """The steps of an attempt that have samples."""
        found = set(self._singles(attempt))  # first: a step moves from single files to compacted
        for path, _, _ in self._compacted(attempt):
            with pq.ParquetFile(path) as file:
                found.update(_steps_of(file))
        return sorted(found)

    def read(self, step: int, attempt: int) -> Batch:
        """The samples of one step.

        Raises:
            DataError: there are none.
        """
        try:
            with pq.ParquetFile(self._single(step, attempt)) as file:
                return Batch(file.read())
        except FileNotFoundError:
            return self._read_compacted(step, attempt)

    def _read_compacted(self, step: int, attempt: int) -> Batch:
        for path, first, last in self._compacted(attempt):
            if first <= step <= last:
                with pq.ParquetFile(path) as file:
                    steps = _steps_of(file)
                    if step in steps:
                        return Batch(file.read_row_group(steps.index(step)))
        known = self.steps(attempt)
        which = f"{known[0]} to {known[-1]} have some" if known else "no step of it has any yet"
        raise DataError(f"samples: step {step} has none in attempt {attempt}; {which}")

    def _compact(self, singles: list[int], attempt: int) -> None:
        alike: list[tuple[pa.Schema, list[int], list[pa.Table]]] = []
        for step in singles:
            with pq.ParquetFile(self._single(step, attempt)) as file:
                table = file.read()
            for schema, steps, tables in alike:
                if schema.equals(table.schema):
                    steps.append(step)
                    tables.append(table)
                    break
            else:
                alike.append((table.schema, [step], [table]))
        for _, steps, tables in alike:
            path = self._path / f"steps-{steps[0]:06d}-{steps[-1]:06d}.a{attempt}.parquet"
            _write(tables, path, is_synced=True)
        for step in singles:
            self._single(step, attempt).unlink()

    def _single(self, step: int, attempt: int) -> Path:
        return self._path / f"step-{step:06d}.a{attempt}.parquet"

    def _singles(self, attempt: int) -> list[int]:
        matches = (SINGLE.fullmatch(path.name) for path in self._path.iterdir())
        return sorted(int(m[1]) for m in matches if m and int(m[2]) == attempt)

    def _compacted(self, attempt: int) -> list[tuple[Path, int, int]]:
        """Compacted files with their first and last step, the newest first."""
        matches = ((path, MANY.fullmatch(path.name)) for path in self._path.iterdir())
        found = [(p, int(m[1]), int(m[2])) for p, m in matches if m and int(m[3]) == attempt]
        return sorted(found, key=lambda file: (file[2], file[1]), reverse=True)


def _write(tables: list[pa.Table], path: Path, *, is_synced: bool = False) -> None:
    draft = path.with_name(f".{path.name}")
    with pq.ParquetWriter(draft, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=table.num_rows)
    if is_synced:  # on disk before what it replaces is gone
        with draft.open("rb") as file:
            os.fsync(file.fileno())
    draft.replace(path)


def _steps_of(file: pq.ParquetFile) -> list[int]:
    """The step of each row group, from its statistics."""
    leaf = next(
        i for i in range(len(file.schema)) if file.schema.column(i).path.split(".")[0] == "step"
    )
    return [
        int(file.metadata.row_group(i).column(leaf).statistics.min)
        for i in range(file.metadata.num_row_groups)
    ]
