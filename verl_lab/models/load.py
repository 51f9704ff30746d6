"""Loading models and tokenizers: by Hugging Face id, from a folder, or from inside an installed
package.

Nothing here runs code that comes with a model, and nothing unpickles weights, unless the config
asks for it by name.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from verl_lab.config.schema import ModelConfig
from verl_lab.config.sources import KEY, find
from verl_lab.errors import DataError, LabError
from verl_lab.models.lora import merge_adapter

logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # in the log of a worker it is noise


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
    with explained(config):
        model = AutoModelForCausalLM.from_pretrained(
            source.location,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=config.trust_remote_code,
            use_safetensors=None if config.allow_pickle or source.gguf_file else True,
            **source.arguments,
        )
    plain: Any = model if source.gguf_file is None else _plain(model, dtype)
    for adapter in source.adapters:
        plain = merge_adapter(plain, Path(adapter))
    return plain.to(device).eval()  # type: ignore[no-any-return]


def load_tokenizer(config: ModelConfig) -> Any:
    """The model's tokenizer, with the config's chat template if it has one.

    Raises:
        DataError: it cannot be loaded; names the key and the fix.
    """
    source = find(config.name_or_path)
    with explained(config):
        tokenizer = AutoTokenizer.from_pretrained(
            source.location, trust_remote_code=config.trust_remote_code, **source.arguments
        )
    if config.chat_template is not None:
        path = Path(config.chat_template)
        is_file = len(config.chat_template) < 1024 and path.is_file()
        tokenizer.chat_template = path.read_text() if is_file else config.chat_template
    return tokenizer


class explained:
    """Turns what transformers raises into a message that names the key and says what to do."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, LabError) or not isinstance(error, OSError | ValueError | ImportError):
            return
        name, text = self._config.name_or_path, str(error)
        if "trust_remote_code" in text:
            fix = "it brings code of its own; set model.trust_remote_code=true if you trust it"
        elif "safetensors" in text or "pickle" in text:
            fix = (
                "it has no safetensors weights; convert them, or set model.allow_pickle=true if "
                "you trust their source"
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
    config = plain_config(model.config)
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


def plain_config(config: Any) -> Any:
    """The settings of a model, in a copy that is not marked as quantised."""
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    return plain
