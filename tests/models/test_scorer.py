import shutil

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from verl_lab.config.schema import ModelConfig
from verl_lab.errors import DataError
from verl_lab.models.load import find, load_policy, load_tokenizer
from verl_lab.models.lora import adapter_tensors, add_lora, write_adapter
from verl_lab.models.scorer import load_scorer, scorer_head

TINY = "package://verl_lab/models/tiny_policy"
CPU = torch.device("cpu")
IDS = torch.arange(3, 9)[None]


def load(name=TINY, dtype=torch.float32, seed=0):
    return load_scorer(ModelConfig(name_or_path=str(name)), CPU, dtype, seed=seed)


def states(model):
    with torch.no_grad():
        return model.base_model(IDS).last_hidden_state


@pytest.fixture
def saved(tmp_path):
    """Saves a classifier beside the shipped policy's tokenizer."""

    def save(model):
        model.save_pretrained(tmp_path / "saved")
        load_tokenizer(ModelConfig(name_or_path=TINY)).save_pretrained(tmp_path / "saved")
        return tmp_path / "saved"

    return save


@pytest.fixture
def policy():
    return load_policy(ModelConfig(name_or_path=TINY), CPU, torch.float32)


def test_of_a_policy_it_is_the_trunk_with_one_number_on_top(policy):
    model = load()
    assert torch.equal(states(model), states(policy))
    assert scorer_head(model)(states(model)).shape == (1, 6, 1)
    assert not model.training


def test_a_new_head_is_small_and_depends_on_the_seed_alone():
    weights = []
    for noise, seed in ((1, 0), (2, 0), (1, 5)):
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        weights.append(scorer_head(load(seed=seed)).weight)
        assert torch.equal(torch.get_rng_state(), before), "the global state is as it was"
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    hidden = weights[0].shape[1]
    assert weights[0].std().item() == pytest.approx((hidden + 1) ** -0.5, rel=0.2)


def test_the_head_stays_in_full_precision():
    model = load(dtype=torch.bfloat16)
    assert scorer_head(model).weight.dtype == torch.float32
    assert {p.dtype for p in model.base_model.parameters()} == {torch.bfloat16}


def test_a_saved_scorer_keeps_its_head(saved):
    model = load(seed=3)
    again = load(saved(model), seed=4)
    assert torch.equal(scorer_head(again).weight, scorer_head(model).weight)
    assert torch.equal(states(again), states(model))


def test_transformers_scores_a_padded_batch_by_the_same_numbers(saved):
    model = load()
    theirs = AutoModelForSequenceClassification.from_pretrained(saved(model)).eval()
    pad = load_tokenizer(ModelConfig(name_or_path=TINY)).pad_token_id
    with torch.no_grad():
        padded = torch.cat([IDS, torch.full((1, 3), pad)], dim=1)
        both = theirs(torch.cat([padded, torch.arange(3, 12)[None]])).logits
        mine = scorer_head(model)(states(model)[:, -1])
    torch.testing.assert_close(both[:1], mine, atol=1e-5, rtol=1e-5)


def test_of_a_run_with_adapters_it_is_the_merged_trunk(policy, tmp_path):
    add_lora(policy, rank=2, alpha=4, target_modules="all-linear", seed=0)
    for tensor in adapter_tensors(policy).values():
        tensor.normal_(0, 0.1)
    write_adapter(policy, tmp_path, TINY)
    torch.testing.assert_close(states(load(tmp_path)), states(policy), atol=1e-5, rtol=1e-5)


def test_a_classifier_of_several_labels_is_refused(saved, policy):
    policy.config.num_labels = 3
    folder = saved(AutoModelForSequenceClassification.from_config(policy.config))
    with pytest.raises(DataError, match="has 3 labels; a critic or a reward model has one"):
        load(folder)


def test_a_classifier_without_its_head_is_refused(tmp_path):
    folder = tmp_path / "headless"
    shutil.copytree(find(TINY).location, folder)
    config = (folder / "config.json").read_text()
    config = config.replace("LlamaForCausalLM", "LlamaForSequenceClassification")
    (folder / "config.json").write_text(config.replace("{", '{"num_labels": 1,', 1))
    with pytest.raises(DataError, match=r"has no score\.weight"):
        load(folder)


def test_a_config_that_cannot_be_read_is_explained(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"model\.name_or_path: .* cannot be loaded"):
        load(tmp_path)


def test_a_model_without_a_known_head_is_named(policy):
    with pytest.raises(DataError, match=r"LlamaForCausalLM: has no head called score or classif"):
        scorer_head(policy)
