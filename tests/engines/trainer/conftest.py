import dataclasses

import pytest
import torch

from verl_lab.batch.columns import Batch
from verl_lab.engines.trainer.attention import NAME
from verl_lab.engines.trainer.base import UpdateSettings
from verl_lab.engines.trainer.engine import PolicyTrainer
from verl_lab.engines.trainer.learner import Learner

SETTINGS = UpdateSettings(
    learning_rate=1e-2,
    total_updates=100,
    warmup_updates=0,
    lr_schedule="constant",
    weight_decay=0.0,
    max_grad_norm=1e9,
    micro_batch_tokens=10_000,
    updates_per_step=1,
    temperature=0.8,
    loss_aggregation="token-mean",
    clip_low=0.2,
    clip_high=0.2,
    kl_coef=0.0,
    kl_estimator="k3",
    max_new_tokens=8,
)


@pytest.fixture
def settings():
    def make(**changes):
        return dataclasses.replace(SETTINGS, **changes)

    return make


@pytest.fixture
def trainer(tiny_model):
    """A trainer over a random model; the reference is the same model again."""

    def make(kind="llama", dtype=torch.float64, seed=0, **arguments):
        learner = Learner(
            tiny_model(kind, dtype, NAME, seed), (0.9, 0.999), offload_optimizer=False
        )
        return PolicyTrainer(
            learner, lambda: tiny_model(kind, dtype, NAME, seed), dtype, **arguments
        )

    return make


@pytest.fixture
def batch():
    """Four groups of two samples, lengths all different, with made-up log-probabilities and
    advantages."""
    generator = torch.Generator().manual_seed(3)

    def ids(n):
        return torch.randint(3, 37, (n,), generator=generator).tolist()

    prompts = [ids(n) for n in (3, 5, 2, 7) for _ in range(2)]
    responses = [[*ids(n), 2] for n in (4, 1, 7, 3, 2, 6, 5, 1)]
    noise = [(-3 * torch.rand(len(r), generator=generator)).tolist() for r in responses]
    values = torch.randn(8, generator=generator).tolist()
    return Batch.from_dict(
        {
            "group_id": [4, 4, 9, 9, 1, 1, 6, 6],
            "prompt_ids": prompts,
            "response_ids": responses,
            "response_mask": [[True] * len(r) for r in responses],
            "rollout_logprobs": noise,
            "advantages": [[v] * len(r) for v, r in zip(values, responses, strict=True)],
        }
    )


@pytest.fixture
def ignore():
    return lambda progress: None
