"""The trainer engine as a worker process serves it: plain data and batches in, the same out."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from verl_lab.batch.columns import Batch
from verl_lab.config.functions import loads
from verl_lab.config.schema import LabConfig, ModelConfig
from verl_lab.engines.trainer.attention import NAME
from verl_lab.engines.trainer.base import Report, UpdateSettings
from verl_lab.engines.trainer.engine import PolicyTrainer
from verl_lab.engines.trainer.learner import Learner
from verl_lab.engines.trainer.scorer import ScorerTrainer
from verl_lab.errors import StateError
from verl_lab.models.export import write_model_files
from verl_lab.models.load import load_policy, load_tokenizer
from verl_lab.models.lora import add_lora, has_adapters, write_adapter
from verl_lab.models.scorer import load_scorer, scorer_head


class TrainerService:
    """The trainer worker.

    Args:
        config: the `LabConfig` as plain data.
        rank: this worker's number among the trainer workers.
        device: what torch calls the device of this process.
        report: takes the progress of the call under way.
        functions: the user's own functions that the config names, as `config.functions.dumps`
            gave them.
    """

    def __init__(
        self,
        config: dict[str, Any],
        rank: int,
        device: str,
        report: Report,
        functions: dict[str, dict[str, str]] | None = None,
    ) -> None:
        loads(functions or {})
        self._config = LabConfig.model_validate(config)
        self._device = torch.device(device)
        self.rank, self._report = rank, report
        self._dtype: torch.dtype = getattr(torch, self._config.model.torch_dtype)
        self._attention = "flash_attention_2" if self._config.model.use_flash_attention_2 else NAME
        self._engine = (
            self._reward_model() if self._config.objective == "reward_model" else self._policy()
        )

    # --- what a policy does

    def logprobs(self, batch: Batch, temperature: float, micro_batch_tokens: int) -> Batch:
        """See `TrainerEngine.logprobs`."""
        return self._of_policy("logprobs").logprobs(batch, temperature, micro_batch_tokens)

    def load_reference(self) -> None:
        """Loads the reference, if it is not there yet."""
        self._of_policy("reference_logprobs").load_reference()

    def ref_logprobs(self, batch: Batch, temperature: float, micro_batch_tokens: int) -> Batch:
        """See `TrainerEngine.ref_logprobs`."""
        policy = self._of_policy("reference_logprobs")
        return policy.ref_logprobs(batch, temperature, micro_batch_tokens)

    def values(self, batch: Batch, micro_batch_tokens: int) -> Batch:
        """See `TrainerEngine.values`."""
        return self._of_policy("values").values(batch, micro_batch_tokens)

    def publish(self, folder: str | Path, version: int) -> dict[str, Any]:
        """See `TrainerEngine.publish`."""
        return self._of_policy("sync_weights").publish(Path(folder), version)

    # --- what every trainer does

    def add_functions(self, functions: dict[str, dict[str, str]]) -> None:
        """Makes functions of the user's own known by name."""
        loads(functions)

    def update(self, batch: Batch, settings: dict[str, Any]) -> tuple[Batch, dict[str, float]]:
        """See `TrainerEngine.update`; `settings` holds the fields of `UpdateSettings`."""
        batch, metrics = self._engine.update(batch, UpdateSettings(**settings), self._report)
        return batch, {**metrics, "memory/peak_bytes": float(_peak_bytes())}

    def evaluate(self, batch: Batch, settings: dict[str, Any]) -> dict[str, float]:
        """See `TrainerEngine.evaluate`."""
        return self._engine.evaluate(batch, UpdateSettings(**settings))

    def save(self, folder: str | Path) -> None:
        """See `TrainerEngine.save`."""
        self._engine.save(Path(folder))

    def load(self, folder: str | Path) -> None:
        """See `TrainerEngine.load`."""
        self._engine.load(Path(folder))

    def memory(self) -> dict[str, int]:
        """Bytes that this process holds: `rss_bytes`, and on a GPU `device_bytes`."""
        held = {"rss_bytes": psutil.Process().memory_info().rss}
        if torch.cuda.is_available():
            held["device_bytes"] = torch.cuda.memory_reserved()
        return held

    # --- making one

    def _policy(self) -> PolicyTrainer:
        config = self._config
        model = self._load_policy(torch.float32)
        if config.lora is not None:
            model = add_lora(
                model,
                rank=config.lora.rank,
                alpha=config.lora.alpha,
                target_modules=config.lora.target_modules,
                seed=config.seed,
            )
        self._prepare(model)
        tokenizer = load_tokenizer(config.model)

        def write_files(folder: Path) -> None:
            if has_adapters(model):
                write_adapter(model, folder, config.model.name_or_path)
            else:
                write_model_files(model, tokenizer, folder)

        critic, head = self._critic(model)
        return PolicyTrainer(
            self._learner(model, write_files),
            lambda: self._load_policy(self._dtype).requires_grad_(False),
            self._dtype,
            critic=critic,
            critic_head=head,
        )

    def _critic(self, policy: nn.Module) -> tuple[Learner | None, nn.Module | None]:
        """The critic and its head; without a head it is a head itself, on the policy's trunk."""
        config = self._config
        if config.critic is None:
            return None, None
        if config.critic.name_or_path == "policy":
            return Learner(
                _value_head(policy, config.seed).to(self._device),
                config.trainer.adam_betas,
                offload_optimizer=config.trainer.fsdp_config.cpu_offload,
            ), None
        model, head = self._load_scorer(config.critic.name_or_path or config.model.name_or_path)
        return self._learner(model, lambda folder: None), head

    def _reward_model(self) -> ScorerTrainer:
        model, head = self._load_scorer(self._config.model.name_or_path)
        tokenizer = load_tokenizer(self._config.model)
        learner = self._learner(model, lambda to: write_model_files(model, tokenizer, to))
        return ScorerTrainer(learner, head, self._dtype)

    def _load_scorer(self, name_or_path: str) -> tuple[nn.Module, nn.Module]:
        lora = self._config.lora
        model = load_scorer(
            self._named(name_or_path),
            self._device,
            torch.float32,
            attn_implementation=self._attention,
            seed=self._config.seed,
        )
        head = scorer_head(model)
        if lora is not None:
            model = add_lora(
                model,
                rank=lora.rank,
                alpha=lora.alpha,
                target_modules=lora.target_modules,
                seed=self._config.seed,
            )
            head = scorer_head(model)
            head.requires_grad_(True)
        self._prepare(model)
        return model, head

    def _learner(self, model: nn.Module, write_files: Any) -> Learner:
        trainer = self._config.trainer
        return Learner(
            model,
            trainer.adam_betas,
            offload_optimizer=trainer.fsdp_config.cpu_offload,
            write_files=write_files,
        )

    def _prepare(self, model: nn.Module) -> None:
        if self._config.trainer.gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
            model.train()

    def _load_policy(self, dtype: torch.dtype) -> nn.Module:
        model = load_policy(
            self._config.model, self._device, dtype, attn_implementation=self._attention
        )
        return model.eval()  # no dropout: log-probabilities must be the same twice

    def _named(self, name_or_path: str) -> ModelConfig:
        return self._config.model.model_copy(update={"name_or_path": name_or_path})

    def _of_policy(self, stage: str) -> PolicyTrainer:
        if isinstance(self._engine, PolicyTrainer):
            return self._engine
        raise StateError(
            f"{stage}: recipe {self._config.recipe} trains a reward model, which has none"
        )


def _value_head(policy: nn.Module, seed: int) -> nn.Module:
    """A linear layer from the policy's hidden states to a value, near 0 at the start."""
    config: Any = policy.config
    size = config.get_text_config().hidden_size
    head = nn.Linear(size, 1)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head.weight.normal_(0.0, 1.0 / (size + 1), generator=generator)
        head.bias.zero_()
    return head


def _peak_bytes() -> int:
    """The most memory this process has held: of its GPU, or on a CPU of the machine."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
