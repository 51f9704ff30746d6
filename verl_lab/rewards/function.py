"""Reward functions: what a user writes in a cell, made fit to run in another process.

A function scores one response (`prompt, response`) or a batch (`prompts, responses`), plainly or
`async`; any other parameter is a column of the dataset, by name. It is checked, and pickled by
value, when it is defined, so that what cannot work is refused in the cell that defines it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, overload

import cloudpickle

from verl_lab.errors import RewardError

Style = Literal["single", "batched"]
OWN_PARAMETERS: dict[Style, tuple[str, str]] = {
    "single": ("prompt", "response"),
    "batched": ("prompts", "responses"),
}


@dataclass(frozen=True)
class RewardFunction:
    """A checked reward function; calling it calls the function itself."""

    name: str
    function: Callable[..., Any]
    style: Style
    """Whether it takes one response at a time or a list of them."""
    is_async: bool
    own: tuple[str, ...]
    """Which of prompt and response it takes."""
    columns: tuple[str, ...]
    """The dataset's columns that it needs."""
    optional: tuple[str, ...]
    """The columns that it takes where there are any."""
    takes_all: bool
    """Whether it has `**columns`."""
    source: str
    """Its text, for the record."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function itself."""
        return self.function(*args, **kwargs)

    def check_columns(self, names: Iterable[str]) -> None:
        """Raises if the data lacks a column that it needs, naming those there are."""
        there = list(names)
        missing = [column for column in self.columns if column not in there]
        if missing:
            raise RewardError(
                f"reward {self.name}: needs the column {missing[0]!r}; the data has "
                f"{', '.join(there)}. Rename the parameter, or give it a default"
            )

    def arguments(self, names: Iterable[str]) -> list[str]:
        """The columns to pass, of those there are."""
        there = list(names)
        if self.takes_all:
            return [n for n in there if n not in ("prompt", "response")]
        return [n for n in (*self.columns, *self.optional) if n in there]

    def dumps(self) -> bytes:
        """Pickled by value: the function, and what it uses of the user's own modules.

        Raises:
            RewardError: something that it uses cannot travel; says what.
        """
        with _by_value(_modules_to_send(self.function)):
            try:
                return cloudpickle.dumps(self)  # type: ignore[no-any-return]
            except Exception as error:  # whatever an object raises when it refuses to be pickled
                raise RewardError(
                    f"reward {self.name}: cannot travel to another process, because of "
                    f"{_culprit(self.function)} ({error}); make it inside the function"
                ) from error

    @staticmethod
    def loads(data: bytes) -> RewardFunction:
        """The inverse of `dumps`."""
        loaded = cloudpickle.loads(data)
        assert isinstance(loaded, RewardFunction)
        loaded._show_source()
        return loaded

    def _show_source(self) -> None:
        """Lets tracebacks show the function's lines, which lie in a cell of another process."""
        inner = inspect.unwrap(_inner(self.function))
        code = getattr(inner, "__code__", None)
        if code is None or not self.source:
            return
        name = f"<reward {self.name}>"
        inner.__code__ = code.replace(co_filename=name)
        lines = ["\n"] * (code.co_firstlineno - 1) + self.source.splitlines(keepends=True)
        linecache.cache[name] = (len(self.source), None, lines, name)


@overload
def reward(function: Callable[..., Any]) -> RewardFunction: ...
@overload
def reward(*, name: str) -> Callable[[Callable[..., Any]], RewardFunction]: ...


def reward(
    function: Callable[..., Any] | None = None, *, name: str | None = None
) -> RewardFunction | Callable[[Callable[..., Any]], RewardFunction]:
    """Makes a function a reward: `@reward`, or `@reward(name="short")`.

    Raises:
        RewardError: its parameters cannot be served, or it cannot travel to another process.
    """
    if function is None:
        return lambda given: _checked(given, name)
    return _checked(function, name)


def from_reference(reference: str) -> RewardFunction:
    """The function that `file.py:function` or `module:function` names.

    Raises:
        RewardError: there is no such file, module or function.
    """
    place, _, attribute = reference.rpartition(":")
    try:
        module = (
            _module_of_file(Path(place))
            if place.endswith(".py")
            else importlib.import_module(place)
        )
    except (ImportError, FileNotFoundError, SyntaxError) as error:
        raise RewardError(
            f"reward.parts: {reference}: {place} cannot be imported ({error})"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise RewardError(
            f"reward.parts: {reference}: {place} has no function {attribute}; it has "
            f"{', '.join(names)}"
        )
    return found if isinstance(found, RewardFunction) else _checked(found, reference)


def _checked(function: Callable[..., Any], name: str | None) -> RewardFunction:
    called = str(name or getattr(function, "__name__", type(function).__name__))
    called = "reward" if called == "<lambda>" else called
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"reward {called}: is {function!r}, whose parameters cannot be read; give a function"
        ) from error
    names = {p.name for p in parameters}
    style: Style = "batched" if names & {"prompts", "responses"} else "single"
    own = OWN_PARAMETERS[style]
    if own[1] not in names:
        raise RewardError(
            f"reward {called}: takes ({', '.join(names)}); it must take `response`, or "
            f"`responses` for a "
            f"whole batch, and may take `prompt` or `prompts` and columns of the dataset"
        )
    mixed = names & set(OWN_PARAMETERS["single" if style == "batched" else "batched"])
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    if mixed or positional or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise RewardError(
            f"reward {called}: cannot be called with ({', '.join(map(str, parameters))}); use "
            f"either "
            f"`prompt, response` or `prompts, responses`, and parameters that can be given by name"
        )
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in own]
    checked = RewardFunction(
        name=called,
        function=function,
        style=style,
        is_async=inspect.iscoroutinefunction(_inner(function)),
        own=tuple(n for n in own if n in names),
        columns=tuple(p.name for p in named if p.default is p.empty),
        optional=tuple(p.name for p in named if p.default is not p.empty),
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
        source=_source(function),
    )
    checked.dumps()
    return checked


def _source(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(_inner(function))
    except (OSError, TypeError):
        return ""


def _module_of_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, where a partial, a method or an object with `__call__` was given."""
    found: Any = function
    while isinstance(found, functools.partial):
        found = found.func
    if not inspect.isroutine(found) and not inspect.isclass(found):
        found = found.__call__
    return getattr(found, "__func__", found)  # type: ignore[no-any-return]


def _modules_to_send(function: Callable[..., Any]) -> list[ModuleType]:
    """The user's modules that a function may use: those of its package, of its folder and of the
    working folder. Another process may lack them, or find them changed."""
    folders, found = [os.getcwd()], []
    own = sys.modules.get(getattr(_inner(function), "__module__", None) or "")
    if own is not None and isinstance(own.__dict__.get("__file__"), str):
        folders.append(os.path.dirname(os.path.abspath(own.__dict__["__file__"])))
    if own is not None and _is_the_users(own):
        found.append(sys.modules.get(own.__name__.partition(".")[0], own))
    return found + [
        module
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType) and _is_the_users(module) and _lies_in(folders, module)
    ]


def _is_the_users(module: ModuleType) -> bool:
    """Whether a module is neither installed nor of Python's own."""
    file, package = module.__dict__.get("__file__"), module.__name__.partition(".")[0]
    if package in ("__main__", "verl_lab") or not isinstance(file, str):
        return False  # cloudpickle takes what is defined in __main__ by value anyway
    if {"site-packages", "dist-packages"} & set(file.split(os.sep)):
        return False
    return not any(
        file.startswith(sysconfig.get_path(kind) + os.sep) for kind in ("stdlib", "platstdlib")
    )


def _lies_in(folders: list[str], module: ModuleType) -> bool:
    file = os.path.abspath(module.__dict__["__file__"])
    return any(file.startswith(os.path.join(folder, "")) for folder in folders)


@contextmanager
def _by_value(modules: list[ModuleType]) -> Iterator[None]:
    """Pickles what the modules define, not their names; leaves alone what was so already."""
    known = cloudpickle.list_registry_pickle_by_value()
    added = {m.__name__: m for m in modules if sys.modules.get(m.__name__) is m}
    added = {name: module for name, module in added.items() if name not in known}
    for module in added.values():
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in added.values():
            cloudpickle.unregister_pickle_by_value(module)


def _culprit(function: Callable[..., Any]) -> str:
    """The name of what a function uses and cannot be pickled."""
    try:
        used = inspect.getclosurevars(_inner(function))
        held = {**used.nonlocals, **used.globals}
    except TypeError:
        held = {}
    owner = getattr(function, "__self__", function)
    for name, value in (*held.items(), *getattr(owner, "__dict__", {}).items()):
        try:
            cloudpickle.dumps(value)
        except Exception:  # this is the one
            return f"`{name}`, a {type(value).__name__}"
    return "what it holds"
