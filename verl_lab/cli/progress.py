"""How a run under way looks: stage lines in a pipe, one live line on a terminal.

Both views are told the same three things: where the run stands, what was measured in a step, and
remarks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from verl_lab.cli.terminal import OUT, print_line

Metrics = Mapping[str, float]

HEARTBEAT_S = 30.0
"""A stage that lasts longer than this shows in a pipe how far it is."""


class View(Protocol):
    """Shows a run to a person."""

    def __enter__(self) -> View:
        """Begins to show."""

    def __exit__(self, *_: object) -> None:
        """Leaves the terminal as it was."""

    def stand(self, status: Mapping[str, Any]) -> None:
        """Takes where the run stands: `Session.status()`."""

    def measured(self, step: int, metrics: Metrics, *, num_samples: int) -> None:
        """Takes what was newly measured in a step."""

    def remark(self, text: str) -> None:
        """Takes a line of text."""


class Lines:
    """A line a stage, for pipes and logs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps_total = 0
        self._spoke_at = clock()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stand(self, status: Mapping[str, Any]) -> None:
        """Says where a long stage is, now and then."""
        self._steps_total = status.get("steps_total", 0)
        if status.get("stage") and self._clock() - self._spoke_at >= HEARTBEAT_S:
            self.remark(f"[{status['stage'].capitalize()}] {_where(status)}: {stage_text(status)}")

    def measured(self, step: int, metrics: Metrics, *, num_samples: int) -> None:
        """Prints the lines of the stages that were measured."""
        for line in stage_lines(metrics, f"step {step}/{self._steps_total}", num_samples):
            self.remark(line)

    def remark(self, text: str) -> None:
        """Prints a line."""
        self._spoke_at = self._clock()
        print_line(text)


class LiveLine:
    """One line that changes in place, with a bar; evaluations and remarks scroll by above it."""

    def __init__(self, console: Console = OUT) -> None:
        self._progress = Progress(
            TextColumn("{task.fields[state]}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            TextColumn("{task.fields[stage]}", style="dim", markup=False),
            console=console,
        )
        self._task = self._progress.add_task("", total=None, state="starting", numbers="", stage="")
        self._numbers: dict[str, str] = {}
        self._steps_total = 0

    def __enter__(self) -> LiveLine:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def stand(self, status: Mapping[str, Any]) -> None:
        """Moves the bar, and says what is going on and how long it will take."""
        self._steps_total = status.get("steps_total", 0)
        left = status.get("eta_s")
        self._numbers["left"] = "" if left is None else f"{duration(left)} left"
        self._progress.update(
            self._task,
            completed=status["step"],
            total=self._steps_total or None,
            state=state_text(status),
            stage=stage_text(status),
            numbers="  ".join(filter(None, self._numbers.values())),
        )

    def measured(self, step: int, metrics: Metrics, *, num_samples: int) -> None:
        """Shows the reward and the speed; an evaluation gets a line that stays."""
        if "reward/mean" in metrics:
            self._numbers["reward"] = f"reward {metrics['reward/mean']:.3f}"
        speed = tokens_per_s(metrics, num_samples)
        if speed is not None:
            self._numbers["speed"] = f"{speed:,.0f} tokens/s"
        for line in stage_lines(metrics, f"step {step}/{self._steps_total}", num_samples):
            if line.startswith("[Eval]"):
                self.remark(line)

    def remark(self, text: str) -> None:
        """Prints a line above the live one."""
        self._progress.console.print(text, markup=False, emoji=False)


def stage_lines(metrics: Metrics, where: str, num_samples: int) -> list[str]:
    """A line for each stage that these metrics tell of.

    Args:
        metrics: what one step measured, by name.
        where: such as `step 3/60`.
        num_samples: samples of a step.
    """
    lines = []
    if "rollout/response_tokens" in metrics:
        tokens = round(metrics["rollout/response_tokens"] * num_samples)
        facts = [f"{num_samples:,} samples", f"{tokens:,} tokens"]
        lines.append(_line("Rollout", where, facts, metrics.get("time/rollout_s")))
    if "reward/mean" in metrics:
        facts = [f"mean {metrics['reward/mean']:.3f}", *_std(metrics), *_failures(metrics)]
        lines.append(_line("Reward", where, facts, metrics.get("time/reward_s")))
    facts = _training(metrics)
    if facts:
        lines.append(_line("Train", where, facts, metrics.get("time/train_s")))
    score = heldout_score(metrics)
    if score is not None:
        facts = [f"held-out {score[0].replace('_', ' ')} {score[1]:.3f}"]
        lines.append(_line("Eval", where, facts, metrics.get("time/eval_s")))
    return lines


def heldout_score(metrics: Metrics) -> tuple[str, float] | None:
    """The name and value that an evaluation is judged by; None where there was no evaluation."""
    for name in ("accuracy", "reward", "pair_accuracy", "loss"):
        if f"eval/{name}" in metrics:
            return name, metrics[f"eval/{name}"]
    return None


def tokens_per_s(metrics: Metrics, num_samples: int) -> float | None:
    """Response tokens per second of the whole step: sampled, scored and trained on."""
    stages = ("rollout", "reward", "reference", "train", "sync")
    seconds = sum(metrics.get(f"time/{stage}_s", 0.0) for stage in stages)
    if "rollout/response_tokens" not in metrics or seconds <= 0:
        return None
    return metrics["rollout/response_tokens"] * num_samples / seconds


def state_text(status: Mapping[str, Any]) -> str:
    """`training` and the like; for a session that is idle after a run, how that ended."""
    runs = status.get("runs") or [{"outcome": None}]
    return str(runs[-1]["outcome"] or status["state"])


def stage_text(status: Mapping[str, Any]) -> str:
    """The stage under way, and how much of it is done."""
    if not status.get("stage"):
        return ""
    total = status["stage_total"]
    return f"{status['stage']} {status['stage_done']:,}/{total:,}" if total else status["stage"]


def duration(seconds: float) -> str:
    """`0:07`, `12:34` or `1:02:03`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _line(stage: str, where: str, facts: list[str], seconds: float | None) -> str:
    timed = facts if seconds is None else [*facts, f"{seconds:.1f} s"]
    return f"[{stage}] {where}: {', '.join(timed)}"


def _where(status: Mapping[str, Any]) -> str:
    return f"step {status['step'] + 1}/{status['steps_total']}"


def _training(metrics: Metrics) -> list[str]:
    """What an update is judged by: its losses, then how the models fare."""
    losses = {name: f"{name.removeprefix('loss/')} loss" for name in metrics if "loss/" in name}
    if "loss/policy" in losses:
        losses["loss/policy"] = "loss"
    facts = [f"{text} {metrics[name]:z.4f}" for name, text in losses.items()]
    shown = {
        "preference/accuracy": "pair accuracy",
        "critic/explained_variance": "explained variance",
        **{f"policy/{name}": name for name in ("kl_ref", "approx_kl", "entropy", "grad_norm")},
    }
    return facts + [
        f"{text} {metrics[name]:.4f}" for name, text in shown.items() if name in metrics
    ]


def _std(metrics: Metrics) -> list[str]:
    return [f"std {metrics['reward/std']:.3f}"] if "reward/std" in metrics else []


def _failures(metrics: Metrics) -> list[str]:
    names = ("timeouts", "errors")
    counts = {name: round(metrics.get(f"reward/{name}", 0)) for name in names}
    return [f"{count:,} {name}" for name, count in counts.items() if count]
