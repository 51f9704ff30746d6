import json

import pytest
import torch
from transformers import (
    BertForSequenceClassification,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from verl_lab.batch.columns import Batch
from verl_lab.config.load import load_config
from verl_lab.engines.reward_model import RewardModelService
from verl_lab.errors import DataError
from verl_lab.models.tiny import tokenizer

POLICY = "package://verl_lab/models/tiny_policy"


@pytest.fixture
def batch():
    return Batch.from_dict(
        {
            "prompt": ["1+1=", "1+1=", "2+2="],
            "response": ["2", "3", "4"],
        }
    )


@pytest.fixture
def service():
    def make(folder, report=lambda progress: None):
        config = {"model": {"name_or_path": POLICY}, "reward_model": {"name_or_path": str(folder)}}
        settings = load_config(config).model_dump(mode="json")
        return RewardModelService(settings, 0, "cpu", report)

    return make


@pytest.fixture
def classifier(tmp_path):
    """Saves a tiny random classifier, and gives it back with its tokenizer."""

    def make(kind=LlamaForSequenceClassification, template=None, pad_token="<pad>", **more):
        coder = tokenizer()
        coder.pad_token, coder.chat_template = pad_token, template
        config = kind.config_class(
            vocab_size=len(coder),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            **{"num_labels": 1, "pad_token_id": 0, **more},
        )
        torch.manual_seed(0)
        model = kind(config).eval()
        model.save_pretrained(tmp_path)
        coder.save_pretrained(tmp_path)
        file = tmp_path / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "padding_side": "left"}))
        return model, coder

    return make


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_labels": 2},
        {"kind": BertForSequenceClassification},  # scores at its first token
        {"pad_token_id": 5},  # the tokenizer pads with another token than the model knows
        {"pad_token_id": None},
        {"pad_token_id": None, "pad_token": None},
    ],
)
def test_a_sequence_classifier_scores_a_batch_as_it_scores_each_sample(
    service, batch, classifier, tmp_path, more
):
    model, coder = classifier(**more)
    batch = batch.with_columns({"prompt": ["1+1=", "123+321=", "2+2="]})
    made = service(tmp_path)
    found = made.score(batch)["reward/reward_model"]
    for score, prompt, response in zip(found, batch["prompt"], batch["response"], strict=True):
        alone = model(**coder(prompt, response, return_tensors="pt")).logits[0, 0].item()
        assert score == pytest.approx(alone, abs=1e-5)


def test_a_classifier_reads_the_chat_messages_of_a_prompt(service, batch, classifier, tmp_path):
    template = "{% for m in messages %}{{ m.content }}={% endfor %}"
    model, coder = classifier(template=template)
    messages = json.dumps([{"role": "system", "content": "3"}, {"role": "user", "content": "1+1"}])
    one = batch.slice(0, 1).with_columns({"prompt_messages": [messages], "prompt": ["rendered"]})
    made = service(tmp_path)
    ids = coder("3=1+1=2=", return_tensors="pt", add_special_tokens=False)
    assert made.score(one)["reward/reward_model"] == [
        pytest.approx(model(**ids).logits[0, 0].item(), abs=1e-5)
    ]


def test_a_model_without_a_trained_head_is_no_reward_model(service, classifier, tmp_path):
    classifier(LlamaForCausalLM)
    with pytest.raises(DataError, match=r"reward_model\.name_or_path: .* has no score\.weight"):
        service(tmp_path)


def test_one_that_was_trained_here_reads_the_very_token_ids(service, classifier, tmp_path):
    model, _ = classifier()
    (tmp_path / "verl_lab.json").write_text('{"reads": "ids"}')
    rows = [([4, 13, 4, 15], [5, 2]), ([7, 13, 9, 15], [11, 3, 2])]  # 2 ends a sequence
    batch = Batch.from_dict(
        {
            "prompt": ["text that", "is not read"],
            "response": ["at", "all"],
            "prompt_ids": [prompt for prompt, _ in rows],
            "response_ids": [response for _, response in rows],
        }
    )
    found = service(tmp_path).score(batch)["reward/reward_model"]
    for score, (prompt, response) in zip(found, rows, strict=True):
        hidden = model.model(torch.tensor([prompt + response])).last_hidden_state[0, -1]
        assert score == pytest.approx(model.score(hidden).item(), abs=1e-5)


@pytest.mark.parametrize("is_marked", [True, False])
def test_many_rows_are_scored_in_their_order_and_reported_on_the_way(
    service, classifier, tmp_path, is_marked
):
    classifier()
    if is_marked:
        (tmp_path / "verl_lab.json").write_text('{"reads": "ids"}')
    digits = [str(7 ** (i % 9)) for i in range(70)]
    ids = [[4 + (3 * i + j) % 11 for j in range(1 + i % 7)] for i in range(70)]
    batch = Batch.from_dict(
        {"prompt": digits, "response": digits, "prompt_ids": ids, "response_ids": ids}
    )
    rows = []
    made = service(tmp_path, rows.append)
    found = made.score(batch)["reward/reward_model"]
    assert rows == [{"row": 32}, {"row": 64}, {"row": 70}]
    for row in (0, 33, 69):
        alone = made.score(batch.slice(row, 1))["reward/reward_model"]
        assert found[row] == pytest.approx(alone[0], abs=1e-5)
    assert len({round(score, 4) for score in found}) > 3


def test_one_of_another_vocabulary_reads_text_though_it_was_trained_here(
    service, batch, classifier, tmp_path
):
    classifier()
    plain = service(tmp_path).score(batch)["reward/reward_model"]
    (tmp_path / "verl_lab.json").write_text('{"reads": "ids"}')
    file = tmp_path / "tokenizer.json"
    coder = json.loads(file.read_text())
    vocab = coder["model"]["vocab"]
    *_, first, second = vocab
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(coder))
    assert service(tmp_path).score(batch)["reward/reward_model"] == pytest.approx(plain)


def test_its_memory_is_counted(service, classifier, tmp_path):
    model, _ = classifier()
    held = service(tmp_path).memory()
    assert held["weights_bytes"] == 4 * sum(p.numel() for p in model.parameters())
    assert held["rss_bytes"] > held["weights_bytes"]
