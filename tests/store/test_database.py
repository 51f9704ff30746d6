import math
import os
import signal
import sqlite3
import subprocess
import sys

import pytest

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


def test_a_reader_never_writes(folder, recorder):
    recorder.step(1, {"x": 1})
    with Reader(folder) as reader, pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader._db.execute("DELETE FROM metrics")
