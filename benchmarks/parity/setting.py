"""The models and the samples that both sides get, in a folder.

Needs torch, transformers and tokenizers, which both environments have; only our side builds.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

TEMPERATURE = 0.8
MAX_TOKENS = 12
GROUP_SIZE = 4
PAD, BOS, EOS = 0, 1, 2
WORDS = ("<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(38)))
VOCABULARY = len(WORDS)
PROMPT_LENGTHS = (3, 6)
RESPONSE_LENGTHS = (5, 1, 9, 3, MAX_TOKENS, 7, 2, 6)
TRUNCATED = 4
"""The row whose response has no end."""
OBSERVED = {2: range(3, 6), 5: range(2, 4)}
"""Rows with tokens that a tool wrote, and where."""
REWARDS = (1.0, 0.25, -0.5, 0.0, 0.75, -1.0, 2.0, 0.5)
SECOND_REWARDS = (0.0, 1.0, 0.5, 0.5, 1.0, 0.0, 0.25, -1.0)
MARGINS = (0.5, 0.0, 1.0, 0.25)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


def build(folder: Path) -> dict[str, Any]:
    """Writes models, tokenizer and samples; returns the samples.

    The models are `policy`; `old`, `reference` and `far_reference`, which are the policy with noise
    on its weights; and `scorer`.
    """
    policy = _model(LlamaForCausalLM, seed=0)
    old = _with_noise(policy, deviation=0.03, seed=1)
    models = {
        "policy": policy,
        "old": old,
        "reference": _with_noise(policy, deviation=0.01, seed=2),
        "far_reference": _with_noise(policy, deviation=0.04, seed=2),
        "scorer": _model(LlamaForSequenceClassification, seed=3, num_labels=1),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
    _tokenizer().save_pretrained(folder / "tokenizer")
    samples = _samples(old)
    (folder / "samples.json").write_text(json.dumps(samples, indent=1))
    return samples


def read_samples(folder: Path) -> dict[str, Any]:
    """The samples that `build` wrote."""
    return json.loads((folder / "samples.json").read_text())  # type: ignore[no-any-return]


def text_of(ids: list[int]) -> str:
    """What the tokenizer reads as these ids."""
    return " ".join(WORDS[i] for i in ids)


def _model(kind: type, *, seed: int, **more: Any) -> Any:
    torch.manual_seed(seed)
    return kind(LlamaConfig(**SIZES, **more)).eval()


@torch.no_grad()
def _with_noise(model: Any, *, deviation: float, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    moved = copy.deepcopy(model)
    for parameter in moved.parameters():
        parameter += deviation * torch.randn(parameter.shape, generator=generator)
    return moved


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate(WORDS)}
    backend = Tokenizer(tokenizer_models.WordLevel(words, unk_token=WORDS[PAD]))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=WORDS[PAD],
        bos_token=WORDS[BOS],
        eos_token=WORDS[EOS],
    )


def _samples(old: Any) -> dict[str, Any]:
    """Columns, a row a sample; the rows of a group are neighbours."""
    generator = torch.Generator().manual_seed(4)

    def ids(length: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()  # type: ignore[no-any-return]

    prompts = [row for n in PROMPT_LENGTHS for row in [ids(n)] * GROUP_SIZE]
    responses = [
        ids(n) if row == TRUNCATED else [*ids(n - 1), EOS] for row, n in enumerate(RESPONSE_LENGTHS)
    ]
    masks = [
        [place not in OBSERVED.get(row, ()) for place in range(n)]
        for row, n in enumerate(RESPONSE_LENGTHS)
    ]
    rollout = []
    for prompt, response in zip(prompts, responses, strict=True):
        noise = 0.4 * torch.randn(len(response), generator=generator)
        rollout.append((_logprobs(old, prompt, response) + noise).tolist())
    return {
        "prompt_ids": prompts,
        "response_ids": responses,
        "ended_ids": [r if r[-1] == EOS else [*r, EOS] for r in responses],
        "is_truncated": [r[-1] != EOS for r in responses],
        "response_mask": masks,
        "rollout_logprobs": rollout,
        "group_id": [row // GROUP_SIZE for row in range(len(responses))],
        "reward": list(REWARDS),
        "second_reward": list(SECOND_REWARDS),
        "pair": [row // 2 for row in range(len(responses))],
        "is_chosen": [row % 2 == 0 for row in range(len(responses))],
        "margin": [MARGINS[row // 2] for row in range(len(responses))],
    }


@torch.no_grad()
def _logprobs(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    found = (logits.float() / TEMPERATURE).log_softmax(-1)
    return found.gather(-1, torch.tensor(response)[:, None])[:, 0]
