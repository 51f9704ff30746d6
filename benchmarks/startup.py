"""How long a user waits: import, first session, second session in the same kernel, `train`
returning.

    python benchmarks/startup.py [--json FILE] [--quick]

Medians of repeats on the shipped policy, with the spread. `first session` includes starting the
fork server, which imports torch and transformers; the sessions after it are forked off that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import verl_lab as lab

CONFIG = {
    "steps": 2,
    "model": {"name_or_path": "package://verl_lab/models/tiny_policy"},
    "task": {"name": "add_compare"},
    "rollout": {"group_size": 4, "max_new_tokens": 8, "device_map": "cpu"},
    "trainer": {"train_batch_size": 16, "device_map": "cpu"},
    "eval": {"every_steps": 0},
}


def import_s(module: str) -> float:
    """Seconds that a fresh interpreter needs for an import, less those it needs for nothing."""
    times = []
    for code in (f"import {module}", "pass"):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        times.append(time.perf_counter() - began)
    return times[0] - times[1]


def session_times(runs_dir: str) -> dict[str, float]:
    """Seconds until a session is ready, until `train` returns, and until the first step is
    recorded."""
    began = time.perf_counter()
    session = lab.Session({**CONFIG, "runs_dir": runs_dir}, keep_alive_s=0)
    session.start()
    ready = time.perf_counter() - began
    began = time.perf_counter()
    run = session.train()
    returned = time.perf_counter() - began
    while not len(session.metrics.get("reward/mean", [])):
        time.sleep(0.005)
    first_reward = time.perf_counter() - began
    run.wait()
    session.close()
    return {"ready_s": ready, "train_returns_s": returned, "first_step_s": first_reward}


def measure(what: Callable[[], float], repeats: int) -> dict[str, float]:
    """Median and spread of repeated calls."""
    times = [what() for _ in range(repeats)]
    return {"median_s": statistics.median(times), "min_s": min(times), "max_s": max(times)}


def main() -> None:
    """Measures, prints a table, and writes the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="one repeat")
    options = parser.parse_args()
    repeats = 1 if options.quick else 5

    figures = {"import verl_lab": measure(lambda: import_s("verl_lab"), repeats)}
    with tempfile.TemporaryDirectory() as runs_dir:
        first = session_times(runs_dir)
        later = [session_times(runs_dir) for _ in range(repeats)]
    figures["first session ready"] = measure(lambda: first["ready_s"], 1)
    for key, name in (
        ("ready_s", "later session ready"),
        ("train_returns_s", "train() returns"),
        ("first_step_s", "train() to first recorded step"),
    ):
        values = iter([times[key] for times in later])
        figures[name] = measure(lambda values=values: next(values), repeats)  # type: ignore[misc]

    sys.stdout.write(f"{'what':32} {'median':>9} {'min':>9} {'max':>9}\n")
    for name, row in figures.items():
        cells = "".join(f"{row[key]:8.3f} s" for key in ("median_s", "min_s", "max_s"))
        sys.stdout.write(f"{name:32}{cells}\n")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
