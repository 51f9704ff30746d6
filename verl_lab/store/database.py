"""The run database: SQLite in WAL mode, one writer, any number of readers in other processes.

A rewind or a resume begins a new attempt from a step. Rows of older attempts beyond that step stay
on disk and are hidden: a row of attempt a at step t is visible if every later attempt began from
step t or later.
"""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from verl_lab.errors import DataError
from verl_lab.store.folder import RunFolder

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = """
CREATE TABLE IF NOT EXISTS attempts (
    attempt INTEGER PRIMARY KEY, from_step INTEGER, time REAL, reason TEXT);
CREATE TABLE IF NOT EXISTS metrics (
    attempt INTEGER, step INTEGER, name TEXT, value REAL,
    PRIMARY KEY (attempt, step, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, time REAL, attempt INTEGER, step INTEGER, kind TEXT, text TEXT);
CREATE TABLE IF NOT EXISTS interventions (
    id INTEGER PRIMARY KEY, time REAL, attempt INTEGER, step INTEGER, key TEXT, old TEXT, new TEXT);
CREATE TABLE IF NOT EXISTS spans (
    id INTEGER PRIMARY KEY, worker TEXT, device TEXT, kind TEXT, step INTEGER,
    start REAL, "end" REAL);
CREATE TABLE IF NOT EXISTS workers (
    id INTEGER PRIMARY KEY, name TEXT, role TEXT, device TEXT, pid INTEGER,
    started REAL, ended REAL, exit_code INTEGER);
"""
VISIBLE = """
WITH visible AS (
    SELECT attempt, coalesce(
        (SELECT min(from_step) FROM attempts AS later WHERE later.attempt > attempts.attempt),
        9223372036854775807) AS last
    FROM attempts)
"""
"""The last step of each attempt that later ones leave visible. Joined first, so that the metrics
are looked up by their key instead of read through."""


class Recorder:
    """The writer; there is one, in the controller."""

    def __init__(self, folder: RunFolder) -> None:
        self._db = sqlite3.connect(folder.database, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(SCHEMA)
        self._spans: list[tuple[Any, ...]] = []
        self.attempt: int = self._db.execute(
            "SELECT coalesce(max(attempt), -1) FROM attempts"
        ).fetchone()[0]

    def begin_attempt(self, from_step: int, reason: str) -> int:
        """Hides what was recorded beyond `from_step`; returns the new attempt's number."""
        self.attempt += 1
        row = (self.attempt, from_step, time.time(), reason)
        self._db.execute("INSERT INTO attempts VALUES (?, ?, ?, ?)", row)
        return self.attempt

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records metrics of a step, and the spans since the last call, in one transaction.

        If it fails, none of them are recorded, and the spans wait for the next call.
        """
        assert self.attempt >= 0, "begin_attempt comes before the first step"
        rows = [
            (self.attempt, step, name, None if math.isnan(value) else float(value))
            for name, value in metrics.items()
        ]
        self._write(rows)

    def event(self, kind: str, text: str, step: int | None = None) -> None:
        """Records that something happened."""
        self._db.execute(
            "INSERT INTO events (time, attempt, step, kind, text) VALUES (?, ?, ?, ?, ?)",
            (time.time(), self.attempt, step, kind, text),
        )

    def intervention(self, step: int, key: str, old: Any, new: Any) -> None:
        """Records that a knob was changed, from `step` on."""
        self._db.execute(
            "INSERT INTO interventions (time, attempt, step, key, old, new) VALUES (?, ?, ?, ?, "
            "?, ?)",
            (time.time(), self.attempt, step, key, json.dumps(old), json.dumps(new)),
        )

    def span(
        self, worker: str, device: str, kind: str, step: int, start: float, end: float
    ) -> None:
        """Notes what a worker did when (seconds since the epoch); written with the next step."""
        self._spans.append((worker, device, kind, step, start, end))

    def worker_started(self, name: str, role: str, device: str, pid: int) -> None:
        """Records a process."""
        self._db.execute(
            "INSERT INTO workers (name, role, device, pid, started) VALUES (?, ?, ?, ?, ?)",
            (name, role, device, pid, time.time()),
        )

    def worker_ended(self, name: str, pid: int, exit_code: int | None) -> None:
        """Records the end of a process; a negative code is the signal that ended it."""
        self._db.execute(
            "UPDATE workers SET ended = ?, exit_code = ? WHERE name = ? AND pid = ? AND ended IS "
            "NULL",
            (time.time(), exit_code, name, pid),
        )

    def close(self) -> None:
        """Writes the spans still held and closes the database; readers may go on."""
        try:
            if self._spans:
                self._write([])
        finally:
            self._db.close()

    def _write(self, metrics: list[tuple[Any, ...]]) -> None:
        with self._db:  # commits, or rolls back what failed
            self._db.execute("BEGIN")
            self._db.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?)", metrics)
            self._db.executemany("INSERT INTO spans VALUES (NULL, ?, ?, ?, ?, ?, ?)", self._spans)
        self._spans.clear()


class Reader:
    """A look at the records, from any process, while they grow. A run that has none yet is
    empty.

    Raises:
        DataError: the file is damaged or no database.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._db = _open(folder)

    def metrics(self, after_step: int = -1) -> pd.DataFrame:
        """A row a step, a column a metric; NaN where a step has none."""
        import pandas as pd

        rows = self._query(
            f"{VISIBLE} SELECT step, name, value FROM visible CROSS JOIN metrics USING (attempt) "
            "WHERE step > ? AND step <= last ORDER BY attempt",
            (after_step,),
        )
        frame = pd.DataFrame(rows, columns=["step", "name", "value"])
        frame = frame.drop_duplicates(["step", "name"], keep="last")  # the later attempt's
        wide = frame.pivot(index="step", columns="name", values="value")
        wide.columns.name = None
        return wide.astype(float)

    def latest(self) -> tuple[int, dict[str, float]]:
        """The last step recorded and its metrics; step 0 and none for a new run."""
        rows = self._query(
            f"{VISIBLE} SELECT step, name, value FROM visible CROSS JOIN metrics USING (attempt) "
            "WHERE +step <= last AND step = ("  # with `+` the equality is what is looked up
            "SELECT max((SELECT max(step) FROM metrics AS rows "
            "WHERE rows.attempt = visible.attempt AND rows.step <= visible.last)) FROM visible) "
            "ORDER BY attempt"
        )
        if not rows:
            return 0, {}
        return rows[0][0], {n: math.nan if value is None else value for _, n, value in rows}

    def evaluations(self) -> list[int]:
        """The steps that have an evaluation."""
        rows = self._query(
            f"{VISIBLE} SELECT DISTINCT step FROM visible CROSS JOIN metrics USING (attempt) "
            "WHERE name IN ('eval/reward', 'eval/loss') AND step <= last ORDER BY step"
        )
        return [row[0] for row in rows]

    def visible_attempt(self, step: int) -> int:
        """The attempt whose samples of a step are visible.

        That is the last one that began before it. A later one that began from this very step may
        have evaluated it, but did not train it.
        """
        rows = self._query(
            "SELECT coalesce(max(attempt), 0) FROM attempts WHERE from_step < ?", (step,)
        )
        return int(rows[0][0]) if rows else 0

    def attempts(self) -> pd.DataFrame:
        """Where the run began, was resumed or rewound."""
        return self._frame("attempts", ["attempt", "from_step", "time", "reason"])

    def events(self, after_id: int = 0) -> pd.DataFrame:
        """What happened, oldest first."""
        return self._frame("events", ["id", "time", "attempt", "step", "kind", "text"], after_id)

    def interventions(self, after_id: int = 0) -> pd.DataFrame:
        """Knobs that were changed, oldest first; values as JSON."""
        columns = ["id", "time", "attempt", "step", "key", "old", "new"]
        return self._frame("interventions", columns, after_id)

    def spans(self, after_id: int = 0) -> pd.DataFrame:
        """Who did what when; `start` and `end` in seconds since the epoch."""
        columns = ["id", "worker", "device", "kind", "step", "start", "end"]
        return self._frame("spans", columns, after_id)

    def workers(self) -> pd.DataFrame:
        """The processes that there were."""
        columns = ["name", "role", "device", "pid", "started", "ended", "exit_code"]
        return self._frame("workers", columns)

    def close(self) -> None:
        """Closes the connection."""
        if self._db is not None:
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _frame(self, table: str, columns: list[str], after_id: int | None = None) -> pd.DataFrame:
        import pandas as pd

        names = ", ".join(f'"{column}"' for column in columns)
        where = "" if after_id is None else f" WHERE id > {int(after_id)}"
        rows = self._query(f"SELECT {names} FROM {table}{where} ORDER BY rowid")
        return pd.DataFrame(rows, columns=columns)

    def _query(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        if self._db is None:
            self._db = _open(self._folder)
        if self._db is None:
            return []
        try:
            return self._db.execute(sql, values).fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):  # the writer has not made them yet
                return []
            raise


def _open(folder: RunFolder) -> sqlite3.Connection | None:
    """A connection that cannot write, or None where there is no database yet."""
    path = folder.database
    if not path.exists():
        return None
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)
    try:
        db.execute("SELECT 1 FROM sqlite_master").fetchall()
    except sqlite3.DatabaseError as error:
        db.close()
        code = error.sqlite_errorcode & 0xFF
        if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            return _copied(path)
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise DataError(
                f"{path}: cannot be read ({error}); copy the run folder from where it is whole"
            ) from error
        raise
    return db


def _copied(database: Path) -> sqlite3.Connection:
    """The whole database in memory.

    SQLite reads a write-ahead log only with a lock file beside it, which in a read-only folder it
    cannot make; `immutable` would read without the log, and miss all that is still in it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        for path in (database, database.with_name(f"{database.name}-wal")):
            if path.exists():
                shutil.copyfile(path, Path(scratch) / path.name)
        memory = sqlite3.connect(":memory:")
        with closing(sqlite3.connect(Path(scratch) / database.name)) as copy:
            copy.backup(memory)
    return memory
