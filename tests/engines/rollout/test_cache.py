import pytest
import torch

from verl_lab.engines.rollout.cache import PromptCache, SlotCache


def prompts(lengths, layers=2):
    """Keys that say (prompt, position), ten times as large a layer on; values are the negatives."""
    cache = PromptCache()
    for layer in range(layers):
        keys = torch.zeros(len(lengths), 1, max(lengths), 2)
        for i, length in enumerate(lengths):
            keys[i, 0, :length] = torch.tensor([[i + 1.0, t + 1.0] for t in range(length)])
        keys *= 10**layer
        cache.update(keys, -keys, layer)
    return cache


def step(cache, positions, length, marks, layer=0):
    """One token a row, whose key is its mark twice."""
    cache.aim(torch.tensor(positions), length)
    new = torch.tensor(marks).reshape(-1, 1, 1, 1).expand(-1, 1, 1, 2)
    return cache.update(new, -new, layer)


def test_slots_hold_prompts_of_different_lengths_and_grow_by_a_token():
    cache = SlotCache(rows=4, length=8, max_length=100)
    two = prompts([2, 3])
    cache.load([0, 2], two, row=1, length=3)
    cache.load([1], two, row=0, length=2)
    keys, values = step(cache, [3, 2, 3], 4, [7.0, 8.0, 9.0])
    assert keys.shape == (3, 1, 4, 2)
    assert keys[0, 0].tolist() == [[2, 1], [2, 2], [2, 3], [7, 7]]
    assert keys[1, 0].tolist() == [[1, 1], [1, 2], [8, 8], [0, 0]]
    assert keys[2, 0].tolist() == [[2, 1], [2, 2], [2, 3], [9, 9]]
    assert torch.equal(values, -keys)
    second, _ = step(cache, [3, 2, 3], 4, [7.0, 8.0, 9.0], layer=1)
    assert second[1, 0].tolist() == [[10, 10], [10, 20], [8, 8], [0, 0]]


def test_a_move_takes_the_tokens_along():
    cache = SlotCache(rows=4, length=8, max_length=100)
    cache.load([0, 3], prompts([1, 3]), row=1, length=3)
    cache.load([0], prompts([1]), row=0, length=1)
    cache.move(3, 0, length=3)
    keys, _ = step(cache, [3], 4, [5.0])
    assert keys[0, 0].tolist() == [[2, 1], [2, 2], [2, 3], [5, 5]]


def test_room_is_made_without_losing_what_is_there():
    cache = SlotCache(rows=2, length=60, max_length=500)
    assert cache.length == 64
    cache.load([0, 1], prompts([3]), row=0, length=3)
    cache.make_room(64)
    assert cache.length == 64
    cache.make_room(65)
    assert cache.length == 128  # half as much again, in whole steps
    keys, _ = step(cache, [3, 100], 101, [5.0, 6.0])
    assert keys[0, 0, :5].tolist() == [[1, 1], [1, 2], [1, 3], [5, 5], [0, 0]]
    assert keys[1, 0, 100].tolist() == [6, 6]


def test_growth_stops_at_the_longest_sequence():
    cache = SlotCache(rows=1, length=300, max_length=330)
    cache.make_room(330)
    assert cache.length == 384


@pytest.mark.parametrize("cache", [PromptCache(), SlotCache(1, 8, 8)])
def test_a_new_cache_has_seen_nothing(cache):
    assert cache.get_seq_length() == 0
    assert cache.get_mask_sizes(5, 0) == (5, 0)
