"""Device strings, the devices that exist, and who gets which. No torch: asking must not take a
device.

`cuda:<i>` is one GPU, `cpu` all cores this process may use, `cpu:0`, `cpu:0-3` and `cpu:0,2` a
pinned set of cores. `auto` is decided here: GPUs in turn where there are any, else all cores for
every role, taking turns.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from verl_lab.errors import DeviceError

if TYPE_CHECKING:
    from verl_lab.config.schema import LabConfig

FORMS = "`auto`, `cpu`, `cpu:0`, `cpu:0-3`, `cpu:0,2` or `cuda:0`"


@dataclass(frozen=True)
class Device:
    """One device; `str` gives back its text."""

    kind: Literal["cpu", "cuda", "auto"]
    index: int | None = None
    """Of a GPU."""
    cores: tuple[int, ...] | None = None
    """A pinned set of cores; None is all."""

    def __str__(self) -> str:
        if self.kind == "cuda":
            return f"cuda:{self.index}"
        if self.cores is None:
            return self.kind
        return f"cpu:{_ranges(self.cores)}"

    def overlaps(self, other: Device) -> bool:
        """Whether both share hardware."""
        if self.kind != other.kind:
            return False
        if self.kind == "cuda":
            return self.index == other.index
        return self.cores is None or other.cores is None or bool({*self.cores} & {*other.cores})


def parse_device(text: str) -> Device:
    """The device that a text names.

    Raises:
        DeviceError: it names none.
    """
    kind, _, rest = text.partition(":")
    if text in ("cpu", "auto"):
        return Device(kind)  # type: ignore[arg-type]
    if kind == "cuda" and rest.isdecimal():
        return Device("cuda", index=int(rest))
    if kind == "cpu" and re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", rest):
        cores: set[int] = set()
        for part in rest.split(","):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
        if cores:
            return Device("cpu", cores=tuple(sorted(cores)))
    raise DeviceError(f"{text!r} is no device; use {FORMS}")


def available_devices() -> list[Device]:
    """The cores this process may use, as one device, and the GPUs it may see, in order."""
    cores = Device("cpu", cores=tuple(sorted(os.sched_getaffinity(0))))
    return [cores, *(Device("cuda", index=i) for i in range(num_gpus()))]


def num_gpus() -> int:
    """GPUs that processes started here would see, counted without initialising CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


def resolve_devices(config: LabConfig) -> dict[str, list[Device]]:
    """A device for each worker of each role that the recipe has: `rollout`, `trainer`, `reward`,
    `reward_model`.

    Raises:
        DeviceError: one is missing; says what there is.
    """
    problems = missing_devices(config)
    if problems:
        raise DeviceError("\n".join(problems))
    gpus = [device for device in available_devices() if device.kind == "cuda"]
    free = gpus * 64  # handed out in turn, the trainer's after the rollout's
    resolved: dict[str, list[Device]] = {}
    for role, (_, devices) in _wanted(config).items():
        resolved[role] = []
        for device in devices:
            if device.kind != "auto":
                resolved[role].append(device)
            elif role == "reward_model":
                resolved[role].append(resolved["rollout"][0])
            elif role == "reward" or not gpus:
                resolved[role].append(Device("cpu"))
            else:
                resolved[role].append(free.pop(0))
    return resolved


def missing_devices(config: LabConfig) -> list[str]:
    """What is wrong with the devices that the config names, a line each."""
    there = available_devices()
    cores = set(there[0].cores or ())
    gpus = {device.index for device in there if device.kind == "cuda"}
    listing = ", ".join(str(device) for device in there) + ("" if gpus else " (no GPU)")
    problems = []
    for key, devices in _wanted(config).values():
        for device in dict.fromkeys(devices):
            is_missing = (
                device.index not in gpus
                if device.kind == "cuda"
                else not cores.issuperset(device.cores or ())
            )
            if is_missing:
                problems.append(f"{key}: {device} does not exist here; there is {listing}")
    return problems


def _wanted(config: LabConfig) -> dict[str, tuple[str, list[Device]]]:
    counts = {
        "rollout": (config.rollout.num_rollout_workers, config.rollout.device_map),
        "trainer": (config.trainer.num_train_workers, config.trainer.device_map),
        "reward": (config.reward.num_reward_workers, config.reward.device_map),
    }
    if not config.has_rollout:
        counts = {"trainer": counts["trainer"]}
    wanted = {}
    for role, (count, given) in counts.items():
        texts = [given] if isinstance(given, str) else given
        texts = texts * count if len(texts) == 1 else texts
        wanted[role] = (f"{role}.device_map", [parse_device(text) for text in texts])
    if config.has_rollout and config.reward_model is not None:
        given = config.reward_model.device
        beside = wanted["rollout"][1][0]  # unset: the first rollout worker's device
        device = beside if given == "auto" else parse_device(given)
        wanted["reward_model"] = ("reward_model.device", [device])
    return wanted


def _ranges(cores: tuple[int, ...]) -> str:
    """`0-3,5` of (0, 1, 2, 3, 5)."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
