import copy
import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, Qwen3NextConfig

from verl_lab.batch.columns import Batch
from verl_lab.engines.rollout.native import NativeEngine, stop_ids
from verl_lab.engines.weights import distinct_tensors, publish
from verl_lab.errors import ConfigError, DataError, ShapeError, StateError


@torch.no_grad()
def full_logits(model, prompt, response):
    """Logits [T, V] that predict the response, from one plain forward pass."""
    ids = torch.tensor([[*prompt, *response]])
    return model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()


def rows(batch):
    return zip(batch["prompt_ids"], batch["response_ids"], strict=True)


def test_greedy_is_what_transformers_generates(bench, prompts, kind):
    lab = bench(kind)
    batch = lab.generate(prompts, temperature=0, group_size=1, max_new_tokens=30, slots=4)
    for prompt, response in rows(batch):
        expected = lab.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=30)
        assert response == expected[0, len(prompt) :].tolist()


def test_slots_grow_with_long_responses(bench, prompts):
    lab = bench()
    lab.engine.stop_ids = frozenset()
    lab.model.generation_config.eos_token_id = None
    prompts = prompts.slice(3, 2)
    batch = lab.generate(prompts, temperature=0, group_size=1, max_new_tokens=250)
    for prompt, response in rows(batch):
        expected = lab.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=250)
        assert response == expected[0, len(prompt) :].tolist()


def test_logprobs_are_those_of_a_full_forward_pass(bench, prompts, kind):
    lab = bench(kind)
    batch = lab.generate(prompts, temperature=0.7, max_new_tokens=20)
    for (prompt, response), recorded in zip(rows(batch), batch["rollout_logprobs"], strict=True):
        logits = full_logits(lab.model, prompt, response) / 0.7
        expected = logits.log_softmax(-1)[range(len(response)), response]
        torch.testing.assert_close(torch.tensor(recorded), expected, rtol=0, atol=1e-4)


def test_greedy_logprobs_are_recorded_at_temperature_1(bench, prompts):
    lab = bench()
    batch = lab.generate(prompts, temperature=0, group_size=1)
    prompt, response = next(rows(batch))
    expected = full_logits(lab.model, prompt, response).log_softmax(-1).amax(-1)
    torch.testing.assert_close(torch.tensor(batch["rollout_logprobs"][0]), expected)


@pytest.mark.parametrize("slots", [1, 3, 64])
def test_the_number_of_slots_changes_nothing(bench, prompts, kind, slots):
    lab = bench(kind)
    assert lab.generate(prompts, slots=slots).table.equals(lab.generate(prompts, slots=8).table)


def test_the_number_of_slots_changes_nothing_in_half_precision(bench, prompts):
    lab = bench(dtype=torch.bfloat16)
    assert lab.generate(prompts, slots=2).table.equals(lab.generate(prompts, slots=8).table)


def test_the_split_over_engines_changes_nothing(bench, prompts):
    whole = bench().generate(prompts)
    one, two = [3, 0, 7, 8, 10], [1, 2, 4, 5, 6, 9]
    parts = Batch.concat(
        [bench().generate(prompts.take(one)), bench().generate(prompts.take(two), slots=5)]
    )
    order = np.argsort([3 * row + i for row in one + two for i in range(3)])
    assert parts.take(order).table.equals(whole.table)


def test_step_and_seed_and_group_and_sample_all_change_the_noise(bench, prompts):
    lab = bench()
    prompts = prompts.with_columns({"prompt_ids": [[9, 10, 11]] * len(prompts)})
    found = [
        lab.generate(prompts, step=step, seed=seed, max_new_tokens=30)["response_ids"]
        for step, seed in ((1, 0), (2, 0), (1, 1))
    ]
    responses = {tuple(ids) for part in found for ids in part if len(ids) > 8}
    assert len(responses) == sum(len(ids) > 8 for part in found for ids in part) > 20
    again = lab.generate(prompts, step=2, seed=0, max_new_tokens=30)["response_ids"]
    assert again == found[1]


def test_samples_follow_the_distribution(bench, prompts):
    """Chi-square of first tokens against the model's softmax; 0.1 % of good samplers fail it."""
    lab = bench()
    first = lab.generate(prompts.slice(0, 1), group_size=4000, max_new_tokens=1, slots=4000)
    counts = np.bincount([ids[0] for ids in first["response_ids"]], minlength=96)
    p = full_logits(lab.model, prompts["prompt_ids"][0], [0]).softmax(-1)[0].numpy()
    common = p * 4000 >= 5
    expected = np.append(p[common], p[~common].sum()) * 4000
    observed = np.append(counts[common], counts[~common].sum())
    chi_square = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert chi_square < freedom + 3.1 * (2 * freedom) ** 0.5 + 5


def test_every_column_of_the_prompts_is_repeated(bench, prompts):
    batch = bench().generate(prompts)
    assert batch["group_id"][:4] == [100, 100, 100, 101]
    assert batch["sample_id"][:4] == [0, 1, 2, 0]
    assert batch["answer"][2:4] == ["a0", "a1"]
    assert batch["weights_version"] == [-1] * 33
    assert [len(m) for m in batch["response_mask"]] == [len(i) for i in batch["response_ids"]]
    assert all(all(mask) for mask in batch["response_mask"])


def test_a_response_ends_with_its_stop_token_and_its_text_leaves_special_tokens_out(bench, prompts):
    lab = bench()
    batch = lab.generate(prompts, max_new_tokens=40)
    assert {"stop", "length"} == set(batch["finish_reason"])
    for ids, text, reason in zip(
        batch["response_ids"], batch["response"], batch["finish_reason"], strict=True
    ):
        assert not lab.engine.stop_ids & set(ids[:-1])
        assert (ids[-1] in lab.engine.stop_ids) == (reason == "stop")
        assert reason == "stop" or len(ids) == 40
        assert text.split() == [f"t{i}" for i in ids if i not in (0, 2)]


def test_a_stop_token_in_the_last_place_is_a_stop(bench, prompts):
    batch = bench().generate(prompts, max_new_tokens=1, group_size=50)
    assert set(map(len, batch["response_ids"])) == {1}
    reasons = dict(
        zip((ids[0] for ids in batch["response_ids"]), batch["finish_reason"], strict=True)
    )
    assert {i: r for i, r in reasons.items() if r == "stop"}.keys() <= {2, 3, 5, 7}
    assert {r for i, r in reasons.items() if i in (2, 3, 5, 7)} == {"stop"}


def test_stop_tokens_come_from_the_generation_config_and_the_tokenizer(tokenizer):
    model = torch.nn.Module()
    assert stop_ids(model, tokenizer) == {2}
    model.generation_config = type("Config", (), {"eos_token_id": 7})
    assert stop_ids(model, tokenizer) == {2, 7}
    model.generation_config.eos_token_id = [3, 5]
    assert stop_ids(model, tokenizer) == {2, 3, 5}


def test_a_finished_sample_frees_its_slot_at_once(bench, prompts):
    lab = bench()
    batch = lab.generate(prompts, slots=8, max_new_tokens=60)
    decoded = [n for n, width in lab.shapes if width == 1]
    lengths = [len(ids) - 1 for ids in batch["response_ids"]]  # the first comes from the prompt
    assert sum(decoded) <= sum(lengths) + 3 * 60  # padding to four rows, at the very end only
    waves = [lengths[i : i + 8] for i in range(0, len(lengths), 8)]
    assert sum(decoded) < 0.7 * sum(8 * max(wave) for wave in waves)
    assert max(decoded) == 8


def test_a_prompt_goes_through_the_model_once(bench, prompts):
    for slots in (1, 4, 64):
        lab = bench()
        lab.generate(prompts, slots=slots, group_size=6)
        prefilled = [n for n, width in lab.shapes if width > 1]
        assert sum(prefilled) == len(prompts)
        assert len(prefilled) == 3  # up to 16, 32 and 48 tokens


@pytest.mark.parametrize(("limit", "allowed"), [({"top_k": 3}, 3), ({"top_p": 0.5}, None)])
def test_top_k_and_top_p_restrict_what_is_sampled(bench, prompts, limit, allowed):
    lab = bench()
    batch = lab.generate(prompts, temperature=1.5, max_new_tokens=25, **limit)
    different = 0
    for (prompt, response), recorded in zip(rows(batch), batch["rollout_logprobs"], strict=True):
        logprobs = (full_logits(lab.model, prompt, response) / 1.5).log_softmax(-1)
        chosen = logprobs[range(len(response)), response]
        rank = (logprobs > chosen[:, None]).sum(-1)
        before = torch.where(logprobs > chosen[:, None], logprobs.exp(), 0.0).sum(-1)
        assert (rank < allowed if allowed else before < 0.5 + 1e-5).all()
        different += int((rank > 0).sum())
        # Recorded over the whole vocabulary, not over what was left.
        torch.testing.assert_close(torch.tensor(recorded), chosen, rtol=0, atol=1e-4)
    assert different > 20


def test_progress_ends_with_everything_done(bench, prompts):
    lab = bench()
    start = time.monotonic()
    batch = lab.generate(prompts)
    elapsed_s = time.monotonic() - start
    tokens = sum(map(len, batch["response_ids"]))
    last = {"tokens": tokens, "sequences_done": 33, "sequences_total": 33}
    assert lab.reports[-1] == last
    assert len(lab.reports) <= 2 + elapsed_s * 5


@pytest.mark.parametrize(
    ("columns", "sampling", "error", "message"),
    [
        ({"prompt_ids": [[9], []]}, {}, DataError, "group 101 is empty"),
        ({"prompt_ids": [[9], [96]]}, {}, DataError, "from 96 to 96.* has 96"),
        ({"prompt_ids": [[9], [9] * 505]}, {}, ConfigError, "505 tokens and 12 new.*512"),
        ({"group_id": [4, 4]}, {}, ShapeError, "group_id: 4 occurs twice"),
        ({}, {"slots": 0}, StateError, "2 prompts and 0 slots"),
    ],
)
def test_what_cannot_be_generated_is_refused(bench, prompts, columns, sampling, error, message):
    with pytest.raises(error, match=message):
        bench().generate(prompts.slice(0, 2).with_columns(columns), **sampling)


def test_no_prompts_are_refused(bench, prompts):
    with pytest.raises(StateError, match="0 prompts"):
        bench().generate(prompts.slice(0, 0))


def test_a_policy_that_has_diverged_is_an_error_and_leaves_nothing_behind(bench, prompts):
    lab = bench()
    before = lab.generate(prompts)
    good = copy.deepcopy(lab.model.state_dict())
    lab.model.model.norm.weight.data[3] = float("nan")
    with pytest.raises(StateError, match=r"token 0 of sample 0 of group 103 is nan"):
        lab.generate(prompts)
    lab.model.load_state_dict(good)
    assert lab.generate(prompts).table.equals(before.table)


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # with tied and with separate output weights
def test_published_weights_are_the_ones_sampled_from(bench, prompts, name, tmp_path, make_model):
    trained = make_model(name, seed=1)
    folder = tmp_path / "weights-4"
    published = publish(distinct_tensors(trained).items(), folder, 4)
    lab = bench(name)
    before = lab.generate(prompts)
    held = lab.engine.load_weights(folder)
    assert (held["version"], held["hash"]) == (4, published["hash"])
    after = lab.generate(prompts)
    assert set(after["weights_version"]) == {4}
    assert after["response_ids"] != before["response_ids"]
    assert after["response_ids"] == bench(model=trained).generate(prompts)["response_ids"]


def test_models_with_another_kind_of_state_are_refused(tokenizer):
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 2}
    hybrid = Qwen3NextConfig(
        **sizes,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=0,
        layer_types=["linear_attention", "full_attention"],
    )
    with torch.device("meta"), pytest.raises(DataError, match=r"kind.*linear_attention"):
        NativeEngine(AutoModelForCausalLM.from_config(hybrid), tokenizer)
    bloom = BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=1)
    with torch.device("meta"), pytest.raises(DataError, match="takes no position_ids"):
        NativeEngine(AutoModelForCausalLM.from_config(bloom), tokenizer)


@pytest.mark.gpu
def test_greedy_on_a_gpu_is_what_the_cpu_generates(bench, prompts):
    on_cpu = bench()
    on_gpu = bench(model=copy.deepcopy(on_cpu.model).to("cuda"))
    options = {"temperature": 0, "group_size": 1, "max_new_tokens": 30}
    expected = on_cpu.generate(prompts, **options)["response_ids"]
    assert on_gpu.generate(prompts, **options)["response_ids"] == expected
