"""Where models lie: names and paths, looked at without loading anything."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verl_lab.errors import DataError

if TYPE_CHECKING:
    from verl_lab.config.schema import LabConfig

PACKAGE = "package://"
KEY = "model.name_or_path"


@dataclass(frozen=True)
class Source:
    """Where a model lies."""

    location: str
    """A folder, or a Hugging Face id."""
    gguf_file: str | None = None
    """The name of a GGUF file in that folder."""
    adapters: tuple[str, ...] = ()
    """Folders with low-rank adapters that belong on top, the innermost first."""

    @property
    def arguments(self) -> dict[str, str]:
        """What `from_pretrained` needs beside the location."""
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}


def find(name_or_path: str) -> Source:
    """Where a model lies.

    Args:
        name_or_path: a Hugging Face id, a folder, a run folder (its newest checkpoint, or
            `<run>@<checkpoint>`), a GGUF file, or `package://<package>/<path>`.

    Raises:
        DataError: a package, a path or a checkpoint does not exist, or a folder holds no model.
    """
    path = Path(name_or_path).expanduser()
    if name_or_path.startswith(PACKAGE):
        path = _in_package(name_or_path)
    elif is_run(name_or_path):
        path = checkpoint_of(name_or_path) / "trainer"
    elif not path.exists():
        is_path = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
        if is_path or path.suffix == ".gguf" or "@" in name_or_path:
            raise DataError(f"{KEY}: {name_or_path} does not exist; name a folder or a model id")
        return Source(name_or_path)
    if path.is_dir():
        return _with_adapter(path)
    if path.suffix != ".gguf":
        raise DataError(f"{KEY}: {path} is a file; name the model's folder, or a .gguf file")
    return Source(str(path.parent), path.name)


def model_problem(key: str, name_or_path: str) -> str | None:
    """What keeps a model from being found here; None for one that only the hub can know."""
    try:
        find(name_or_path)
    except DataError as error:
        return f"{key}: {str(error).removeprefix(KEY + ': ')}"
    return None


def pinned(name_or_path: str) -> str:
    """A name that goes on to mean the same, wherever it is read: of a run its newest checkpoint by
    name, of a path the whole path.

    Raises:
        DataError: the run has no checkpoint.
    """
    if is_run(name_or_path):
        checkpoint = checkpoint_of(name_or_path).absolute()
        return f"{checkpoint.parent.parent}@{checkpoint.name}"
    path = Path(name_or_path).expanduser()
    return str(path.absolute()) if path.exists() else name_or_path


def with_pinned_models(config: LabConfig) -> LabConfig:
    """The settings with each run folder that names a model pinned to its checkpoint, so that they
    mean the same after that run went on."""
    changes = {}
    for name in ("model", "critic", "reward_model"):
        section = getattr(config, name)
        given = None if section is None else section.name_or_path
        if given is not None and is_run(given):
            changes[name] = section.model_copy(update={"name_or_path": pinned(given)})
    return config.model_copy(update=changes)


def is_run(name: str) -> bool:
    """Whether a name means a run folder of this lab, or a checkpoint in one."""
    folder = Path(name.partition("@")[0]).expanduser()
    return (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir()


def checkpoint_of(name: str) -> Path:
    """The newest checkpoint or snapshot of a run folder, or the one named after an `@`.

    Raises:
        DataError: there is no such run or checkpoint; says which there are.
    """
    run, _, wanted = name.partition("@")
    folder = Path(run).expanduser() / "checkpoints"
    if not is_run(run):
        raise DataError(f"{run}: is no run folder; it must hold config.yaml and checkpoints/")
    known = {path.name: path for path in folder.iterdir() if not path.name.startswith(".")}
    if wanted in known:
        return known[wanted]
    if wanted:
        raise DataError(
            f"{run}: has no checkpoint {wanted}; it has {', '.join(sorted(known)) or 'none'}"
        )
    if not known:
        raise DataError(f"{run}: has no checkpoint yet; let it finish, or take a snapshot")
    return max(known.values(), key=_age)


def _age(checkpoint: Path) -> tuple[int, int, float]:
    """What orders checkpoints: a later attempt is newer, though a rewind put it at an earlier
    step."""
    written = checkpoint.stat().st_mtime
    try:
        state = json.loads((checkpoint / "state.json").read_text())
        return int(state["attempt"]), int(state["step"]), written
    except (OSError, ValueError, TypeError, KeyError):
        return 0, 0, written


def _with_adapter(folder: Path) -> Source:
    described = folder / "adapter_config.json"
    if not described.exists():
        if not (folder / "config.json").exists():
            raise DataError(
                f"{KEY}: {folder} holds no model, for it has no config.json; name a folder that "
                f"transformers saved, or the folder of a run"
            )
        return Source(str(folder))
    try:
        name = str(json.loads(described.read_text())["base_model_name_or_path"] or "")
    except (ValueError, TypeError, KeyError):
        name = ""
    if not name:
        raise DataError(
            f"{KEY}: {described} names no base_model_name_or_path; write there which model the "
            f"adapters belong to"
        )
    base = find(name)
    return Source(base.location, base.gguf_file, (*base.adapters, str(folder)))


def _in_package(name: str) -> Path:
    package, _, rest = name.removeprefix(PACKAGE).partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"{KEY}: {name} needs the package {package}; install it with pip")
    path = Path(next(iter(spec.submodule_search_locations)), rest)
    if not path.exists():
        there = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
        raise DataError(f"{KEY}: {name} does not exist; beside it are {', '.join(there) or 'none'}")
    return path
