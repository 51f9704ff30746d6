"""The settings of an experiment: one frozen pydantic tree, importable without torch.

A key's help is the string under it. `LIVE` in a field's metadata marks the keys that `Session.set`
may change while a run is under way; they take effect at the next step. What can be derived from
other keys is a property, never a key.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

LIVE = Field(json_schema_extra={"live": True})
"""Marks a key that may change while a run is under way."""

Fraction = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """A frozen group of settings; an unknown key is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelConfig(Section):
    """The policy: which weights, in which precision."""

    name_or_path: str
    """A Hugging Face id, a local folder, or `package://<package>/<path>` for files inside an
    installed package."""

    torch_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of sampling and of forward passes. The trainer's master weights are always
    float32."""

    use_flash_attention_2: bool = False
    """Use the flash-attn kernels; they need a CUDA device and the `flash-attn` package."""

    chat_template: str | None = None
    """A Jinja chat template, or the path of a file with one, in place of the tokenizer's own."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off: such a model is refused."""

    allow_pickle: bool = False
    """Load `pytorch_model.bin` files, which can run code when they are unpickled."""


class DataConfig(Section):
    """Prompts that you bring. Leave it out where a `task` makes them."""

    prompts: list[str] | None = None
    """The prompts themselves."""

    path: str | None = None
    """A `.jsonl` or `.parquet` file, or a folder written by `datasets.Dataset.save_to_disk`."""

    heldout_path: str | None = None
    """A file or folder of the same kind for evaluation only."""

    prompt_column: str = "prompt"
    """The column that holds the prompt: a string, or a list of chat messages."""

    chat: bool | None = None
    """Wrap each prompt in the chat template. Unset: where the tokenizer has one."""

    system_prompt: str | None = None
    """A system message put before each prompt that goes through the chat template."""

    max_prompt_tokens: PositiveInt = 512
    """Longest prompt in tokens; a longer one is left out and counted, never cut."""

    heldout_size: NonNegativeInt = 128
    """Prompts set aside for evaluation, never trained on (where `heldout_path` names none)."""

    shuffle: bool = True
    """Draw prompts in a new random order each epoch, fixed by `seed`."""


class TaskConfig(Section):
    """A verifiable task: it makes the prompts and checks the answers. Other keys go to the task
    itself."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    name: str
    """`add_compare`, or a dataset of reasoning-gym such as `basic_arithmetic`."""

    @property
    def options(self) -> dict[str, Any]:
        """The keys that belong to the task itself."""
        return dict(self.model_extra or {})


class RolloutConfig(Section):
    """How responses are sampled, and where."""

    engine: Literal["native"] = "native"
    """What generates."""

    num_rollout_workers: PositiveInt = 1
    """Processes that sample."""

    device_map: str | list[str] = "auto"
    """A device for all rollout workers, or one each: `cuda:0`, `cpu`, `cpu:0`, `cpu:0-3`,
    `auto`."""

    rollout_batch_size: Annotated[PositiveInt, LIVE] = 32
    """Sequences in flight over all rollout workers. Changes speed and memory, never the samples."""

    group_size: Annotated[PositiveInt, LIVE] = 8
    """Responses sampled per prompt. Group baselines need at least 2."""

    max_new_tokens: Annotated[PositiveInt, LIVE] = 128
    """Longest response in tokens; a longer one is cut and marked `length`."""

    temperature: Annotated[PositiveFloat, LIVE] = 1.0
    """Sampling temperature. Log-probabilities are recorded at this temperature."""

    top_p: Annotated[Fraction, LIVE] = 1.0
    """Sample from the smallest set of tokens with this much probability."""

    top_k: Annotated[NonNegativeInt, LIVE] = 0
    """Sample from this many likeliest tokens; 0 is all."""

    allow_truncated_sampling: bool = False
    """Train on samples of `top_p` < 1 or `top_k` > 0, although the loss then assumes another
    distribution."""


class FsdpConfig(Section):
    """How the trainer's state is spread."""

    cpu_offload: bool = False
    """Keep optimizer state and master weights in host memory between updates."""


class TrainerConfig(Section):
    """How the policy is updated, and where."""

    num_train_workers: PositiveInt = 1
    """Processes that train."""

    device_map: str | list[str] = "auto"
    """A device for all trainer workers, or one each: `cuda:0`, `cpu`, `cpu:0`, `cpu:0-3`,
    `auto`."""

    train_batch_size: Annotated[PositiveInt, LIVE] = 64
    """Samples a step over all trainer workers: prompts times `rollout.group_size`."""

    updates_per_step: Annotated[PositiveInt, LIVE] = 1
    """Optimizer updates a step; each takes an equal share of its groups."""

    micro_batch_tokens: Annotated[PositiveInt, LIVE] = 4096
    """Tokens, prompt included, in one forward pass. Changes speed and memory, never the
    gradient."""

    learning_rate: Annotated[PositiveFloat, LIVE] = 1e-6
    """Peak learning rate of AdamW."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate decays from its peak to 0 over `steps`."""

    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises from 0 to its peak."""

    weight_decay: Annotated[NonNegativeFloat, LIVE] = 0.0
    """AdamW's decoupled weight decay; norms and biases are left out."""

    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay of the gradient's mean."""

    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW's decay of the gradient's square."""

    max_grad_norm: Annotated[PositiveFloat, LIVE] = 1.0
    """The gradient's norm is clipped to this."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    fsdp_config: FsdpConfig = FsdpConfig()
    """How the trainer's state is spread."""


class AlgorithmConfig(Section):
    """The estimator and the loss, as knobs that combine freely."""

    baseline: Annotated[Literal["group_mean", "leave_one_out", "none"], LIVE] = "group_mean"
    """What is subtracted from a reward: the mean of its group, the mean of the others (RLOO),
    nothing."""

    scale: Annotated[Literal["group_std", "batch_std", "none"], LIVE] = "group_std"
    """What an advantage is divided by. GRPO: `group_std`; Dr.GRPO and RLOO: `none`."""

    loss_aggregation: Annotated[
        Literal[
            "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
        ],
        LIVE,
    ] = "token-mean"
    """How token losses become one number. Dr.GRPO: `seq-mean-token-sum-norm`, over
    `rollout.max_new_tokens`."""

    clip_low: Annotated[Fraction, LIVE] = 0.2
    """How far below 1 the probability ratio may go before its gradient stops."""

    clip_high: Annotated[PositiveFloat, LIVE] = 0.2
    """How far above 1; DAPO's clip-higher is 0.28."""

    kl_coef: Annotated[NonNegativeFloat, LIVE] = 0.0
    """Weight of the KL term to the reference, in the loss. 0 at the start loads no reference."""

    kl_estimator: Annotated[Literal["k1", "k2", "k3", "straight_through"], LIVE] = "k3"
    """Estimator of that KL term."""


class RewardConfig(Section):
    """What scores a response: a weighted sum of parts, each recorded as `reward/<part>`."""

    parts: dict[str, float] = {}
    """Weight per part: `task` (its verifier), `file.py:function` or `module:function`. Empty: the
    task alone."""

    num_reward_workers: PositiveInt = 1
    """Processes that score."""

    device_map: str | list[str] = "auto"
    """Where they run; a reward function sees these cores only."""

    timeout_s: PositiveFloat = 10.0
    """Longest time for one call of a reward function; its process is killed then."""

    fallback: float = 0.0
    """The score of a part whose call timed out or raised."""


class RewardModelConfig(Section):
    """A Hugging Face sequence classifier that scores responses, beside the rollout."""

    name_or_path: str
    """A Hugging Face id or a local folder."""

    device: str = "auto"
    """Where it runs; a device that a rollout worker has is shared with it."""

    weight: float = 1.0
    """Its weight in the reward, as part `reward_model`."""


class EvalConfig(Section):
    """Evaluation on the held-out prompts."""

    every_steps: Annotated[NonNegativeInt, LIVE] = 10
    """Evaluate before the first step, then after every so many and at the end; 0 is never."""

    num_prompts: Annotated[PositiveInt, LIVE] = 128
    """Held-out prompts used, the first of them."""

    temperature: Annotated[NonNegativeFloat, LIVE] = 0.0
    """Sampling temperature of evaluations; 0 takes the likeliest token."""


class CheckpointConfig(Section):
    """Saving what a resume needs."""

    every_steps: Annotated[NonNegativeInt, LIVE] = 10
    """Save after every so many steps and at the end; 0 is at the end only."""

    keep: Annotated[PositiveInt, LIVE] = 3
    """Newest checkpoints kept; named snapshots are always kept."""


class LabConfig(Section):
    """One experiment."""

    name: str | None = None
    """Name of the run folder. Unset: made from the model, the task and a number."""

    runs_dir: str = "runs"
    """Folder that holds the run folders."""

    recipe: Literal["grpo"] = "grpo"
    """The order of a step's stages."""

    steps: PositiveInt = 100
    """Training steps of the whole run."""

    seed: int = 0
    """Fixes the sampling and the order of prompts."""

    keep_alive_s: NonNegativeFloat | None = None
    """How long an idle session outlives its last client. Unset: 600 with a person at the notebook,
    else 5."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    task: TaskConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reward: RewardConfig = RewardConfig()
    reward_model: RewardModelConfig | None = None
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def prompts_per_step(self) -> int:
        """Groups sampled for one step."""
        return self.trainer.train_batch_size // self.rollout.group_size

    @property
    def total_updates(self) -> int:
        """Optimizer updates of the whole run; the learning-rate schedule spans them."""
        return self.steps * self.trainer.updates_per_step

    @model_validator(mode="after")
    def _sizes_divide(self) -> Self:
        n, g, k = (
            self.trainer.train_batch_size,
            self.rollout.group_size,
            self.trainer.updates_per_step,
        )
        if n % g:
            below = n - n % g
            fits = [m for m in (below, below + g) if m]
            raise ValueError(
                f"trainer.train_batch_size={n} is no multiple of rollout.group_size={g}; "
                f"use {' or '.join(map(str, fits))}, or a group size among {divisors(n)}"
            )
        if (n // g) % k:
            raise ValueError(
                f"trainer.updates_per_step={k} does not divide the {n // g} prompts of a step "
                f"(trainer.train_batch_size={n} / rollout.group_size={g}); use one of "
                f"{divisors(n // g)}"
            )
        return self


def divisors(n: int) -> list[int]:
    """The whole numbers that divide `n`, smallest first."""
    return [d for d in range(1, n + 1) if n % d == 0]
