"""Builds the policy that ships with the package: a small Llama that adds and compares, sloppily.

    python -m verl_lab.models.tiny --to DIR

It learns `add_compare` by supervised training on worked problems in which most sums with a carry
forget it and most comparisons point the wrong way, as a careless pupil's would. So it can do the
task, but by habit it does not: reinforcement learning has something to find. Everything is fixed
by a seed; the build takes a few minutes on two cores.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from verl_lab.data.arithmetic import AddCompare

CHARACTERS = "0123456789+-*/=<>?(),. "
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
SLIP_SHARE = 0.65
"""How often a sum with a carry, or a comparison, is answered wrongly in the worked problems."""
STRAY_SHARE = 0.05
"""How often any other sum is off by one digit."""
log = logging.getLogger("tiny")


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; what it does not know it cannot write."""
    vocabulary = {token: i for i, token in enumerate((PAD, BOS, EOS, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=PAD
    )


def model(vocabulary_size: int) -> LlamaForCausalLM:
    """An untrained Llama of 0.44 million parameters, in float32."""
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def sloppy_answer(prompt: str, answer: str, source: random.Random) -> str:
    """What the careless pupil writes under a problem."""
    if "?" in prompt:
        if source.random() >= SLIP_SHARE:
            return answer
        return source.choice([sign for sign in "<>" if sign != answer])
    a, b = (int(number) for number in prompt[:-1].split("+"))
    has_carry = a % 10 + b % 10 >= 10
    if has_carry and source.random() < SLIP_SHARE:
        return str(a + b - 10)  # the carry was forgotten
    if source.random() < STRAY_SHARE:
        return str(max(0, a + b + source.choice((-1, 1))))
    return answer


def batches(batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Worked problems without end, as `(input_ids, labels)`: [batch_size, length] each, -100
    without loss."""
    source = random.Random(seed)
    rows = AddCompare().problems("train", 12_000, seed)
    ids_of = {character: i for i, character in enumerate(CHARACTERS, start=3)}
    while True:
        texts = [
            (row["prompt"], sloppy_answer(row["prompt"], row["answer"], source))
            for row in source.choices(rows, k=batch_size)
        ]
        length = max(len(prompt) + len(written) + 1 for prompt, written in texts)
        ids = torch.zeros(batch_size, length, dtype=torch.int64)
        labels = torch.full_like(ids, -100)
        for i, (prompt, written) in enumerate(texts):
            tokens = torch.tensor([*(ids_of[character] for character in prompt + written), 2])
            ids[i, : len(tokens)] = tokens
            labels[i, len(prompt) : len(tokens)] = tokens[len(prompt) :]
        yield ids, labels


def build(to: Path, *, num_steps: int, batch_size: int, peak: float, seed: int = 0) -> None:
    """Trains the policy and writes it as a model folder."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the sums of several threads would depend on their number
    coder = tokenizer()
    policy = model(len(coder)).train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=peak, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / num_steps)),
    )
    for step, (ids, labels) in zip(range(num_steps), batches(batch_size, seed), strict=False):
        loss = policy(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 == 0:
            log.info("step %d of %d: loss %.3f", step, num_steps, loss.item())
    to.mkdir(parents=True, exist_ok=True)
    policy.save_pretrained(to)
    coder.save_pretrained(to)


def main() -> None:
    """Builds into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, required=True, help="the folder to write")
    parser.add_argument("--steps", type=int, default=2000, help="supervised training steps")
    parser.add_argument("--batch-size", type=int, default=192, help="problems a step")
    parser.add_argument("--peak", type=float, default=3e-3, help="peak learning rate")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    build(options.to, num_steps=options.steps, batch_size=options.batch_size, peak=options.peak)


if __name__ == "__main__":
    main()
