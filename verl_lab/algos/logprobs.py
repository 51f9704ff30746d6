"""Log-probabilities at a temperature: the one definition that sampling and training share.

    logprob(y) = z[y] / T - logsumexp(z / T), with logits z in float32

Dividing log-probabilities by T instead would be wrong. Shapes: N tokens, V vocabulary, D hidden
size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from verl_lab.errors import ShapeError


def token_logprobs(
    logits: Tensor,
    ids: Tensor,
    temperature: float,
    *,
    with_entropy: bool = True,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of given tokens, and the entropy of the distributions they came from.

    Args:
        logits: [N, V]; computed in float32 unless they are float64.
        ids: [N] int64.
        temperature: of sampling, above 0.
        with_entropy: without it the entropy is 0, and cheaper.
        entropy_grad: lets the entropy have a gradient, for a bonus in the loss.

    Returns:
        Two [N] tensors: log-probabilities, and the entropy in nats.
    """
    _require_a_row_each("logits", logits, ids)
    scaled = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    normaliser = scaled.logsumexp(-1)
    logprobs = scaled.gather(-1, ids[:, None])[:, 0] - normaliser
    if not with_entropy:
        return logprobs, torch.zeros_like(logprobs)
    with torch.set_grad_enabled(entropy_grad):
        entropy = normaliser - (scaled.softmax(-1) * scaled).sum(-1)
    return logprobs, entropy


def chunked_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    ids: Tensor,
    *,
    temperature: float,
    chunk_tokens: int = 1024,
    with_entropy: bool = True,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` of `head(hidden)` with at most `chunk_tokens` rows of logits at a time.

    The backward pass computes each chunk's logits again instead of keeping them.

    Args:
        hidden: [N, D].
        head: [n, D] to logits [n, V].
        ids: [N] int64.
        temperature: of sampling.
        chunk_tokens: rows of logits held at once.
        with_entropy: see `token_logprobs`.
        entropy_grad: see `token_logprobs`.

    Returns:
        Two [N] tensors: log-probabilities and entropy.
    """
    _require_a_row_each("hidden", hidden, ids)

    def of_chunk(part: Tensor, part_ids: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            head(part),
            part_ids,
            temperature,
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
        )

    pieces = [
        checkpoint(of_chunk, part, part_ids, use_reentrant=False, preserve_rng_state=False)
        if torch.is_grad_enabled()
        else of_chunk(part, part_ids)
        for part, part_ids in zip(
            torch.split(hidden, chunk_tokens), torch.split(ids, chunk_tokens), strict=True
        )
    ]
    logprobs, entropy = zip(*pieces, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


def _require_a_row_each(name: str, rows: Tensor, ids: Tensor) -> None:
    """One id would otherwise be broadcast over all rows."""
    if rows.ndim != 2 or ids.shape != rows.shape[:1]:
        raise ShapeError(
            f"{name}, ids: must have one row and one id a token, got {name} "
            f"{tuple(rows.shape)}, ids {tuple(ids.shape)}; flatten or index them alike"
        )
