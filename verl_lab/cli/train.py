"""`verl-lab train`: a run from its config, or from its last checkpoint, to its end."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verl_lab.cli.exits import INTERRUPTED, WRONG_INPUT, exit_code
from verl_lab.cli.follow import POLL_S, Interrupts, News, end_on_record, follow, view_for_terminal
from verl_lab.cli.progress import View, heldout_score
from verl_lab.cli.terminal import print_line
from verl_lab.config.presets import describe_recipe
from verl_lab.errors import ConfigError, LabError, RewardError, StateError, WorkerError

if TYPE_CHECKING:
    import pandas as pd

    from verl_lab.session.run import Run
    from verl_lab.session.session import Session


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
    if resume is not None:
        refuse_finished(resume, config, keys)
    from verl_lab.session.session import Session

    began = time.time()
    with Interrupts() as interrupts:
        session = Session(config, *keys, resume=resume)
        with view_for_terminal() as view:
            run = begin(session, view, interrupts, is_new=resume is None)
            news = News(after_step=session.status()["step"] if resume else -1, since=began)
            watch(session, run, view, interrupts, news)
        session.close()
    done = session.status()["step"]
    print_line(f"{done} of {session.config.steps} steps done in {session.folder.path}")
    print_line(heldout_line(session.metrics))
    if interrupts.count:
        raise typer.Exit(INTERRUPTED)


def refuse_finished(run: Path, config: Path | None, keys: list[str]) -> None:
    """Raises at once, before processes start, if a run has done all its steps."""
    from verl_lab.config.load import load_config
    from verl_lab.store.checkpoint import problems
    from verl_lab.store.database import Reader
    from verl_lab.store.folder import RunFolder

    folder = RunFolder.open(run)
    steps = load_config(config or folder.config_path, keys).steps
    with Reader(folder) as reader:
        done, _ = reader.latest()
    if done >= steps and not problems(folder.checkpoints / f"step-{done:06d}"):
        raise StateError(
            f"{run}: nothing left to do, {done} of {steps} steps are done; raise `steps`: "
            f"verl-lab train --resume {run} steps={2 * done}"
        )


def begin(session: Session, view: View, interrupts: Interrupts, *, is_new: bool) -> Run:
    """Waits until the session is ready, and begins to train.

    A session that cannot start, of a wrong config or of an interrupt, leaves no run folder.

    Raises:
        KeyboardInterrupt: Ctrl-C came while nothing was trained yet.
    """
    from verl_lab.session import launch

    try:
        while session.status()["state"] == "starting":
            view.stand(session.status())
            if interrupts.count:
                view.remark("Stopped before training began.")
                launch.abandon()
                raise KeyboardInterrupt
            time.sleep(POLL_S)
        session.start()
    except (LabError, KeyboardInterrupt) as error:
        session.close()
        if isinstance(error, RewardError):  # before the first step it is about the config
            error = ConfigError(str(error))
        if is_new and not (isinstance(error, LabError) and exit_code(error) != WRONG_INPUT):
            shutil.rmtree(session.folder.path)
        raise error from None
    view.remark(f"Run folder: {session.folder.path}")
    if is_new:
        config = session.config
        view.remark(f"Recipe {describe_recipe(config.recipe, config.model_dump())}")
    return session.train()


def watch(session: Session, run: Run, view: View, interrupts: Interrupts, news: News) -> None:
    """Shows a run to its end; a first Ctrl-C stops it, a second leaves it where it is.

    Raises:
        LabError: what the run failed of.
    """
    was_asked = False

    def is_left() -> bool:
        nonlocal was_asked
        if interrupts.count and not was_asked:
            was_asked = True
            view.remark("Stopping after this step. Ctrl-C again stops at once.")
            run.stop()
        return interrupts.count > 1

    try:
        follow(session, view, is_over=lambda: run.is_over, is_left=is_left, news=news)
        if interrupts.count < 2:
            run.wait()  # it is over; this raises what it failed of
    except LabError as error:
        session.close()
        is_gone = isinstance(error, WorkerError) and error.worker == "controller"
        if not (is_gone and end_on_record(session.folder)):  # else `verl-lab stop` came first
            raise


def heldout_line(metrics: pd.DataFrame) -> str:
    """The first and the last evaluation, such as `held-out accuracy: 0.31 -> 0.78`."""
    known = {str(name): values.dropna() for name, values in metrics.items()}
    first = heldout_score({name: float(v.iloc[0]) for name, v in known.items() if len(v)})
    if first is None:
        return "held-out: never evaluated (eval.every_steps is 0)"
    name, before = first
    after = known[f"eval/{name}"].iloc[-1]
    return f"held-out {name.replace('_', ' ')}: {before:.2f} -> {after:.2f}"
