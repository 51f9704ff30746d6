import numpy as np
import pytest

from verl_lab.data.entries import decode, encode
from verl_lab.errors import DataError


@pytest.mark.parametrize(
    "entry",
    [
        {"a": [1, 2.5, None, True, "é"]},
        {"board": ((1, 0), (0, 1)), "moves": [("a", 1)]},
        {1: "red", 2: {(0, 1): "edge"}},
        {},
        (),
    ],
)
def test_an_entry_comes_back_as_it_was(entry):
    assert decode(encode(entry)) == entry


def test_numbers_of_numpy_come_back_as_numbers():
    assert decode(encode({"n": np.int64(3), "x": np.float32(0.5)})) == {"n": 3, "x": 0.5}


def test_what_would_not_come_back_is_refused():
    with pytest.raises(
        DataError, match=r"task: a problem holds .* a complex, which cannot be kept"
    ):
        encode({"z": 1j})
