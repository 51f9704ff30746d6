"""Functions of the user's own that a config names: advantages, policy losses, recipes.

    @lab.advantage
    def centred(samples): ...

registers `centred`, and `algorithm.advantage: centred` then means it; so does
`algorithm.advantage: file.py:centred` without the decorator. The built-in ones are looked up by
the same names first. A function travels by value to the process that calls it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import cloudpickle

from verl_lab.config.algorithm import ADVANTAGES, POLICY_LOSSES
from verl_lab.config.presets import PRESETS
from verl_lab.errors import ConfigError

if TYPE_CHECKING:
    from verl_lab.config.schema import LabConfig

Kind = Literal["advantage", "policy_loss", "recipe"]
F = TypeVar("F", bound=Callable[..., Any])
KEYS: dict[Kind, str] = {
    "advantage": "algorithm.advantage",
    "policy_loss": "algorithm.policy_loss",
    "recipe": "recipe",
}
BUILT_IN: dict[Kind, tuple[str, ...]] = {
    "advantage": ADVANTAGES,
    "policy_loss": POLICY_LOSSES,
    "recipe": tuple(PRESETS),
}
_registered: dict[Kind, dict[str, Callable[..., Any]]] = {kind: {} for kind in KEYS}


def advantage(function: F) -> F:
    """Registers an estimator under its name, for `algorithm.advantage`.

    It takes `samples`, an `algos.estimators.Samples`, and returns a tensor: a value a sample [B],
    or a token [T]. Further parameters come from `algorithm.advantage_options`, and `baseline` and
    `scale` from the keys of that name.
    """
    return register("advantage", function.__name__, function)


def policy_loss(function: F) -> F:
    """Registers a policy loss under its name, for `algorithm.policy_loss`.

    It is called like those of `algos.losses`: `(logprobs, old_logprobs, advantages, loss_mask,
    weights, *, num_tokens, sample_index, …)`, and returns the loss and metrics. Further
    parameters come from `algorithm.loss_options`, `clip_low` and `clip_high` from the keys of
    that name.
    """
    return register("policy_loss", function.__name__, function)


def recipe(function: F) -> F:
    """Registers a recipe under its name, for `recipe`: `async (lab, prompts) -> Batch`."""
    return register("recipe", function.__name__, function)


def register(kind: Kind, name: str, function: F) -> F:
    """Makes a name mean a function in this process."""
    if name in BUILT_IN[kind]:
        raise ConfigError(f"{KEYS[kind]}: `{name}` is built in; give your function another name")
    _registered[kind][name] = function
    return function


def lookup(kind: Kind, name: str) -> Callable[..., Any]:
    """The user's function of that name or reference.

    Raises:
        ConfigError: there is none; says which there are.
    """
    if name in _registered[kind]:
        return _registered[kind][name]
    place, sign, attribute = name.rpartition(":")
    if not sign:
        raise ConfigError(f"{KEYS[kind]}: {_unknown(kind, name)}")
    try:
        module = _of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(f"{KEYS[kind]}: {place} cannot be imported ({error})") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"{KEYS[kind]}: {place} has no function {attribute}")
    return found  # type: ignore[no-any-return]


def name_problems(config: LabConfig) -> Iterable[str]:
    """What is wrong with the names of functions in a config."""
    for kind, name in _names(config).items():
        is_known = name in BUILT_IN[kind] or name in _registered[kind]
        file = name.rpartition(":")[0]
        if is_known or (file and not file.endswith(".py")):
            continue
        if not file:
            yield f"{KEYS[kind]}: {_unknown(kind, name)}"
        elif not Path(file).exists():
            yield (
                f"{KEYS[kind]}: the file {file} does not exist; paths are relative to where you "
                f"start"
            )


def dumps(config: LabConfig) -> dict[str, dict[str, str]]:
    """The user's functions that a config names, pickled, as hexadecimal text by kind and name.

    Raises:
        ConfigError: one cannot travel to another process.
    """
    return {
        kind: {name: _pickled(kind, name)}
        for kind, name in _names(config).items()
        if name not in BUILT_IN[kind]
    }


def functions_named(changes: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The same for the functions that some changes of keys name, as far as they are known here."""
    found: dict[str, dict[str, str]] = {}
    for kind, key in KEYS.items():
        name = changes.get(key)
        if isinstance(name, str) and (name in _registered[kind] or ":" in name):
            found[kind] = {name: _pickled(kind, name)}
    return found


def loads(functions: dict[str, dict[str, str]]) -> None:
    """Registers what `dumps` gave in this process."""
    for kind, by_name in functions.items():
        for name, text in by_name.items():
            _registered[kind][name] = cloudpickle.loads(bytes.fromhex(text))  # type: ignore[index]


def _names(config: LabConfig) -> dict[Kind, str]:
    algorithm = config.algorithm
    return {
        "advantage": algorithm.advantage,
        "policy_loss": algorithm.policy_loss,
        "recipe": config.recipe,
    }


def _pickled(kind: Kind, name: str) -> str:
    function = lookup(kind, name)
    try:
        return str(cloudpickle.dumps(function).hex())
    except Exception as error:  # whatever an object raises when it refuses to be pickled
        raise ConfigError(
            f"{KEYS[kind]}: {name} cannot travel to another process ({error}); make what it needs "
            f"inside the function"
        ) from error


def _unknown(kind: Kind, name: str) -> str:
    known = [*BUILT_IN[kind], *_registered[kind]]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"
    return f"no such {kind.replace('_', ' ')} {name!r}{hint}"


def _of_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"functions_{path.stem}", path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    cloudpickle.register_pickle_by_value(module)
    spec.loader.exec_module(module)
    return module
