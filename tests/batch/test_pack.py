import numpy as np
import pytest
import torch

from verl_lab.batch.columns import Batch
from verl_lab.batch.pack import pack, unpack
from verl_lab.errors import ShapeError


@pytest.fixture
def batch():
    return Batch.from_dict(
        {
            "prompt_ids": [[1, 2], [3]],
            "response_ids": [[4, 5, 6], [7]],
            "response_mask": [[True, True, False], [True]],
            "advantages": [[0.5, 1.5, 2.5], [-1.0]],
        }
    )


def test_samples_lie_one_after_the_other_with_positions_of_their_own(batch):
    packed = pack(batch, "cpu")
    assert packed.input_ids.tolist() == [[1, 2, 4, 5, 6, 3, 7]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert packed.cu_seqlens.tolist() == [0, 5, 7]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.max_seqlen == 5


def test_each_response_token_is_predicted_from_the_place_before_it(batch):
    packed = pack(batch, "cpu")
    assert packed.prediction_index.tolist() == [1, 2, 3, 5]
    assert packed.target_ids.tolist() == [4, 5, 6, 7]
    after = packed.prediction_index + 1
    assert packed.input_ids[0, after].tolist() == packed.target_ids.tolist()
    assert packed.sample_index.tolist() == [0, 0, 0, 1]


def test_token_columns_come_along_in_the_same_order(batch):
    tokens = pack(batch, "cpu", ["advantages", "response_mask"]).tokens
    assert tokens["advantages"].tolist() == [0.5, 1.5, 2.5, -1.0]
    assert tokens["response_mask"].dtype == torch.bool


def test_unpacking_gives_each_row_its_values_back(batch):
    rows = unpack(torch.tensor([1.0, 2.0, 3.0, 4.0]), batch)
    assert [row.tolist() for row in rows] == [[1, 2, 3], [4]]
    with pytest.raises(ShapeError, match="4 response tokens"):
        unpack(torch.zeros(3), batch)


@pytest.mark.parametrize("column", ["prompt_ids", "response_ids"])
def test_an_empty_row_is_refused_by_its_number(column):
    rows = {"prompt_ids": [[1], [2]], "response_ids": [[3], [4]]}
    rows[column][1] = []
    with pytest.raises(ShapeError, match=f"{column}: row 1 is empty"):
        pack(Batch.from_dict(rows), "cpu")


def test_a_batch_without_rows_is_refused(batch):
    with pytest.raises(ShapeError, match="batch: has no rows"):
        pack(batch.slice(0, 0), "cpu")


def test_only_token_columns_can_be_packed(batch):
    with pytest.raises(ShapeError, match="reward: no token column"):
        pack(batch.with_columns({"reward": np.zeros(2)}), "cpu", ["reward"])
