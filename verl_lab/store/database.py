"""The run database: SQLite in WAL mode, one writer, any number of readers in other processes.

A rewind or a resume begins a new attempt from a step. Rows of older attempts beyond that step stay
on disk and are hidden: a row of attempt a at step t is visible if every later attempt began from
step t or later.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

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
VISIBLE = (
    "NOT EXISTS (SELECT 1 FROM attempts AS later "
    "WHERE later.attempt > rows.attempt AND later.from_step < rows.step)"
)


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
        """Records metrics of a step, and the spans since the last call, in one transaction."""
        rows = [
            (self.attempt, step, name, None if math.isnan(value) else float(value))
            for name, value in metrics.items()
        ]
        self._db.execute("BEGIN")
        self._db.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?)", rows)
        self._db.executemany(
            "INSERT INTO spans VALUES (NULL, ?, ?, ?, ?, ?, ?)",
            self._spans,
        )
        self._db.execute("COMMIT")
        self._spans.clear()

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
        """Closes the database; readers may go on."""
        self._db.close()


class Reader:
    """A look at the records, from any process, while they grow. A run that has none yet is
    empty."""

    def __init__(self, folder: RunFolder) -> None:
        self._db = _open(folder)

    def metrics(self, after_step: int = -1) -> pd.DataFrame:
        """A row a step, a column a metric; NaN where a step has none."""
        import pandas as pd

        rows = self._query(
            f"SELECT step, name, value FROM metrics AS rows WHERE step > ? AND {VISIBLE}",
            (after_step,),
        )
        frame = pd.DataFrame(rows, columns=["step", "name", "value"])
        wide = frame.pivot_table(
            index="step", columns="name", values="value", aggfunc="last", dropna=False
        )
        wide.columns.name = None
        return wide.astype(float)

    def latest(self) -> tuple[int, dict[str, float]]:
        """The last step recorded and its metrics; step 0 and none for a new run."""
        rows = self._query(
            f"SELECT step, name, value FROM metrics AS rows WHERE {VISIBLE} "
            "ORDER BY step DESC LIMIT 400"
        )
        if not rows:
            return 0, {}
        last = rows[0][0]
        return last, {n: math.nan if v is None else v for step, n, v in rows if step == last}

    def evaluations(self) -> list[int]:
        """The steps that have an evaluation."""
        rows = self._query(
            "SELECT DISTINCT step FROM metrics AS rows "
            f"WHERE name = 'eval/reward' AND {VISIBLE} ORDER BY step"
        )
        return [row[0] for row in rows]

    def visible_attempt(self, step: int) -> int:
        """The attempt whose row of a step is visible."""
        rows = self._query(
            f"SELECT max(attempt) FROM metrics AS rows WHERE step = ? AND {VISIBLE}",
            (step,),
        )
        return int(rows[0][0]) if rows and rows[0][0] is not None else 0

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
            return []
        try:
            return self._db.execute(sql, values).fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):  # the writer has not made them yet
                return []
            raise


def _open(folder: RunFolder) -> sqlite3.Connection | None:
    """Read-only; a folder that cannot be written to is read without its write-ahead log's lock
    file."""
    if not folder.database.exists():
        return None
    address = folder.database.absolute().as_uri()
    try:
        db = sqlite3.connect(f"{address}?mode=ro", uri=True, timeout=10)
        db.execute("SELECT 1 FROM sqlite_master").fetchall()
    except sqlite3.OperationalError:
        db = sqlite3.connect(f"{address}?immutable=1", uri=True)
    return db
