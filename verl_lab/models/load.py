"""Loading models and tokenizers: by Hugging Face id, from a folder, or from inside an installed
package.

Nothing here runs code that comes with a model, and nothing unpickles weights, unless the config
asks for it by name.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from verl_lab.config.schema import ModelConfig
from verl_lab.errors import DataError

PACKAGE = "package://"
KEY = "model.name_or_path"


@dataclass(frozen=True)
class Source:
    """Where a model lies."""

    location: str
    """A folder, or a Hugging Face id."""
    gguf_file: str | None = None
    """The name of a GGUF file in that folder."""

    @property
    def arguments(self) -> dict[str, Any]:
        """What `from_pretrained` needs beside the location."""
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}


def find(name_or_path: str) -> Source:
    """Where a model lies.

    Raises:
        DataError: a package or a path does not exist.
    """
    path = Path(name_or_path).expanduser()
    if name_or_path.startswith(PACKAGE):
        path = _in_package(name_or_path)
    elif not path.exists():
        is_path = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
        if is_path or path.suffix == ".gguf":
            raise DataError(f"{KEY}: {name_or_path} does not exist; name a folder or a model id")
        return Source(name_or_path)
    if path.is_dir():
        return Source(str(path))
    if path.suffix != ".gguf":
        raise DataError(f"{KEY}: {path} is a file; name the model's folder, or a .gguf file")
    return Source(str(path.parent), path.name)


def load_policy(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    attn_implementation: str = "sdpa",
) -> nn.Module:
    """A causal language model, in evaluation mode.

    Args:
        config: which, and what it may do.
        device: where its parameters go.
        dtype: of its parameters.
        attn_implementation: what transformers computes attention with.

    Raises:
        DataError: it cannot be loaded as asked; names the key and the fix.
    """
    source = find(config.name_or_path)
    with _explained(config):
        model = AutoModelForCausalLM.from_pretrained(
            source.location,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=config.trust_remote_code,
            use_safetensors=None if config.allow_pickle or source.gguf_file else True,
            **source.arguments,
        )
    plain: Any = model if source.gguf_file is None else _plain(model, dtype)
    return plain.to(device).eval()  # type: ignore[no-any-return]


def load_tokenizer(config: ModelConfig) -> Any:
    """The model's tokenizer, with the config's chat template if it has one.

    Raises:
        DataError: it cannot be loaded; names the key and the fix.
    """
    source = find(config.name_or_path)
    with _explained(config):
        tokenizer = AutoTokenizer.from_pretrained(
            source.location, trust_remote_code=config.trust_remote_code, **source.arguments
        )
    if config.chat_template is not None:
        path = Path(config.chat_template)
        is_file = len(config.chat_template) < 1024 and path.is_file()
        tokenizer.chat_template = path.read_text() if is_file else config.chat_template
    return tokenizer


class _explained:
    """Turns what transformers raises into a message that names the key and says what to do."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, OSError | ValueError | ImportError):
            return
        name, text = self._config.name_or_path, str(error)
        if "trust_remote_code" in text:
            fix = "it brings code of its own; set model.trust_remote_code=true if you trust it"
        elif "safetensors" in text or "pickle" in text:
            fix = (
                "it has no safetensors weights; convert them, or set model.allow_pickle=true if "
                "you "
                "trust their source"
            )
        elif not Path(find(name).location).exists():
            fix = (
                "it is no folder here, and the hub was not reached or lacks it; name a local folder"
            )
        else:
            fix = "see the error below"
        raise DataError(f"{KEY}: {name} cannot be loaded: {fix}\n{text}") from error


def _plain(model: Any, dtype: torch.dtype) -> nn.Module:
    """The same weights in a model that is not marked as quantised, so that it can be saved and
    trained."""
    config = AutoConfig.for_model(**_without_quantisation(model.config.to_dict()))
    config._attn_implementation = model.config._attn_implementation
    with torch.device("meta"):
        fresh: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=model.config._attn_implementation
        )
    fresh.load_state_dict(model.state_dict(), assign=True)
    fresh.tie_weights()
    buffers = dict(model.named_buffers())
    for name, buffer in fresh.named_buffers():
        if buffer.is_meta:
            parent, _, leaf = name.rpartition(".")
            setattr(fresh.get_submodule(parent), leaf, buffers[name])
    fresh.generation_config = model.generation_config
    return fresh  # type: ignore[no-any-return]


def _without_quantisation(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "quantization_config"}


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
