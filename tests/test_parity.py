"""The comparison with TRL, without TRL: our side still runs, its samples reach every branch of the
losses, and a difference is seen."""

import dataclasses
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks" / "parity"


@pytest.fixture(scope="module")
def parity():
    """The scripts as modules, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        names = ("cases", "setting", "our_side", "compare")
        yield {name: importlib.import_module(name) for name in names}
        for name in names:
            sys.modules.pop(name)


@pytest.fixture(scope="module")
def side(parity, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parity")
    parity["setting"].build(folder)
    return parity["our_side"].OurSide(folder)


def first_of(parity, kind):
    return next(case for case in parity["cases"].CASES if case.kind == kind)


@pytest.mark.parametrize("kind", ["policy", "rloo", "advantages", "pairs", "kto", "reward_model"])
def test_our_side_agrees_with_itself_and_with_nothing_else(parity, side, kind):
    case = first_of(parity, kind)
    found = side.found(case)
    assert parity["compare"].row(case, found, found).agrees
    moved = dict(found)
    if "gradients" in found:
        moved["gradients"] = {name: g.clone() for name, g in found["gradients"].items()}
        last = list(moved["gradients"].values())[-1]
        last.view(-1)[0] += 1e-4 * last.abs().max()
    else:
        moved["advantages"] = [found["advantages"][0] + 1e-4, *found["advantages"][1:]]
    assert not parity["compare"].row(case, found, moved).agrees


def test_a_nan_never_agrees(parity, side):
    case = first_of(parity, "policy")
    found = side.found(case)
    first, *others = found["gradients"]
    broken = {first: torch.full_like(found["gradients"][first], torch.nan)}
    broken |= {name: found["gradients"][name] for name in others}
    assert not parity["compare"].row(case, {**found, "gradients": broken}, found).agrees
    assert not parity["compare"].row(case, {**found, "loss": float("nan")}, found).agrees


def test_a_row_that_is_said_to_differ_is_wrong_where_it_agrees(parity, side):
    case = dataclasses.replace(first_of(parity, "advantages"), agrees=False)
    found = side.found(case)
    row = parity["compare"].row(case, found, found)
    assert not row.is_as_said
    assert row.verdict in parity["compare"].table([row], "versions")


def test_models_with_other_parameters_are_not_compared(parity, side):
    case = first_of(parity, "policy")
    found = side.found(case)
    less = {**found, "gradients": dict(list(found["gradients"].items())[1:])}
    with pytest.raises(ValueError, match="other tensors"):
        parity["compare"].row(case, found, less)


def test_the_samples_reach_every_branch(parity, side):
    """Else two losses that differ there would agree."""
    batch = side.policy_batch(first_of(parity, "policy"))
    policy = side.causal("policy").score(batch, parity["setting"].TEMPERATURE, 10_000)
    kept = np.concatenate(batch.lists("response_mask"))
    old = np.concatenate(batch.lists("old_logprobs"))[kept]
    ratio = np.exp(np.concatenate(policy)[kept] - old)
    advantages = np.concatenate(batch.lists("advantages"))[kept]
    rho = np.exp(old - np.concatenate(batch.lists("rollout_logprobs"))[kept])
    for reached in (
        (ratio > 1.28) & (advantages > 0),
        (ratio < 0.8) & (advantages < 0),
        (ratio > 3) & (advantages < 0),
        (ratio > 5),
        (ratio > 0.8) & (ratio < 1.28),
        (rho > 2),
        (rho < 0.5),
        (rho > 0.5) & (rho < 2),
    ):
        assert reached.any()
    assert not kept.all()


def test_a_failure_of_the_other_side_says_what_to_do(parity, tmp_path):
    with pytest.raises(SystemExit, match="make parity"):
        parity["compare"].trl_found(tmp_path, "false")
