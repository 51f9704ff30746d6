"""Tiny random models and a tokenizer whose token `i` is the word `t<i>`."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from verl_lab.batch.columns import Batch
from verl_lab.engines.rollout.base import Sampling
from verl_lab.engines.rollout.native import NativeEngine

VOCAB = 96
STOP = [2, 3, 5, 7]
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": STOP,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "mistral, window 8": lambda: MistralConfig(**SIZES, sliding_window=8),
    "gemma3, mixed windows": lambda: Gemma3TextConfig(
        **SIZES,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
}


def _make_model(kind="llama", dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=dtype)
    model.generation_config.eos_token_id = STOP
    model.generation_config.pad_token_id = 0
    return model.eval()


@pytest.fixture(scope="session")
def make_model():
    """Makes a model of one of `CONFIGS`, the same for the same seed."""
    return _make_model


@pytest.fixture(scope="session")
def tokenizer():
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t2", pad_token="t0")


@dataclass
class Bench:
    """An engine, and what its model was asked."""

    engine: NativeEngine
    shapes: list[tuple[int, int]] = field(default_factory=list)
    """Rows and tokens a row of each forward pass."""
    reports: list[dict] = field(default_factory=list)

    def generate(self, prompts, *, slots=8, step=1, **sampling):
        sampling = Sampling(**{"max_new_tokens": 12, "group_size": 3, **sampling})
        return self.engine.generate(
            prompts, sampling, step=step, slots=slots, report=self.reports.append
        )

    @property
    def model(self):
        return self.engine.policy.model


@pytest.fixture(params=list(CONFIGS))
def kind(request):
    return request.param


@pytest.fixture
def bench(tokenizer, make_model):
    """Makes an engine on a tiny model; what the model is asked is written down."""

    def _bench(kind="llama", dtype=torch.float32, model=None):
        model = make_model(kind, dtype) if model is None else model
        made = Bench(NativeEngine(model, tokenizer))

        def note(module, args, kwargs):
            made.shapes.append(tuple(kwargs["input_ids"].shape))

        model.register_forward_pre_hook(note, with_kwargs=True)
        return made

    return _bench


@pytest.fixture(scope="session")
def prompts():
    """Eleven prompts of 1 to 40 tokens."""
    rng = np.random.default_rng(0)
    lengths = [5, 1, 17, 40, 5, 16, 3, 9, 33, 2, 12]
    return Batch.from_dict(
        {
            "group_id": [100 + i for i in range(len(lengths))],
            "prompt_ids": [rng.integers(8, VOCAB, n).tolist() for n in lengths],
            "answer": [f"a{i}" for i in range(len(lengths))],
        }
    )
