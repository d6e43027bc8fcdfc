"""Every recipe on a GPU: it learns what it learns on the CPU, in lower precision too, and resumes."""

import math

import pytest
from accelerate.state import AcceleratorState

from mmrl.recipes import RECIPES
from tests.contracts.domains import make_low, run, weights
from tests.contracts.test_two_processes import STEPS, assert_same, make, train

pytestmark = pytest.mark.gpu
RELATIVE = 1e-2
"""Of the largest move of a weight: other kernels add in another order; measured is up to 4.4e-3."""
REPEATS = 0.05
"""Largest difference of weights after a resume, as a share of the move: sums of atomic additions differ from run to
run. A run that forgot its optimiser, its random streams or its step would differ by about the move."""


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Forget the device that an earlier test has chosen."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def train_on(monkeypatch):
    """`train` on a device, "cpu" or "cuda"."""

    def on(device, *arguments):
        AcceleratorState._reset_state(reset_partial_state=True)
        with monkeypatch.context() as patched:
            if device == "cpu":
                patched.setenv("ACCELERATE_USE_CPU", "true")
            found = train(*arguments)
        assert found["weights"].device.type == device
        return found | {"weights": found["weights"].cpu()}

    return on


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_learns_on_a_gpu_what_it_learns_on_the_cpu(name, tmp_path, train_on):
    config = make(name, tmp_path)
    whole = train_on("cpu", config, tmp_path / "cpu")
    assert_same(train_on("cuda", config, tmp_path / "gpu"), whole, RELATIVE)


@pytest.mark.parametrize("name", ["papo", "awm", "robot_ppo"])
def test_a_run_is_resumed_on_the_other_device(name, tmp_path, train_on):
    config = make(name, tmp_path)
    whole = train_on("cpu", config, tmp_path / "whole")
    train_on("cuda", config, tmp_path / "run", STEPS - 1)
    assert_same(train_on("cpu", config, tmp_path / "run", STEPS, True), whole, RELATIVE)
    train_on("cpu", config, tmp_path / "other", STEPS - 1)
    assert_same(train_on("cuda", config, tmp_path / "other", STEPS, True), whole, RELATIVE)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_and_resumes_in_lower_precision(name, precision, tmp_path, monkeypatch):
    config = make_low(name, precision, tmp_path, monkeypatch)
    whole, losses = run(config, tmp_path / "whole", steps=2)
    assert whole.accelerator.device.type == "cuda"
    assert losses
    assert all(math.isfinite(loss) for loss in losses)
    assert whole.updater.moved
    first, _ = run(config, tmp_path / "parts", steps=1)
    start = weights(first).clone()
    second, _ = run(config, tmp_path / "parts", steps=2, resume=True)
    moved = (weights(whole) - start).abs().max()
    assert moved > 0
    assert (weights(second) - weights(whole)).abs().max() <= REPEATS * moved
