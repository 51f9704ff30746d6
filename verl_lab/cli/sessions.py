"""`verl-lab ps`, `attach` and `stop`: sessions that live, whoever started them."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_lab.cli.follow import POLL_S, Interrupts, News, end_on_record, follow, view_for_terminal
from verl_lab.cli.progress import duration, state_text
from verl_lab.cli.terminal import print_line, print_table
from verl_lab.errors import WorkerError

if TYPE_CHECKING:
    from verl_lab.session.session import Session

UNDER_WAY = ("training", "paused", "stopping")
LiveRun = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder or name, or a session's id.")
]


def ps() -> None:
    """List live sessions, what they hold, when they end."""
    from verl_lab.session.registry import ps as live_sessions

    sessions = live_sessions()
    if not sessions:
        print_line("No session is live.")
        return
    columns = ["run", "id", "state", "step", "devices", "pid", "memory", "clients", "ends"]
    print_table(columns, [session_row(session) for session in sessions])


def attach(run: LiveRun) -> None:
    """Follow a run that another process started. Ctrl-C leaves; the run goes on."""
    from verl_lab.session.registry import attach as attach_to

    session = attach_to(run)
    try:
        _follow_to_end(session)
        status = session.status()
        session.detach()
    except WorkerError:  # the session is gone; its record tells whether the run was over
        end = end_on_record(session.folder)
        if not end:
            raise
        print_line(f"{session.name}: {end}.")
        return
    print_line(f"{session.name}: {state_text(status)}, {status['step']} steps done.")
    _raise_failure(status)


def stop(
    run: LiveRun,
    now: Annotated[
        bool, typer.Option("--now", help="Do not wait for the step under way; nothing is saved.")
    ] = False,
) -> None:
    """End a session: after the step under way, with a checkpoint."""
    from verl_lab.session.registry import attach as attach_to

    session = attach_to(run)
    if not now and session.status()["state"] in UNDER_WAY:
        print_line("Stopping after this step.")
        with contextlib.suppress(WorkerError):  # the command that began it has ended the session
            _stop_run(session)
    session.close()
    print_line(f"Stopped. Go on with: verl-lab train --resume {_short(session.folder.path)}")


def session_row(session: dict[str, Any]) -> list[str]:
    """One line of `ps`; a session that does not answer shows what it announced."""
    memory = sum(worker["rss_bytes"] for worker in session.get("workers", []))
    step = f"{session['step']}/{session['steps_total']}" if "steps_total" in session else "?"
    return [
        _short(Path(session["run_folder"])),
        session["id"],
        session["state"],
        step,
        ",".join(session["devices"]),
        str(session["pid"]),
        f"{memory / 2**20:,.0f} MiB" if memory else "?",
        str(session.get("num_clients", "?")),
        _ends(session),
    ]


def _ends(session: dict[str, Any]) -> str:
    """When the session will be gone by itself."""
    left = session.get("lease_ends_in_s")
    if left is not None:
        return f"in {duration(left)}"
    kept = f"{session.get('keep_alive_s', 0):g} s after"
    if session.get("num_clients"):
        return f"{kept} its last client"
    return f"{kept} its run" if session["state"] in UNDER_WAY else "?"


def _follow_to_end(session: Session) -> None:
    """Shows the run until it is over or Ctrl-C comes."""
    news = News(after_step=session.status()["step"], since=time.time())
    with Interrupts() as interrupts, view_for_terminal() as view:
        follow(
            session,
            view,
            is_over=lambda: session.status()["state"] not in ("starting", *UNDER_WAY),
            is_left=lambda: interrupts.count > 0,
            news=news,
        )


def _stop_run(session: Session) -> None:
    session.call("stop", timeout_s=30.0)
    while session.status()["state"] in UNDER_WAY:
        time.sleep(POLL_S)


def _raise_failure(status: dict[str, Any]) -> None:
    last_run = status["runs"][-1] if status["runs"] else {}
    error = last_run.get("error") or status.get("error")
    if error:
        from verl_lab.runtime.messages import rebuild_error

        raise rebuild_error(error, "run")


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
