import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification

from verl_lab.errors import ConfigError, DataError
from verl_lab.models.lora import (
    adapter_tensors,
    adapters_off,
    add_lora,
    has_adapters,
    merge_adapter,
    merged_state,
    read_adapter,
    write_adapter,
)


def adapted(model, *, seed=0, target_modules="all-linear", trained=True):
    """With adapters that, if trained, change what the model says."""
    model = add_lora(model, rank=3, alpha=6.0, target_modules=target_modules, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in adapter_tensors(model).items():
        if trained and "lora_B" in name:
            tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
    return model


def test_new_adapters_change_nothing(make_model, kind, logits):
    assert torch.equal(logits(adapted(make_model(kind), trained=False)), logits(make_model(kind)))


def test_without_its_adapters_the_policy_is_the_model_it_began_as(make_model, kind, logits):
    model = adapted(make_model(kind))
    assert not torch.allclose(logits(model), logits(make_model(kind)), atol=0.1)
    with adapters_off(model):
        assert torch.equal(logits(model), logits(make_model(kind)))
    assert torch.equal(logits(model), logits(adapted(make_model(kind))))


def test_an_adapted_layer_computes_the_formula(make_model):
    model = adapted(make_model(), target_modules=["q_proj"])
    layer = model.model.layers[1].self_attn.q_proj
    x = torch.randn(5, 16)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = x @ layer.base_layer.weight.T + 6.0 / 3 * (x @ a.T) @ b.T
    torch.testing.assert_close(layer(x), expected)


def test_merged_weights_fit_the_plain_model_and_say_the_same(make_model, kind, logits):
    model, plain = adapted(make_model(kind)), make_model(kind, seed=1)
    plain.load_state_dict(merged_state(model), strict=True)
    torch.testing.assert_close(logits(plain), logits(model), atol=1e-5, rtol=1e-5)


def test_all_linear_is_every_linear_layer_but_the_head(make_model, kind):
    names = {name.partition(".lora_")[0] for name in adapter_tensors(adapted(make_model(kind)))}
    per_layer = 4 if kind == "gpt2" else 7
    assert len(names) == 2 * per_layer
    assert not any("head" in name or "embed" in name or "wte" in name for name in names)


def test_only_adapters_train_and_they_do_so_in_full_precision(make_model):
    model = adapted(make_model(dtype=torch.bfloat16))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == adapter_tensors(model).keys()
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert model(torch.tensor([[3, 4]])).logits.dtype == torch.bfloat16
    assert (
        trained[next(iter(trained))].data_ptr()
        == next(iter(adapter_tensors(model).values())).data_ptr()
    ), "shared, not copied"


def test_the_first_values_depend_on_the_seed_alone(make_model):
    def first(seed, noise):
        model = make_model()
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        found = adapter_tensors(adapted(model, seed=seed, trained=False))
        assert torch.equal(torch.get_rng_state(), before), "the global state is as it was"
        return torch.cat([tensor.flatten() for tensor in found.values()])

    assert torch.equal(first(0, noise=1), first(0, noise=2))
    assert not torch.equal(first(0, noise=1), first(1, noise=1))


def test_what_trains_is_the_same_after_the_reference_was_asked(make_model, logits):
    model = adapted(make_model())
    frozen = next(p for name, p in model.named_parameters() if "lora_A" in name)
    frozen.requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}

    def fail():
        with adapters_off(model):
            with adapters_off(model):
                logits(model)
            assert torch.equal(logits(model), logits(make_model())), "still off in the outer block"
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert torch.equal(logits(model), logits(adapted(make_model())))


def test_peft_loads_what_is_written(make_model, kind, logits, tmp_path):
    model = adapted(make_model(kind))
    write_adapter(model, tmp_path, "somebody/base")
    loaded = PeftModel.from_pretrained(make_model(kind), tmp_path)
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-6, rtol=1e-6)
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == "somebody/base"


def test_written_adapters_come_back_in_place(make_model, logits, tmp_path):
    model, other = adapted(make_model()), adapted(make_model(), seed=1)
    places = [tensor.data_ptr() for tensor in adapter_tensors(other).values()]
    write_adapter(model, tmp_path, "base")
    read_adapter(other, tmp_path)
    assert torch.equal(logits(other), logits(model))
    assert [tensor.data_ptr() for tensor in adapter_tensors(other).values()] == places


def test_adapters_of_other_layers_are_not_read(make_model, tmp_path):
    write_adapter(adapted(make_model(), target_modules=["q_proj"]), tmp_path, "base")
    with pytest.raises(DataError, match=r"other layers \(4 tensors for 28\)"):
        read_adapter(adapted(make_model()), tmp_path)


@pytest.mark.parametrize("target_modules", ["all-linear", ["q_proj", "v_proj"], r".*1.*up_proj"])
def test_a_merged_model_is_plain_and_can_be_adapted_again(
    make_model, logits, tmp_path, target_modules
):
    model = adapted(make_model(), target_modules=target_modules)
    write_adapter(model, tmp_path, "base")
    merged = merge_adapter(make_model(), tmp_path)
    assert merged.state_dict().keys() == make_model().state_dict().keys()
    assert all(p.requires_grad for p in merged.parameters())
    assert not has_adapters(merged)
    torch.testing.assert_close(logits(merged), logits(model), atol=1e-5, rtol=1e-5)
    assert has_adapters(adapted(merged))


def test_adapters_of_kinds_that_only_peft_makes_are_merged_by_their_own_formula(
    make_model, logits, tmp_path
):
    settings = LoraConfig(
        r=4, lora_alpha=8, use_rslora=True, target_modules=["q_proj"], init_lora_weights=False
    )
    theirs = get_peft_model(make_model(), settings).eval()
    theirs.save_pretrained(tmp_path)
    merged = merge_adapter(make_model(), tmp_path)
    torch.testing.assert_close(logits(merged), logits(theirs), atol=1e-5, rtol=1e-5)


def test_adapters_of_another_model_are_refused(make_model, tmp_path):
    write_adapter(adapted(make_model("qwen2")), tmp_path, "base")
    with pytest.raises(DataError, match=r"do not fit .* correct base_model_name_or_path"):
        merge_adapter(make_model("llama, tied"), tmp_path)


def test_pickled_adapters_are_refused(make_model, tmp_path):
    write_adapter(adapted(make_model()), tmp_path, "base")
    torch.save({}, tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(DataError, match="convert the adapters to safetensors"):
        merge_adapter(make_model(), tmp_path)


@pytest.mark.parametrize(
    ("target_modules", "message"),
    [
        (["q_proj", "query"], r"query names no layer .* names among down_proj, gate_proj"),
        ("query", "query names no layer"),
        ([], "names no layer"),
        (["lm_head"], "lm_head is tied to the embeddings"),
        (["embed_tokens"], r"embed_tokens is a Embedding and not linear"),
    ],
)
def test_layers_that_can_have_no_adapter_are_named(make_model, target_modules, message):
    with pytest.raises(ConfigError, match=rf"lora\.target_modules: .*{message}"):
        adapted(make_model(), target_modules=target_modules)


def test_the_head_of_a_classifier_gets_no_adapter(make_model):
    classifier = AutoModelForSequenceClassification.from_config(make_model().config)
    names = adapter_tensors(adapted(classifier))
    assert len(names) == 28
    assert not any("score" in name for name in names)
