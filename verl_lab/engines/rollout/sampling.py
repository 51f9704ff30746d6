"""Choosing tokens: temperature, top-k, top-p, and noise that is a function of where it is used.

The noise of a token is a hash of (seed, step, group, sample, position, vocabulary index), so a
sample does not depend on what else is sampled, in which order, or on which device. Hashing is
integer arithmetic that wraps around, the same on every device.

Letters: `B` rows, `V` vocabulary.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

LANES = 16
"""Rows are padded to a multiple of this many elements: an element then goes through the same
vector instruction whatever the shape, so rounding does not depend on how many rows there are."""
CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements worked on at once: what fits in a core's cache, what fills a GPU."""
TOP_P_CANDIDATES = 1024
"""Likeliest tokens among which the `top_p` set is looked for first; sorting them all is slow."""

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


def sample_key(seed: int, step: int, group_id: int, sample_id: int) -> int:
    """A 64-bit key of one sample's noise, as a signed integer."""
    key = 0
    for part in (seed, step, group_id, sample_id):
        key = _mix64((key ^ (part & _MASK64)) + _GOLDEN & _MASK64)
    return _signed(key, 64)


def choose(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    *,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
) -> Tensor:
    """One token per row, by the Gumbel-max trick (Maddison et al. 2014, arXiv:1411.0030, sec. 2).

        argmax_v (logits_v / T - log E_v),    E_v ~ Exponential(1)

    is a sample of softmax(logits / T). With temperature 0 it is argmax_v logits_v.

    Args:
        logits: [B, V] float32.
        keys: [B] int64, the `sample_key` of each row.
        positions: [B] int64, the index of the token in its response.
        temperature: T.
        top_p: sample from the smallest set of likeliest tokens with this much probability, at
            temperature T and after `top_k`; tokens as likely as the last one in it are in it too.
        top_k: sample from this many likeliest tokens; 0 is all.

    Returns:
        [B] int64.
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    step = max(1, CHUNK_ELEMENTS.get(logits.device.type, 1 << 18) // logits.shape[1])
    row_keys = _mix64_tensor(keys + positions * _signed(_GOLDEN, 64))
    chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        scores = restrict(logits[rows] / temperature, top_p=top_p, top_k=top_k)
        scores -= log_exponential(row_keys[rows], logits.shape[1])
        chosen[rows] = scores.argmax(dim=-1)
    return chosen


def restrict(scores: Tensor, *, top_p: float, top_k: int) -> Tensor:
    """Scores [B, V] with -inf where `top_k` or `top_p` leaves a token out."""
    if 0 < top_k < scores.shape[1]:
        least = scores.topk(top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    if top_p < 1:
        probabilities = scores.softmax(dim=-1)
        least = _least_in_top_p(probabilities, top_p)
        scores = scores.masked_fill(probabilities < least, float("-inf"))
    return scores


def log_exponential(row_keys: Tensor, num_columns: int) -> Tensor:
    """log E [B, V] of standard exponential variables, keyed by row key [B] and column.

    E = -log(1 - u) with u = (bits + 1/2) / 2^32. Small E win, and there u keeps its relative
    precision, which -log(u) near u = 1 would not.
    """
    bits = noise_bits(row_keys, num_columns)
    noise = bits.view(torch.uint32).to(torch.float32)
    noise.mul_(-(2.0**-32)).sub_(2.0**-33)
    noise.clamp_(min=-(1 - 2.0**-24))  # u rounded up to 1 would make E infinite
    return noise.log1p_().neg_().log_()[:, :num_columns]


def noise_bits(row_keys: Tensor, num_columns: int) -> Tensor:
    """32 random bits for each row key [B] and column, as int32 [B, V rounded up to LANES].

    The function is `lowbias32` (Wellons, nullprogram.com/blog/2018/07/31) over the hashed column
    xor one half of the key, with the other half added in the middle: rows whose first halves are
    equal still differ.
    """
    first = _low32(row_keys)[:, None]
    second = _low32(row_keys >> 32)[:, None]
    bits = _hashed_columns(-(-num_columns // LANES) * LANES, row_keys.device) ^ first
    scratch = torch.empty_like(bits)
    _xor_shifted(bits, 16, scratch)
    bits.mul_(0x7FEB352D).add_(second)
    _xor_shifted(bits, 15, scratch)
    bits.mul_(_signed(0x846CA68B, 32))
    _xor_shifted(bits, 16, scratch)
    return bits


@functools.lru_cache(maxsize=4)
def _hashed_columns(num_columns: int, device: torch.device) -> Tensor:
    bits = torch.arange(num_columns, dtype=torch.int32, device=device)
    scratch = torch.empty_like(bits)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        _xor_shifted(bits, shift, scratch)
        bits.mul_(_signed(factor, 32))
    _xor_shifted(bits, 16, scratch)
    return bits


def _least_in_top_p(probabilities: Tensor, top_p: float) -> Tensor:
    num_candidates = min(TOP_P_CANDIDATES, probabilities.shape[1])
    likeliest = probabilities.topk(num_candidates, dim=-1).values
    if num_candidates < probabilities.shape[1] and (likeliest.sum(dim=-1) < top_p).any():
        likeliest = probabilities.sort(dim=-1, descending=True).values
    before = likeliest.cumsum(dim=-1) - likeliest
    # A token is in the set if those before it do not fill it; the first always is.
    num_kept = (before < top_p).sum(dim=-1, keepdim=True).clamp(min=1)
    return likeliest.gather(-1, num_kept - 1)


def _xor_shifted(bits: Tensor, shift: int, scratch: Tensor) -> None:
    """bits ^= bits >>> shift, in place. int32 shifts copy the sign; the copies are cut off."""
    torch.bitwise_right_shift(bits, shift, out=scratch)
    scratch &= (1 << (32 - shift)) - 1
    bits ^= scratch


def _low32(values: Tensor) -> Tensor:
    """The low half of int64 as int32, without a cast that overflows."""
    return (((values & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)


def _mix64(value: int) -> int:
    """The finaliser of SplitMix64 (Steele et al. 2014, doi:10.1145/2660193.2660195)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK64
    return value ^ value >> 31


def _mix64_tensor(values: Tensor) -> Tensor:
    """`_mix64` of each element, int64 in and out."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ _shift64(values, shift)) * _signed(factor, 64)
    return values ^ _shift64(values, 31)


def _shift64(values: Tensor, shift: int) -> Tensor:
    return (values >> shift) & ((1 << (64 - shift)) - 1)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value
