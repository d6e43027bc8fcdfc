"""PMOE: a mixture as the policy of soft actor-critic, in sampling, updates, cloning and its folder."""

import numpy as np
import pytest
import torch

from robotics.contrib.pmoe import MixtureActionPolicy, MixturePolicyConfig
from robotics.offpolicy.q_ensemble import QEnsemble
from robotics.offpolicy.sac_learner import Rates, SacLearner, SacSettings
from robotics.offpolicy.transitions import TransitionBatch
from robotics.policies.base.action_policy import PolicyInputs, open_policy
from robotics.policies.base.action_tokens import RowGenerators
from robotics.policies.base.encoder import EncoderConfig
from robotics.policies.policy_loading import ActionPolicyConfig
from tests.robotics.offpolicy.line_sac import TINY, sac_config, trainer_of, weights_of

STATE = 3


def make(chunk=2, **options):
    encoder = EncoderConfig(image_size=None, state_size=STATE, width=32, layers=2)
    config = MixturePolicyConfig(2, chunk, encoder=encoder, **options)
    return MixtureActionPolicy.build(config, ["go left", "go right"])


def inputs(rows=4):
    states = torch.randn(rows, STATE, generator=torch.Generator().manual_seed(0))
    return PolicyInputs(None, states, ("go left",) * rows)


def test_decisions_score_as_they_were_drawn():
    policy, batch = make(), inputs(64)
    choice = policy.act(batch, torch.Generator().manual_seed(1))
    torch.testing.assert_close(policy.log_probs(batch, choice.decisions)[0], choice.logp)
    assert torch.equal(choice.actions, choice.decisions.tanh())


def test_the_density_of_one_number_integrates_to_one():
    encoder = EncoderConfig(image_size=None, state_size=STATE, width=32, layers=2)
    policy = MixtureActionPolicy.build(MixturePolicyConfig(1, 1, experts=3, encoder=encoder), [""])
    with torch.no_grad():
        policy.mean.bias.copy_(torch.tensor([-1.0, 0.0, 1.5]))
        policy.weights.bias.copy_(torch.tensor([0.0, 1.0, -1.0]))
    edges = torch.linspace(-1, 1, 20001, dtype=torch.float64)
    before = ((edges[1:] + edges[:-1]) / 2).atanh()[:, None, None]
    rows = len(before)
    with torch.no_grad():
        logp, _ = policy.log_probs(PolicyInputs(None, torch.zeros(rows, STATE), ("",) * rows), before)
    assert float((logp[:, 0].exp() * (edges[1] - edges[0])).sum()) == pytest.approx(1, abs=1e-3)


def test_experts_are_drawn_by_their_weights_and_greedy_takes_the_most_likely():
    policy, rows = make(experts=3), 4000
    shares = torch.tensor([0.2, 0.5, 0.3])
    places = torch.tensor([-2.0, 0.0, 2.0])
    with torch.no_grad():
        policy.weights.weight.zero_()
        policy.weights.bias.copy_(shares.log())
        policy.mean.weight.zero_()
        policy.mean.bias.copy_(places.repeat_interleave(2))
    policy.config.min_std, policy._low, policy._span = 0.01, np.log(0.01), np.log(2)
    batch = PolicyInputs(None, torch.zeros(rows, STATE), ("",) * rows)
    before = policy.act(batch, torch.Generator().manual_seed(0)).decisions
    chosen = before[:, 0, 0].div(2).round()
    found = torch.tensor([(chosen == place / 2).float().mean() for place in places])
    torch.testing.assert_close(found, shares, atol=0.03, rtol=0)
    # one expert for the whole chunk
    assert torch.equal(chosen, before[:, 1, 1].div(2).round())
    assert not policy.act(batch, torch.Generator(), greedy=True).decisions.any()


def test_a_row_does_not_depend_on_the_others():
    policy, batch = make(), inputs(3)
    whole = policy.act(batch, RowGenerators.seeded([1, 2, 3]))
    alone = policy.act(batch.select([2]), RowGenerators.seeded([3]))
    torch.testing.assert_close(whole.actions[2:], alone.actions)


def test_only_the_best_expert_learns_from_a_row_and_the_weights_move_to_it():
    policy, batch = make(chunk=1, experts=3), inputs(16)
    # the value grows with the first entry, which only the last expert reaches
    with torch.no_grad():
        policy.mean.bias.copy_(torch.tensor([-1.0, 0.0, -1.0, 0.0, 3.0, 0.0]))
    value, logp, further = policy.propose(batch, torch.Generator().manual_seed(0), lambda actions: actions[:, 0, 0])
    (further + (logp - value).mean()).backward()
    moved = policy.mean.bias.grad.view(3, 2).abs().sum(1)
    assert moved.tolist()[:2] == [0.0, 0.0]
    assert moved[2] > 0
    assert policy.weights.bias.grad.argmin() == 2


def test_soft_actor_critic_finds_both_the_good_place_and_the_weights():
    """A bandit whose value has two peaks, the right one higher: the weights go to an expert that is there."""
    policy = make(chunk=1, experts=2)
    critics = QEnsemble(STATE, 2, width=16)

    def values(states, actions):
        place = actions[:, 0, 0]
        return torch.maximum(1.2 - (place - 0.7).abs(), 1 - (place + 0.7).abs()).expand(2, -1)

    critics.forward = values
    learner = SacLearner(policy, critics, SacSettings(), Rates(1e-3))
    learner._update_critics = lambda batch, generator: {}
    rows = 64
    zeros = torch.zeros(rows)
    batch = TransitionBatch(
        *(torch.zeros(rows, STATE),) * 2,
        *(torch.zeros(rows, 1, 2), zeros[:, None], torch.ones(rows, dtype=torch.int64)),
        *(torch.zeros(rows, STATE),) * 2,
        *(torch.ones(rows, dtype=torch.bool), zeros.long(), zeros.bool(), None),
    )
    for number in range(600):
        learner.log_alpha.data.fill_(-4.0)
        learner.update(batch, torch.Generator().manual_seed(number))
    seen = PolicyInputs(None, torch.zeros(1, STATE), ("",))
    found = policy.experts(seen)
    best = int(found.weights.argmax())
    assert found.weights.exp()[0, best] > 0.7
    assert float(found.mean[0, best, 0, 0].tanh()) == pytest.approx(0.7, abs=0.15)


def test_cloning_keeps_two_ways_apart():
    policy, batch = make(chunk=1, experts=2), inputs(64)
    actions = torch.where(torch.arange(64)[:, None, None] % 2 == 0, 0.8, -0.8).expand(64, 1, 2)
    batch = PolicyInputs(None, torch.zeros(64, STATE), batch.instructions)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    for _ in range(300):
        loss, _ = policy.bc_loss(batch, actions, torch.ones(64, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    drawn = policy.act(batch, torch.Generator().manual_seed(0)).actions
    assert (drawn.abs() - 0.8).abs().mean() < 0.1
    assert (drawn > 0).float().mean() == pytest.approx(0.5, abs=0.2)


def test_a_run_of_robot_sac_resumes_to_the_bit_and_its_policy_opens(tmp_path):
    model = ActionPolicyConfig(kind="mixture", chunk=2, options={"experts": 3, "encoder": {**TINY, "image_size": None}})

    def run(name, steps, resume=False):
        trainer = trainer_of(sac_config(tmp_path / name, model=model), tmp_path / name, steps)
        if resume:
            trainer.resume()
        trainer.run()
        trainer.recipe.close()
        return trainer

    whole = run("whole", 4)
    run("parts", 2)
    parts = run("parts", 4, resume=True)
    one, other = weights_of(whole), weights_of(parts)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    whole.policy.save_pretrained(tmp_path / "saved")
    policy = open_policy(tmp_path / "saved")
    assert isinstance(policy, MixtureActionPolicy)
    batch = PolicyInputs(None, torch.randn(5, 2), ("go right",) * 5)
    drawn = [each.act(batch, torch.Generator().manual_seed(0)) for each in (whole.policy, policy)]
    assert torch.equal(drawn[0].actions, drawn[1].actions)
