"""Verifiable tasks: they make problems, and check answers themselves."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from verl_lab.config.schema import TaskConfig
from verl_lab.data.arithmetic import AddCompare
from verl_lab.data.entries import decode, encode
from verl_lab.errors import ConfigError

Split = Literal["train", "heldout"]
OWN = {"add_compare": AddCompare}
ENTRY = "task_entry"
"""The column that keeps what a verifier needs, as JSON."""


class Task(Protocol):
    """A source of problems with its verifier."""

    @property
    def size(self) -> int:
        """Problems to train on."""

    def problems(self, split: Split, size: int, seed: int) -> Sequence[Mapping[str, Any]]:
        """Up to `size` distinct problems: `prompt`, `answer`, and what the verifier needs."""

    def score(self, response: str, row: dict[str, Any]) -> float:
        """How good a response is, 1 being right."""


def make_task(config: TaskConfig) -> Task:
    """The task of a name, with its options checked.

    Raises:
        ConfigError: there is no such task, or an option is not one of its own.
    """
    if config.name in OWN:
        return _with_options(OWN[config.name], config)
    return ReasoningGym(config)


def task_problems(config: TaskConfig | None, *, is_deep: bool) -> list[str]:
    """What is wrong with a task's name and options.

    Args:
        config: the task, if there is one.
        is_deep: also ask reasoning-gym, whose import takes seconds.
    """
    if config is None or not (is_deep or config.name in OWN):
        return []
    try:
        make_task(config)
    except ConfigError as error:
        return [str(error)]
    return []


class ReasoningGym:
    """A dataset of reasoning-gym, with its own verifier (github.com/open-thought/reasoning-gym).

    The last `<answer>…</answer>` of a response is what is checked; without one, the whole response
    without the space around it. `data.system_prompt` can ask for the tags where there is a chat.
    """

    DEFAULT_SIZE = 4000

    def __init__(self, config: TaskConfig) -> None:
        from reasoning_gym.factory import DATASETS

        self.name = config.name
        if config.name not in DATASETS:
            names = [*OWN, *DATASETS]
            close = difflib.get_close_matches(config.name, names, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ConfigError(
                f"task.name: there is no task {config.name}; {hint}there are {len(names)}"
            )
        dataset, settings = DATASETS[config.name]
        options = {"size": self.DEFAULT_SIZE, **config.options}
        _check_options({f.name for f in dataclasses.fields(settings)} - {"seed"}, config)
        self.size = options["size"]
        if not isinstance(self.size, int) or self.size < 1:
            raise ConfigError(f"task.size: is {self.size!r}; give a whole number above 0")
        try:
            self._settings = settings(**options)
            self._verifier = dataset(self._settings)  # checks the options, where it has a check
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(f"task: reasoning-gym refuses {options}: {error}") from error
        self._make = dataset

    def problems(self, split: Split, size: int, seed: int) -> list[dict[str, Any]]:
        """Distinct problems; each split of each seed has a range of its own.

        The `answer` is None where there are many and reasoning-gym names none.
        """
        if not size:
            return []  # many of its datasets refuse to be empty
        settings = dataclasses.replace(
            self._settings, seed=_first_seed(self.name, split, seed), size=size
        )
        drawn: dict[str, dict[str, Any]] = {}
        for entry in self._make(settings):
            answer = entry["answer"]
            drawn[entry["question"]] = {
                "prompt": entry["question"],
                "answer": None if answer is None else str(answer),
                ENTRY: encode(entry),
            }
        return list(drawn.values())

    def score(self, response: str, row: dict[str, Any]) -> float:
        """The dataset's own score of the answer in a response."""
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(response)
        answer = response.strip() if answer is None else answer
        return float(self._verifier.score_answer(answer, entry=decode(row[ENTRY])))


def _first_seed(name: str, split: Split, seed: int) -> int:
    """Where a split's range of seeds begins.

    reasoning-gym makes problem `i` from `seed + i`, so that seeds which are neighbours have almost
    all problems in common: these lie far apart. It wants them below 2**32.
    """
    digest = hashlib.sha256(f"{name}/{split}/{seed}".encode()).digest()
    return int.from_bytes(digest[:4]) % (2**32 - 2**24)


def _with_options(kind: type[AddCompare], config: TaskConfig) -> AddCompare:
    _check_options({field.name for field in dataclasses.fields(kind)}, config)
    try:
        return kind(**config.options)
    except TypeError as error:
        raise ConfigError(f"task: {config.name} refuses {config.options}: {error}") from error


def _check_options(known: set[str], config: TaskConfig) -> None:
    for key in config.options:
        if key not in known:
            close = difflib.get_close_matches(key, sorted(known), n=1)
            hint = f"did you mean task.{close[0]}? " if close else ""
            raise ConfigError(
                f"task.{key}: {config.name} has no such option; {hint}it has "
                f"{', '.join(sorted(known))}"
            )
