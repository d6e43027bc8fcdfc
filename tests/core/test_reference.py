"""The package against numbers that a second implementation in plain Python computed (tests/core/reference.json)."""

import math

import pytest
import torch

from mmrl.core import PolicyOutputs, all_objectives, get
from mmrl.core.blocks import all_kinds
from tests.core import reference
from tests.core.builders import reference_numbers, rollouts_from
from tests.golden.numbers import PAPERS, load

DATA = reference_numbers()


def nearly_equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(nearly_equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(nearly_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, str):
        return a == b
    return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-12)


def estimator(case):
    name, *pairs = case.split()
    values = dict(pair.split("=") for pair in pairs)
    kinds = {"singleton": str, "mask_carry": str, "ddof": int}
    return all_kinds("advantage")[name](**{key: kinds.get(key, float)(value) for key, value in values.items()})


def test_the_file_equals_the_references_numbers():
    assert nearly_equal(DATA, reference.all_numbers())


@pytest.mark.parametrize("case", DATA["advantages"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_advantages(case, dtype, tolerance):
    advantage = estimator(case)(rollouts_from(DATA["batch"], dtype))
    assert advantage.dtype == dtype
    expected = torch.tensor(DATA["advantages"][case], dtype=dtype)
    torch.testing.assert_close(advantage, expected, rtol=tolerance, atol=tolerance)


def test_every_estimator_has_a_case():
    """Here, or in the golden file of a row that has it, or is given it by a peer's changes, or in a test of its own."""
    changes = [(row, peer.get("changes", {})) for row in all_objectives() if row in PAPERS for peer in load(row).peers]
    checked = {get(row).override(changed).advantage.kind for row, changed in changes}
    checked |= {"group_branches"}  # tests/core/test_turns.py
    missing = set(all_kinds("advantage")) - checked - {case.split()[0] for case in DATA["advantages"]}
    assert missing <= {"smooth_std"}, "its row follows"


def loss_of(name, dtype):
    objective = get(name)
    rollouts = objective.compute_advantages(rollouts_from(DATA["batch"], dtype))
    logp = torch.tensor(DATA["batch"]["logp"], dtype=dtype, requires_grad=True)
    exact = 0.5 * (logp - torch.tensor(DATA["batch"]["logp_ref"], dtype=dtype)).square()
    moved = 0.5 * (logp - rollouts.logp_old).square()
    values = torch.tensor(DATA["batch"]["values_new"], dtype=dtype)
    scores = PolicyOutputs(logp, values=values, kl_ref=exact, kl_old=moved)
    return objective.loss(scores, rollouts, objective.denominators(rollouts)).loss, logp


@pytest.mark.parametrize("name", DATA["methods"])
def test_catalogue_losses_and_gradients(name):
    loss, logp = loss_of(name, torch.float64)
    (gradient,) = torch.autograd.grad(loss, logp)
    assert loss.item() == pytest.approx(DATA["methods"][name]["loss"], rel=1e-10, abs=1e-13)
    expected = torch.tensor(DATA["methods"][name]["gradient"], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("name", DATA["methods"])
def test_catalogue_losses_in_float32(name):
    loss, _ = loss_of(name, torch.float32)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(DATA["methods"][name]["loss"], rel=1e-4, abs=1e-6)
