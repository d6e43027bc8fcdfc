"""The learner without a run: a chain whose values are known, gradients, ensembles and the temperature."""

import copy
import math

import pytest
import torch
from torch import nn

from robotics.offpolicy.q_ensemble import QEnsemble
from robotics.offpolicy.sac_learner import (
    NonFiniteError,
    QSettings,
    Rates,
    SacLearner,
    SacSettings,
    TemperatureSettings,
)
from robotics.offpolicy.transitions import TransitionBatch
from robotics.policies.base.action_policy import PolicyInputs
from robotics.policies.base.action_statistics import StateStatistics
from robotics.policies.base.encoder import EncoderConfig
from robotics.policies.squashed import SquashedActionPolicy, SquashedPolicyConfig

CHUNK, ACTION = 2, 1


def policy_of(seed=0):
    encoder = EncoderConfig(image_size=None, state_size=1, width=32, layers=1)
    return SquashedActionPolicy.build(SquashedPolicyConfig(ACTION, CHUNK, encoder=encoder), [""], seed)


def batch_of(rows=8, terminated=False, steps=CHUNK, rewards=None, state=1.0):
    states = torch.full((rows, 1), state)
    rewards = torch.ones(rows, CHUNK) if rewards is None else rewards
    flags = torch.full((rows,), terminated)
    steps = torch.full((rows,), steps)
    none = torch.zeros(rows, dtype=torch.bool)
    # all over the range, because the targets ask for the value of any action
    actions = torch.rand(rows, CHUNK, ACTION, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return TransitionBatch(states, states, actions, rewards, steps, states, states, flags, none.long(), none)


def learner_of(rate=3e-3, **settings):
    critics = QEnsemble(1, CHUNK * ACTION, critics=settings.pop("critics", 2), width=16, layers=1, norm=True)
    chosen = SacSettings(**{"gamma": 0.8, "entropy_in_target": False, "tau": 0.05, **settings})
    return SacLearner(policy_of(), critics, chosen, Rates(learning_rate=rate))


def learned_value(batch, **settings):
    torch.manual_seed(0)
    learner = learner_of(rate=1e-2, actor_every=10_000, tau=0.2, **settings)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        learner.update(batch, generator)
    with torch.no_grad():
        return float(learner.critics(batch.full, batch.actions).mean())


@pytest.mark.parametrize(
    ("terminated", "steps", "value"),
    [
        # the same state for ever, cut off by time limits: 1 / (1 - gamma)
        (False, CHUNK, 5.0),
        # the limit cuts the chunk after a step: 1 + gamma Q, and not 1 + gamma^2 Q = 2.8
        (False, 1, 5.0),
        # an end: the rewards of the chunk, 1 + gamma
        (True, CHUNK, 1.8),
        (True, 1, 1.0),
    ],
)
def test_values_of_a_chain_with_time_limits_and_ends(terminated, steps, value):
    # what is not executed is not paid
    rewards = torch.ones(64, CHUNK) if steps == CHUNK else torch.tensor([[1.0, 99.0]]).repeat(64, 1)
    found = learned_value(batch_of(64, terminated, steps, rewards), critics=1)
    assert found == pytest.approx(value, abs=0.1)


def test_each_loss_moves_its_own_weights_alone():
    learner = learner_of(actor_every=2)
    parts = {"actor": learner.actor, "critics": learner.critics, "targets": learner.targets}

    def moved(number):
        before = {name: [w.clone() for w in part.parameters()] for name, part in parts.items()}
        learner.update(batch_of(), torch.Generator().manual_seed(number))
        assert all(weight.grad is None for part in parts.values() for weight in part.parameters())
        return {
            name
            for name, part in parts.items()
            if any(not torch.equal(old, new) for old, new in zip(before[name], part.parameters(), strict=True))
        }

    assert moved(0) == {"critics", "targets"}
    assert moved(1) == {"actor", "critics", "targets"}


def test_critics_of_an_ensemble_are_independent_networks():
    batch = batch_of()
    ensemble = QEnsemble(1, CHUNK * ACTION, critics=3, width=8, norm=True, seed=1)
    found = ensemble(batch.full, batch.actions)
    assert found.shape == (3, 8)
    assert len(found[:, 0].unique()) == 3
    gradient = torch.autograd.grad(found[1].sum(), list(ensemble.parameters()), allow_unused=True)
    assert all(float(part[[0, 2]].abs().sum()) == 0 for part in gradient)
    assert any(float(part[1].abs().sum()) > 0 for part in gradient)


def test_an_ensemble_computes_what_separate_networks_do():
    ensemble = QEnsemble(2, 2, critics=2, width=8, layers=2, norm=True, seed=1)
    ensemble.scale_states(StateStatistics(mean=torch.tensor([1.0, 0.0]).numpy(), std=torch.tensor([2.0, 0.0]).numpy()))
    states, actions = torch.randn(5, 2), torch.rand(5, 1, 2)
    for number in range(2):
        layers: list[nn.Module] = []
        for weight, bias in zip(ensemble.weights, ensemble.biases, strict=True):
            linear = nn.Linear(*weight.shape[1:])
            linear.weight.data, linear.bias.data = weight[number].T, bias[number, 0]
            layers += [linear, nn.LayerNorm(8), nn.ReLU()]
        net = nn.Sequential(*layers[:-2])
        inputs = torch.cat([(states - torch.tensor([1.0, 0.0])) / torch.tensor([2.0, 1.0]), actions[:, 0]], 1)
        torch.testing.assert_close(ensemble(states, actions)[number], net(inputs)[:, 0])


def test_the_temperature_moves_towards_the_target_entropy():
    def after(target):
        settings = TemperatureSettings(initial=0.5, target_entropy=target)
        learner = learner_of(temperature=settings)
        for number in range(5):
            metrics = learner.update(batch_of(), torch.Generator().manual_seed(number))
        return learner.alpha, metrics

    # an entry of an action in -1..1 has at most log 2
    high, metrics = after(5.0)
    low, _ = after(-5.0)
    assert low < 0.5 < high
    assert -5 < metrics["sac/entropy"] < math.log(2)


def test_equal_generators_give_equal_updates_and_state_restores_them():
    batches, rates = batch_of(), {"critics": 5}
    first, second = (learner_of(**rates) for _ in range(2))
    first.settings.critics = second.settings.critics = QSettings(count=5, subset=2)
    first.update(batches, torch.Generator().manual_seed(0))
    second.actor.load_state_dict(first.actor.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    torch.manual_seed(1)  # the global generator is not used
    again = [one.update(batches, torch.Generator().manual_seed(7)) for one in (first, second)]
    assert again[0] == again[1]
    for own, other in zip(first.actor.parameters(), second.actor.parameters(), strict=True):
        assert torch.equal(own, other)


def test_a_loss_that_is_not_finite_changes_nothing():
    learner = learner_of()
    before = [weight.clone() for weight in learner.critics.parameters()]
    with pytest.raises(NonFiniteError, match="loss of critics is nan"):
        learner.update(batch_of(rewards=torch.full((8, CHUNK), math.nan)), torch.Generator())
    assert all(torch.equal(old, new) for old, new in zip(before, learner.critics.parameters(), strict=True))


def test_the_chunk_of_an_actor_is_one_action_of_the_critic():
    actions, logp = policy_of().draw(PolicyInputs(None, torch.zeros(3, 1), ("",) * 3), torch.Generator())
    assert actions.shape == (3, CHUNK, ACTION)
    assert logp.shape == (3, CHUNK)
