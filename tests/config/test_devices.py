import os

import pytest

from verl_lab.config.devices import Device, available_devices, parse_device, resolve_devices
from verl_lab.config.load import load_config
from verl_lab.config.plan import plan
from verl_lab.errors import DeviceError

CORES = sorted(os.sched_getaffinity(0))
BASE = {
    "model": {"name_or_path": "m"},
    "task": {"name": "add_compare"},
    "rollout": {"device_map": "cpu:0"},
    "trainer": {"device_map": "cpu"},
}


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cpu", Device("cpu")),
        ("cpu:0", Device("cpu", cores=(0,))),
        ("cpu:0-3", Device("cpu", cores=(0, 1, 2, 3))),
        ("cpu:0-1,5", Device("cpu", cores=(0, 1, 5))),
        ("cuda:2", Device("cuda", index=2)),
        ("auto", Device("auto")),
    ],
)
def test_a_device_string_is_read_and_written_back(text, device):
    assert parse_device(text) == device
    assert str(device) == text


@pytest.mark.parametrize("text", ["gpu:0", "cuda", "cuda:x", "cpu:", "cpu:3-1", "cpu:a", ""])
def test_anything_else_is_refused_with_the_forms_that_work(text):
    with pytest.raises(DeviceError, match=r"is no device; use `auto`, `cpu`, `cpu:0`"):
        parse_device(text)


def test_devices_overlap_where_they_share_cores_or_a_gpu():
    assert parse_device("cpu").overlaps(parse_device("cpu:1"))
    assert not parse_device("cpu:0").overlaps(parse_device("cpu:1-2"))
    assert not parse_device("cuda:0").overlaps(parse_device("cuda:1"))
    assert not parse_device("cuda:0").overlaps(parse_device("cpu"))


def test_the_cores_that_this_process_may_use_come_first():
    assert available_devices()[0] == Device("cpu", cores=tuple(CORES))


def test_gpus_are_counted_as_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    config = load_config(BASE, ["rollout.device_map=auto", "trainer.device_map=auto"])
    resolved = resolve_devices(config)
    assert [str(d) for d in (*resolved["rollout"], *resolved["trainer"])] == ["cuda:0", "cuda:1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [str(d) for d in resolve_devices(config)["rollout"]] == ["cpu"]


def test_a_missing_device_says_what_there_is():
    config = load_config(BASE, ["trainer.device_map=cpu:500"])
    with pytest.raises(
        DeviceError, match=r"trainer.device_map: cpu:500 does not exist here; there is"
    ):
        resolve_devices(config)


def test_one_device_serves_all_workers_of_a_role():
    config = load_config(BASE, ["rollout.num_rollout_workers=3"])
    assert [str(d) for d in resolve_devices(config)["rollout"]] == ["cpu:0"] * 3


def test_the_plan_says_who_runs_where_and_how_much():
    config = load_config(
        BASE, ["rollout.num_rollout_workers=2", "rollout.rollout_batch_size=33", "steps=10"]
    )
    made = plan(config)
    assert made.total_samples == 640
    assert made.shared == [
        ("rollout-0", "rollout-1"),
        ("rollout-0", "trainer-0"),
        ("rollout-1", "trainer-0"),
    ]
    text = made.describe()
    assert "64 samples = 8 prompts x 8 responses" in text
    assert "17 sequences in flight" in text
    assert "rollout-1" in text
