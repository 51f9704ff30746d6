"""What sampling ahead of training brings: the same samples a step, on the same two cores.

    python benchmarks/pipeline.py [--config FILE] [--steps N] [--json FILE] [--quick] [KEY=VALUE …]

Three placements take turns, and the medians over the repeats are compared: `synchronous` (rollout
on one core, trainer on the other, one waits for the other), `pipelined` (the same with
pipeline.max_staleness=1), and `both cores in turn` (each stage has both cores to itself). Shown
beside the samples per second: how much of the time each worker was busy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import verl_lab as lab

ROOT = Path(__file__).parents[1]
APART = ("rollout.device_map=cpu:0", "trainer.device_map=cpu:1")
PLACEMENTS = {
    "synchronous": (*APART, "pipeline.max_staleness=0"),
    "pipelined": (*APART, "pipeline.max_staleness=1"),
    "both cores in turn": ("rollout.device_map=cpu:0-1", "trainer.device_map=cpu:0-1"),
}
NO_INTERRUPTION = ("eval.every_steps=0", "checkpoint.every_steps=0")


def measure(config: Path, overrides: tuple[str, ...], steps: int) -> dict[str, float]:
    """Samples per second and the share of the time that rollout and trainer were busy, after the
    first step."""
    with tempfile.TemporaryDirectory() as runs_dir:
        keys = (*overrides, *NO_INTERRUPTION, f"steps={steps}", f"runs_dir={runs_dir}")
        with lab.Session(config, *keys, keep_alive_s=0) as session:
            session.train().wait()
            seconds = session.metrics["time/step_s"].dropna().loc[2:].median()
            busy = session.utilisation(first=2, last=steps - 1)["share"]
            samples = session.config.trainer.train_batch_size
    return {
        "samples_per_s": samples / seconds,
        "rollout_busy": float(busy.get("rollout-0", 0.0)),
        "trainer_busy": float(busy.get("trainer-0", 0.0)),
    }


def main() -> None:
    """Measures, prints a table, and writes the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--steps", type=int, default=30, help="steps of each run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each placement")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="one short run of each placement")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE over the config")
    options = parser.parse_args()
    steps, repeats = (6, 1) if options.quick else (options.steps, options.repeats)

    found: dict[str, list[dict[str, float]]] = {name: [] for name in PLACEMENTS}
    for _ in range(repeats):
        for name, keys in PLACEMENTS.items():
            found[name].append(measure(options.config, (*options.overrides, *keys), steps))

    figures = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        | {"spread": max(r["samples_per_s"] for r in runs) - min(r["samples_per_s"] for r in runs)}
        for name, runs in found.items()
    }
    base = figures["synchronous"]["samples_per_s"]
    head = f"{'placement':20} {'samples/s':>10} {'spread':>8} {'ratio':>7} {'rollout':>9}"
    sys.stdout.write(f"{head} {'trainer':>9}\n")
    for name, row in figures.items():
        row["ratio"] = row["samples_per_s"] / base
        sys.stdout.write(
            f"{name:20} {row['samples_per_s']:10.1f} {row['spread']:8.1f} {row['ratio']:7.2f} "
            f"{row['rollout_busy']:9.0%} {row['trainer_busy']:9.0%}\n"
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
