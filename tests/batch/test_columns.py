import numpy as np
import pyarrow as pa
import pytest

from verl_lab.batch.columns import Batch
from verl_lab.errors import ShapeError


@pytest.fixture
def batch():
    return Batch.from_dict(
        {
            "group_id": [7, 7, 3],
            "prompt": ["a", "a", "b"],
            "response_ids": [[1, 2], [3], [4, 5, 6]],
            "rollout_logprobs": [[-1.0, -2.0], [-3.0], [-4.0, -5.0, -6.0]],
            "reward": [1, 0, 0.5],
        }
    )


def test_known_columns_get_their_types(batch):
    types = {name: batch.table.schema.field(name).type for name in batch.names}
    assert types["group_id"] == pa.int64()
    assert types["response_ids"] == pa.list_(pa.int32())
    assert types["rollout_logprobs"] == pa.list_(pa.float32())
    assert types["reward"] == pa.float64()


def test_a_token_column_of_another_length_is_refused_with_its_row(batch):
    with pytest.raises(ShapeError, match=r"advantages: row 1 has 2 values for the 1 tokens"):
        batch.with_columns({"advantages": [[0.0, 0.0], [0.0, 0.0], [0.0] * 3]})
    with pytest.raises(ShapeError, match="rollout_logprobs: row 2"):
        batch.with_columns({"response_ids": [[1, 2], [3], [4]]})


def test_a_row_without_token_values_is_refused(batch):
    with pytest.raises(ShapeError, match="advantages: row 1 has no values for the 1 tokens"):
        batch.with_columns({"advantages": [[0.0, 0.0], None, [0.0] * 3]})


def test_a_missing_token_is_refused_instead_of_becoming_a_number(batch):
    with pytest.raises(ShapeError, match="prompt_ids: a value is missing within a row"):
        batch.with_columns({"prompt_ids": [[1, None], [2], [3]]}).lists("prompt_ids")


def test_a_mask_needs_a_value_a_row(batch):
    with pytest.raises(ShapeError, match=r"mask: has shape \(2,\) for 3 rows"):
        batch.filter([True, False])


def test_batches_whose_columns_differ_in_type_cannot_be_joined(batch):
    other = batch.select(["prompt"]).with_columns({"answer": ["x"] * 3})
    with pytest.raises(ShapeError, match=r"Batch.concat: .*answer.* give the column one type"):
        Batch.concat([batch.with_columns({"answer": [1, 2, 3]}), other])


def test_a_column_needs_a_value_a_row(batch):
    with pytest.raises(ShapeError, match="reward: has 2 values for 3 rows"):
        batch.with_columns({"reward": [1, 2]})


def test_a_missing_column_names_those_there_are(batch):
    with pytest.raises(ShapeError, match=r"advantages: no such column; there are group_id, prompt"):
        batch["advantages"]


def test_changing_a_batch_leaves_the_old_one_as_it_was(batch):
    changed = batch.with_columns({"reward": [9, 9, 9], "answer": ["x", "y", "z"]})
    assert batch["reward"] == [1, 0, 0.5]
    assert "answer" not in batch
    assert changed["reward"] == [9, 9, 9]


def test_ragged_rows_come_without_a_copy_also_after_joining_and_slicing(batch):
    rows = Batch.concat([batch, batch]).slice(2, 3).lists("response_ids")
    assert [row.tolist() for row in rows] == [[4, 5, 6], [1, 2], [3]]
    alone = batch.lists("rollout_logprobs")
    assert not alone[0].flags.owndata


def test_rows_can_be_taken_filtered_and_repeated(batch):
    assert batch.take([2, 0])["prompt"] == ["b", "a"]
    assert batch.filter([False, True, True])["group_id"] == [7, 3]
    assert batch.take([0, 2]).repeat(2)["group_id"] == [7, 7, 3, 3]


def test_groups_are_found_by_id_wherever_their_rows_are(batch):
    assert batch.take([0, 2, 1]).groups() == {7: [0, 2], 3: [1]}


def test_ipc_and_a_mapped_file_give_back_the_same_table(batch, tmp_path):
    assert Batch.from_ipc(batch.to_ipc()).table.equals(batch.table)
    batch.write_ipc(tmp_path / "b.arrow")
    opened = Batch.open_ipc(tmp_path / "b.arrow")
    (tmp_path / "b.arrow").unlink()
    assert opened.table.equals(batch.table)


def test_pandas_and_back_keeps_rows_and_types(batch):
    back = Batch.from_pandas(batch.to_pandas())
    assert back.table.equals(batch.table)


def test_numpy_gives_one_value_a_row(batch):
    assert batch.numpy("reward").tolist() == [1, 0, 0.5]


def test_joining_fills_columns_that_one_batch_lacks(batch):
    joined = Batch.concat([batch, batch.without(["reward"])])
    assert joined["reward"][3:] == [None, None, None]


def test_the_notebook_view_escapes_what_a_model_wrote():
    html = Batch.from_dict({"response": ["<script>alert(1)</script>"]})._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_values_that_fit_no_column_are_refused_by_name():
    with pytest.raises(ShapeError, match="response_ids: cannot be a column"):
        Batch.from_dict({"response_ids": [["x"]]})
    with pytest.raises(ShapeError, match="reward: cannot be a column of double"):
        Batch.from_dict({"reward": pa.array(["x"])})


def test_numpy_rows_make_ragged_columns():
    rows = [np.array([1, 2], dtype=np.int64), np.array([], dtype=np.int64)]
    assert Batch.from_dict({"prompt_ids": rows})["prompt_ids"] == [[1, 2], []]
