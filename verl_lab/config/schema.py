"""The settings of an experiment: one frozen pydantic tree, importable without torch.

A key's help is the string under it. `LIVE` in a field's metadata marks the keys that `Session.set`
may change while a run is under way; they take effect at the next step. What can be derived from
other keys is a property, never a key.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from verl_lab.config.algorithm import AlgorithmConfig, CriticConfig, LoraConfig, PreferenceConfig
from verl_lab.config.presets import PRESETS, Objective
from verl_lab.config.section import LIVE, Fraction, Section

Beta = Annotated[float, Field(ge=0, lt=1)]


class ModelConfig(Section):
    """The policy: which weights, in which precision."""

    name_or_path: str
    """A Hugging Face id, a local folder, a run folder (its newest checkpoint, or another as
    `runs/x@step-000010`), or `package://<package>/<path>` for files inside an installed package."""

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

    adam_betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's decay of the gradient's mean and square."""

    max_grad_norm: Annotated[PositiveFloat, LIVE] = 1.0
    """The gradient's norm is clipped to this."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    fsdp_config: FsdpConfig = FsdpConfig()
    """How the trainer's state is spread."""


class RewardConfig(Section):
    """What scores a response: a weighted sum of parts, each recorded as `reward/<part>`."""

    parts: dict[str, float] = {}
    """Weight per part: `task` (its verifier), `file.py:function`, `module:function`, an
    `http(s)://` endpoint, `length` (tokens over `rollout.max_new_tokens`), `overlong`. Empty: the
    task alone."""

    overlong_buffer: PositiveInt = 16
    """Tokens before `rollout.max_new_tokens` over which part `overlong` falls from 0 to -1."""

    requests_per_s: PositiveFloat | None = None
    """Most requests a second to each endpoint. Unset: no limit."""

    num_reward_workers: PositiveInt = 1
    """Processes that score."""

    device_map: str | list[str] = "auto"
    """Where they run; a reward function sees these cores only."""

    timeout_s: PositiveFloat = 10.0
    """Longest time for one call of a reward function; its process is killed then."""

    fallback: float = 0.0
    """The score of a part whose call timed out or raised."""


class RewardModelConfig(Section):
    """A Hugging Face sequence classifier that scores responses, beside the rollout: part
    `reward_model`, of weight 1 unless `reward.parts` says otherwise."""

    name_or_path: str
    """A Hugging Face id, a local folder, or the run folder of a reward model trained here."""

    device: str = "auto"
    """Where its process runs, beside whatever else is there. Unset: on the first rollout worker's
    device."""


class PipelineConfig(Section):
    """Rollout and training at the same time, on devices of their own."""

    max_staleness: NonNegativeInt = 0
    """Steps that sampling may run ahead of training, so that a sample's weights are at most so
    many versions old. 0 is strictly on-policy, and bit for bit reproducible."""


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

    recipe: str = "grpo"
    """What is learned: a preset over the other keys (`verl-lab recipes` lists them and what each
    sets), or a function of yours, by the name it was registered under or as `file.py:function`."""

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
    critic: CriticConfig | None = None
    preference: PreferenceConfig = PreferenceConfig()
    lora: LoraConfig | None = None
    reward: RewardConfig = RewardConfig()
    reward_model: RewardModelConfig | None = None
    pipeline: PipelineConfig = PipelineConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def objective(self) -> Objective:
        """What the trainer minimises; a recipe of the user's own trains the policy."""
        preset = PRESETS.get(self.recipe)
        return "policy" if preset is None else preset.objective

    @property
    def samples_policy(self) -> bool:
        """Whether a step samples responses, rather than taking them from the data."""
        preset = PRESETS.get(self.recipe)
        return preset is None or preset.is_online

    @property
    def has_rollout(self) -> bool:
        """Whether there is a policy that can answer prompts; a reward model answers none."""
        return self.objective != "reward_model"

    @property
    def correction(self) -> str:
        """The off-policy correction that `auto` means here."""
        if self.algorithm.correction != "auto":
            return self.algorithm.correction
        is_stale = self.pipeline.max_staleness > 0 and not self.algorithm.bypass
        return "tis" if is_stale else "none"

    @property
    def samples_per_prompt(self) -> int:
        """Responses a prompt: sampled, or given as a pair or one by one."""
        if self.samples_policy:
            return self.rollout.group_size
        has_pairs = self.objective == "reward_model" or (
            self.objective == "preference" and self.preference.loss != "kto"
        )
        return 2 if has_pairs else 1

    @property
    def prompts_per_step(self) -> int:
        """Groups of one step."""
        return self.trainer.train_batch_size // self.samples_per_prompt

    @property
    def total_updates(self) -> int:
        """Optimizer updates of the whole run; the learning-rate schedule spans them."""
        return self.steps * self.trainer.updates_per_step

    @model_validator(mode="after")
    def _sizes_divide(self) -> Self:
        n, g, k = (
            self.trainer.train_batch_size,
            self.samples_per_prompt,
            self.trainer.updates_per_step,
        )
        if n % g:
            below = n - n % g
            fits = [m for m in (below, below + g) if m]
            if not self.samples_policy:
                raise ValueError(
                    f"trainer.train_batch_size={n} counts both responses of a pair; use "
                    f"{' or '.join(map(str, fits))}"
                )
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
