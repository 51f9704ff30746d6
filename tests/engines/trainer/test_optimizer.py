import pytest
import torch

from verl_lab.engines.trainer.optimizer import Optimizer, learning_rate


def test_the_learning_rate_rises_holds_and_decays(settings):
    warm = settings(learning_rate=1.0, warmup_updates=4, total_updates=14)
    assert [learning_rate(u, warm) for u in (0, 1, 3, 4, 13)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    linear = settings(learning_rate=1.0, warmup_updates=4, total_updates=14, lr_schedule="linear")
    assert [learning_rate(u, linear) for u in (4, 9, 14, 99)] == [1.0, 0.5, 0.0, 0.0]
    cosine = settings(learning_rate=1.0, total_updates=10, lr_schedule="cosine")
    assert learning_rate(5, cosine) == pytest.approx(0.5)
    assert learning_rate(10, cosine) == pytest.approx(0)


def test_the_gradient_is_clipped_and_its_norm_reported_as_it_was(tiny_model, settings):
    model = tiny_model()
    optimizer = Optimizer(model, (0.9, 0.999), offload=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    expected = sum(p.numel() for p in model.parameters()) ** 0.5
    seen = []
    optimizer._adam.step, step = (
        lambda: seen.append([p.grad.clone() for p in model.parameters()]) or step(),
        optimizer._adam.step,
    )
    metrics = optimizer.step(settings(max_grad_norm=1.0))
    assert metrics["grad_norm"] == pytest.approx(expected)
    total = sum(float(g.square().sum()) for g in seen[0]) ** 0.5
    assert total == pytest.approx(1.0, rel=1e-4)


def test_weight_decay_leaves_norms_alone(tiny_model, settings):
    model = tiny_model()
    before = {n: p.clone() for n, p in model.named_parameters()}
    optimizer = Optimizer(model, (0.9, 0.999), offload=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(settings(learning_rate=0.1, weight_decay=0.5))
    for name, parameter in model.named_parameters():
        factor = 0.95 if parameter.ndim > 1 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name].detach() * factor)
