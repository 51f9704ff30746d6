import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SIZES = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_SIZES = {"vocab_size": 37, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
IDS = {"bos_token_id": 1, "eos_token_id": 2}
KINDS = {
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2_SIZES, **IDS, initializer_range=0.3)),
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(params=list(KINDS))
def kind(request):
    return request.param


@pytest.fixture(scope="session")
def make_model():
    """Makes random causal models, the same for the same seed."""

    def make(kind="llama, tied", seed=0, dtype=torch.float32):
        torch.manual_seed(seed)
        return KINDS[kind]().to(dtype).eval()

    return make


@pytest.fixture(scope="session")
def logits():
    """What a model says of a few tokens."""

    def of(model):
        with torch.no_grad():
            return model(torch.arange(3, 12)[None]).logits

    return of
