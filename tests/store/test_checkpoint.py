import pytest

from verl_lab.store.checkpoint import MANIFEST, problems, seal


@pytest.fixture
def sealed(tmp_path):
    draft = tmp_path / ".draft"
    (draft / "trainer").mkdir(parents=True)
    (draft / "state.json").write_text("{}")
    (draft / "trainer" / "model.bin").write_bytes(b"weights")
    seal(draft, tmp_path / "step-1")
    return tmp_path / "step-1"


def test_a_sealed_folder_is_whole_and_has_its_name(sealed):
    assert problems(sealed) == []
    assert not sealed.with_name(".draft").exists()
    assert (sealed / MANIFEST).exists()


def test_what_is_missing_cut_or_changed_is_named(sealed):
    model = sealed / "trainer" / "model.bin"
    model.write_bytes(b"weighty")
    assert problems(sealed) == ["trainer/model.bin is damaged"]
    model.write_bytes(b"weig")
    assert problems(sealed) == ["trainer/model.bin has 4 bytes of 7"]
    model.unlink()
    assert problems(sealed) == ["trainer/model.bin is missing"]


def test_a_folder_without_its_manifest_is_no_checkpoint(sealed):
    (sealed / MANIFEST).unlink()
    assert problems(sealed) == [f"{MANIFEST} is missing or damaged"]


@pytest.mark.parametrize("text", ["[]", '{"a": 3}', '{"a": {}}', "3", "no json"])
def test_a_manifest_of_another_shape_is_reported_as_damage(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    assert problems(tmp_path) == ["manifest.json is missing or damaged"]
