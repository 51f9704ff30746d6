"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685), through `peft`.

They are put into the model itself, which stays the class that transformers gave it, so everything
that works with a plain model works with an adapted one. Shapes: an adapted layer computes
W x + alpha / rank * B A x with A [rank, in] and B [out, rank]; B begins as 0.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from verl_lab.config.sources import pinned
from verl_lab.errors import ConfigError, DataError

ADAPTER = "default"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
"""What peft puts before a parameter's name in its files."""


def add_lora(
    model: nn.Module, *, rank: int, alpha: float, target_modules: list[str] | str, seed: int
) -> nn.Module:
    """The model with adapters; all else is frozen. Its values are what they were.

    Args:
        model: a transformers model.
        rank: of the adapters.
        alpha: their scale times the rank.
        target_modules: names of the layers, or `all-linear` for all but the output head.
        seed: of the adapters' first values; the global random state stays as it was.

    Raises:
        ConfigError: no layer has such a name, or one that has can have no adapter.
    """
    from peft import LoraConfig, inject_adapter_in_model

    names = _linear_names(model) if target_modules == "all-linear" else target_modules
    layers = _targets(model, names)
    settings = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,
        target_modules=names,
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers),
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # peft makes the first values on the CPU
        inject_adapter_in_model(settings, model, adapter_name=ADAPTER)
    for layer in _adapted(model).values():
        layer.set_adapter(ADAPTER)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    model._verl_lab_lora = settings  # type: ignore[assignment]
    return model


def has_adapters(model: nn.Module) -> bool:
    """Whether the model has adapters."""
    return getattr(model, "_verl_lab_lora", None) is not None


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model as it was before it was adapted, for as long as the block lasts."""
    layers = [layer for layer in _adapted(model).values() if not layer.disable_adapters]
    parameters = [(p, p.requires_grad) for layer in layers for p in layer.parameters()]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, is_trained in parameters:  # peft changes this both times
            parameter.requires_grad_(is_trained)


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The adapters' tensors by their names in the state dict, not copied."""
    return {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}


@torch.no_grad()
def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """The state of the plain model with the adapters added to its weights.

    Returns:
        Tensors by the names that they have in the model without adapters.
    """
    adapted = _adapted(model)
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if "lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        owner = plain.rpartition(".")[0]
        if owner in adapted and plain.endswith(".weight"):
            delta = adapted[owner].get_delta_weight(ADAPTER)
            tensor = (tensor.float() + delta.float()).to(tensor.dtype)
        state[plain] = tensor
    return state


def write_adapter(model: nn.Module, folder: Path, base: str) -> None:
    """Writes the adapters as `peft.PeftModel.from_pretrained(model, folder)` reads them.

    Args:
        model: with adapters.
        folder: is made if need be.
        base: the name or path of the model without adapters; of a run, its newest checkpoint is
            written down.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings: Any = model._verl_lab_lora
    described = {
        **settings.to_dict(),
        "base_model_name_or_path": pinned(base),
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
    }
    if not isinstance(described["target_modules"], str):
        described["target_modules"] = sorted(described["target_modules"])
    (folder / CONFIG).write_text(json.dumps(described, indent=1, default=str))
    tensors = {
        PREFIX + name.replace(f".{ADAPTER}.", "."): tensor.contiguous()
        for name, tensor in adapter_tensors(model).items()
    }
    save_file(tensors, folder / WEIGHTS)


@torch.no_grad()
def read_adapter(model: nn.Module, folder: Path) -> None:
    """Takes over adapters that `write_adapter` wrote.

    Raises:
        DataError: they belong to another model, or to other layers.
    """
    saved = load_file(folder / WEIGHTS)
    mine = adapter_tensors(model)
    names = {PREFIX + name.replace(f".{ADAPTER}.", "."): name for name in mine}
    if names.keys() != saved.keys():
        raise DataError(
            f"{folder}: has adapters of other layers ({len(saved)} tensors for {len(mine)}); "
            f"`lora` must be as it was when they were saved"
        )
    for key, tensor in saved.items():
        mine[names[key]].copy_(tensor)


def merge_adapter(model: nn.Module, folder: Path) -> nn.Module:
    """The plain model with the adapters in a folder added to its weights, in place.

    Args:
        model: without adapters.
        folder: as any release of peft writes it, of whatever kind that can be merged.

    Raises:
        DataError: the adapters belong to another model, or cannot be merged.
    """
    from peft import PeftModel

    if not (folder / WEIGHTS).is_file():
        raise DataError(f"{folder}: has no {WEIGHTS}; convert the adapters to safetensors")
    try:
        with warnings.catch_warnings():
            # peft asks transformers for a property by its old name
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            adapted: Any = PeftModel.from_pretrained(model, str(folder))
        merged: nn.Module = adapted.merge_and_unload()
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{folder}: its adapters do not fit the model that {CONFIG} names; correct "
            f"base_model_name_or_path there\n{error}"
        ) from error
    return merged.requires_grad_(True)


def _adapted(model: nn.Module) -> dict[str, Any]:
    """The layers with an adapter, by name."""
    from peft.tuners.lora import LoraLayer

    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}


def _targets(model: nn.Module, names: list[str] | str) -> list[nn.Module]:
    """The layers that get adapters: those whose names end with one of a list, or match a pattern.

    Raises:
        ConfigError: a name fits no layer, or one that can have no adapter.
    """
    layers = dict(model.named_modules())
    fits = f"use `all-linear`, or names among {', '.join(_linear_names(model))}"
    if isinstance(names, str):
        found = {full for full in layers if re.fullmatch(names, full)}
        unknown = [] if found else [names]
    else:
        hits = {n: {f for f in layers if f == n or f.endswith(f".{n}")} for n in names}
        found = set().union(*hits.values())
        unknown = [name for name, full in hits.items() if not full]
    if unknown or not found:
        what = ", ".join(unknown) or "[]"
        raise ConfigError(f"lora.target_modules: {what} names no layer of the model; {fits}")
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    for full in sorted(found):
        layer = layers[full]
        if not isinstance(layer, nn.Linear | Conv1D):
            kind = type(layer).__name__
            raise ConfigError(f"lora.target_modules: {full} is a {kind} and not linear; {fits}")
        if layer.weight is embeddings.weight:
            raise ConfigError(f"lora.target_modules: {full} is tied to the embeddings; {fits}")
    return [layers[full] for full in sorted(found)]


def _linear_names(model: nn.Module) -> list[str]:
    """The last parts of the names of all linear layers in the trunk."""
    trunk: Any = model.base_model
    return sorted(
        {
            name.rpartition(".")[2]
            for name, layer in trunk.named_modules()
            if isinstance(layer, nn.Linear | Conv1D)
        }
    )
