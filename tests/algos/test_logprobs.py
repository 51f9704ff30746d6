import math

import pytest
import torch

from verl_lab.algos.logprobs import chunked_logprobs, token_logprobs
from verl_lab.errors import ShapeError


def test_logits_are_divided_by_the_temperature_before_the_softmax():
    logits = torch.tensor([[0.0, math.log(3.0)]])
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]), 0.5)
    # softmax of (0, 2 ln 3) is (0.1, 0.9); dividing log-probabilities would give 2 ln 0.75
    assert logprobs.item() == pytest.approx(math.log(0.9))
    assert entropy.item() == pytest.approx(-0.9 * math.log(0.9) - 0.1 * math.log(0.1))


def test_half_precision_logits_are_computed_in_float32():
    logits = torch.randn(4, 1000).bfloat16()
    logprobs, _ = token_logprobs(logits, torch.arange(4), 1.0)
    exact = logits.double().log_softmax(-1)[torch.arange(4), torch.arange(4)]
    torch.testing.assert_close(logprobs.double(), exact, atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100])
def test_chunks_change_neither_values_nor_gradients(chunk_tokens):
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    ids, upstream = torch.randint(11, (7,)), torch.randn(7, dtype=torch.float64)

    def gradients(logprobs):
        return torch.autograd.grad((logprobs * upstream).sum(), (hidden, weight))

    whole = (hidden @ weight.T / 0.7).log_softmax(-1)
    dense, entropy = whole[torch.arange(7), ids], -(whole.exp() * whole).sum(-1)
    found, found_entropy = chunked_logprobs(
        hidden, lambda h: h @ weight.T, ids, temperature=0.7, chunk_tokens=chunk_tokens
    )
    torch.testing.assert_close(found, dense, atol=1e-10, rtol=0)
    torch.testing.assert_close(found_entropy, entropy, atol=1e-10, rtol=0)
    for one, other in zip(gradients(found), gradients(dense), strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


def test_the_head_never_sees_more_than_a_chunk_also_in_the_backward_pass():
    weight, sizes = torch.randn(11, 5), []

    def head(hidden):
        sizes.append(len(hidden))
        return hidden @ weight.T

    hidden = torch.randn(10, 5, requires_grad=True)
    ids = torch.randint(11, (10,))
    logprobs, _ = chunked_logprobs(hidden, head, ids, temperature=1.0, chunk_tokens=4)
    logprobs.sum().backward()
    assert sorted(sizes) == [2, 2, 4, 4, 4, 4]


def test_logits_are_not_kept_for_the_backward_pass():
    kept = []
    weight = torch.randn(1000, 4)
    hidden = torch.randn(6, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        chunked_logprobs(
            hidden, lambda h: h @ weight.T, torch.arange(6), temperature=1.0, chunk_tokens=3
        )
    assert max(kept) < 1000


def test_no_tokens_give_no_values():
    hidden = torch.zeros(0, 5, requires_grad=True)
    found = chunked_logprobs(
        hidden, lambda h: h @ torch.ones(5, 11), torch.zeros(0, dtype=torch.int64), temperature=1.0
    )
    assert [f.tolist() for f in found] == [[], []]


def test_entropy_has_no_gradient_and_is_zero_when_not_asked_for():
    logits, ids = torch.randn(4, 7, requires_grad=True), torch.arange(4)
    for find in (
        lambda **knobs: token_logprobs(logits, ids, 1.0, **knobs),
        lambda **knobs: chunked_logprobs(logits, lambda h: h * 1, ids, temperature=1.0, **knobs),
    ):
        logprobs, entropy = find(with_entropy=True)
        assert logprobs.requires_grad
        assert not entropy.requires_grad
        assert find(with_entropy=False)[1].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
def test_the_entropy_has_its_own_gradient_when_asked_for(chunk_tokens):
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    ids, upstream = torch.randint(11, (7,)), torch.randn(2, 7, dtype=torch.float64)

    def gradients(logprobs, entropy):
        total = (upstream[0] * logprobs + upstream[1] * entropy).sum()
        return torch.autograd.grad(total, (hidden, weight))

    logs = (hidden @ weight.T / 0.7).log_softmax(-1)
    dense = gradients(logs[torch.arange(7), ids], -(logs.exp() * logs).sum(-1))
    found = gradients(
        *chunked_logprobs(
            hidden,
            lambda h: h @ weight.T,
            ids,
            temperature=0.7,
            chunk_tokens=chunk_tokens,
            entropy_grad=True,
        )
    )
    whole = gradients(*token_logprobs(hidden @ weight.T, ids, 0.7, entropy_grad=True))
    for one, two, expected in zip(found, whole, dense, strict=True):
        torch.testing.assert_close(one, expected, atol=1e-10, rtol=0)
        torch.testing.assert_close(two, expected, atol=1e-10, rtol=0)


def test_the_gradient_of_the_entropy_of_two_tokens_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)]], requires_grad=True)
    _, entropy = token_logprobs(logits, torch.tensor([0]), 1.0, entropy_grad=True)
    entropy.sum().backward()
    # dH/dz = -p (log p + H) with p = 1/4, 3/4; the two cancel
    slope = 3 / 16 * math.log(3)
    assert logits.grad[0].tolist() == pytest.approx([slope, -slope])


def test_entropy_has_no_gradient_where_gradients_are_off():
    logits = torch.randn(4, 7, requires_grad=True)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            _, entropy = token_logprobs(logits, torch.arange(4), 1.0, entropy_grad=True)
        assert not entropy.requires_grad


def test_one_id_is_not_taken_for_all_rows():
    with pytest.raises(ShapeError, match=r"logits, ids: .*logits \(4, 7\), ids \(1,\)"):
        token_logprobs(torch.zeros(4, 7), torch.tensor([1]), 1.0)
    with pytest.raises(ShapeError, match=r"hidden, ids: .*hidden \(4, 7\), ids \(3,\)"):
        chunked_logprobs(torch.zeros(4, 7), lambda h: h, torch.arange(3), temperature=1.0)
