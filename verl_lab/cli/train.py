"""`verl-lab train`: a run from its config, or from its last checkpoint, to its end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verl_lab.cli.follow import Interrupts, News, follow, view_for_terminal
from verl_lab.cli.progress import View, heldout_score
from verl_lab.cli.terminal import print_line

if TYPE_CHECKING:
    import pandas as pd

    from verl_lab.session.run import Run
    from verl_lab.session.session import Session

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""


def train(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Over the config's keys.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="A YAML config.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN", help="A run folder to go on with.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="The run folder's name, as the key `name`.")
    ] = None,
) -> None:
    """Train a policy, and show how it gets on.

    Ctrl-C stops after the step under way and saves; a second one stops at once. If this command
    dies, the run goes on: see `verl-lab ps`.

    Example: verl-lab train --config configs/quickstart.yaml steps=20 trainer.learning_rate=1e-4
    """
    if config is None and resume is None:
        raise typer.BadParameter("give --config FILE, or --resume RUN to go on with a run")
    keys = [*(overrides or []), *([f"name={name}"] if name else [])]
    began = time.time()
    session, run = _begin(config, keys, resume)
    news = News(after_step=session.status()["step"] if resume else -1, since=began)
    print_line(f"Run folder: {session.folder.path}")
    num_interrupts = watch(session, run, view_for_terminal(), news)
    try:
        if num_interrupts < 2:
            run.wait()  # it is over; this raises what it failed of
    finally:
        session.close()
    done = session.status()["step"]
    print_line(f"{done} of {session.config.steps} steps done in {session.folder.path}")
    print_line(heldout_line(session.metrics))
    if num_interrupts:
        raise typer.Exit(INTERRUPTED)


def watch(session: Session, run: Run, view: View, news: News) -> int:
    """Shows a run to its end; a first Ctrl-C stops it, a second leaves. Returns how many came."""
    was_asked = False

    with Interrupts() as interrupts, view:

        def is_left() -> bool:
            nonlocal was_asked
            if interrupts.count and not was_asked:
                was_asked = True
                view.remark("Stopping after this step. Ctrl-C again stops at once.")
                run.stop()
            return interrupts.count > 1

        follow(session, view, is_over=lambda: run.is_over, is_left=is_left, news=news)
        return interrupts.count


def heldout_line(metrics: pd.DataFrame) -> str:
    """The first and the last evaluation, such as `held-out accuracy: 0.31 -> 0.78`."""
    known = {str(name): values.dropna() for name, values in metrics.items()}
    first = heldout_score({name: float(v.iloc[0]) for name, v in known.items() if len(v)})
    if first is None:
        return "held-out: never evaluated (eval.every_steps is 0)"
    name, before = first
    return f"held-out {name}: {before:.2f} -> {known[f'eval/{name}'].iloc[-1]:.2f}"


def _begin(config: Path | None, keys: list[str], resume: Path | None) -> tuple[Session, Run]:
    from verl_lab.session.session import Session

    session = Session(config, *keys, resume=resume)
    try:
        session.start()
        return session, session.train()
    except BaseException:  # an interrupt too: nothing runs yet that should go on without us
        session.close()
        raise
