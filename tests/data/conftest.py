import pytest

from verl_lab.config.load import load_config
from verl_lab.config.schema import ModelConfig
from verl_lab.models.load import load_tokenizer

TINY = "package://verl_lab/models/tiny_policy"


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(ModelConfig(name_or_path=TINY))


@pytest.fixture
def settings():
    def make(**sections):
        return load_config({"model": {"name_or_path": TINY}, **sections})

    return make
