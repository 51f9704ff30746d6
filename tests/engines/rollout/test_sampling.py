import math

import numpy as np
import pytest
import torch

from verl_lab.engines.rollout import sampling
from verl_lab.engines.rollout.sampling import (
    choose,
    log_exponential,
    noise_bits,
    restrict,
    sample_key,
)

MASK = 0xFFFFFFFF


def keys(n, seed=0):
    return torch.tensor([sample_key(seed, 1, i // 8, i % 8) for i in range(n)])


def positions(n):
    return torch.zeros(n, dtype=torch.int64)


def lowbias32(x, between=0):
    """Wellons' function in plain integers, with a key added in the middle."""
    x ^= x >> 16
    x = (x * 0x7FEB352D + between) & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16


def chi_square(counts, probabilities):
    """How many standard deviations the statistic is above its mean."""
    expected = probabilities * counts.sum()
    assert expected.min() > 5
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = expected.size - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_bits_are_the_hash_by_hand():
    key = sample_key(7, 3, 2, 1)
    bits = noise_bits(torch.tensor([key]), 5)
    unsigned = [int(b) & MASK for b in bits[0, :5]]
    expected = [lowbias32(lowbias32(v) ^ (key & MASK), key >> 32 & MASK) for v in range(5)]
    assert unsigned == expected


def test_keys_of_tensors_and_of_numbers_are_mixed_alike():
    values = [0, 1, -1, 2**62 + 12345, -(2**61) + 99, sample_key(1, 2, 3, 4)]
    mixed = sampling._mix64_tensor(torch.tensor(values)).tolist()
    assert [m & (1 << 64) - 1 for m in mixed] == [
        sampling._mix64(v & (1 << 64) - 1) for v in values
    ]


def test_every_part_of_the_key_counts_and_none_stands_for_another():
    parts = [(s, t, g, i) for s in range(4) for t in range(6) for g in range(10) for i in range(8)]
    assert len({sample_key(*p) for p in parts}) == len(parts)
    assert sample_key(-1, 0, 2**40, 0) != sample_key(-1, 0, 2**40 + 2**33, 0)


def test_every_bit_is_a_fair_coin_and_two_rows_agree_in_half_of_them():
    bits = noise_bits(keys(64), 4096).numpy().view(np.uint32)
    ones = np.unpackbits(bits.view(np.uint8)).reshape(64, 4096, 32)
    assert abs(ones.mean(axis=(0, 1)) - 0.5).max() < 5 * 0.5 / math.sqrt(64 * 4096)
    same = (ones[:-1] == ones[1:]).mean(axis=(1, 2))
    assert abs(same - 0.5).max() < 5 * 0.5 / math.sqrt(4096 * 32)


def test_neighbouring_columns_rows_and_positions_are_independent():
    """Pairs of uniforms fill a 16 x 16 grid evenly."""
    row_keys = sampling._mix64_tensor(keys(1)[0] + torch.arange(128) * -7046029254386353131)
    uniform = noise_bits(row_keys, 4096).numpy().view(np.uint32) / 2.0**32
    cell = (uniform * 16).astype(int)
    for one, other in ((cell[:, 1:], cell[:, :-1]), (cell[1:], cell[:-1])):
        counts = np.bincount((one * 16 + other).ravel(), minlength=256)
        assert abs(chi_square(counts, np.full(256, 1 / 256))) < 4


def test_exponentials_have_the_right_distribution_where_tokens_win():
    noise = log_exponential(keys(256), 8192).exp().numpy().ravel()
    edges = np.array([0, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 0.5, 1, 2, 4, 8, np.inf])
    counts, _ = np.histogram(noise, edges)
    assert abs(chi_square(counts, np.diff(1 - np.exp(-edges)))) < 4
    assert noise.min() < 3 / noise.size  # fine-grained near 0


def test_noise_is_finite_at_both_ends():
    for bits in (0, -1):
        u = (bits & MASK) * 2.0**-32 + 2.0**-33
        assert math.isfinite(math.log(-math.log1p(-min(u, 1 - 2.0**-24))))
    assert log_exponential(keys(512), 32768).isfinite().all()


def test_tokens_are_drawn_from_the_softmax_at_the_temperature():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.5, -2.0]])
    n = 40_000
    for temperature in (0.5, 1.0, 2.0):
        ids = choose(logits.expand(n, -1), keys(n), positions(n), temperature=temperature)
        p = (logits[0] / temperature).softmax(-1).double().numpy()
        assert chi_square(np.bincount(ids.numpy(), minlength=6), p) < 4


def test_draws_at_successive_positions_are_independent():
    n = 20_000
    logits = torch.tensor([[1.0, 0.0, 0.5]]).expand(n, -1)
    same = keys(1).expand(n)
    ids = choose(logits, same, torch.arange(n), temperature=1.0).numpy()
    p = logits[0].softmax(-1).double().numpy()
    counts = np.bincount(ids[::2] * 3 + ids[1::2], minlength=9)
    assert chi_square(counts, np.outer(p, p).ravel()) < 4


def test_a_row_does_not_depend_on_the_others():
    logits = torch.randn(9, 1003, generator=torch.Generator().manual_seed(0))
    together = choose(logits, keys(9), positions(9), temperature=0.8)
    alone = [
        choose(logits[i : i + 1], keys(9)[i : i + 1], positions(1), temperature=0.8)
        for i in range(9)
    ]
    assert together.tolist() == torch.cat(alone).tolist()
    noise = log_exponential(keys(9), 1003)
    assert torch.equal(noise[4:5], log_exponential(keys(9)[4:5], 1003))


def test_temperature_0_takes_the_likeliest_token():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert choose(logits, keys(2), positions(2), temperature=0).tolist() == [1, 0]


def left(scores):
    return scores.isfinite().nonzero()[:, 1].tolist()


@pytest.mark.parametrize(
    ("top_p", "top_k", "expected"),
    [
        (1.0, 0, [0, 1, 2, 3]),
        (1.0, 2, [0, 2]),
        (1.0, 9, [0, 1, 2, 3]),
        (0.39, 0, [0]),  # probabilities 0.4, 0.2, 0.3, 0.1
        (0.41, 0, [0, 2]),
        (0.69, 0, [0, 2]),
        (0.71, 0, [0, 1, 2]),
        (0.05, 0, [0]),
        (0.56, 2, [0]),  # of what top_k leaves, the first has 0.571
        (0.58, 2, [0, 2]),
    ],
)
def test_top_p_and_top_k_by_hand(top_p, top_k, expected):
    scores = torch.tensor([[0.4, 0.2, 0.3, 0.1]]).log() + 3
    assert left(restrict(scores, top_p=top_p, top_k=top_k)) == expected


def test_top_p_finds_a_set_larger_than_the_candidates():
    scores = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0)) * 0.1
    scores[0] *= 60
    found = restrict(scores, top_p=0.9, top_k=0).isfinite()
    for row in range(2):
        p, order = scores[row].softmax(-1).sort(descending=True)
        size = int((p.cumsum(-1) < 0.9).sum()) + 1
        assert set(order[:size].tolist()) == set(found[row].nonzero()[:, 0].tolist())
    assert found.sum(-1)[1] > sampling.TOP_P_CANDIDATES > found.sum(-1)[0]


@pytest.mark.gpu
def test_bits_are_the_same_on_a_gpu():
    assert torch.equal(noise_bits(keys(40).cuda(), 50_001).cpu(), noise_bits(keys(40), 50_001))
