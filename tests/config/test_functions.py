import subprocess
import sys

import pytest

from verl_lab.config import functions
from verl_lab.config.load import load_config, set_knob, start_problems
from verl_lab.errors import ConfigError

TREE = {
    "model": {"name_or_path": "somewhere"},
    "task": {"name": "add_compare"},
    "rollout": {"device_map": "cpu:0"},
    "trainer": {"device_map": "cpu:0"},
}


@pytest.fixture(autouse=True)
def _forget():
    kept = {kind: dict(known) for kind, known in functions._registered.items()}
    yield
    functions._registered.clear()
    functions._registered.update(kept)


def test_a_registered_function_is_known_by_its_name():
    @functions.advantage
    def centred(samples):
        return samples.rewards - samples.rewards.mean()

    config = load_config({**TREE, "algorithm": {"advantage": "centred"}})
    assert not [p for p in start_problems(config) if "advantage" in p]
    assert functions.lookup("advantage", "centred") is centred


def test_a_name_that_nobody_registered_is_a_problem_with_a_hint():
    config = load_config({**TREE, "algorithm": {"advantage": "grop", "policy_loss": "pppo"}})
    found = "\n".join(start_problems(config))
    assert "algorithm.advantage: no such advantage 'grop'; did you mean group?" in found
    assert "algorithm.policy_loss: no such policy loss 'pppo'; did you mean ppo?" in found
    config = load_config({**TREE, "recipe": "gropo"})
    assert "recipe: no such recipe 'gropo'" in "\n".join(start_problems(config))


def test_a_live_change_to_an_unknown_function_is_refused():
    with pytest.raises(ConfigError, match="no such policy loss 'gpso'; did you mean gspo"):
        set_knob(load_config(TREE), {"algorithm.policy_loss": "gpso"})


def test_built_in_names_cannot_be_taken():
    def ppo(logprobs):
        return logprobs

    with pytest.raises(ConfigError, match="`ppo` is built in"):
        functions.policy_loss(ppo)


def test_a_function_of_a_file_travels_to_a_process_that_lacks_the_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("FACTOR = 3\ndef triple(samples):\n    return FACTOR * samples\n")
    name = f"{file}:triple"
    config = load_config({**TREE, "algorithm": {"advantage": name}})
    sent = functions.dumps(config)
    file.unlink()
    code = (
        "import sys, json; from verl_lab.config import functions as f; "
        f"f.loads(json.loads(sys.argv[1])); print(f.lookup('advantage', {name!r})(14))"
    )
    import json

    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(sent)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "42"


def test_a_missing_file_or_function_is_named(tmp_path):
    file = tmp_path / "mine.py"
    config = load_config({**TREE, "algorithm": {"policy_loss": f"{file}:loss"}})
    assert f"the file {file} does not exist" in "\n".join(start_problems(config))
    file.write_text("")
    with pytest.raises(ConfigError, match="has no function loss"):
        functions.dumps(config)
