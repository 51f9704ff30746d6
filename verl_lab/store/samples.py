"""The samples of a run: one Parquet file a step, compacted as they grow many.

`step-000012.a0.parquet` holds step 12 of attempt 0; `steps-000001-000064.a0.parquet` holds a row
group for each of its steps. Files appear whole, by renaming. A crash in the middle of compaction
leaves a step in two files, with the same rows; the single file is then the one that is read, and
the next compaction removes it.
"""

from __future__ import annotations

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
        """Writes a step's samples; compacts when there are many single files of the attempt."""
        _write([_with_step(batch.table, step)], self._single(step, attempt))
        singles = self._singles(attempt)
        if len(singles) >= COMPACT_FILES:
            self._compact(singles, attempt)

    def steps(self, attempt: int) -> list[int]:
        """The steps of an attempt that have samples."""
        found = set(self._singles(attempt))
        for path, _, _ in self._compacted(attempt):
            found.update(_steps_of(pq.ParquetFile(path)))
        return sorted(found)

    def read(self, step: int, attempt: int) -> Batch:
        """The samples of one step.

        Raises:
            DataError: there are none.
        """
        single = self._single(step, attempt)
        if single.exists():
            return Batch(pq.ParquetFile(single).read())
        for path, first, last in self._compacted(attempt):
            if first <= step <= last:
                file = pq.ParquetFile(path)
                steps = _steps_of(file)
                if step in steps:
                    return Batch(file.read_row_group(steps.index(step)))
        known = self.steps(attempt)
        which = f"{known[0]} to {known[-1]} have some" if known else "no step has any yet"
        raise DataError(f"samples: step {step} has none; {which}")

    def _compact(self, singles: list[int], attempt: int) -> None:
        tables = [pq.ParquetFile(self._single(step, attempt)).read() for step in singles]
        name = f"steps-{singles[0]:06d}-{singles[-1]:06d}.a{attempt}.parquet"
        schema = pa.unify_schemas([table.schema for table in tables], promote_options="default")
        _write([_conform(table, schema) for table in tables], self._path / name)
        for step in singles:
            self._single(step, attempt).unlink()

    def _single(self, step: int, attempt: int) -> Path:
        return self._path / f"step-{step:06d}.a{attempt}.parquet"

    def _singles(self, attempt: int) -> list[int]:
        matches = (SINGLE.fullmatch(path.name) for path in self._path.iterdir())
        return sorted(int(m[1]) for m in matches if m and int(m[2]) == attempt)

    def _compacted(self, attempt: int) -> list[tuple[Path, int, int]]:
        matches = ((path, MANY.fullmatch(path.name)) for path in sorted(self._path.iterdir()))
        return [(p, int(m[1]), int(m[2])) for p, m in matches if m and int(m[3]) == attempt]


def _write(tables: list[pa.Table], path: Path) -> None:
    draft = path.with_name(f".{path.name}")
    with pq.ParquetWriter(draft, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=max(1, table.num_rows))
    draft.replace(path)


def _with_step(table: pa.Table, step: int) -> pa.Table:
    return Batch(table).with_columns({"step": [step] * table.num_rows}).table


def _steps_of(file: pq.ParquetFile) -> list[int]:
    """The step of each row group, from its statistics."""
    leaf = next(
        i for i in range(len(file.schema)) if file.schema.column(i).path.split(".")[0] == "step"
    )
    return [
        int(file.metadata.row_group(i).column(leaf).statistics.min)
        for i in range(file.metadata.num_row_groups)
    ]


def _conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    for field in schema:
        if field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    return table.select(schema.names).cast(schema)
