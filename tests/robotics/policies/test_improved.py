"""Heads on frozen policies: a residual starts as its base to the bit, and chosen noise is what the flow starts from."""

import copy

import pytest
import torch

from mmrl.errors import UserError
from robotics.policies.base.action_policy import open_policy
from robotics.policies.base.action_statistics import ActionStatistics
from robotics.policies.improved import ResidualPolicy, ResidualPolicyConfig, SteeredPolicy, SteeredPolicyConfig
from robotics.serving import ServeConfig, open_served_policy
from robotics.sim.interface import read_sizes
from tests.robotics.policies.builders import (
    TEXTS,
    B,
    D,
    K,
    S,
    demonstrations,
    draw,
    make_flow,
    make_gaussian,
    make_inputs,
    make_small,
)


def residual(base=None, seed=0, **changes) -> ResidualPolicy:
    config = ResidualPolicyConfig(D, K, **changes)
    config.encoder.width, config.encoder.layers = 32, 2
    return ResidualPolicy.improve(base or make_gaussian(), config, S, TEXTS, seed)


def steered(base=None, seed=0, **changes) -> SteeredPolicy:
    config = SteeredPolicyConfig(D, K, **changes)
    config.encoder.width, config.encoder.layers = 32, 2
    return SteeredPolicy.improve(base or make_flow(), config, S, TEXTS, seed)


def moved(policy):
    """The policy after its head's weights moved."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=generator)
    return policy


@pytest.mark.parametrize("base", [make_gaussian, make_small, make_flow])
def test_a_new_residual_acts_as_its_base_to_the_bit(base):
    policy = residual(base())
    assert torch.equal(draw(policy, greedy=True).actions, draw(base(), greedy=True).actions)
    assert torch.equal(draw(policy, base_only=True).actions, draw(base(), greedy=True).actions)
    sampled = draw(policy).actions - draw(base(), greedy=True).actions
    assert 0 < float(sampled.abs().max()) <= 0.2 + 1e-6


@pytest.mark.parametrize("make", [residual, steered])
def test_decisions_are_scored_without_the_base(make, monkeypatch):
    policy = moved(make())
    choice = draw(policy, temperature=1.5)
    monkeypatch.setattr(policy.base, "act", None)
    logp, entropy = policy.log_probs(make_inputs(), choice.decisions, 1.5)
    torch.testing.assert_close(logp.detach(), choice.logp, rtol=0, atol=1e-5)
    assert entropy is None
    assert tuple(choice.logp.shape) == (B, policy.decisions) == (B, 1)


def test_what_critics_judge_of_a_residual_is_what_was_executed():
    policy = moved(residual(xi=0.5))
    choice = draw(policy)
    assert torch.equal(policy.chosen(choice.decisions), choice.actions)
    # also through the head's own draw, from what it read
    seen = policy.looks(make_inputs().state, choice.decisions)
    drawn = policy.draw(policy._read(seen, TEXTS), torch.Generator().manual_seed(1))[0].detach()
    base = draw(policy.base, greedy=True).actions
    assert float((drawn - base).abs().max()) <= 0.5 + 1e-6
    assert float((drawn - base).abs().max()) > 0.1


def test_a_flow_starts_from_the_chosen_noise():
    base, policy = make_flow(), moved(steered(bound=2.0))
    choice = draw(policy)
    noise = 2.0 * policy.chosen(choice.decisions)
    assert torch.equal(draw(base, greedy=True, start=noise).actions, choice.actions)
    assert torch.equal(draw(base, greedy=True, start=noise).decisions[:, 0], noise.flatten(1))
    assert not torch.equal(draw(base, greedy=True).actions, choice.actions)
    # greedy is repeatable: nothing else is drawn
    assert torch.equal(draw(policy, seed=0, greedy=True).actions, draw(policy, seed=9, greedy=True).actions)


def test_the_base_alone_starts_from_normal_noise_within_the_bound():
    policy = steered(bound=1.5)
    noise = torch.cat([policy.chosen(draw(policy, seed=seed, base_only=True).decisions) for seed in range(40)]) * 1.5
    # 1.5 standard deviations keep 87% of a normal distribution
    assert float((noise.abs() > 1.49).float().mean()) == pytest.approx(0.134, abs=0.04)
    inner = noise[noise.abs() < 1.49]
    assert float(inner.std()) == pytest.approx(0.744, abs=0.05)


def test_one_noise_may_serve_all_control_steps():
    policy = moved(steered(repeat=True))
    choice = draw(policy)
    chosen = policy.chosen(choice.decisions)
    assert tuple(chosen.shape) == (B, 1, D)
    start = policy.config.bound * chosen.expand(-1, K, -1)
    assert torch.equal(draw(policy.base, greedy=True, start=start).actions, choice.actions)


def test_fewer_steps_of_a_chunk_may_be_executed():
    policy = residual(n_action_steps=2)
    assert (policy.chunk, tuple(draw(policy).actions.shape)) == (2, (B, 2, D))
    assert torch.equal(draw(policy, greedy=True).actions, draw(policy.base, greedy=True).actions[:, :2])
    short = steered(n_action_steps=3)
    assert tuple(draw(short).actions.shape) == (B, 3, D)
    assert tuple(short.chosen(draw(short).decisions).shape) == (B, K, D)
    with pytest.raises(UserError, match="n_action_steps is 9, but the base's chunk has 4 steps"):
        residual(n_action_steps=9)


def test_normalised_actions_of_a_base_are_converted():
    base = make_gaussian()
    low, high = [-0.5] * D, [0.25] * D
    base.statistics = ActionStatistics.from_arrays(torch.tensor([low, high]).numpy().repeat(60, 0))
    plain, policy = draw(make_gaussian(), greedy=True).actions, residual(base)
    assert policy.statistics is None
    wanted = torch.from_numpy(base.statistics.unnormalise(plain.numpy())).clamp(-1, 1)
    assert torch.equal(draw(policy, greedy=True).actions, wanted)


@pytest.mark.parametrize("make", [residual, steered])
def test_only_the_head_is_trained_copied_and_counted(make):
    policy = make()
    assert not any(name.startswith("base") for name in policy.state_dict())
    assert not any(weight.requires_grad for weight in policy.base.parameters())
    before = copy.deepcopy(policy.base.state_dict())
    logp = policy.log_probs(make_inputs(), draw(policy).decisions)[0]
    logp.sum().backward()
    assert all(weight.grad is not None for weight in policy.parameters())
    assert all(torch.equal(value, before[name]) for name, value in policy.base.state_dict().items())
    assert all(weight.grad is None for weight in policy.base.parameters())


@pytest.mark.parametrize("make", [residual, steered])
@pytest.mark.parametrize("write", ["save_pretrained", "export"])
def test_a_folder_holds_head_and_base(make, write, tmp_path):
    policy = moved(make(seed=3))
    getattr(policy, write)(tmp_path / "saved")
    (tmp_path / "saved").rename(tmp_path / "elsewhere")
    again = open_policy(tmp_path / "elsewhere")
    assert type(again) is type(policy)
    assert torch.equal(draw(again).actions, draw(policy).actions)
    assert torch.equal(draw(again, greedy=True).decisions, draw(policy, greedy=True).decisions)


def test_features_are_read_if_the_base_sees_images():
    assert residual().config.features is True
    policy = residual(features=False)
    seen = policy.look(make_inputs(), torch.Generator())
    assert seen.shape[1] == K * D + S
    assert torch.equal(seen[:, K * D :], make_inputs().state)
    full = residual().look(make_inputs(), torch.Generator())
    assert torch.equal(full[:, K * D + S :], make_gaussian().features(make_inputs()))


def test_what_cannot_be_improved_is_refused():
    with pytest.raises(UserError, match="a GaussianActionPolicy does not start from noise"):
        steered(make_gaussian())
    base = make_gaussian()
    base.past = 2
    with pytest.raises(UserError, match="reads 2 past control steps"):
        residual(base)
    with pytest.raises(UserError, match="clone its base"):
        residual().bc_loss(make_inputs(), *demonstrations())


def test_what_it_observes_is_stated(tmp_path):
    """The images of the base, and the simulator's state, which the head reads even if the base does not."""
    policy = residual()
    sizes = read_sizes(policy)
    assert (tuple(sizes.image_size), sizes.state_size) == ((32, 32), S)
    policy.save_pretrained(tmp_path / "saved")
    served = open_served_policy(tmp_path / "saved", ServeConfig())
    assert served.format.state_size == S
