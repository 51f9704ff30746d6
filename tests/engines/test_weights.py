import pytest
import torch

from verl_lab.engines.weights import (
    distinct_tensors,
    load_into,
    publish,
    remove_version,
    tensor_hash,
)
from verl_lab.errors import StateError
from verl_lab.models.lora import adapter_tensors, add_lora


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_reader_holds_what_was_published(tiny_model, tmp_path, kind):
    source, target = tiny_model(kind, seed=1), tiny_model(kind, seed=2)
    published = publish(distinct_tensors(source).items(), tmp_path / "w", 7)
    pointers = {n: p.data_ptr() for n, p in target.named_parameters()}
    held = load_into(target, tmp_path / "w")
    assert (held["version"], held["hash"]) == (7, published["hash"])
    assert held["bytes"] == published["bytes"]
    ids = torch.arange(3, 9)[None]
    assert torch.equal(target(ids).logits, source(ids).logits)
    assert pointers == {n: p.data_ptr() for n, p in target.named_parameters()}, "copied in place"


def test_a_tied_head_is_written_once(tiny_model, tmp_path):
    model = tiny_model("llama")
    names = list(distinct_tensors(model))
    assert "lm_head.weight" not in names
    assert "model.embed_tokens.weight" in names


def test_a_flipped_byte_is_found(tiny_model, tmp_path):
    publish(distinct_tensors(tiny_model(seed=1)).items(), tmp_path / "w", 1)
    file = tmp_path / "w" / "rank0.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(StateError, match=r"weights 1: .* has hash"):
        load_into(tiny_model(seed=2), tmp_path / "w")


def test_another_model_is_refused_by_the_tensor_that_differs(tiny_model, tmp_path):
    publish(distinct_tensors(tiny_model("llama")).items(), tmp_path / "w", 1)
    with pytest.raises(StateError, match=r"trainer and rollout must load the same model|lacks"):
        load_into(tiny_model("qwen2"), tmp_path / "w")


def test_a_cast_is_part_of_what_is_published(tiny_model, tmp_path):
    published = publish(
        distinct_tensors(tiny_model(seed=1)).items(), tmp_path / "w", 1, dtype=torch.bfloat16
    )
    held = load_into(tiny_model(dtype=torch.bfloat16, seed=2), tmp_path / "w")
    assert held["hash"] == published["hash"]


@pytest.fixture
def adapted(tiny_model):
    """Makes tiny models with adapters that are no zeros."""

    def make(dtype=torch.float32, seed=0):
        model = tiny_model(dtype=dtype)
        add_lora(model, rank=2, alpha=4, target_modules="all-linear", seed=seed)
        for name, tensor in adapter_tensors(model).items():
            generator = torch.Generator().manual_seed(seed + len(name))
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        return model

    return make


def test_of_a_model_with_adapters_these_alone_can_be_published(adapted, tmp_path):
    source, target = adapted(seed=1), adapted(seed=2)
    tensors = adapter_tensors(source)
    published = publish(tensors.items(), tmp_path / "w", 3, is_partial=True)
    held = load_into(target, tmp_path / "w")
    assert (held["version"], held["hash"]) == (3, published["hash"])
    assert held["bytes"] == published["bytes"] == sum(t.numel() * 4 for t in tensors.values())
    assert held["tensors"] == len(tensors)
    ids = torch.arange(3, 9)[None]
    assert torch.equal(target(ids).logits, source(ids).logits)


def test_a_part_that_does_not_say_so_is_refused(adapted, tmp_path):
    publish(adapter_tensors(adapted()).items(), tmp_path / "w", 3)
    with pytest.raises(StateError, match=r"w: lacks model\.embed_tokens\.weight"):
        load_into(adapted(), tmp_path / "w")


def test_a_part_of_another_model_is_refused(tiny_model, adapted, tmp_path):
    publish(adapter_tensors(adapted()).items(), tmp_path / "w", 3, is_partial=True)
    with pytest.raises(StateError, match=r"lora_A.*the model has no such tensor"):
        load_into(tiny_model(), tmp_path / "w")


def test_a_reader_may_hold_in_more_precision_what_was_published_in_less(adapted, tmp_path):
    source, target = adapted(seed=1), adapted(dtype=torch.bfloat16, seed=2)
    tensors = adapter_tensors(source)
    published = publish(tensors.items(), tmp_path / "w", 1, dtype=torch.bfloat16, is_partial=True)
    assert load_into(target, tmp_path / "w")["hash"] == published["hash"]
    for name, tensor in adapter_tensors(target).items():
        assert torch.equal(tensor, tensors[name].bfloat16().float())


def test_a_reader_that_would_round_is_refused(tiny_model, tmp_path):
    publish(distinct_tensors(tiny_model()).items(), tmp_path / "w", 1)
    with pytest.raises(StateError, match=r"must have the same model\.torch_dtype"):
        load_into(tiny_model(dtype=torch.bfloat16), tmp_path / "w")


def test_a_removed_version_is_gone_and_removing_it_again_is_no_error(tiny_model, tmp_path):
    publish(distinct_tensors(tiny_model()).items(), tmp_path / "w", 1)
    remove_version(tmp_path / "w")
    remove_version(tmp_path / "w")
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1000, (1 << 18) + 3, 1 << 19])
def test_every_changed_byte_changes_the_hash(size):
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    original = tensor_hash(data)
    for place in {0, size // 2, size - 1}:
        for bit in (1, 128):
            changed = data.clone()
            changed[place] ^= bit
            assert tensor_hash(changed) != original


def test_the_hash_sees_the_order_and_not_the_shape_or_strides():
    data = torch.randn(64, 32)
    assert tensor_hash(data) == tensor_hash(data.t().contiguous().t())
    assert tensor_hash(data) == tensor_hash(data.flatten())
    assert tensor_hash(data) != tensor_hash(data.flip(0))
    assert tensor_hash(torch.zeros(0)) == 0
