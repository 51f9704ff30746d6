import random

import pytest

from verl_lab.batch.balance import micro_batches, split_groups
from verl_lab.errors import ShapeError


def test_every_row_is_in_one_micro_batch_and_none_is_over_the_limit():
    source = random.Random(0)
    lengths = [source.randint(1, 50) for _ in range(200)]
    bins = micro_batches(lengths, 100)
    assert sorted(row for rows in bins for row in rows) == list(range(200))
    assert all(sum(lengths[row] for row in rows) <= 100 for rows in bins)
    assert len(bins) <= -(-sum(lengths) // 100) * 1.25


def test_a_row_over_the_limit_gets_a_micro_batch_of_its_own():
    assert micro_batches([5, 300, 4], 100) == [[1], [0, 2]]


def test_micro_batches_are_even_where_as_few_even_ones_fit():
    assert micro_batches([6, 4, 1, 1], 8) == [[0], [1, 2, 3]]
    assert micro_batches([2] * 6, 10) == [[0, 2, 4], [1, 3, 5]]


def test_micro_batches_stay_few_where_even_ones_would_not_fit():
    assert micro_batches([3, 3, 2, 2, 2], 6) == [[0, 1], [2, 3, 4]]


def test_no_rows_need_no_micro_batch():
    assert micro_batches([], 10) == []


def test_the_split_by_hand():
    assert micro_batches([5, 3, 9, 2, 2], 7) == [[2], [0, 3], [1, 4]]


def test_groups_stay_together_and_in_order_and_the_load_is_even():
    lengths = [5, 5, 1, 1, 3]
    assert split_groups(lengths, [0, 0, 1, 1, 2], 2) == [[0, 1], [2, 3, 4]]


def test_there_may_be_more_workers_than_groups():
    assert split_groups([1, 1], [4, 4], 3) == [[0, 1], [], []]


def test_lengths_and_groups_must_match():
    with pytest.raises(ShapeError, match="2 of them for 1"):
        split_groups([1, 1], [0], 2)
