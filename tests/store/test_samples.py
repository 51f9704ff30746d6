import threading

import pyarrow.parquet as pq
import pytest

from verl_lab.batch.columns import Batch
from verl_lab.errors import DataError
from verl_lab.store.folder import RunFolder
from verl_lab.store.samples import SampleStore


def samples(step, **more):
    columns = {"response": [f"{step}a", f"{step}b"], "response_ids": [[step], [step, 1]]}
    return Batch.from_dict({**columns, **more})


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
        store.write(step, 0, samples(step))
    compacted = list(folder.samples.glob("steps-*"))
    assert len(compacted) == 1
    assert pq.ParquetFile(compacted[0]).metadata.num_row_groups == 64
    assert len(list(folder.samples.iterdir())) == 1 + 6
    for step in (1, 33, 64, 65, 70):
        assert store.read(step, 0)["response"] == [f"{step}a", f"{step}b"]
    assert store.steps(0) == list(range(1, 71))


def test_each_step_keeps_its_own_columns_and_types_when_compacted(store):
    kinds = [{}, {"answer": [1, 2]}, {"answer": ["x", "y"]}]
    for step in range(1, 65):
        store.write(step, 0, samples(step, **kinds[step % 3]))
    assert store.read(63, 0).names == ["response", "response_ids", "step"]
    assert store.read(64, 0)["answer"] == [1, 2]
    assert store.read(2, 0)["answer"] == ["x", "y"]
    assert store.steps(0) == list(range(1, 65))


def test_what_was_written_last_is_read_also_after_compaction(store):
    for step in range(1, 65):
        store.write(step, 0, samples(step))
    store.write(1, 0, samples(9))
    assert store.read(1, 0)["response"] == ["9a", "9b"]
    for step in range(65, 128):
        store.write(step, 0, samples(step))
    assert store.read(1, 0)["response"] == ["9a", "9b"]


def test_a_step_is_never_missing_while_files_are_compacted(store, folder):
    store.write(1, 0, samples(1))
    lost, reads = [], 0
    is_done = threading.Event()

    def watch():
        nonlocal reads
        while not is_done.is_set():
            try:
                SampleStore(folder).read(1, 0)
                reads += 1
            except (DataError, OSError) as error:
                lost.append(error)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(300):  # the moment between looking and opening is short
        store._compact([1], 0)
        store.write(1, 0, samples(1))
    is_done.set()
    watcher.join()
    assert lost == []
    assert reads > 0


def test_a_step_without_samples_leaves_no_file(store, folder):
    store.write(1, 0, samples(1).slice(0, 0))
    assert list(folder.samples.iterdir()) == []
    with pytest.raises(DataError, match="step 1 has none in attempt 0; no step of it has any"):
        store.read(1, 0)


def test_a_crash_between_compaction_and_clean_up_changes_nothing(store, folder):
    store.write(1, 0, samples(1))
    single = folder.samples / "step-000001.a0.parquet"
    kept = single.read_bytes()
    for step in range(2, 65):
        store.write(step, 0, samples(step))
    single.write_bytes(kept)
    (folder.samples / ".steps-half.parquet").write_bytes(b"half a file")
    assert store.read(1, 0)["response"] == ["1a", "1b"]
    assert store.steps(0) == list(range(1, 65))
    for step in range(65, 128):
        store.write(step, 0, samples(step))
    assert not single.exists()
    assert store.read(1, 0)["response"] == ["1a", "1b"]
    assert store.steps(0) == list(range(1, 128))


def test_a_step_without_samples_says_which_have_some(store):
    store.write(4, 0, samples(4))
    with pytest.raises(DataError, match="step 9 has none in attempt 0; 4 to 4 have some"):
        store.read(9, 0)
