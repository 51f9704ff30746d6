"""Recipes as presets: a few documented keys each, which the user's own keys override.

A preset adds no behaviour. What it sets could be written in the config instead, and mixes freely
with the presets of others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Objective = Literal["policy", "sft", "preference", "reward_model"]


@dataclass(frozen=True)
class Preset:
    """What a recipe's name stands for."""

    summary: str
    """One line, with the paper."""
    sets: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys and their values."""
    objective: Objective = "policy"
    """What the trainer minimises."""
    is_online: bool = True
    """Whether a step samples responses; else they come with the data."""


def _group(baseline: str, scale: str) -> dict[str, Any]:
    return {
        "algorithm.advantage": "group",
        "algorithm.baseline": baseline,
        "algorithm.scale": scale,
    }


def _returns(baseline: str, scale: str) -> dict[str, Any]:
    return {**_group(baseline, scale), "algorithm.advantage": "returns"}


KL_IN_REWARD = {"algorithm.kl_in": "reward", "algorithm.kl_estimator": "k1"}

PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        "group-relative policy optimisation (arXiv:2402.03300)",
        _group("group_mean", "group_std"),
    ),
    "dr_grpo": Preset(
        "GRPO without the bias of its normalisers (arXiv:2503.20783)",
        {
            **_group("group_mean", "none"),
            "algorithm.loss_aggregation": "seq-mean-token-sum-norm",
        },
    ),
    "rloo": Preset(
        "REINFORCE with the mean of the other samples as its baseline (arXiv:2402.14740)",
        {
            **_group("leave_one_out", "none"),
            **KL_IN_REWARD,
            "algorithm.policy_loss": "reinforce",
            "algorithm.loss_aggregation": "seq-mean-token-sum",
        },
    ),
    "reinforce": Preset(
        "the policy gradient with a token's return, and nothing else (Williams 1992)",
        {
            **_returns("none", "none"),
            **KL_IN_REWARD,
            "algorithm.policy_loss": "reinforce",
            "rollout.group_size": 1,
        },
    ),
    "reinforce_plus_plus": Preset(
        "returns whitened over the batch, no critic (arXiv:2501.03262)",
        {**_returns("none", "whiten"), **KL_IN_REWARD, "rollout.group_size": 1},
    ),
    "reinforce_plus_plus_baseline": Preset(
        "rewards less their group's mean, whitened over the batch (arXiv:2501.03262)",
        {**_group("group_mean", "whiten"), "algorithm.kl_estimator": "k2"},
    ),
    "remax": Preset(
        "the reward of the greedy response as the baseline (arXiv:2310.10505)",
        {
            **_returns("greedy", "none"),
            **KL_IN_REWARD,
            "algorithm.policy_loss": "reinforce",
            "rollout.group_size": 1,
        },
    ),
    "opo": Preset(
        "the baseline of least variance on-policy, weighted by length (arXiv:2505.23585)",
        {**_group("length_weighted", "none"), "algorithm.policy_loss": "reinforce"},
    ),
    "dapo": Preset(
        "clip-higher, token mean, dynamic sampling, no KL (arXiv:2503.14476)",
        {
            **_group("group_mean", "group_std"),
            "algorithm.clip_high": 0.28,
            "algorithm.loss_aggregation": "token-mean",
            "algorithm.dynamic_sampling_rounds": 4,
            "algorithm.kl_coef": 0.0,
        },
    ),
    "gspo": Preset(
        "one ratio a sequence (arXiv:2507.18071)",
        {
            **_group("group_mean", "group_std"),
            "algorithm.policy_loss": "gspo",
            "algorithm.clip_low": 3e-4,
            "algorithm.clip_high": 4e-4,
            "algorithm.loss_aggregation": "seq-mean-token-mean",
        },
    ),
    "cispo": Preset(
        "clipped importance weights, a gradient for every token (arXiv:2506.13585)",
        {**_group("group_mean", "group_std"), "algorithm.policy_loss": "cispo"},
    ),
    "sapo": Preset(
        "a soft gate in place of the clip (arXiv:2511.20347)",
        {
            **_group("group_mean", "group_std"),
            "algorithm.policy_loss": "sapo",
            "algorithm.loss_aggregation": "seq-mean-token-mean",
        },
    ),
    "dppo": Preset(
        "a mask by the change of probability in place of the clip (arXiv:2602.04879)",
        {**_group("group_mean", "group_std"), "algorithm.policy_loss": "dppo"},
    ),
    "gdpo": Preset(
        "each part of the reward normalised for itself (arXiv:2601.05242)",
        {"algorithm.advantage": "gdpo", "algorithm.scale": "whiten"},
    ),
    "pass_at_k": Preset(
        "what the best sample of a group adds to the second best (arXiv:2505.15201)",
        {"algorithm.advantage": "pass_at_k", "algorithm.scale": "none"},
    ),
    "ppo": Preset(
        "PPO with a critic and generalised advantages (arXiv:1707.06347, arXiv:1506.02438)",
        {
            "algorithm.advantage": "gae",
            "algorithm.advantage_options": {"gamma": 1.0, "lam": 0.95},
            "algorithm.baseline": "none",
            "algorithm.scale": "whiten",
            **KL_IN_REWARD,
            "rollout.group_size": 1,
            "critic": {},
        },
    ),
    "sft": Preset(
        "supervised fine-tuning on given responses",
        {"algorithm.loss_aggregation": "token-mean"},
        objective="sft",
        is_online=False,
    ),
    "reward_model": Preset(
        "a reward model from pairs (Bradley & Terry; arXiv:2203.02155)",
        objective="reward_model",
        is_online=False,
    ),
    "dpo": Preset(
        "direct preference optimisation (arXiv:2305.18290)",
        {"preference.loss": "dpo"},
        objective="preference",
        is_online=False,
    ),
    "cdpo": Preset(
        "DPO where some labels are wrong (Mitchell 2023)",
        {"preference.loss": "dpo", "preference.options": {"label_smoothing": 0.1}},
        objective="preference",
        is_online=False,
    ),
    "rdpo": Preset(
        "DPO with the label noise taken out of the gradient (arXiv:2403.00409)",
        {"preference.loss": "rdpo", "preference.options": {"label_smoothing": 0.1}},
        objective="preference",
        is_online=False,
    ),
    "ipo": Preset(
        "a squared loss around a margin (arXiv:2310.12036)",
        {"preference.loss": "ipo"},
        objective="preference",
        is_online=False,
    ),
    "hinge": Preset(
        "a hinge loss on the margin (arXiv:2305.10425)",
        {"preference.loss": "hinge"},
        objective="preference",
        is_online=False,
    ),
    "kto": Preset(
        "single responses that are good or bad (arXiv:2402.01306)",
        {"preference.loss": "kto"},
        objective="preference",
        is_online=False,
    ),
    "online_dpo": Preset(
        "DPO on the best and the worst of each group just sampled (arXiv:2402.04792)",
        {"preference.loss": "dpo"},
        objective="preference",
    ),
}
"""By the name that `recipe` gives in the config."""


def describe_preset(name: str) -> str:
    """What a recipe's name stands for and sets, on a line each."""
    preset = PRESETS.get(name)
    if preset is None:
        return f"{name}: a function of your own, which sets nothing"
    lines = [f"{name}: {preset.summary}"]
    lines += [f"  {key}: {_text(value)}" for key, value in preset.sets.items()]
    return "\n".join(lines)


def describe_recipe(name: str, tree: Mapping[str, Any]) -> str:
    """One line for a recipe: what it sets, and which of these keys are set otherwise.

    Args:
        name: the recipe.
        tree: the resolved config as plain data.
    """
    preset = PRESETS.get(name)
    if preset is None or not preset.sets:
        return name
    parts = []
    for key, value in preset.sets.items():
        found: Any = tree
        for part in key.split("."):
            found = found[part] if isinstance(found, Mapping) else None
        is_same = found == value or (value == {} and found is not None)
        parts.append(f"{key}={_text(value)}" if is_same else f"{key}={_text(found)} (yours)")
    return f"{name} sets {', '.join(parts)}"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_text(v)}" for k, v in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def apply_preset(tree: dict[str, Any]) -> dict[str, Any]:
    """Puts what the tree's recipe sets into the tree, where the user has set nothing.

    Returns:
        What it set, by dotted key.
    """
    preset = PRESETS.get(tree.get("recipe", "grpo"))
    applied: dict[str, Any] = {}
    for key, value in ({} if preset is None else preset.sets).items():
        section, name = tree, key
        while "." in name:
            part, _, name = name.partition(".")
            child = section.setdefault(part, {})
            if not isinstance(child, dict):
                break  # the user's own mistake, which validation names
            section = child
        else:
            if name not in section:
                section[name] = dict(value) if isinstance(value, Mapping) else value
                applied[key] = value
    return applied
