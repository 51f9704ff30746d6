"""Estimators of KL(policy || reference) from samples of the policy (Schulman,
joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from verl_lab.algos.arguments import require_choice, require_flat

Estimator = Literal["k1", "k2", "k3", "straight_through"]
MAX_LOG_RATIO = 20.0
"""Keeps the exponential finite in float32 whatever the policies are."""

MAX_KL = 10.0


def kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """One estimate a token. With d = logprobs - ref_logprobs:

    - `k1` = d: unbiased, may be negative; as a loss its gradient has zero mean, so use it in a
      reward
    - `k2` = d² / 2: biased value, whose gradient is that of the reverse KL
    - `k3` = exp(-d) + d - 1: unbiased and never negative; its gradient is that of the forward KL
    - `straight_through`: the value of k3 with the gradient of k2

    Args:
        logprobs: [T]; the only input that gets a gradient. There is no mask here: put 0 where
            nothing trains, in both, and the estimate is 0.
        ref_logprobs: [T].
        estimator: one of the above.

    Returns:
        [T]; d is clamped to ±20 and the estimate to ±10, where the gradient stops.
        `straight_through` keeps its gradient up to the first bound.
    """
    require_flat(logprobs=logprobs, ref_logprobs=ref_logprobs)
    require_choice("estimator", estimator, get_args(Estimator))
    d = (logprobs - ref_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        value = d
    elif estimator == "k2":
        value = d.square() / 2
    else:
        # Not exp(-d) + d - 1: near 0 float32 loses it all, and makes it negative.
        value = (-d).expm1() + d
    value = value.clamp(-MAX_KL, MAX_KL)
    if estimator == "straight_through":
        k2 = d.square() / 2
        value = value.detach() + (k2 - k2.detach())
    return value


def adapted_coefficient(
    coefficient: float,
    measured_kl: float,
    *,
    target: float,
    num_samples: int,
    horizon: int = 10_000,
) -> float:
    """A KL coefficient that follows the KL it is to hold (Ziegler et al. 2019, arXiv:1909.08593,
    sec. 2.2).

        beta * (1 + clip(measured / target - 1, -0.2, 0.2) * num_samples / horizon)

    Args:
        coefficient: beta until now.
        measured_kl: to the reference, in the unit of `target`.
        target: the KL to keep to, above 0.
        num_samples: samples since the last change.
        horizon: samples over which a fifth more or less builds up.

    Returns:
        The next beta.
    """
    error = min(max(measured_kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * num_samples / horizon)
