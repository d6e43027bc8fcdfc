"""Loss scaling of fp16, against torch's GradScaler and against runs without it."""

import pytest
import torch
from torch import nn

from mmrl.errors import RunError, UserError
from mmrl.training import optimizer
from mmrl.training.optimizer import LossScale
from tests.training.conftest import weights
from tests.training.loop.test_unequal_ranks import run
from tests.training.toy import ToyRecipe


def test_scales_and_skipped_steps_are_those_of_grad_scaler(monkeypatch):
    monkeypatch.setattr(optimizer, "GROWTH_INTERVAL", 3)
    draws = torch.Generator().manual_seed(0)
    ours, theirs = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    step, peer = torch.optim.SGD([ours], lr=0.1), torch.optim.SGD([theirs], lr=0.1)
    scale, scaler = LossScale(enabled=True), torch.amp.GradScaler("cpu", growth_interval=3)
    for number in range(60):
        factor = torch.randn(4, generator=draws)
        if torch.rand((), generator=draws) < 0.25:
            factor[number % 4] = (float("inf"), float("nan"))[number % 2]
        for weight, scaled in ((ours, scale.scaled), (theirs, scaler.scale)):
            weight.grad = None
            scaled((weight * factor).sum()).backward()
        assert torch.equal(ours.grad.nan_to_num(), theirs.grad.nan_to_num())
        scale.unscale([ours])
        if bool(ours.grad.isfinite().all()):
            step.step()
            scale.keep()
        else:
            scale.shrink()
        scaler.step(peer)
        scaler.update()
        assert scale.value == scaler.get_scale()
        assert torch.equal(ours, theirs)
    assert 5 < scale.overflows < 25


def noting(trainer):
    """Metrics of the update of the latest step, filled as the trainer goes."""
    found = {}
    trainer.recipe.on_step_end = lambda step, metrics: found.update(metrics)
    return found


class Overflowing(ToyRecipe):
    """The gradient of a weight is infinite in the first steps of the run."""

    first = 2

    def __init__(self, config):
        super().__init__(config)
        self.policy.shared.register_hook(self._spoilt)

    def _spoilt(self, gradient):
        return gradient * float("inf") if len(self.seen_tasks) <= self.first else gradient


@pytest.mark.parametrize("micro_batch", [0, 5])
def test_scaling_by_a_power_of_two_changes_no_bit(make_trainer, micro_batch):
    plain, scaled = (
        make_trainer(mixed_precision=kind, micro_batch=micro_batch, minibatches_per_step=2) for kind in ("none", "fp16")
    )
    theirs, ours = noting(plain), noting(scaled)
    for _ in range(3):
        plain.train_step()
        scaled.train_step()
    for one, other in zip(weights(plain), weights(scaled), strict=True):
        assert torch.equal(one, other)
    assert ours["optim/grad_norm"] == theirs["optim/grad_norm"]
    assert ours.keys() - theirs.keys() == {"optim/loss_scale", "optim/overflows"}


def test_an_overflow_skips_the_step_and_halves_the_scale(make_trainer, caplog):
    trainer = make_trainer(recipe=Overflowing, mixed_precision="fp16", minibatches_per_step=2)
    start, found = weights(trainer), noting(trainer)
    trainer.train_step()
    assert all(torch.equal(one, other) for one, other in zip(start, weights(trainer), strict=True))
    assert not trainer.updater.optimizer.state
    assert (found["optim/overflows"], found["optim/skipped"], found["optim/loss_scale"]) == (2, 0, 2.0**14)
    assert "step 0: a gradient overflows in fp16; optimiser step skipped, loss scale 32768 instead of 65536" in (
        caplog.text
    )
    trainer.train_step()
    trainer.train_step()
    assert (trainer.updater.scale.overflows, trainer.updater.optimiser_step) == (4, 2)
    assert not torch.equal(start[1], weights(trainer)[1])


def test_what_no_scale_can_mend_goes_to_the_guard(make_trainer, monkeypatch):
    monkeypatch.setattr(optimizer, "START", 2.0**-13)
    trainer = make_trainer(recipe=Overflowing, mixed_precision="fp16", on_nonfinite="stop")
    trainer.train_step()
    assert trainer.updater.scale.value == 2.0**-14
    with pytest.raises(RunError, match="4 of 4 entries of gradient of shared"):
        trainer.train_step()
    loss = make_trainer(mixed_precision="fp16", poison_step=0)
    loss.train_step()
    assert (loss.updater.skipped, loss.updater.scale.overflows) == (1, 0)


def test_a_resumed_run_goes_on_with_the_scale(make_trainer, monkeypatch):
    monkeypatch.setattr(optimizer, "GROWTH_INTERVAL", 3)
    options = {"recipe": Overflowing, "mixed_precision": "fp16", "minibatches_per_step": 2}
    whole, part = make_trainer(steps=6, **options), make_trainer("part", steps=3, **options)
    whole.run()
    part.run()
    resumed = make_trainer("part", steps=6, **options)
    resumed.resume()
    resumed.recipe.first = 0  # it has not seen the steps before
    assert resumed.updater.scale.state_dict() == {"value": 2.0**12, "overflows": 4, "finite": 2}
    resumed.run()
    assert resumed.updater.scale.state_dict() == whole.updater.scale.state_dict()
    assert resumed.updater.scale.value > 2.0**12
    for one, other in zip(weights(whole), weights(resumed), strict=True):
        assert torch.equal(one, other)


def test_float16_weights_are_not_trained(make_trainer):
    class Half(ToyRecipe):
        def __init__(self, config):
            super().__init__(config)
            self.policy.to(torch.float16)

    with pytest.raises(UserError, match="to be trained are float16, for which gradients cannot be unscaled"):
        make_trainer(recipe=Half, mixed_precision="fp16")


@pytest.mark.slow
def test_processes_skip_a_step_together(tmp_path):
    one = run(tmp_path / "one.pt", "none", 2, 5, 1, "overflow")
    two = run(tmp_path / "two.pt", "none", 2, 5, 2, "overflow")
    assert one["steps"] == two["steps"] == 2
    assert one["scale"] == two["scale"] == {"value": 2.0**14, "overflows": 2, "finite": 2}
    for name, value in one["weights"].items():
        assert value.abs().max() > 0
        torch.testing.assert_close(two["weights"][name], value, rtol=1e-5, atol=1e-6)
