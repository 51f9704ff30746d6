import math
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from verl_lab.errors import DataError
from verl_lab.store.database import Reader, Recorder
from verl_lab.store.folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path, "run", "run")


@pytest.fixture
def recorder(folder):
    recorder = Recorder(folder)
    recorder.begin_attempt(0, "start")
    yield recorder
    recorder.close()


def read(folder):
    with Reader(folder) as reader:
        return reader.metrics()


def test_metrics_come_back_a_row_a_step_while_the_writer_is_open(folder, recorder):
    recorder.step(1, {"reward/mean": 0.5, "loss/policy": 2})
    recorder.step(2, {"reward/mean": 0.75})
    frame = read(folder)
    assert frame["reward/mean"].tolist() == [0.5, 0.75]
    assert frame.index.tolist() == [1, 2]
    assert math.isnan(frame.loc[2, "loss/policy"])


def test_a_step_can_be_added_to_later(folder, recorder):
    recorder.step(1, {"reward/mean": 0.5})
    recorder.step(1, {"eval/reward": 0.25})
    with Reader(folder) as reader:
        assert reader.latest() == (1, {"reward/mean": 0.5, "eval/reward": 0.25})
        assert reader.evaluations() == [1]


def test_a_value_that_is_no_number_comes_back_as_nan(folder, recorder):
    recorder.step(1, {"x": float("nan"), "y": 1.0})
    assert math.isnan(read(folder).loc[1, "x"])


def test_a_new_attempt_hides_what_lies_beyond_it_and_keeps_the_rest(folder, recorder):
    for step in range(1, 6):
        recorder.step(step, {"x": step})
    recorder.begin_attempt(3, "rewind")
    assert read(folder)["x"].tolist() == [1, 2, 3]
    recorder.step(4, {"x": 40})
    assert read(folder)["x"].tolist() == [1, 2, 3, 40]
    with Reader(folder) as reader:
        assert [reader.visible_attempt(step) for step in (3, 4)] == [0, 1]


def test_an_older_branch_stays_hidden_when_a_later_one_began_earlier(folder, recorder):
    for step in range(1, 6):
        recorder.step(step, {"x": step})
    recorder.begin_attempt(4, "first")
    recorder.step(5, {"x": 50})
    recorder.begin_attempt(1, "second")
    recorder.step(2, {"x": 200})
    assert read(folder)["x"].tolist() == [1, 200]


def test_samples_of_the_step_gone_back_to_stay_those_it_was_trained_on(folder, recorder):
    for step in (1, 2, 3):
        recorder.step(step, {"x": step})
    recorder.begin_attempt(2, "rewind")
    recorder.step(2, {"eval/reward": 0.5})
    with Reader(folder) as reader:
        assert [reader.visible_attempt(step) for step in (0, 1, 2, 3)] == [0, 0, 0, 1]
        assert reader.latest() == (2, {"x": 2.0, "eval/reward": 0.5})


def test_the_last_step_has_nothing_of_a_hidden_attempt(folder, recorder):
    for step in (1, 2):
        recorder.step(step, {"x": step, "eval/reward": 0.5})
    recorder.begin_attempt(1, "rewind")
    recorder.step(2, {"x": 20})
    with Reader(folder) as reader:
        assert reader.latest() == (2, {"x": 20.0})


def test_of_two_values_for_one_step_the_later_attempts_counts(folder, recorder):
    recorder.step(1, {"eval/reward": 0.25})
    recorder.begin_attempt(1, "rewind")
    recorder.step(1, {"eval/reward": 0.75})
    assert read(folder)["eval/reward"].tolist() == [0.75]
    with Reader(folder) as reader:
        assert reader.latest() == (1, {"eval/reward": 0.75})


def test_polling_gets_only_what_is_visible_beyond_the_step(folder, recorder):
    for step in range(1, 6):
        recorder.step(step, {"x": step})
    recorder.begin_attempt(4, "rewind")
    recorder.step(5, {"x": 50})
    with Reader(folder) as reader:
        assert reader.metrics(after_step=3)["x"].to_dict() == {4: 4.0, 5: 50.0}
        assert reader.metrics(after_step=5).empty


def test_the_last_step_comes_whole_however_many_metrics_it_has(folder, recorder):
    metrics = {f"part/{i}": float(i) for i in range(500)}
    recorder.step(1, metrics)
    with Reader(folder) as reader:
        assert reader.latest() == (1, metrics)


def test_infinity_and_nan_keep_apart(folder, recorder):
    recorder.step(1, {"x": math.inf, "y": math.nan})
    assert read(folder).loc[1, "x"] == math.inf
    with Reader(folder) as reader:
        assert math.isnan(reader.latest()[1]["y"])


def test_a_step_that_cannot_be_written_leaves_nothing_and_the_next_one_can(folder, recorder):
    recorder._db.execute(
        "CREATE TRIGGER full BEFORE INSERT ON metrics WHEN new.name = 'last' "
        "BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
    )
    recorder.span("trainer", "cpu", "update", 1, 0.0, 1.0)
    with pytest.raises(sqlite3.IntegrityError, match="disk is full"):
        recorder.step(1, {"first": 1.0, "last": 2.0})
    assert read(folder).empty
    recorder.step(2, {"first": 1.0})
    assert read(folder).index.tolist() == [2]
    with Reader(folder) as reader:
        assert len(reader.spans()) == 1


def test_closing_writes_the_spans_of_the_step_under_way(folder, recorder):
    recorder.span("rollout-0", "cpu:0", "generate", 1, 10.0, 12.5)
    recorder.close()
    with Reader(folder) as reader:
        assert reader.spans()["kind"].tolist() == ["generate"]


def test_spans_events_interventions_and_workers_are_kept(folder, recorder):
    recorder.span("rollout-0", "cpu:0", "generate", 1, 10.0, 12.5)
    recorder.event("pause", "asked to pause", 1)
    recorder.intervention(2, "rollout.temperature", 1.0, 0.9)
    recorder.worker_started("rollout-0", "rollout", "cpu:0", 123)
    recorder.worker_ended("rollout-0", 123, -9)
    recorder.step(1, {"x": 1})
    with Reader(folder) as reader:
        span = reader.spans().iloc[0]
        assert (span["worker"], span["kind"], span["end"] - span["start"]) == (
            "rollout-0",
            "generate",
            2.5,
        )
        assert reader.spans(after_id=int(span["id"])).empty
        assert reader.events()["kind"].tolist() == ["pause"]
        assert reader.interventions()[["old", "new"]].values.tolist() == [["1.0", "0.9"]]
        assert reader.workers()["exit_code"].tolist() == [-9]


def test_a_run_without_records_is_empty(tmp_path):
    folder = RunFolder.create(tmp_path, "empty", "x")
    with Reader(folder) as reader:
        assert reader.metrics().empty
        assert reader.latest() == (0, {})
        assert reader.events().empty


def test_a_reader_may_be_there_before_the_writer(tmp_path):
    folder = RunFolder.create(tmp_path, "run", "run")
    with Reader(folder) as reader:
        assert reader.latest() == (0, {})
        recorder = Recorder(folder)
        recorder.begin_attempt(0, "start")
        recorder.step(1, {"x": 1})
        assert reader.latest() == (1, {"x": 1.0})
        recorder.close()


def test_a_file_that_is_no_database_is_refused_by_name(folder):
    folder.database.write_bytes(b"not a database, however long it may be" * 100)
    with pytest.raises(DataError, match=r"run\.db: cannot be read .* copy the run folder"):
        Reader(folder)


def test_a_reopened_database_goes_on_with_the_next_attempt(folder, recorder):
    recorder.close()
    again = Recorder(folder)
    assert again.begin_attempt(0, "resume") == 1
    again.close()


WRITER = """
import sys
from pathlib import Path
from verl_lab.store.database import Recorder
from verl_lab.store.folder import RunFolder
recorder = Recorder(RunFolder(Path(sys.argv[1])))
recorder.begin_attempt(0, "start")
for step in range(1, 10**6):
    recorder.step(step, {"x": step, "y": -step})
    if step == 50:
        print("fifty", flush=True)
"""


def test_after_a_kill_of_the_writer_every_recorded_step_is_whole(folder):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder.path)], stdout=subprocess.PIPE
    )
    assert writer.stdout.readline() == b"fifty\n"
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    frame = read(folder)
    assert len(frame) >= 50
    assert frame.index.tolist() == list(range(1, len(frame) + 1))
    assert (frame["x"] == -frame["y"]).all()


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from verl_lab.store.database import Recorder
from verl_lab.store.folder import RunFolder
recorder = Recorder(RunFolder(Path(sys.argv[1])))
recorder.begin_attempt(0, "start")
for step in range(1, 21):
    recorder.step(step, {"x": step})
os.kill(os.getpid(), signal.SIGKILL)
"""
OTHER_USER = """
import os, sys
from pathlib import Path
import pandas
from verl_lab.store.database import Reader
from verl_lab.store.folder import RunFolder
if os.geteuid() == 0:  # root may write anywhere
    os.seteuid(65534)
folder = RunFolder(Path(sys.argv[1]))
assert not os.access(folder.path, os.W_OK, effective_ids=True)
with Reader(folder) as reader:
    print(len(reader.metrics()), *reader.latest())
"""


@pytest.mark.parametrize("lost", [[], ["run.db-shm"], ["run.db-shm", "run.db-wal"]])
def test_a_read_only_folder_shows_all_that_its_files_hold(lost):
    with tempfile.TemporaryDirectory() as root:
        Path(root).chmod(0o755)
        folder = RunFolder.create(root, "run", "run")
        subprocess.run([sys.executable, "-c", KILLED_WRITER, str(folder.path)], check=False)
        assert (folder.path / "run.db-wal").stat().st_size > 0
        if "run.db-wal" in lost:
            with closing(sqlite3.connect(folder.database)) as db:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        for name in lost:
            (folder.path / name).unlink(missing_ok=True)
        for path in folder.path.iterdir():
            path.chmod(0o555 if path.is_dir() else 0o444)
        folder.path.chmod(0o555)
        reader = [sys.executable, "-c", OTHER_USER, str(folder.path)]
        found = subprocess.run(reader, capture_output=True, text=True, check=False)
        folder.path.chmod(0o700)
    assert found.stdout == "20 20 {'x': 20.0}\n", found.stderr


def test_a_reader_never_writes(folder, recorder):
    recorder.step(1, {"x": 1})
    with Reader(folder) as reader, pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader._db.execute("DELETE FROM metrics")
