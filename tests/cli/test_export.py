import json

import peft
import pytest
import transformers
import yaml

from verl_lab.config.load import load_config
from verl_lab.engines.trainer.service import TrainerService
from verl_lab.store.checkpoint import seal


@pytest.fixture
def run(folder, small_config):
    """A run folder with one checkpoint, as the trainer and the history write it."""
    config = load_config(folder / "small.yaml", ["lora.rank=2"]).model_dump(mode="json")
    checkpoints = folder / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (folder / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    draft = checkpoints / ".draft"
    TrainerService(config, 0, "cpu", lambda progress: None).save(draft / "trainer")
    (draft / "state.json").write_text(json.dumps({"attempt": 1, "step": 3}))
    seal(draft, checkpoints / "step-000003")
    return "run"


@pytest.mark.parametrize(
    ("options", "loader"),
    [
        ([], "transformers.AutoModelForCausalLM.from_pretrained('out')"),
        (["--no-merge"], "peft.AutoPeftModelForCausalLM.from_pretrained('out')"),
    ],
)
def test_it_says_where_the_model_is_and_how_python_loads_it(
    verl_lab, run, folder, monkeypatch, options, loader
):
    code, out, _ = verl_lab("export", "--run", run, "--to", "out", *options)
    assert (code, out) == (0, ["Wrote out. Load it with:", f"  {loader}"])
    monkeypatch.chdir(folder)
    loaded = eval(loader, {"peft": peft, "transformers": transformers})
    assert loaded.get_input_embeddings().weight.shape[0] == loaded.config.vocab_size


def test_what_is_wrong_is_one_message(verl_lab, run, folder):
    code, _, err = verl_lab("export", "--run", f"{run}@step-000004", "--to", "out")
    assert code == 2
    assert err.strip() == "Error: run: has no checkpoint step-000004; it has step-000003"
    assert not (folder / "out").exists()
