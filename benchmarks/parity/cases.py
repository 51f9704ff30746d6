"""What is compared: a setting of TRL beside ours, and where the two define something differently.

No imports but the standard library: both environments read this file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["policy", "rloo", "advantages", "pairs", "kto", "reward_model"]

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
"""TRL's `epsilon` and `epsilon_high`, where a case has no others."""
BETA = 0.3
"""Of preferences."""
REWARD_WEIGHTS = {"reward": 1.0, "second_reward": 0.5}
GSPO_TRL = {"epsilon": 3e-4, "epsilon_high": 4e-4, "importance_sampling_level": "sequence"}
GSPO = {"policy_loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}
KL_TRL, KL = {"beta": 0.05, "use_bias_correction_kl": False}, {"kl_coef": 0.05}


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    name: str
    kind: Kind
    trl: dict[str, Any]
    """Arguments of TRL's config."""
    ours: dict[str, Any]
    """Settings of our trainer, or arguments of our estimator."""
    note: str = ""
    """Where and why a definition differs."""
    agrees: bool = True
    factor: float = 1.0
    """What ours is multiplied with before the comparison; not 1 where definitions differ by it."""
    num_micro_batches: int = 1
    masks_truncated: bool = False
    """Whether the response without an end trains nothing."""
    columns: tuple[str, ...] = ("reward",)
    """The rewards, or the margin of a reward model."""
    reference: str = "reference"
    """The model that the policy is held to."""


def policy_cases() -> list[Case]:
    """GRPO's losses, each without and with a KL term."""
    losses: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
        ("`grpo`", {"loss_type": "grpo"}, {"loss_aggregation": "seq-mean-token-mean"}, ""),
        ("`bnpo`", {"loss_type": "bnpo"}, {"loss_aggregation": "token-mean"}, ""),
        (
            "`dr_grpo`",
            {"loss_type": "dr_grpo"},
            {"loss_aggregation": "seq-mean-token-sum-norm"},
            "Divides by the longest response allowed: TRL's `max_completion_length`, our "
            "`rollout.max_new_tokens`.",
        ),
        ("`dapo`", {"loss_type": "dapo"}, {"loss_aggregation": "token-mean"}, ""),
        (
            "`cispo`",
            {"loss_type": "cispo", "epsilon_high": 5.0},
            {
                "policy_loss": "cispo",
                "loss_aggregation": "token-mean",
                "loss_options": {"ratio_max": 5.0},
            },
            "TRL's `epsilon_high` is here the bound of the ratio itself, as our `ratio_max` is; "
            "at its default no ratio could weigh more than 0.2.",
        ),
        (
            "`sapo`",
            {"loss_type": "sapo"},
            {"policy_loss": "sapo", "loss_aggregation": "seq-mean-token-mean"},
            "",
        ),
        (
            "`grpo`, `importance_sampling_level=sequence` (GSPO)",
            {"loss_type": "grpo", **GSPO_TRL},
            {"loss_aggregation": "seq-mean-token-mean", **GSPO},
            "",
        ),
        (
            "`luspo`",
            {"loss_type": "luspo", **GSPO_TRL},
            {"loss_aggregation": "seq-mean-token-sum", **GSPO},
            "Our `gspo` with another aggregation.",
        ),
    ]
    cases = []
    for name, trl, ours, note in losses:
        cases.append(Case(name, "policy", trl, ours, note))
        cases.append(Case(f"{name}, KL", "policy", {**trl, **KL_TRL}, {**ours, **KL}))
    return cases


def policy_variants() -> list[Case]:
    """Options of GRPO's losses, micro-batches, and a response that trains nothing."""
    grpo, seq_mean = {"loss_type": "grpo"}, {"loss_aggregation": "seq-mean-token-mean"}
    dapo, token_mean = {"loss_type": "dapo"}, {"loss_aggregation": "token-mean"}
    masks = {"mask_truncated_completions": True}
    return [
        Case(
            "`grpo`, `delta`",
            "policy",
            {**grpo, "delta": 3.0},
            {**seq_mean, "loss_options": {"dual_clip": 3.0}},
            "Dual clip by another name: it acts where the advantage is negative.",
        ),
        Case(
            "`grpo`, KL as TRL has it by default",
            "policy",
            {**grpo, "beta": 0.05},
            {**seq_mean, **KL},
            "TRL's `use_bias_correction_kl` multiplies each token's k3 by the ratio, which has a "
            "gradient; we have no such estimator. The other rows set it to False.",
            agrees=False,
        ),
        Case(
            "`grpo`, KL to a policy further away",
            "policy",
            {**grpo, **KL_TRL},
            {**seq_mean, **KL},
            "We hold a token's estimate at 10, where its gradient stops; k3 gets there where the "
            "reference gives the token 13 times the policy's probability.",
            agrees=False,
            reference="far_reference",
        ),
        Case(
            "`dapo`, entropy bonus",
            "policy",
            {**dapo, "entropy_coef": 0.05},
            {**token_mean, "entropy_coef": 0.05},
        ),
        Case(
            "`grpo`, entropy bonus",
            "policy",
            {**grpo, "entropy_coef": 0.05},
            {**seq_mean, "entropy_coef": 0.05},
            "TRL's entropy is a mean over tokens whatever the loss; ours is aggregated as the loss "
            "is.",
            agrees=False,
        ),
        Case(
            "`grpo`, two micro-batches",
            "policy",
            grpo,
            seq_mean,
            "Of equally many samples, as TRL's always are; ours need not be.",
            num_micro_batches=2,
        ),
        Case("`dapo`, two micro-batches", "policy", dapo, token_mean, num_micro_batches=2),
        Case(
            "`bnpo`, two micro-batches",
            "policy",
            {"loss_type": "bnpo"},
            token_mean,
            "TRL averages the means of the micro-batches, so a token's weight depends on its "
            "neighbours; ours divides by the tokens of the whole update, as TRL's `dapo` does.",
            agrees=False,
            num_micro_batches=2,
        ),
        Case(
            "`grpo`, a response masked",
            "policy",
            {**grpo, **masks},
            seq_mean,
            "TRL counts the masked response in the mean over samples, we leave it out: compared "
            "after ours × 7/8.",
            factor=7 / 8,
            masks_truncated=True,
        ),
        Case(
            "`dr_grpo`, a response masked",
            "policy",
            {"loss_type": "dr_grpo", **masks},
            {"loss_aggregation": "seq-mean-token-sum-norm"},
            "The same: ours × 7/8.",
            factor=7 / 8,
            masks_truncated=True,
        ),
        Case(
            "`dapo`, a response masked",
            "policy",
            {**dapo, **masks},
            token_mean,
            masks_truncated=True,
        ),
    ]


def correction_cases() -> list[Case]:
    """What TRL does where vLLM samples: weights for the difference to the trainer."""
    modes: list[tuple[str, str, float | None, float, str]] = [
        (
            "token_truncate",
            "tis",
            None,
            2.0,
            "The KL term is not weighted, there or here. TRL can hold the weights from below too, "
            "`tis` cannot.",
        ),
        ("token_mask", "mis", 0.5, 2.0, ""),
        ("sequence_truncate", "sequence_tis", None, 3.0, ""),
        (
            "sequence_mask",
            "sequence_mis",
            None,
            3.0,
            "The default there; here it is no correction.",
        ),
    ]
    return [
        Case(
            f"`dapo`, `vllm_importance_sampling_mode={mode}`, KL",
            "policy",
            {
                "loss_type": "dapo",
                "vllm_importance_sampling_mode": mode,
                "vllm_importance_sampling_clip_min": low,
                "vllm_importance_sampling_clip_max": high,
                **KL_TRL,
            },
            {
                "loss_aggregation": "token-mean",
                "correction": correction,
                "correction_bounds": (low or 0.0, high),
                **KL,
            },
            note,
        )
        for mode, correction, low, high, note in modes
    ]


def rloo_cases() -> list[Case]:
    """RLOO from rewards to gradients, while the policy is the one that sampled."""
    ours = {"policy_loss": "reinforce", "loss_aggregation": "seq-mean-token-sum"}
    return [
        Case(
            "RLOO, on-policy",
            "rloo",
            {"beta": 0.0},
            ours,
            "Another loss value with the same gradient: TRL's is PPO's of a whole response, whose "
            "ratio is 1 here and is not compared elsewhere. TRL has no mask for a tool's tokens in "
            "RLOO, so none is masked.",
        ),
        Case("RLOO, on-policy, KL in the reward", "rloo", {"beta": 0.05}, {**ours, **KL}),
    ]


def advantage_cases() -> list[Case]:
    """From rewards to advantages."""
    both = ("reward", "second_reward")
    gdpo = {
        "multi_objective_aggregation": "normalize_then_sum",
        "reward_weights": [REWARD_WEIGHTS[column] for column in both],
    }
    found = [
        Case(
            f"`scale_rewards={scale}`",
            "advantages",
            {"scale_rewards": scale},
            {"baseline": "group_mean", "scale": ours},
            note,
            agrees=not note,
        )
        for scale, ours, note in (
            ("none", "none", ""),
            (
                "group",
                "group_std",
                "The deviation is the unbiased one in both; TRL adds 1e-4 to it, we add 1e-6.",
            ),
            ("batch", "batch_std", "1e-4 and 1e-6 again."),
        )
    ]
    found.append(
        Case(
            "`normalize_then_sum` (GDPO)",
            "advantages",
            gdpo,
            {"advantage": "gdpo", "scale": "whiten"},
            "TRL whitens over samples, we over tokens, so that longer responses count more; and "
            "1e-4 and 1e-6 again.",
            agrees=False,
            columns=both,
        )
    )
    differing = [case for case in found if not case.agrees]
    return [*found, *(with_trl_epsilon(case) for case in differing)]


def with_trl_epsilon(case: Case) -> Case:
    """The same with TRL's epsilon in ours, and whitened over samples if at all: so there is no
    other difference."""
    is_whitened = case.ours["scale"] == "whiten"
    over = {"scale": "none", "whitened_over": "samples"} if is_whitened else {}
    return replace(
        case,
        name=f"{case.name}, as TRL does it",
        ours={**case.ours, **over, "epsilon": 1e-4},
        note="No setting of ours; it shows that nothing else differs.",
        agrees=True,
    )


def comparison_cases() -> list[Case]:
    """Preferences and reward models."""
    smooth = {"label_smoothing": 0.1}
    return [
        Case("`sigmoid`", "pairs", {"loss_type": ["sigmoid"]}, {"preference_loss": "dpo"}),
        Case(
            "`sigmoid`, `label_smoothing`",
            "pairs",
            {"loss_type": ["sigmoid"], **smooth},
            {"preference_loss": "dpo", "preference_options": smooth},
            "TRL's `sigmoid` has no smoothing (cDPO) and ignores the number.",
            agrees=False,
        ),
        Case(
            "`aot`, `label_smoothing`, a pair at a time",
            "pairs",
            {"loss_type": ["aot"], **smooth},
            {"preference_loss": "dpo", "preference_options": smooth},
            "TRL's way to cDPO: `aot` sorts the pairs of a micro-batch, and one pair is sorted.",
            num_micro_batches=4,
        ),
        Case(
            "`ipo`",
            "pairs",
            {"loss_type": ["ipo"]},
            {"preference_loss": "ipo"},
            "Averages over a response's tokens in both; with sums it would be another loss.",
        ),
        Case("`hinge`", "pairs", {"loss_type": ["hinge"]}, {"preference_loss": "hinge"}),
        Case(
            "`robust`, `label_smoothing`",
            "pairs",
            {"loss_type": ["robust"], **smooth},
            {"preference_loss": "rdpo", "preference_options": smooth},
        ),
        *kto_cases(),
        Case("reward model", "reward_model", {}, {}),
        Case(
            "reward model, centred",
            "reward_model",
            {"center_rewards_coefficient": 0.01},
            {"preference_options": {"centre_coef": 0.01}},
        ),
        Case(
            "reward model, centred, margin",
            "reward_model",
            {"center_rewards_coefficient": 0.01},
            {"preference_options": {"centre_coef": 0.01}},
            columns=("margin",),
        ),
    ]


def kto_cases() -> list[Case]:
    """With an estimated KL above 0, and with one that is held there."""
    weights = {"desirable_weight": 1.2, "undesirable_weight": 0.8}
    trl = {"loss_type": "kto", **weights}
    ours = {"preference_loss": "kto", "preference_options": weights}
    note = (
        "For the KL TRL pairs a prompt with the response to the one before it, we with that to the "
        "one after it; here TRL gets the samples in reverse order."
    )
    return [
        Case("`kto`", "kto", trl, ours, note, reference="old"),
        Case(
            "`kto`, KL held at 0",
            "kto",
            trl,
            ours,
            "Both hold the estimate at 0 from below.",
        ),
    ]


CASES = [
    *policy_cases(),
    *policy_variants(),
    *correction_cases(),
    *rloo_cases(),
    *advantage_cases(),
    *comparison_cases(),
]
