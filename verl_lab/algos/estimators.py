"""Advantage estimators by name: what `algorithm.advantage` chooses from.

An estimator takes `Samples` and returns a value a sample [B], or a token [T], or an `Estimate`
where it has returns for a critic too. Shapes: B samples, T response tokens, P reward parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_lab.algos.advantages import (
    Baseline,
    Scale,
    gdpo_advantages,
    group_advantages,
    pass_at_k_advantages,
)
from verl_lab.algos.arguments import call_options
from verl_lab.algos.returns import discounted_returns, place_rewards, whiten
from verl_lab.algos.returns import gae as generalised_advantages
from verl_lab.errors import ConfigError, ShapeError


@dataclass(frozen=True)
class Samples:
    """The scored samples of a step as tensors."""

    rewards: Tensor
    """[B] float64."""
    group_ids: Tensor
    """[B] int64: the samples of one prompt share one."""
    lengths: Tensor
    """[B] response tokens."""
    mask: Tensor
    """[T] bool: True where the policy sampled the token."""
    sample_index: Tensor
    """[T] int64: the sample of each token."""
    kl_penalty: Tensor
    """[T] what the KL term takes from each token's reward; 0 where it is not in the reward."""
    parts: Tensor
    """[P, B] the parts of the reward, before their weights."""
    part_weights: Tensor
    """[P]."""
    is_truncated: Tensor
    """[B] bool: cut at the longest response allowed."""
    values: Tensor | None = None
    """[T] of the critic, where there is one."""
    greedy_rewards: Tensor | None = None
    """[B] the reward of the greedy response to the same prompt, where it was sampled."""

    @property
    def penalised_rewards(self) -> Tensor:
        """[B] rewards less the KL penalty of all tokens."""
        penalty = torch.where(self.mask, self.kl_penalty, 0.0).to(self.rewards.dtype)
        return self.rewards - torch.zeros_like(self.rewards).index_add_(
            0, self.sample_index, penalty
        )

    @property
    def token_rewards(self) -> Tensor:
        """[T] the reward on a sample's last token, less the KL penalty of each."""
        placed = place_rewards(self.rewards, self.sample_index, self.mask)
        return placed - torch.where(self.mask, self.kl_penalty, 0.0).to(placed.dtype)


@dataclass(frozen=True)
class Estimate:
    """Advantages, and what a critic learns."""

    advantages: Tensor
    """[T]."""
    returns: Tensor | None = None
    """[T]."""


Estimator = Callable[..., "Tensor | Estimate"]


def group(samples: Samples, *, baseline: Baseline, scale: Scale) -> Tensor:
    """A sample's reward less the baseline of its group, over a scale; see `group_advantages`."""
    return group_advantages(
        samples.penalised_rewards,
        samples.group_ids,
        baseline=baseline,
        scale=scale,
        lengths=samples.lengths,
        greedy_rewards=samples.greedy_rewards,
    )


def returns(samples: Samples, *, baseline: Baseline, scale: Scale, gamma: float = 1.0) -> Tensor:
    """A token's discounted return less the baseline of its sample: REINFORCE, REINFORCE++, ReMax.

    With `whiten` as the scale and no baseline it is REINFORCE++ (arXiv:2501.03262, sec. 3).
    """
    if scale not in ("none", "whiten"):
        raise ConfigError(
            f"algorithm.scale: {scale} divides rewards, and algorithm.advantage=returns has a "
            f"return a token; use `whiten` or `none`"
        )
    found = discounted_returns(
        samples.token_rewards, samples.sample_index, samples.mask, gamma=gamma
    )
    if baseline == "none":
        return found
    centred = group_advantages(
        samples.rewards,
        samples.group_ids,
        baseline=baseline,
        scale="none",
        lengths=samples.lengths,
        greedy_rewards=samples.greedy_rewards,
    )
    return found - (samples.rewards - centred)[samples.sample_index]


def gae(
    samples: Samples,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap_truncated: bool = False,
) -> Estimate:
    """Generalised advantages of a critic (Schulman et al. 2016, arXiv:1506.02438).

    With `bootstrap_truncated` a sample that was cut is worth, after its last token, what the
    critic said before that token; else nothing.
    """
    if samples.values is None:
        raise ConfigError(
            "algorithm.advantage=gae: the samples have no `values`; add a `critic:` section, or "
            "run the stage `values` first"
        )
    values = samples.values.to(samples.rewards.dtype)
    last = None
    if bootstrap_truncated:
        last = place_last(values, samples) * samples.is_truncated
    advantages, found = generalised_advantages(
        samples.token_rewards,
        values,
        samples.sample_index,
        samples.mask,
        gamma=gamma,
        lam=lam,
        last_values=last,
    )
    return Estimate(advantages, found)


def pass_at_k(samples: Samples) -> Tensor:
    """What the best sample of a group adds to the second best; see `pass_at_k_advantages`."""
    return pass_at_k_advantages(samples.penalised_rewards, samples.group_ids)


def gdpo(samples: Samples) -> Tensor:
    """Each part of the reward normalised in its group; see `gdpo_advantages`."""
    return gdpo_advantages(samples.parts, samples.part_weights, samples.group_ids)


ESTIMATORS: dict[str, Estimator] = {
    "group": group,
    "returns": returns,
    "gae": gae,
    "pass_at_k": pass_at_k,
    "gdpo": gdpo,
}


def estimate(
    estimator: Estimator, samples: Samples, options: Mapping[str, Any], *, baseline: str, scale: str
) -> Estimate:
    """What an estimator gives, a value a token, whitened if `scale` says so.

    Args:
        estimator: one of `ESTIMATORS`, or the user's.
        samples: the scored samples.
        options: its own numbers, by parameter.
        baseline: given to an estimator that has such a parameter.
        scale: likewise; `whiten` is done here.

    Raises:
        ConfigError: an option is no parameter of the estimator; says which there are.
        ShapeError: it returned neither a value a sample nor one a token.
    """
    arguments = call_options(
        estimator, options, {"baseline": baseline, "scale": scale}, "algorithm.advantage_options"
    )
    found = estimator(samples, **arguments)
    if not isinstance(found, Estimate):
        found = Estimate(torch.as_tensor(found))
    advantages = found.advantages
    if advantages.shape == samples.rewards.shape:
        advantages = advantages[samples.sample_index]
    if advantages.shape != samples.mask.shape:
        name = getattr(estimator, "__name__", "the estimator")
        raise ShapeError(
            f"advantages: {name} returned {tuple(found.advantages.shape)} for "
            f"{len(samples.rewards)} samples of {len(samples.mask)} tokens; return a value a "
            f"sample or a value a token"
        )
    if scale == "whiten":
        advantages = whiten(advantages, samples.mask)
    return Estimate(torch.where(samples.mask, advantages, 0.0), found.returns)


def place_last(values: Tensor, samples: Samples) -> Tensor:
    """[B] each sample's value at its last token that the policy sampled; 0 without one."""
    places = torch.arange(len(values), device=values.device)
    last = torch.full_like(samples.group_ids, -1).scatter_reduce_(
        0, samples.sample_index[samples.mask], places[samples.mask], "amax"
    )
    return torch.where(last >= 0, values[last.clamp(min=0)], 0.0)
