from pathlib import Path

import numpy as np
import pytest

from verl_lab.batch.columns import Batch
from verl_lab.errors import ConfigError, WorkerError
from verl_lab.runtime.messages import Message, decode, describe_error, encode, rebuild_error


def round_trip(body, spill=None):
    return decode([bytes(frame) for frame in encode(Message("call", 4, body), spill)]).body


def test_plain_data_paths_and_numpy_scalars_travel():
    body = {"a": [1, 2.5, None, True, "ü", b"raw"], "p": Path("/x/y"), "n": np.float64(0.5)}
    assert round_trip(body) == {**body, "n": 0.5}


def test_several_batches_in_one_message_keep_their_places():
    one, two = Batch.from_dict({"step": [1]}), Batch.from_dict({"step": [2, 3]})
    back = round_trip({"x": [two, {"y": one}]})
    assert back["x"][0]["step"] == [2, 3]
    assert back["x"][1]["y"]["step"] == [1]


def test_a_large_batch_goes_by_reference_and_leaves_no_file(tmp_path):
    batch = Batch.from_dict({"response_ids": [list(range(5000))] * 100})
    frames = encode(Message("reply", 1, batch), tmp_path)
    assert sum(len(bytes(frame)) for frame in frames) < 1000
    assert len(list(tmp_path.iterdir())) == 1
    assert decode(frames).body.table.equals(batch.table)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_travel_is_named():
    with pytest.raises(TypeError, match="object cannot travel"):
        encode(Message("call", 1, object()))


def test_our_errors_come_back_as_themselves():
    error = rebuild_error(describe_error(ConfigError("trainer.x: is 3; use 4")), "trainer-0")
    assert isinstance(error, ConfigError)
    assert str(error) == "trainer.x: is 3; use 4"


def test_a_worker_error_keeps_its_three_parts():
    error = rebuild_error(describe_error(WorkerError("rollout-1", "died", "log end")), "controller")
    assert (error.worker, error.reason, error.log_tail) == ("rollout-1", "died", "log end")


def test_other_errors_become_worker_errors_that_name_the_peer():
    error = rebuild_error(describe_error(KeyError("k")), "reward-0")
    assert isinstance(error, WorkerError)
    assert "reward-0: raised KeyError: 'k'" in str(error)
