"""The runtime folder: where live sessions of this user are found, and their sockets lie.

`/tmp/verl-lab-<uid>/<session>/` (mode 0700; `VERL_LAB_RUNTIME_DIR` moves it) holds `session.json`,
the sockets `rpc` and `lease`, and one socket a worker. Paths are short because a socket's may have
107 bytes. Weights and large messages lie in `/dev/shm/verl-lab-<uid>/<session>/`, or beside the
sockets where there is no shared memory (`VERL_LAB_MEMORY_DIR` moves them). A process is known by
its pid and its start time, so a reused pid is no match.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from verl_lab.errors import StateError

LONGEST_SOCKET_PATH = 107
INFO = "session.json"


@dataclass(frozen=True)
class SessionInfo:
    """What others may know of a live session."""

    id: str
    pid: int
    start_ticks: int
    run_folder: str
    owner: str
    """Who made it: the notebook's path, or the pid of a script."""
    devices: list[str]
    created: float

    @property
    def is_alive(self) -> bool:
        """Whether the controller still runs."""
        return start_ticks(self.pid) == self.start_ticks


def start_ticks(pid: int) -> int | None:
    """The start time of a living process in clock ticks since boot; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def root() -> Path:
    """This user's runtime folder, made if missing."""
    return _private(_root_path())


def session_folder(session_id: str) -> Path:
    """The folder of one session, made if missing."""
    path = _private(root() / session_id)
    longest = len(str(path / "reward-00-00"))
    if longest > LONGEST_SOCKET_PATH:
        raise StateError(
            f"VERL_LAB_RUNTIME_DIR: {path} is too long for a socket ({longest} of at most "
            f"{LONGEST_SOCKET_PATH} bytes); set it to a shorter folder"
        )
    return path


def fork_server_log(pid: int) -> Path:
    """Where the fork server of a process writes; removed when the process is gone."""
    return root() / f"fork-server-{pid}.log"


def memory_folder(session_id: str) -> Path:
    """Where one session keeps weights and large messages, made if missing."""
    return _private(_private(_memory_root()) / session_id)


def write_info(info: SessionInfo) -> None:
    """Announces a session; the file appears whole or not at all."""
    for folder in (memory_folder(info.id), session_folder(info.id)):
        draft = folder / ".session.json"
        draft.write_text(json.dumps(asdict(info)))
        draft.rename(folder / INFO)


def read_info(session_id: str) -> SessionInfo | None:
    """What a session announced; None while it has not, or when it is gone."""
    return _info_in(_root_path() / session_id)


def sessions() -> Iterator[SessionInfo]:
    """The live sessions of this user, oldest first; what dead ones left is removed on the way."""
    found = []
    for folder in root().iterdir():
        if folder.suffix == ".log" and start_ticks(int(folder.stem.rpartition("-")[2])) is None:
            folder.unlink(missing_ok=True)  # of the fork server of a process that is gone
        info = _info_in(folder)
        if info is not None and info.is_alive:
            found.append(info)
    for place in (_root_path(), _memory_root()):
        for folder in place.glob("*/"):
            if _is_left_over(folder):
                shutil.rmtree(folder, ignore_errors=True)
    yield from sorted(found, key=lambda info: info.created)


def remove(session_id: str) -> None:
    """Removes all that a session had outside its run folder."""
    for place in (_memory_root(), _root_path()):
        shutil.rmtree(place / session_id, ignore_errors=True)


def _root_path() -> Path:
    return Path(os.environ.get("VERL_LAB_RUNTIME_DIR") or f"/tmp/verl-lab-{os.getuid()}")


def _memory_root() -> Path:
    """In shared memory, if there is any; `VERL_LAB_MEMORY_DIR` moves it, to a disk for example."""
    shm = Path("/dev/shm")
    if given := os.environ.get("VERL_LAB_MEMORY_DIR"):
        return Path(given)
    if shm.is_dir() and os.access(shm, os.W_OK):
        return shm / f"verl-lab-{os.getuid()}"
    return _root_path() / "memory"


def _info_in(folder: Path) -> SessionInfo | None:
    try:
        return SessionInfo(**json.loads((folder / INFO).read_text()))
    except (OSError, ValueError):
        return None


def _is_left_over(folder: Path) -> bool:
    """Whether a folder belongs to a session that is dead, or has belonged to none for an hour."""
    info = _info_in(folder)
    if info is not None:
        return not info.is_alive
    return folder.name != "memory" and _age_s(folder) > 3600


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _private(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise StateError(
            f"{path}: belongs to another user or is open to others; "
            "remove it, or set VERL_LAB_RUNTIME_DIR to a folder of your own"
        )
    return path
