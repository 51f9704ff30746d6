import torch

from verl_lab.engines.rollout import prefill
from verl_lab.engines.rollout.prefill import Prefill
from verl_lab.engines.rollout.schedule import Sample


class Recorder:
    """Stands in for a policy: the logits of a prompt are its first token."""

    def __init__(self):
        self.blocks = []

    def prefill(self, prompts):
        self.blocks.append([len(ids) for ids in prompts])
        return f"cache {len(self.blocks)}", torch.tensor([[float(ids[0])] for ids in prompts])


def queue(lengths, group_size=2):
    prompts = [[10 + row] * n for row, n in enumerate(lengths)]
    samples = [
        Sample(row=row, group_id=row, sample_id=i, key=0, prompt_length=n)
        for row, n in enumerate(lengths)
        for i in range(group_size)
    ]
    policy = Recorder()
    return policy, Prefill(policy, prompts, samples)


def started(start):
    return [(s.row, s.sample_id) for s in start.samples]


def test_a_group_can_start_in_parts_and_is_computed_once():
    policy, waiting = queue([3, 5], group_size=3)
    first, second, third = (waiting.start(2) for _ in range(3))
    assert started(first) == [(0, 0), (0, 1)]
    assert started(second) == [(0, 2), (1, 0)]
    assert started(third) == [(1, 1), (1, 2)]
    assert second.places == [0, 1]
    assert second.logits.tolist() == [[10.0], [11.0]]
    assert waiting.start(2) is None
    assert policy.blocks == [[3, 5]]


def test_prompts_of_one_padded_length_go_together_the_longest_first():
    policy, waiting = queue([3, 40, 16, 33, 17], group_size=1)
    order = []
    while start := waiting.start(10):
        order.append((start.cache, started(start)))
    assert policy.blocks == [[40, 33], [17], [3, 16]]
    assert [[row for row, _ in rows] for _, rows in order] == [[1, 3], [4], [0, 2]]
    assert [cache for cache, _ in order] == ["cache 1", "cache 2", "cache 3"]


def test_a_forward_pass_stays_within_its_tokens_but_takes_a_long_prompt_alone():
    limit = prefill.MAX_TOKENS
    policy, waiting = queue([limit + 1, limit + 1, limit // 2, limit // 2, limit // 2])
    while waiting.start(4):
        pass
    half = limit // 2
    assert policy.blocks == [[limit + 1], [limit + 1], [half, half], [half]]


def test_nothing_is_computed_before_the_last_sample_of_the_block_has_started():
    policy, waiting = queue([20, 3])
    waiting.start(1)
    assert policy.blocks == [[20]]
    waiting.start(1)
    assert policy.blocks == [[20]]
    waiting.start(1)
    assert policy.blocks == [[20], [3]]
