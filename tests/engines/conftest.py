import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

SIZES = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = {
    "llama": (
        LlamaConfig,
        LlamaForCausalLM,
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"num_key_value_heads": 2}),
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def tiny_model():
    """Makes random models: `tiny_model("llama", torch.float64, attention="sdpa", seed=0)`."""

    def make(kind="llama", dtype=torch.float32, attention="sdpa", seed=0):
        config_class, model_class, more = KINDS[kind]
        config = config_class(**SIZES, **more, initializer_range=0.3)
        config._attn_implementation = attention
        torch.manual_seed(seed)
        return model_class(config).to(dtype).eval()

    return make
