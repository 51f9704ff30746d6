import json

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from verl_lab.config.schema import LabConfig, ModelConfig
from verl_lab.engines.trainer.service import TrainerService
from verl_lab.errors import ConfigError, DataError
from verl_lab.models.export import export, write_model_files
from verl_lab.models.load import load_policy, load_tokenizer
from verl_lab.models.scorer import load_scorer
from verl_lab.store.checkpoint import seal

TINY = "package://verl_lab/models/tiny_policy"
CPU = torch.device("cpu")


def add_noise(file, *, to, seed=0):
    """Stands in for training: changes some of the tensors in a file."""
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if to in name:
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, file)


@pytest.fixture
def make_run(tmp_path):
    """Makes run folders as the trainer and the history write them; what was trained differs from
    step to step."""

    def make(name, *, model=TINY, steps=(1,), **sections):
        folder = tmp_path / name
        (folder / "checkpoints").mkdir(parents=True)
        config = {"model": {"name_or_path": str(model)}, **sections}
        config = LabConfig.model_validate(config).model_dump(mode="json")
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        trainer = TrainerService(config, 0, "cpu", lambda progress: None)
        for step in steps:
            draft = folder / "checkpoints" / ".draft"
            trainer.save(draft / "trainer")
            has_lora = config["lora"] is not None
            file = "adapter_model.safetensors" if has_lora else "model.safetensors"
            to = "lora_B" if has_lora else "layers"
            add_noise(draft / "trainer" / file, to=to, seed=step)
            (draft / "state.json").write_text(json.dumps({"attempt": 1, "step": step}))
            seal(draft, folder / "checkpoints" / f"step-{step:06d}")
        return folder

    return make


LORA = {"rank": 4, "alpha": 8.0}


def of_run(name):
    """The policy of a run, as a rollout worker or another run loads it."""
    return load_policy(ModelConfig(name_or_path=str(name)), CPU, torch.float32)


def files(folder):
    return {path.name for path in folder.iterdir()}


def test_transformers_loads_what_a_run_trained(make_run, logits, tmp_path):
    run = make_run("run")
    folder = export(run, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(loaded), logits(of_run(run)))
    assert not torch.equal(logits(loaded), logits(of_run(TINY)))
    weights = load_file(run / "checkpoints/step-000001/trainer/model.safetensors")
    state = loaded.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())


def test_only_the_model_is_exported_and_its_tokenizer(make_run, tmp_path):
    folder = export(make_run("run"), tmp_path / "out")
    assert files(folder) >= {"config.json", "generation_config.json", "model.safetensors"}
    assert not files(folder) & {"optimizer.safetensors", "rng.safetensors", "learner.json"}
    mine = load_tokenizer(ModelConfig(name_or_path=TINY))
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == mine.get_vocab()


def test_the_newest_checkpoint_is_exported_unless_another_is_named(make_run, logits, tmp_path):
    run = make_run("run", steps=(1, 2))
    newest, older = export(run, tmp_path / "2"), export(f"{run}@step-000001", tmp_path / "1")
    assert torch.equal(logits(of_run(newest)), logits(of_run(f"{run}@step-000002")))
    assert torch.equal(logits(of_run(older)), logits(of_run(f"{run}@step-000001")))
    assert not torch.equal(logits(of_run(newest)), logits(of_run(older)))


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "adapters"])
def test_the_precision_is_the_one_asked_for_and_written_down(make_run, lora, tmp_path):
    run = make_run("run", lora=lora)
    exact = AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "32"))
    short = AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "16", dtype="bfloat16"))
    assert (exact.dtype, short.dtype) == (torch.float32, torch.bfloat16)
    for name, parameter in short.named_parameters():
        assert torch.equal(parameter, exact.get_parameter(name).bfloat16()), "rounded once"


def test_adapters_are_merged_or_written_as_peft_loads_them(make_run, logits, tmp_path):
    run = make_run("run", lora=LORA)
    merged = AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "merged"))
    apart = AutoPeftModelForCausalLM.from_pretrained(export(run, tmp_path / "apart", merge=False))
    assert files(tmp_path / "apart") == {"adapter_config.json", "adapter_model.safetensors"}
    assert torch.equal(logits(merged), logits(of_run(run)))
    torch.testing.assert_close(logits(merged), logits(apart), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits(merged), logits(of_run(TINY)), atol=0.1)


def test_a_run_from_a_run_with_adapters_has_those_of_both(make_run, logits, tmp_path):
    first = make_run("first", lora=LORA)
    second = make_run("second", model=first, lora=LORA)
    alone = AutoPeftModelForCausalLM.from_pretrained(export(first, tmp_path / "1", merge=False))
    sum_of_both = alone.merge_and_unload()
    trained = second / "checkpoints/step-000001/trainer"
    for name, tensor in load_file(trained / "adapter_model.safetensors").items():
        layer = name.removeprefix("base_model.model.").partition(".lora_")[0]
        if "lora_B" in name:
            a = load_file(trained / "adapter_model.safetensors")[name.replace("lora_B", "lora_A")]
            sum_of_both.get_submodule(layer).weight.data += 2.0 * tensor @ a
    exported = AutoModelForCausalLM.from_pretrained(export(second, tmp_path / "2"))
    torch.testing.assert_close(logits(exported), logits(sum_of_both), atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match=r"--no-merge: the adapters lie on those of .*first"):
        export(second, tmp_path / "3", merge=False)


def test_a_run_that_went_on_is_still_the_base_that_it_was(make_run, logits):
    first = make_run("first", steps=(1,))
    second = make_run("second", model=first, lora=LORA)
    before = logits(of_run(second))
    make_run("more", steps=(1, 2))
    (first.parent / "more/checkpoints/step-000002").rename(first / "checkpoints/step-000002")
    assert torch.equal(logits(of_run(second)), before)


def test_a_reward_model_is_exported_as_a_classifier(make_run, tmp_path):
    run = make_run("run", recipe="reward_model", data={"path": "pairs.jsonl"})
    folder = export(run, tmp_path / "out")
    loaded = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    mine = load_scorer(ModelConfig(name_or_path=str(run)), CPU, torch.float32)
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, mine(ids).logits)
    assert json.loads((folder / "verl_lab.json").read_text()) == {"reads": "ids"}


def test_a_folder_with_something_in_it_is_left_alone(make_run, tmp_path):
    run = make_run("run")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").touch()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--to: .*out is not empty; .* add --force"):
        export(run, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"--to: .*file is a file"):
        export(run, tmp_path / "file", overwrite=True)
    assert files(tmp_path / "out") == {"notes"}


def test_what_is_written_over_another_export_leaves_none_of_its_weights(make_run, logits, tmp_path):
    run, out = make_run("run", lora=LORA), tmp_path / "out"
    export(run, out, merge=False)
    (out / "notes").touch()
    export(run, out, overwrite=True)
    assert "notes" in files(out)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(loaded), logits(of_run(run))), "merged once, not adapted again"


def test_a_damaged_checkpoint_is_not_exported(make_run, tmp_path):
    run = make_run("run")
    add_noise(run / "checkpoints/step-000001/trainer/model.safetensors", to="norm")
    with pytest.raises(DataError, match=r"trainer/model.safetensors is damaged"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int8"}, "--dtype: is 'int8'; use one of float32"),
        ({"merge": False}, "--no-merge: .* was trained without adapters"),
    ],
)
def test_what_cannot_be_exported_is_said_before_anything_is_written(
    make_run, tmp_path, arguments, message
):
    with pytest.raises(ConfigError, match=message):
        export(make_run("run"), tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(DataError, match=r"is no run folder; it must hold config\.yaml"):
        export(tmp_path, tmp_path / "out")


def test_beside_the_weights_lies_what_transformers_needs(make_model, tmp_path):
    model = make_model(dtype=torch.bfloat16)
    model.config.quantization_config = {"quant_method": "gguf"}
    write_model_files(model, load_tokenizer(ModelConfig(name_or_path=TINY)), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32", "as checkpoints hold them"
    assert "quantization_config" not in config
    assert model.config.quantization_config == {"quant_method": "gguf"}, "the model's own is as was"
    assert files(tmp_path) >= {"generation_config.json", "tokenizer.json"}
    assert "model.safetensors" not in files(tmp_path)
