"""TRL's side of the comparison, in its own environment: losses and gradients by TRL's own code.

    python trl_side.py FOLDER

Reads the models and samples that `setting.build` wrote, and writes `trl.json` (losses, advantages
and versions) and `trl.safetensors` (gradients). Nothing of a loss is repeated here: each case makes
a trainer of TRL, lets it prepare its inputs (collators; for GRPO the whole way from responses and
rewards to advantages, masks, old and reference log-probabilities), and calls its `compute_loss`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import warnings
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from cases import BETA, CASES, CLIP_HIGH, CLIP_LOW, Case
from datasets import Dataset
from safetensors.torch import save_file
from setting import GROUP_SIZE, MAX_TOKENS, TEMPERATURE, read_samples, text_of
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from trl.trainer.utils import split_tensor_dict

PACKAGES = ("trl", "transformers", "accelerate", "torch")
PLAIN = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "disable_tqdm": True,
}
SAMPLING = {
    "num_generations": GROUP_SIZE,
    "max_completion_length": MAX_TOKENS,
    "temperature": TEMPERATURE,
}


class TrlSide:
    """Makes trainers of TRL on the models of a folder.

    Args:
        folder: where `setting.build` wrote.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.samples = read_samples(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        self.rows = range(len(self.samples["prompt_ids"]))

    def found(self, case: Case) -> dict[str, Any]:
        """`loss`, `gradients` or `advantages` of a case: what there is to compare."""
        return getattr(self, case.kind)(case)  # type: ignore[no-any-return]

    def config(self, kind: type, case: Case, **more: Any) -> Any:
        """TRL's config of a case, over what else it needs."""
        return kind(**{"output_dir": str(self.folder / "out"), **PLAIN, **more, **case.trl})

    def causal(self, name: str) -> Any:
        """A causal language model in float64; TRL's log-probabilities are float32 even so."""
        return AutoModelForCausalLM.from_pretrained(self.folder / name, dtype=torch.float64)

    def reward_rows(self, case: Case) -> list[dict[str, Any]]:
        """The data of a trainer that samples: a prompt's name, and the rewards."""
        return [
            {
                "prompt": str(self.samples["group_id"][i]),
                **{c: self.samples[c][i] for c in case.columns},
            }
            for i in self.rows
        ]

    # --- GRPO and RLOO

    def grpo_inputs(self, case: Case) -> tuple[GRPOTrainer, dict[str, Any]]:
        """A trainer, and what it makes of responses and rewards while it has the old weights."""
        samples, parts = self.samples, case.num_micro_batches
        is_corrected = "vllm_importance_sampling_mode" in case.trl
        config = self.config(
            GRPOConfig,
            case,
            per_device_train_batch_size=len(self.rows) // parts,
            gradient_accumulation_steps=parts,
            num_iterations=2,  # so that old log-probabilities are kept
            scale_rewards="none",
            epsilon=CLIP_LOW,
            epsilon_high=CLIP_HIGH,
            **SAMPLING,
        )

        def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
            return {
                "prompt_ids": samples["prompt_ids"],
                "completion_ids": samples["response_ids"],
                "logprobs": samples["rollout_logprobs"],
                "env_mask": [[int(kept) for kept in row] for row in samples["response_mask"]],
            }

        rows = self.reward_rows(case)
        trainer = GRPOTrainer(
            model=self.causal("old"),
            reward_funcs=[_reader(column) for column in case.columns],
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=self.tokenizer,
            rollout_func=rollout,
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = parts  # as its training loop sets it
        if trainer.ref_model is not None:
            trainer.ref_model.load_state_dict(self.causal(case.reference).state_dict())
        if is_corrected:
            # Its constructor would start vLLM; from here on the flag only means the correction.
            trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
        inputs = trainer._generate_and_score_completions(rows)
        trainer.model.load_state_dict(self.causal("policy").state_dict())
        return trainer, inputs

    def policy(self, case: Case) -> dict[str, Any]:
        """A loss of GRPO."""
        trainer, inputs = self.grpo_inputs(case)
        return _gradients(trainer, split_tensor_dict(inputs, case.num_micro_batches))

    def advantages(self, case: Case) -> dict[str, Any]:
        """GRPO's advantages, [B]."""
        _, inputs = self.grpo_inputs(case)
        return {"advantages": inputs["advantages"].tolist()}

    def rloo(self, case: Case) -> dict[str, Any]:
        """The gradient of RLOO, with the policy that sampled."""
        given = self.samples["prompt_ids"], self.samples["response_ids"], [""] * len(self.rows)

        class Trainer(RLOOTrainer):
            """Takes its responses as given; it has no hook for that."""

            def _generate(self, prompts: list[str]) -> Any:
                return given

        rows = self.reward_rows(case)
        trainer = Trainer(
            model=self.causal("policy"),
            reward_funcs=[_reader(column) for column in case.columns],
            args=self.config(
                RLOOConfig, case, per_device_train_batch_size=len(self.rows), **SAMPLING
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=self.tokenizer,
        )
        trainer.model.train()
        if trainer.ref_model is not None:
            trainer.ref_model.load_state_dict(self.causal(case.reference).state_dict())
        inputs = trainer._generate_and_score_completions(rows)
        return {"gradients": _gradients(trainer, [inputs])["gradients"]}

    # --- comparisons

    def pairs(self, case: Case) -> dict[str, Any]:
        """DPO and its family."""
        parts = case.num_micro_batches
        examples = [
            {
                "prompt": text_of(self.samples["prompt_ids"][i]) + " ",
                "chosen": text_of(self.samples["ended_ids"][i]),
                "rejected": text_of(self.samples["ended_ids"][i + 1]),
            }
            for i in self.rows[::2]
        ]
        trainer = DPOTrainer(
            model=self.causal("policy"),
            ref_model=self.causal(case.reference),
            args=self.config(DPOConfig, case, beta=BETA),
            train_dataset=Dataset.from_list(examples),
            processing_class=self.tokenizer,
        )
        rows = list(trainer.train_dataset)
        size = len(rows) // parts
        batches = [trainer.data_collator(rows[i : i + size]) for i in range(0, len(rows), size)]
        return _gradients(trainer, batches, divide=True)

    def kto(self, case: Case) -> dict[str, Any]:
        """KTO, on the samples in reverse order."""
        examples = [
            {
                "prompt": text_of(self.samples["prompt_ids"][i]) + " ",
                "completion": text_of(self.samples["ended_ids"][i]),
                "label": self.samples["is_chosen"][i],
            }
            for i in reversed(self.rows)
        ]
        trainer = KTOTrainer(
            model=self.causal("policy"),
            ref_model=self.causal(case.reference),
            args=self.config(
                KTOConfig,
                case,
                beta=BETA,
                per_device_train_batch_size=len(examples),
                train_sampling_strategy="sequential",
            ),
            train_dataset=Dataset.from_list(examples),
            processing_class=self.tokenizer,
        )
        return _gradients(trainer, [trainer.data_collator(list(trainer.train_dataset))])

    def reward_model(self, case: Case) -> dict[str, Any]:
        """A reward model, in float64."""
        samples = self.samples
        examples = []
        for i in self.rows[::2]:
            chosen, rejected = (
                samples["prompt_ids"][j] + samples["ended_ids"][j] for j in (i, i + 1)
            )
            margin = {"margin": samples["margin"][i]} if "margin" in case.columns else {}
            examples.append({"chosen_ids": chosen, "rejected_ids": rejected, **margin})
        trainer = RewardTrainer(
            model=AutoModelForSequenceClassification.from_pretrained(
                self.folder / "scorer", dtype=torch.float64
            ),
            args=self.config(RewardConfig, case),
            train_dataset=Dataset.from_list(examples),
            processing_class=self.tokenizer,
        )
        return _gradients(trainer, [trainer.data_collator(examples)])


def _reader(column: str) -> Any:
    """A reward function that reads the reward from the data."""

    def reward(completions: list[str], **columns: Any) -> list[float]:
        return columns[column]  # type: ignore[no-any-return]

    reward.__name__ = column
    return reward


def _gradients(
    trainer: Any, batches: list[dict[str, Any]], *, divide: bool = False
) -> dict[str, Any]:
    """The loss over micro-batches, and its gradient by parameter.

    Args:
        trainer: of TRL.
        batches: its inputs.
        divide: whether Trainer's loop divides by the number of micro-batches; GRPO's loss did.
    """
    trainer.model.train()
    trainer.model.zero_grad()
    total = 0.0
    for inputs in batches:
        loss = trainer.compute_loss(trainer.model, inputs)
        loss = loss / len(batches) if divide else loss
        loss.backward()
        total += loss.item()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters()}
    return {"loss": total, "gradients": gradients}


def main() -> None:
    """Computes every case and writes what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the models and samples are")
    folder = parser.parse_args().folder
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    side = TrlSide(folder)
    figures: dict[str, Any] = {}
    tensors = {}
    for number, case in enumerate(CASES):
        found = side.found(case)
        for name, gradient in found.pop("gradients", {}).items():
            tensors[f"{number}/{name}"] = gradient
        figures[str(number)] = found
    figures["versions"] = {name: importlib.metadata.version(name) for name in PACKAGES}
    save_file(tensors, folder / "trl.safetensors")
    (folder / "trl.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
