"""The native engine on a policy with low-rank adapters."""

import numpy as np
import pytest
import torch

from verl_lab.engines.rollout.service import RolloutService
from verl_lab.engines.weights import publish
from verl_lab.errors import StateError
from verl_lab.models.lora import adapter_tensors, add_lora, merged_state

LORA = {"rank": 4, "alpha": 8.0, "target_modules": "all-linear"}
SAMPLING = {"max_new_tokens": 12, "group_size": 2, "temperature": 0.9, "seed": 3}


@pytest.fixture
def trained(make_model):
    """Makes policies whose adapters have been trained, as the trainer holds them."""

    def make(dtype=torch.float32, seed=0):
        model = add_lora(make_model(dtype=dtype), **LORA, seed=0)
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in adapter_tensors(model).items():
            if "lora_B" in name:
                tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
        return model

    return make


@pytest.fixture
def make_service(make_model, tokenizer, tmp_path):
    make_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")

    def make(dtype="float32"):
        model = {"name_or_path": str(tmp_path / "model"), "torch_dtype": dtype}
        config = {"model": model, "lora": LORA}
        return RolloutService(config, rank=0, device="cpu", report=lambda progress: None)

    return make


def logprobs(model, row, temperature):
    """Of a response's tokens, by one plain forward pass over all of it."""
    ids = [*row["prompt_ids"], *row["response_ids"]]
    with torch.no_grad():
        scores = model(torch.tensor([ids])).logits[0, len(row["prompt_ids"]) - 1 : -1]
    return (
        (scores / temperature)
        .log_softmax(-1)
        .gather(-1, torch.tensor(row["response_ids"])[:, None])[:, 0]
    )


def test_it_samples_from_the_adapters_that_were_published_last(
    make_service, make_model, trained, prompts, tmp_path
):
    service, policy = make_service(), make_model(seed=1)
    for version in (1, 2):
        source = trained(seed=version)
        folder = tmp_path / f"w{version}"
        publish(adapter_tensors(source).items(), folder, version, is_partial=True)
        service.load_weights(folder)
        batch = service.generate(prompts, SAMPLING, step=1, slots=5)
        policy.load_state_dict(merged_state(source))
        assert set(batch["weights_version"]) == {version}
        for row in batch.table.to_pylist():
            expected = logprobs(policy, row, SAMPLING["temperature"])
            np.testing.assert_allclose(row["rollout_logprobs"], expected, atol=1e-4)


def test_adapters_too_sample_alike_whatever_the_slots(make_service, trained, prompts, tmp_path):
    service = make_service()
    publish(adapter_tensors(trained()).items(), tmp_path / "w", 1, is_partial=True)
    service.load_weights(tmp_path / "w")
    batches = [service.generate(prompts, SAMPLING, step=1, slots=n) for n in (1, 5, 22)]
    assert all(batch.table.equals(batches[0].table) for batch in batches[1:])


def test_a_policy_in_less_precision_takes_its_adapters(make_service, trained, prompts, tmp_path):
    service = make_service("bfloat16")
    published = publish(
        adapter_tensors(trained()).items(),
        tmp_path / "w",
        1,
        dtype=torch.bfloat16,
        is_partial=True,
    )
    assert service.load_weights(tmp_path / "w")["hash"] == published["hash"]
    assert len(service.generate(prompts, SAMPLING, step=1, slots=5)) == 22


def test_after_a_load_that_failed_it_samples_only_from_whole_weights(
    make_service, trained, prompts, tmp_path
):
    service = make_service()
    for version in (1, 2):
        tensors = adapter_tensors(trained(seed=version)).items()
        publish(tensors, tmp_path / f"w{version}", version, is_partial=True)
    file = tmp_path / "w1" / "rank0.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-5] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(StateError, match="has hash"):
        service.load_weights(tmp_path / "w1")
    with pytest.raises(StateError, match="failed half-way; load whole ones first"):
        service.generate(prompts, SAMPLING, step=1, slots=5)
    service.load_weights(tmp_path / "w2")
    batch = service.generate(prompts, SAMPLING, step=1, slots=5)
    assert set(batch["weights_version"]) == {2}
