import pytest

from verl_lab.engines.rollout.schedule import Sample, Slots


def sample(number):
    return Sample(row=0, group_id=0, sample_id=number, key=0, prompt_length=4)


def filled(n, num_slots):
    slots = Slots(num_slots)
    for i in range(n):
        slots.put(i, sample(i))
    return slots


def finish(slots, *numbers):
    for s in slots.samples:
        if s.sample_id in numbers:
            s.finish_reason = "stop"
    return slots.release_finished()


def numbers(slots):
    return [s.sample_id for s in slots.samples]


def test_a_sample_grows_until_a_stop_token_or_the_limit():
    one, two = sample(0), sample(1)
    for token in (8, 9):
        one.add(token, -0.5, stop_ids=frozenset({9}), max_new_tokens=3)
        two.add(8, -0.25, stop_ids=frozenset({9}), max_new_tokens=2)
    assert (one.response_ids, one.finish_reason) == ([8, 9], "stop")
    assert (two.logprobs, two.finish_reason) == ([-0.25, -0.25], "length")
    assert one.length == 5  # four of the prompt, and all but the newest


def test_a_stop_token_at_the_limit_is_a_stop():
    one = sample(0)
    one.add(9, -0.5, stop_ids=frozenset({9}), max_new_tokens=1)
    assert one.finish_reason == "stop"


def test_freed_slots_are_offered_before_new_ones():
    slots = filled(4, num_slots=6)
    assert slots.free == [4, 5]
    assert finish(slots, 1, 2) == 2
    assert slots.free == [1, 2, 4, 5]


@pytest.mark.parametrize(
    ("finished", "order", "moves"),
    [
        ([], [0, 1, 2, 3, 4], []),
        ([4], [0, 1, 2, 3], []),
        ([1], [0, 4, 2, 3], [(4, 1)]),
        ([0, 1], [4, 3, 2], [(4, 0), (3, 1)]),
        ([1, 4], [0, 3, 2], [(3, 1)]),
        ([0, 2, 3], [4, 1], [(4, 0)]),
        ([0, 1, 2, 3, 4], [], []),
    ],
)
def test_the_last_samples_close_the_gaps(finished, order, moves):
    slots = filled(5, num_slots=8)
    finish(slots, *finished)
    done = [(source, target, s.sample_id) for source, target, s in slots.compact()]
    assert numbers(slots) == order
    assert done == [(source, target, source) for source, target in moves]
    assert slots.free == list(range(len(order), 8))


def test_a_taken_slot_is_not_given_away():
    with pytest.raises(AssertionError, match="slot 0 is taken"):
        filled(1, num_slots=2).put(0, sample(1))
