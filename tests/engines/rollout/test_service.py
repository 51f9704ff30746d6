import msgpack
import pytest

from verl_lab.batch.columns import Batch
from verl_lab.config.schema import LabConfig
from verl_lab.engines.rollout.service import RolloutService
from verl_lab.engines.weights import distinct_tensors, publish
from verl_lab.errors import ConfigError
from verl_lab.models.load import load_tokenizer

SAMPLING = {"max_new_tokens": 10, "group_size": 2, "temperature": 0.9, "seed": 3}


@pytest.fixture
def reports():
    return []


@pytest.fixture
def service(make_model, tokenizer, reports, tmp_path):
    make_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    config = {"model": {"name_or_path": str(tmp_path / "model")}}
    return RolloutService(config, rank=0, device="cpu", report=reports.append)


def test_it_serves_what_the_engine_generates(service, bench, prompts, reports):
    sent = Batch.from_ipc(prompts.to_ipc())
    batch = service.generate(sent, SAMPLING, step=7, slots=5)
    assert batch.table.equals(bench().generate(prompts, step=7, **SAMPLING).table)
    assert Batch.from_ipc(batch.to_ipc()).table.equals(batch.table)
    assert reports[-1]["sequences_done"] == 22


def test_it_loads_weights_and_says_what_it_holds(service, make_model, prompts, tmp_path):
    published = publish(distinct_tensors(make_model(seed=1)).items(), tmp_path / "w0", 0)
    held = msgpack.unpackb(msgpack.packb(service.load_weights(str(tmp_path / "w0"))))
    assert (held["version"], held["hash"]) == (0, published["hash"])
    batch = service.generate(prompts, SAMPLING, step=1, slots=5)
    assert set(batch["weights_version"]) == {0}


def test_it_counts_its_memory(service):
    held = msgpack.unpackb(msgpack.packb(service.memory()))
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 64 * 96 * 3 + 64 * 2
    assert held["weights_bytes"] == 4 * (2 * layer + 96 * 64 + 64)
    assert held["rss_bytes"] > held["weights_bytes"]


def test_sampling_is_checked_where_it_arrives(service, prompts):
    with pytest.raises(ConfigError, match=r"rollout.top_p: is 2"):
        service.generate(prompts, {**SAMPLING, "top_p": 2}, step=1, slots=5)


def test_the_shipped_policy_is_sampled_alike_whatever_the_slots():
    config = {"model": {"name_or_path": "package://verl_lab/models/tiny_policy"}}
    service = RolloutService(config, rank=0, device="cpu", report=lambda progress: None)
    tokenizer = load_tokenizer(LabConfig.model_validate(config).model)
    prompts = Batch.from_dict(
        {
            "group_id": [1, 2],
            "prompt_ids": [tokenizer(text)["input_ids"] for text in ("5+7=", "12+30=")],
        }
    )
    options = {"max_new_tokens": 24, "group_size": 16, "temperature": 1.5}
    batches = [service.generate(prompts, options, step=1, slots=slots) for slots in (1, 7, 32)]
    assert len(set(batches[0]["response"])) > 4
    assert "stop" in batches[0]["finish_reason"]
    assert all(batch.table.equals(batches[0].table) for batch in batches[1:])
