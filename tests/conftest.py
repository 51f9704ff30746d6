"""What every test runs under: few threads, no network, and no GPU test where there is no GPU."""

import os
import signal

import pytest

# Set before torch is imported. Test processes run side by side and share the cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"


# What runs in the background of a shell, or under nohup, ignores these; the tests send them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items):
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


@pytest.fixture
def small_config():
    """A config that trains the shipped policy for a few quick steps."""
    return {
        "steps": 4,
        "model": {"name_or_path": "package://verl_lab/models/tiny_policy"},
        "task": {"name": "add_compare"},
        "rollout": {
            "rollout_batch_size": 16,
            "group_size": 4,
            "max_new_tokens": 8,
            "device_map": "cpu:0",
        },
        "trainer": {"train_batch_size": 16, "learning_rate": 1e-4, "device_map": "cpu:0"},
        "eval": {"every_steps": 2, "num_prompts": 16},
        "checkpoint": {"every_steps": 2},
    }
