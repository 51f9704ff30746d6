import pytest

from verl_lab.config.schema import LabConfig
from verl_lab.engines.rollout.base import Sampling
from verl_lab.errors import ConfigError


def test_sampling_comes_from_the_config_and_survives_a_message():
    config = LabConfig.model_validate(
        {
            "model": {"name_or_path": "x"},
            "seed": 5,
            "rollout": {"max_new_tokens": 7, "temperature": 0.6, "top_k": 3, "group_size": 4},
        }
    )
    sampling = Sampling.from_config(config)
    assert sampling == Sampling(
        max_new_tokens=7, temperature=0.6, top_p=1.0, top_k=3, group_size=4, seed=5
    )
    assert Sampling(**sampling.to_dict()) == sampling


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("group_size", 0),
    ],
)
def test_a_number_out_of_range_is_refused_by_its_key(name, value):
    with pytest.raises(ConfigError, match=rf"rollout.{name}: is {value}; set it to"):
        Sampling(**{"max_new_tokens": 1, name: value})


def test_greedy_sampling_records_at_temperature_1():
    assert Sampling(max_new_tokens=1, temperature=0).logprob_temperature == 1
    assert Sampling(max_new_tokens=1, temperature=0.5).logprob_temperature == 0.5
