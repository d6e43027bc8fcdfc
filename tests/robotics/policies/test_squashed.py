"""The squashed Gaussian head: its density, gradients, cloning of actions at the bounds, and its folder."""

import math

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from robotics.policies.base.action_policy import PolicyInputs, open_policy
from robotics.policies.base.action_statistics import StateStatistics
from robotics.policies.base.action_tokens import RowGenerators
from robotics.policies.base.encoder import EncoderConfig, ObservationEncoder, StateEncoder
from robotics.policies.squashed import SquashedActionPolicy, SquashedPolicyConfig, score_squashed

STATE = 3


def make(chunk=2, **options):
    encoder = EncoderConfig(image_size=None, state_size=STATE, width=32, layers=2)
    config = SquashedPolicyConfig(2, chunk, encoder=encoder, **options)
    return SquashedActionPolicy.build(config, ["go left", "go right"])


def inputs(rows=4, text="go left"):
    states = torch.randn(rows, STATE, generator=torch.Generator().manual_seed(0))
    return PolicyInputs(None, states, (text,) * rows)


def test_decisions_score_as_they_were_drawn_and_actions_are_inside():
    policy, batch = make(std=3.0), inputs(64)
    choice = policy.act(batch, torch.Generator().manual_seed(1))
    torch.testing.assert_close(policy.log_probs(batch, choice.decisions)[0], choice.logp)
    assert choice.actions.abs().max() <= 1
    assert torch.equal(choice.actions, choice.decisions.tanh())
    greedy = policy.act(batch, torch.Generator(), greedy=True)
    assert torch.equal(greedy.decisions, policy.gaussian(batch)[0])


def test_the_density_integrates_to_one():
    mean, log_std = torch.tensor([[0.4]], dtype=torch.float64), torch.tensor([[-0.3]], dtype=torch.float64)
    edges = torch.linspace(-1, 1, 20001, dtype=torch.float64)
    actions = (edges[1:] + edges[:-1]) / 2
    density = score_squashed(actions.atanh()[:, None], mean, log_std).exp()
    assert float((density * (edges[1] - edges[0])).sum()) == pytest.approx(1, abs=1e-4)


def test_a_row_does_not_depend_on_the_others():
    policy, batch = make(), inputs(3)
    whole = policy.act(batch, RowGenerators.seeded([1, 2, 3]))
    alone = policy.act(batch.select([2]), RowGenerators.seeded([3]))
    torch.testing.assert_close(whole.actions[2:], alone.actions)


def test_drawn_actions_carry_the_gradient_of_the_mean_and_the_spread():
    policy = make()
    actions, logp = policy.draw(inputs(), torch.Generator().manual_seed(0))
    (actions.sum() + logp.sum()).backward()
    assert all(float(part.weight.grad.abs().sum()) > 0 for part in (policy.mean, policy.spread))


@pytest.mark.parametrize("cloning", ["error", "likelihood"])
def test_demonstrations_at_the_bounds_can_be_cloned(cloning):
    """The density of -1 and 1 is infinite; experts hold grippers there."""
    policy, batch = make(cloning=cloning), inputs(8)
    wanted = torch.ones(8, 2, 2)
    wanted[..., 1] = -1
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    for _ in range(60):
        loss, metrics = policy.bc_loss(batch, wanted, torch.ones(8, 2))
        assert math.isfinite(metrics["bc/loss"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert metrics["bc/action_error"] < 0.2


def test_the_instruction_changes_the_action():
    policy = make()
    torch.nn.init.normal_(policy.mean.weight)
    left, right = (
        policy.act(inputs(text=text), torch.Generator(), greedy=True).actions for text in ("go left", "go right")
    )
    assert not torch.equal(left, right)
    mixed = PolicyInputs(None, inputs(2).state, ("go right", "go left"))
    found = policy.act(mixed, torch.Generator(), greedy=True).actions
    torch.testing.assert_close(found, torch.stack([right[0], left[1]]))


def test_its_folder_opens_with_the_scale_of_states(tmp_path):
    policy = make()
    policy.scale_states(StateStatistics(np.array([1.0, 2, 3]), np.array([2.0, 1, 1])))
    policy.save_pretrained(tmp_path)
    other = open_policy(tmp_path)
    assert isinstance(other, SquashedActionPolicy)
    batch = inputs()
    assert torch.equal(*(each.act(batch, torch.Generator(), greedy=True).actions for each in (policy, other)))


def test_with_images_it_has_the_encoder_of_the_other_policies():
    encoder = EncoderConfig(image_size=(32, 32), state_size=STATE, width=32, heads=2, layers=1, channels=8, keypoints=4)
    policy = SquashedActionPolicy.build(SquashedPolicyConfig(2, 1, encoder=encoder), [""])
    assert isinstance(policy.encoder, ObservationEncoder)
    assert isinstance(make().encoder, StateEncoder)
    batch = PolicyInputs(torch.zeros(2, 32, 32, 3, dtype=torch.uint8), torch.zeros(2, STATE), ("", ""))
    assert policy.act(batch, torch.Generator()).actions.shape == (2, 1, 2)


def test_states_of_another_size_are_refused():
    with pytest.raises(UserError, match="expects a state of 3 entries, got 2"):
        make().act(PolicyInputs(None, torch.zeros(1, 2), ("",)), torch.Generator())
    with pytest.raises(ValueError, match=r"decisions have the shape \(4, 1, 2\)"):
        make().log_probs(inputs(), torch.zeros(4, 1, 2))
