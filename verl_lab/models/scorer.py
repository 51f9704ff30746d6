"""Models that give a number: critics and reward models, as transformers' sequence classifiers with
one label."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from verl_lab.config.schema import ModelConfig
from verl_lab.config.sources import find
from verl_lab.errors import DataError
from verl_lab.models.load import explained, load_policy, load_tokenizer, plain_config

HEADS = ("score", "classifier")


def load_scorer(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    attn_implementation: str = "sdpa",
    seed: int = 0,
) -> nn.Module:
    """A sequence classifier with one label, in evaluation mode.

    One that is saved as such keeps its head. Of a causal language model it is the trunk, with a
    new head of deviation 1 / sqrt(D + 1) as in Stiennon et al. 2020 (arXiv:2009.01325, app. B.1),
    D the hidden size.

    Args:
        config: which model, and what it may do.
        device: where its parameters go.
        dtype: of its trunk; the head is float32 at least.
        attn_implementation: what transformers computes attention with.
        seed: of a new head.

    Raises:
        DataError: it cannot be loaded as asked, or has no head of one label.
    """
    if _is_scorer(config):
        model: Any = _saved(config, dtype, attn_implementation)
    else:
        model = _from_policy(config, dtype, attn_implementation, seed)
    head = scorer_head(model)
    if next(head.parameters()).dtype in (torch.bfloat16, torch.float16):
        head.float()
    return model.to(device).eval()  # type: ignore[no-any-return]


def scorer_head(model: nn.Module) -> nn.Module:
    """The last layer of a sequence classifier.

    Raises:
        DataError: it has none under a name that is known.
    """
    for name in HEADS:
        head = getattr(model, name, None)
        if isinstance(head, nn.Module):
            return head
    raise DataError(
        f"{type(model).__name__}: has no head called {' or '.join(HEADS)}; a critic or a reward "
        f"model needs a transformers sequence classifier with one of them"
    )


def _is_scorer(config: ModelConfig) -> bool:
    source = find(config.name_or_path)
    if source.gguf_file is not None or source.adapters:
        return False
    with explained(config):
        found = AutoConfig.from_pretrained(
            source.location, trust_remote_code=config.trust_remote_code
        )
    return any("SequenceClassification" in name for name in found.architectures or ())


def _saved(config: ModelConfig, dtype: torch.dtype, attn_implementation: str) -> nn.Module:
    with explained(config):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            find(config.name_or_path).location,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=config.trust_remote_code,
            use_safetensors=None if config.allow_pickle else True,
            output_loading_info=True,
        )
    if model.config.num_labels != 1:
        raise DataError(
            f"{config.name_or_path}: has {model.config.num_labels} labels; a critic or a reward "
            f"model has one"
        )
    missing = sorted(set(info["missing_keys"]) & dict(model.named_parameters()).keys())
    if missing:  # transformers makes them up, without our seed
        raise DataError(
            f"{config.name_or_path}: says that it is a sequence classifier, and has no "
            f"{', '.join(missing)}; name a model that was saved whole"
        )
    return model  # type: ignore[no-any-return]


def _from_policy(
    config: ModelConfig, dtype: torch.dtype, attn_implementation: str, seed: int
) -> nn.Module:
    cpu = torch.device("cpu")
    policy: Any = load_policy(config, cpu, dtype, attn_implementation=attn_implementation)
    settings = plain_config(policy.config)
    settings.num_labels = 1
    pad = getattr(load_tokenizer(config), "pad_token_id", None)
    if settings.pad_token_id is None and pad is not None:
        settings.pad_token_id = pad
    settings._attn_implementation = attn_implementation
    with torch.random.fork_rng(devices=[]):
        model: Any = AutoModelForSequenceClassification.from_config(  # type: ignore[no-untyped-call]
            settings, dtype=dtype, attn_implementation=attn_implementation
        )
    model.base_model.load_state_dict(policy.base_model.state_dict())
    head: Any = scorer_head(model)
    generator = torch.Generator().manual_seed(seed)
    deviation = 1.0 / (head.weight.shape[1] + 1) ** 0.5
    with torch.no_grad():
        head.weight.normal_(0.0, deviation, generator=generator)
        if head.bias is not None:
            head.bias.zero_()
    model.config.architectures = [type(model).__name__]
    return model  # type: ignore[no-any-return]
