"""User-defined modules."""

import math

import pytest
import torch
from torch import nn

from mmrl.errors import RunError, UserError
from robotics.episodes.collect import sim_actions
from robotics.policies.base.action_policy import PolicyInputs
from robotics.policies.module import ModuleAdapter
from tests.robotics.policies.builders import TEXTS, B, D, Gaussian, K, S, demonstrations, draw, make_inputs


class Plain(nn.Module):
    """The minimal interface: one step at a time, one log-probability, no options."""

    def act(self, obs, generator):
        actions = torch.randn(len(obs["instructions"]), D, generator=generator) * 3
        return actions, self.log_probs(obs, actions)

    def log_probs(self, obs, actions):
        return torch.distributions.Normal(0.0, 3.0).log_prob(actions).sum(-1)


def test_the_least_module_will_do():
    policy = ModuleAdapter(Plain(), D)
    choice = draw(policy)
    assert tuple(choice.actions.shape) == (B, 1, D)
    assert float(choice.actions.abs().max()) == 1
    # the actions that were carried out are clipped, those that are scored are not
    logp, entropy = policy.log_probs(make_inputs(), choice.decisions)
    assert entropy is None
    torch.testing.assert_close(logp, choice.logp)
    with pytest.raises(UserError, match=r"greedy is True, but Plain.act has no argument 'greedy'"):
        draw(policy, greedy=True)
    with pytest.raises(UserError, match=r"temperature is 2.0, but Plain.log_probs has no argument"):
        policy.log_probs(make_inputs(), choice.decisions, 2.0)


def test_a_module_gets_the_available_inputs():
    seen = {}

    class Curious(Plain):
        def act(self, obs, generator):
            seen.update(obs)
            return super().act(obs, generator)

    draw(ModuleAdapter(Curious(), D), PolicyInputs(None, torch.zeros(B, S), TEXTS))
    assert set(seen) == {"state", "instructions"}
    assert seen["instructions"] == list(TEXTS)


def test_cloning_one_log_probability_a_chunk_needs_whole_chunks():
    class Whole(Gaussian):
        def log_probs(self, obs, actions, temperature=1.0):
            return super().log_probs(obs, actions, temperature)[0].sum(1)

    policy = ModuleAdapter(Whole(), D, K)
    actions, mask = demonstrations()
    loss, _ = policy.bc_loss(make_inputs(), actions, mask)
    each = -policy.log_probs(make_inputs(), actions)[0][:, 0]
    torch.testing.assert_close(loss, each[[0, 2]].mean())


def test_a_modules_own_cloning_loss_is_used():
    class Cloned(Gaussian):
        def bc_loss(self, obs, actions, mask):
            return (self.mean(obs["state"]).unflatten(1, (K, D)) - actions).square().mean()

    actions, mask = demonstrations()
    module = Cloned()
    loss, metrics = ModuleAdapter(module, D, K).bc_loss(make_inputs(), actions, mask)
    expected = (module.mean(make_inputs().state).unflatten(1, (K, D)) - actions).square().mean()
    torch.testing.assert_close(loss, expected)
    assert metrics == {"bc/loss": pytest.approx(float(expected.detach()))}


def test_a_modules_weights_are_saved(tmp_path):
    policy, other = ModuleAdapter(Gaussian(), D, K, K), ModuleAdapter(Gaussian(), D, K, K)
    with torch.no_grad():
        policy.module.mean.weight.add_(1.0)
    policy.save_pretrained(tmp_path)
    other.load_weights(tmp_path)
    assert torch.equal(draw(other).logp, draw(policy).logp)


def wrong(act=None, log_probs=None):
    module = Plain()
    module.act = (lambda obs, generator: act) if act is not None else module.act
    module.log_probs = (lambda obs, actions: log_probs) if log_probs is not None else module.log_probs
    return ModuleAdapter(module, D)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (torch.zeros(B, D), "returned Tensor; expected two tensors"),
        ((torch.zeros(B, D),), "returned 1 values; expected two tensors"),
        ((torch.zeros(B, D + 1), torch.zeros(B)), r"shape \(3, 3\); expected \(3, 2\), with chunk=1 and action_size=2"),
        ((torch.zeros(B, D), torch.zeros(B, D)), r"logp of the shape \(3, 2\); expected \(3, 1\) or \(3,\)"),
    ],
)
def test_what_a_module_returns_wrongly_is_named(answer, message):
    with pytest.raises(UserError, match=message):
        draw(wrong(act=answer))


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_actions_that_are_not_finite_reach_no_simulator(number):
    choice = draw(wrong(act=(torch.full((B, D), number), torch.zeros(B))))
    with pytest.raises(RunError, match="not finite"):
        sim_actions(choice.actions.numpy(), None)


def test_what_a_module_lacks_is_named():
    with pytest.raises(UserError, match="Linear has no method act and no method log_probs"):
        ModuleAdapter(nn.Linear(2, 2), D)
    with pytest.raises(UserError, match="must be 1, chunk or"):
        ModuleAdapter(Plain(), D, K, decisions=3)
    with pytest.raises(UserError, match=r"Plain.log_probs returned logp of the shape \(7,\)"):
        wrong(log_probs=torch.zeros(7)).log_probs(make_inputs(), torch.zeros(B, 1, D))
