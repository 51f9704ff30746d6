"""The settings of what is learned: estimator, loss, critic, preferences."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from verl_lab.config.section import LIVE, Fraction, Section

ADVANTAGES = ("group", "returns", "gae", "pass_at_k", "gdpo")
POLICY_LOSSES = ("ppo", "gspo", "cispo", "sapo", "reinforce", "dppo")
Options = dict[str, Any]


class AlgorithmConfig(Section):
    """The estimator and the loss, as knobs that combine freely."""

    advantage: Annotated[str, LIVE] = "group"
    """How rewards become advantages: `group` (a sample's reward less a baseline), `returns` (a
    token's return less a baseline), `gae` (needs a critic), `pass_at_k`, `gdpo`, or a function of
    yours, by the name it was registered under or as `file.py:function`."""

    advantage_options: Annotated[Options, LIVE] = {}
    """Numbers of the estimator: `gamma` (returns, gae), `lam` and `bootstrap_truncated` (gae)."""

    baseline: Annotated[
        Literal["group_mean", "leave_one_out", "length_weighted", "greedy", "none"], LIVE
    ] = "group_mean"
    """What is subtracted from a reward: the mean of its group, the mean of the others (RLOO), the
    mean weighted by length (OPO), the reward of the greedy response (ReMax), nothing."""

    scale: Annotated[Literal["group_std", "batch_std", "whiten", "none"], LIVE] = "group_std"
    """What an advantage is divided by. GRPO: `group_std`; Dr.GRPO and RLOO: `none`; `whiten`: mean
    0 and deviation 1 over all tokens of the step (REINFORCE++, PPO)."""

    policy_loss: Annotated[str, LIVE] = "ppo"
    """The policy's loss: `ppo`, `gspo`, `cispo`, `sapo`, `reinforce`, `dppo`, or a function of
    yours, by the name it was registered under or as `file.py:function`."""

    loss_options: Annotated[Options, LIVE] = {}
    """Numbers of the loss beside the clips: `dual_clip` (ppo), `ratio_min` and `ratio_max` (cispo),
    `tau_positive` and `tau_negative` (sapo), `delta` (dppo)."""

    loss_aggregation: Annotated[
        Literal[
            "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
        ],
        LIVE,
    ] = "token-mean"
    """How token losses become one number. Dr.GRPO: `seq-mean-token-sum-norm`, over
    `rollout.max_new_tokens`."""

    clip_low: Annotated[Fraction, LIVE] = 0.2
    """How far below 1 the probability ratio may go before its gradient stops (ppo, gspo)."""

    clip_high: Annotated[PositiveFloat, LIVE] = 0.2
    """How far above 1; DAPO's clip-higher is 0.28."""

    entropy_coef: Annotated[NonNegativeFloat, LIVE] = 0.0
    """Weight of the entropy bonus."""

    kl_coef: Annotated[NonNegativeFloat, LIVE] = 0.0
    """Weight of the KL term to the reference. 0 at the start loads no reference."""

    kl_estimator: Annotated[Literal["k1", "k2", "k3", "straight_through"], LIVE] = "k3"
    """Estimator of that KL term."""

    kl_in: Annotated[Literal["loss", "reward"], LIVE] = "loss"
    """Where the KL term goes: added to the loss, or taken from each token's reward (then `k1` is
    the right estimator)."""

    kl_target: Annotated[PositiveFloat | None, LIVE] = None
    """A KL to the reference to keep to: `kl_coef` is its start and then follows the measured KL.
    Unset: it stays."""

    mask_truncated: Annotated[bool, LIVE] = False
    """Leave responses that were cut at `rollout.max_new_tokens` out of the loss (DAPO's overlong
    filtering)."""

    dynamic_sampling_rounds: Annotated[NonNegativeInt, LIVE] = 0
    """Sample at most so many times more to replace groups whose rewards are all equal (DAPO); what
    is more than the step needs is thrown away. 0 is off."""

    correction: Annotated[
        Literal["auto", "none", "tis", "mis", "sequence_tis", "sequence_mis", "geometric_filter"],
        LIVE,
    ] = "auto"
    """Importance weights for the difference between the policy that sampled and the trainer's, with
    rho their ratio: per token cut above (`tis`) or zero outside the bounds (`mis`), the same with
    the product over a response, or responses left out whose mean is outside. `auto`: `tis` where
    sampling runs ahead (`pipeline.max_staleness`), else `none`."""

    correction_bounds: Annotated[tuple[float, float], LIVE] = (0.5, 2.0)
    """Lowest and highest ratio of `correction`."""

    bypass: Annotated[bool, LIVE] = False
    """Take the rollout's log-probabilities as the old ones, so that the loss's own ratio is the
    correction."""


class CriticConfig(Section):
    """The critic of PPO: estimates returns token by token, beside the policy in the trainer."""

    name_or_path: str | None = None
    """Its initial weights: a model, a run folder of a reward model, or `policy` for a head on the
    policy's own trunk. Unset: those of the policy, in a model of its own."""

    learning_rate: Annotated[PositiveFloat, LIVE] = 1e-5
    """Of its own AdamW."""

    value_clip: Annotated[PositiveFloat | None, LIVE] = 0.5
    """How far a value may move from its old one before its gradient stops, in units of reward."""

    warmup_steps: NonNegativeInt = 0
    """First steps that train the critic alone."""

    value_coef: Annotated[PositiveFloat, LIVE] = 0.5
    """Weight of the value loss where the trunk is the policy's."""


class PreferenceConfig(Section):
    """Learning from pairs (or from single responses with a label, for `kto`)."""

    loss: Annotated[Literal["dpo", "ipo", "hinge", "rdpo", "kto"], LIVE] = "dpo"
    """The loss of the policy; cDPO is `dpo` with `label_smoothing`."""

    beta: Annotated[PositiveFloat, LIVE] = 0.1
    """How strongly the reference holds."""

    options: Annotated[Options, LIVE] = {}
    """Numbers of the loss: `label_smoothing` (dpo, rdpo), `desirable_weight` and
    `undesirable_weight` (kto), `centre_coef` (reward models)."""


class LoraConfig(Section):
    """Low-rank adapters in place of training all weights; the reference is the policy without
    them."""

    rank: Annotated[int, Field(ge=1)] = 16
    """Rank of each adapter."""

    alpha: PositiveFloat = 32.0
    """Its scale is alpha / rank."""

    target_modules: str | list[str] = "all-linear"
    """Names of the layers that get one."""
