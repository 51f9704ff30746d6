"""Taking a device: pins this process to its cores, or shows it one GPU. To be called before any
tensor."""

from __future__ import annotations

import os

from verl_lab.config.devices import parse_device


def occupy(text: str) -> str:
    """Confines this process to a device; returns what torch calls it: `cpu` or `cuda:0`.

    Args:
        text: a resolved device string (`cpu`, `cpu:0-3`, `cuda:1`). A GPU becomes the only one this
            process sees, so it is always `cuda:0` in here.
    """
    import torch

    device = parse_device(text)
    if device.kind == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = [name for name in visible.split(",") if name]
        os.environ["CUDA_VISIBLE_DEVICES"] = (
            names[device.index or 0] if names else str(device.index)
        )
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        return "cuda:0"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    cores = device.cores or tuple(sorted(os.sched_getaffinity(0)))
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    torch.set_num_threads(len(cores))
    return "cpu"
