"""Properties of the policies of all kinds."""

import copy
import math

import numpy as np
import pytest
import torch

from mmrl.training.processes import avoid_refused_instructions
from robotics.policies.base.action_policy import PolicyInputs, open_policy
from robotics.policies.base.action_statistics import ActionStatistics, StateStatistics
from tests.programs import run_after_torch
from tests.robotics.policies.builders import B, D, K, S, demonstrations, draw, make_flow, make_inputs
from tests.robotics.policies.conftest import BUILDERS


def test_a_choice_has_the_promised_shapes(policy):
    choice = draw(policy)
    assert (policy.chunk, policy.action_size) == (K, D)
    assert tuple(choice.actions.shape) == (B, K, D)
    assert choice.actions.dtype == choice.logp.dtype == torch.float32
    assert float(choice.actions.abs().max()) <= 1
    assert tuple(choice.logp.shape) == (B, policy.decisions)
    assert len(choice.decisions) == B
    assert not choice.logp.requires_grad
    assert not choice.decisions.requires_grad


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_an_update_starts_at_ratio_one(policy, temperature, autocast):
    if autocast:
        avoid_refused_instructions()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        choice = draw(policy, temperature=temperature)
        logp, entropy = policy("log_probs", make_inputs(), choice.decisions, temperature)
    assert logp.dtype == entropy.dtype == torch.float32
    assert entropy.shape == logp.shape
    torch.testing.assert_close(logp.detach(), choice.logp, rtol=0, atol=1e-6)


def test_the_temperature_is_part_of_the_log_probability(policy):
    choice = draw(policy, temperature=1.6)
    other = policy.log_probs(make_inputs(), choice.decisions, 1.0)[0]
    assert float((other.detach() - choice.logp).abs().max()) > 1e-3


def test_one_seed_gives_one_choice(policy):
    first, again, other = draw(policy, seed=1), draw(policy, seed=1), draw(policy, seed=2)
    assert torch.equal(first.decisions, again.decisions)
    assert torch.equal(first.logp, again.logp)
    assert not torch.equal(first.actions, other.actions)


def test_draws_leave_the_global_generator_alone(policy):
    before = torch.random.get_rng_state()
    draw(policy)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_greedy_does_not_depend_on_the_temperature(policy):
    cold, hot = draw(policy, greedy=True), draw(policy, greedy=True, temperature=3.0)
    torch.testing.assert_close(cold.actions, hot.actions)


def test_rows_do_not_depend_on_each_other(policy):
    batch, choice = make_inputs(), draw(policy)
    together = policy.log_probs(batch, choice.decisions)[0]
    for row in range(B):
        alone = policy.log_probs(batch.select([row]), choice.decisions[row : row + 1])[0]
        torch.testing.assert_close(alone[0], together[row], rtol=1e-4, atol=2e-5)


def test_the_gradient_reaches_every_weight(builders, kind):
    policy = builders[kind]()
    choice = draw(policy)
    policy.log_probs(make_inputs(), choice.decisions)[0].square().sum().backward()
    trained = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    assert trained
    # the softmax takes no notice of what all keys have in common, nor of a shift of a whole map
    silent = ("k_proj.bias", "stem.keypoints.bias")
    for name, weight in trained.items():
        assert weight.grad is not None, name
        assert name.endswith(silent) or float(weight.grad.abs().max()) > 0, name


def test_gradients_agree_with_finite_differences(builders, kind):
    policy = builders[kind]()
    batch, choice = make_inputs(), draw(policy, temperature=1.6)
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    generator = torch.Generator().manual_seed(3)
    side = torch.randn(choice.logp.shape, generator=generator)

    def value():
        return (policy.log_probs(batch, choice.decisions, 1.6)[0] * side).sum()

    value().backward()
    # along the gradient itself the slope is largest, and rounding matters least
    slope = math.sqrt(sum(float(weight.grad.square().sum()) for weight in weights))
    step = 2e-3
    ends = []
    with torch.no_grad():
        for sign in (1, -2):
            for weight in weights:
                weight += sign * step / slope * weight.grad
            ends.append(float(value()))
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=0.02)


def test_cloning_ignores_masked_steps(policy):
    actions, mask = demonstrations()
    changed = torch.where(mask[..., None].bool(), actions, -actions)
    losses = []
    for wanted in (actions, changed):
        loss, metrics = policy("bc_loss", make_inputs(), wanted, mask, torch.Generator().manual_seed(0))
        losses.append(float(loss.detach()))
        assert metrics["bc/loss"] == pytest.approx(losses[-1])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    other = policy.bc_loss(make_inputs(), -actions, mask, torch.Generator().manual_seed(0))[0]
    assert float(other.detach()) != pytest.approx(losses[0], rel=1e-5)


def test_cloning_brings_actions_to_the_demonstrations(builders, kind):
    policy, generator = builders[kind](), torch.Generator().manual_seed(0)
    actions, mask = demonstrations()
    steps, rate, repeats = {"flow": (60, 6e-3, 8), "adapter": (200, 1e-2, 1)}.get(kind, (25, 3e-3, 1))
    optimizer = torch.optim.Adam(policy.parameters(), rate)
    before = distance(policy, actions, mask)
    # more draws of time and noise a step
    batch = PolicyInputs.concat([make_inputs()] * repeats)
    wanted, counted = actions.repeat(repeats, 1, 1), mask.repeat(repeats, 1)
    for _ in range(steps):
        loss, _ = policy.bc_loss(batch, wanted, counted, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert distance(policy, actions, mask) < 0.4 * before


def distance(policy, actions, mask):
    found = draw(policy, greedy=True).actions
    return float(((found - actions).abs() * mask[..., None]).sum() / mask.sum())


@pytest.mark.parametrize("kind", [kind for kind in BUILDERS if kind != "adapter"])
def test_a_saved_policy_is_restored_bit_for_bit(builders, kind, tmp_path):
    policy = builders[kind](seed=1)
    policy.statistics = ActionStatistics.from_arrays(np.random.default_rng(0).normal(size=(20, D)))
    policy.scale_states(StateStatistics(np.full(S, 0.5), np.full(S, 2.0)))
    policy.save_pretrained(tmp_path / "saved")
    opened, loaded = open_policy(tmp_path / "saved"), builders[kind](seed=2)
    loaded.load_weights(tmp_path / "saved")
    expected = draw(policy)
    for other in (opened, loaded):
        choice = draw(other)
        assert torch.equal(choice.actions, expected.actions)
        assert torch.equal(choice.logp, expected.logp)
    assert opened.statistics.as_dict() == loaded.statistics.as_dict() == policy.statistics.as_dict()
    assert opened.config == policy.config
    policy.statistics = None
    policy.save_pretrained(tmp_path / "saved")
    loaded.load_weights(tmp_path / "saved")
    assert open_policy(tmp_path / "saved").statistics is loaded.statistics is None


def test_a_copy_is_independent(builders, kind):
    policy = builders[kind]()
    copied, expected = copy.deepcopy(policy), draw(policy)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(0.5)
    # a Gaussian's density at its own draw does not depend on its mean, so actions are looked at as well
    assert outcome(draw(copied)) == outcome(expected)
    assert outcome(draw(policy)) != outcome(expected)


def outcome(choice):
    return choice.actions.tolist(), choice.logp.tolist()


def test_other_calls_than_the_methods_are_refused(policy):
    with pytest.raises(ValueError, match="available: act, log_probs, bc_loss"):
        policy("save_pretrained", "somewhere")
    with pytest.raises(ValueError, match="must be"):
        policy.bc_loss(make_inputs(), torch.zeros(B, K, D + 1), torch.ones(B, K))


def test_tokens_after_the_last_control_step_do_not_count(policies):
    found = policies["small_step"].executed_mask(torch.tensor([[0, 1], [3, 4]]))
    expected = [[[0] * 8, [1] * 2 + [0] * 6], [[1] * 6 + [0] * 2, [1] * 8]]
    assert found.tolist() == expected
    assert policies["adapter"].executed_mask(torch.tensor([2])).tolist() == [[1, 1, 0, 0]]


def test_denoising_steps_count_together():
    # as many as control steps, yet none of them belongs to one
    assert make_flow(steps=K).executed_mask(torch.tensor([0, 1, 4])).tolist() == [[0] * 4, [1] * 4, [1] * 4]


def test_importing_the_policies_loads_nothing_heavy():
    code = (
        "import sys; import robotics.policies.small, robotics.policies.flow, robotics.policies.vlm, "
        "robotics.policies.gaussian, robotics.episodes.collect; print(*[name for name in ('transformers', 'diffusers', "
        "'mujoco', 'PIL', 'sklearn', 'open3d', 'peft') if name in sys.modules])"
    )
    assert run_after_torch(code).strip() == ""
