import numpy as np
import pytest

from verl_lab.rewards.lengths import length_parts

LENGTHS = np.array([0, 10, 15, 20])


def test_length_is_the_share_of_the_tokens_allowed():
    found = length_parts("length", LENGTHS, max_new_tokens=20, overlong_buffer=10)
    assert found.tolist() == [0, 0.5, 0.75, 1]
    assert found.dtype == np.float64


@pytest.mark.parametrize(("buffer", "expected"), [(10, [0, 0, -0.5, -1]), (4, [0, 0, 0, -1])])
def test_overlong_falls_to_minus_one_over_the_buffer(buffer, expected):
    found = length_parts("overlong", LENGTHS, max_new_tokens=20, overlong_buffer=buffer)
    assert found.tolist() == expected
    assert found.dtype == np.float64
