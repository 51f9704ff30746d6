import pytest
import torch

from verl_lab.algos.shaping import overlong_penalty
from verl_lab.errors import ConfigError


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1), (101, -1), (5000, -1)],
)
def test_the_penalty_grows_over_the_last_20_of_100_tokens(length, expected):
    found = overlong_penalty(torch.tensor([length]), max_tokens=100, buffer=20)
    assert found.tolist() == [expected]


@pytest.mark.parametrize(("max_tokens", "buffer"), [(7, 1), (7, 3), (7, 7)])
def test_penalties_are_those_of_a_loop_in_plain_python(max_tokens, buffer):
    expected = []
    for length in range(10):
        if length <= max_tokens - buffer:
            expected.append(0.0)
        elif length <= max_tokens:
            expected.append((max_tokens - buffer - length) / buffer)
        else:
            expected.append(-1.0)
    found = overlong_penalty(torch.arange(10), max_tokens=max_tokens, buffer=buffer)
    assert found.tolist() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_a_buffer_that_does_not_fit_is_refused(buffer):
    message = f"reward.overlong_buffer: is {buffer}; use 1 to rollout.max_new_tokens=100"
    with pytest.raises(ConfigError, match=message):
        overlong_penalty(torch.tensor([1]), max_tokens=100, buffer=buffer)
