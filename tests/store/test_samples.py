import pyarrow.parquet as pq
import pytest

from verl_lab.batch.columns import Batch
from verl_lab.errors import DataError
from verl_lab.store.folder import RunFolder
from verl_lab.store.samples import SampleStore


def samples(step, extra=False):
    columns = {"response": [f"{step}a", f"{step}b"], "response_ids": [[step], [step, 1]]}
    return Batch.from_dict({**columns, **({"note": ["n", "m"]} if extra else {})})


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path, "run", "run")


@pytest.fixture
def store(folder):
    return SampleStore(folder)


def test_a_step_comes_back_as_written_with_its_number(store):
    store.write(3, 0, samples(3))
    back = store.read(3, 0)
    assert back["response"] == ["3a", "3b"]
    assert back["step"] == [3, 3]


def test_attempts_are_apart(store):
    store.write(1, 0, samples(1))
    store.write(1, 1, samples(9))
    assert store.read(1, 0)["response"] == ["1a", "1b"]
    assert store.read(1, 1)["response"] == ["9a", "9b"]


def test_many_files_become_one_with_a_row_group_a_step(store, folder):
    for step in range(1, 71):
        store.write(step, 0, samples(step, extra=step > 60))
    compacted = list(folder.samples.glob("steps-*"))
    assert len(compacted) == 1
    assert pq.ParquetFile(compacted[0]).metadata.num_row_groups == 64
    assert len(list(folder.samples.iterdir())) == 1 + 6
    for step in (1, 33, 64, 65, 70):
        assert store.read(step, 0)["response"] == [f"{step}a", f"{step}b"]
    assert store.steps(0) == list(range(1, 71))


def test_a_crash_between_compaction_and_clean_up_changes_nothing(store, folder):
    store.write(1, 0, samples(1))
    kept = (folder.samples / "step-000001.a0.parquet").read_bytes()
    for step in range(2, 65):
        store.write(step, 0, samples(step))
    (folder.samples / "step-000001.a0.parquet").write_bytes(kept)
    (folder.samples / ".steps-half.parquet").write_bytes(b"half a file")
    assert store.read(1, 0)["response"] == ["1a", "1b"]
    assert store.steps(0) == list(range(1, 65))


def test_a_step_without_samples_says_which_have_some(store):
    store.write(4, 0, samples(4))
    with pytest.raises(DataError, match="step 9 has none; 4 to 4 have some"):
        store.read(9, 0)
