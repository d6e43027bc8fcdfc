"""Policies whose data have other units: options map them to the simulator's -1 and 1."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from mmrl.cli import main
from mmrl.errors import UserError
from mmrl.fields import check_config
from robotics.episodes.collect import ActingSettings, action_scale
from robotics.methods.clone import CloneRecipe
from robotics.methods.ppo import PolicyWithCritic, StateCritic
from robotics.policies.base.action_policy import open_policy
from robotics.policies.base.action_statistics import ActionRange, ActionStatistics, check_bounds
from robotics.policies.lerobot.flow import LeRobotFlowConfig, LeRobotFlowPolicy
from robotics.policies.lerobot.gaussian import LeRobotPolicy, LeRobotPolicyConfig
from robotics.policies.policy_loading import ActionPolicyConfig, load_action_policy
from robotics.serving import ServeConfig
from robotics.serving.opening import ServedPolicy
from robotics.serving.queue import choose_chunks
from robotics.sim.gym_adapter import GymRow
from robotics.sim.interface import RobotInterface
from robotics.sim.subprocess_sim import problem_in_hello
from tests.robotics.ball_env import HIGH, LOW, Ball
from tests.robotics.line_demos import demonstrate
from tests.robotics.line_sim import LineSim
from tests.robotics.test_cloning import clone
from tests.robotics.test_lerobot_flow import GAP, moved
from tests.robotics.test_lerobot_policy import configuration, inputs, seeded
from tests.robotics.test_sim_faults import GOOD

SERVED = (ServeConfig(), None, 2)
LEAST, MOST = 0.04, 0.24
"""Data values of -1 and 1 for the policies below, whose own actions are 0.12 and -0.12."""


pytestmark = pytest.mark.usefixtures("served")


@pytest.fixture
def policy(closing):
    return closing(
        LeRobotPolicy(LeRobotPolicyConfig("anything", std=0.3, action_low=[LEAST], action_high=[MOST]), seed=1)
    )


def scaled(values):
    return 2 * (values - LEAST) / (MOST - LEAST) - 1


def test_the_ends_of_a_range_are_minus_one_and_one_in_both_directions():
    bounds = ActionRange((0.0, -2.0), (512.0, 6.0))
    data = torch.tensor([[0.0, -2.0], [512.0, 6.0], [256.0, 0.0], [600.0, 2.0]])
    simulator = torch.tensor([[-1.0, -1.0], [1.0, 1.0], [0.0, -0.5], [1.34375, 0.0]])
    assert torch.equal(bounds.to_sim(data), simulator)
    assert torch.equal(bounds.to_data(simulator), data)
    assert ActionRange.of([], [], 2, "p") is None
    assert ActionRange.of([0, 0], [], 2, "p") == ActionRange((0, 0), (1.0, 1.0))
    with pytest.raises(UserError, match=r"model.options.action_low has 3 entries, but the actions of p have 2"):
        ActionRange.of([0, 0, 0], [1, 1, 1], 2, "p")


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        ([0, 0], [1], "action_low has 2 entries and action_high 1"),
        (
            [0, 2.5],
            [1, 2],
            "entry 1 of action_low is 2.5 and of action_high 2; both must be finite, and action_low must not exceed",
        ),
        ([], [1, -2], "entry 1 of action_low is -1.0 and of action_high -2"),
        ([0.0], [math.inf], "entry 0 of action_low is 0.0 and of action_high inf"),
        ([math.nan], [], "entry 0 of action_low is nan"),
    ],
)
def test_bounds_that_are_none_are_refused(low, high, message):
    with pytest.raises(ValueError, match=message):
        check_bounds(low, high)
    with pytest.raises(ValueError, match=message):
        LeRobotPolicyConfig("anything", action_low=low, action_high=high).validate()


def test_a_locked_entry_is_zero_of_the_simulator_and_whole_numbers_are_rounded():
    bounds = ActionRange((-2.0, 0.5), (2.0, 0.5))
    assert bounds.to_sim(torch.tensor([[1.0, 0.5], [-3.0, 9.0]])).tolist() == [[0.5, 0.0], [-1.5, 0.0]]
    assert bounds.to_data(torch.tensor([[0.5, 0.0], [-1.0, 1.0]])).tolist() == [[1.0, 0.5], [-2.0, 0.5]]
    check_bounds([0.0, 0.5], [1.0, 0.5])
    whole = ActionRange((0.0,), (10.0,), integer=True)
    asked = torch.arange(11.0)[:, None]
    assert torch.equal(whole.to_data(whole.to_sim(asked)), asked)
    assert whole.to_data(torch.tensor([[0.67], [-0.71]])).tolist() == [[8.0], [1.0]]


def test_actions_come_on_the_simulators_scale_with_the_gaussian_there(policy):
    choice = policy.act(inputs(), seeded(), greedy=True)
    raw = policy.predict(inputs(), int(torch.randint(2**31, (), generator=seeded())))
    assert raw[0].min() > 0.1, "the actions of its data"
    torch.testing.assert_close(choice.decisions[..., 1:], scaled(raw))
    torch.testing.assert_close(choice.actions, scaled(raw).clamp(-1, 1))
    np.testing.assert_allclose(choice.actions[:, 0, 0], [scaled(0.12), -1, scaled(0.12)], atol=0.05)
    drawn = policy.act(inputs(), seeded())
    spread = drawn.decisions[..., 0] - drawn.decisions[..., 1]
    np.testing.assert_allclose(spread.std(), 0.3, rtol=0.5)
    torch.testing.assert_close(policy.log_probs(inputs(), drawn.decisions)[0], drawn.logp)


def test_demonstrations_are_on_the_simulators_scale(policy):
    actions, mask = torch.full((3, 4, 1), 0.25), torch.ones(3, 4)
    loss, _ = policy.bc_loss(inputs(), actions, mask)
    density = torch.distributions.Normal(scaled(policy.predict(inputs(), 0)), 0.3)
    torch.testing.assert_close(loss.detach(), -density.log_prob(actions).mean())


def test_a_saved_policy_keeps_its_range(policy, tmp_path, closing):
    policy.save_pretrained(tmp_path)
    opened = closing(open_policy(tmp_path))
    assert opened.action_range == policy.action_range == ActionRange((LEAST,), (MOST,))
    assert torch.equal(opened.act(inputs(), seeded()).actions, policy.act(inputs(), seeded()).actions)


def test_a_policy_without_a_simulator_is_served_in_the_units_of_its_data_and_only_if_they_are_known(policy):
    assert policy.units_known
    inside = [chunk.actions for chunk in choose_chunks(ServedPolicy.from_policy(policy, *SERVED), inputs(), seeded())]
    scaled_config = ServeConfig(action_units="normalised")
    scaled_ones = choose_chunks(ServedPolicy.from_policy(policy, scaled_config, None, 2), inputs(), seeded())
    own = ActionRange((LEAST,), (MOST,))
    for mine, theirs in zip(inside, scaled_ones, strict=True):
        np.testing.assert_allclose(mine, own.to_data(torch.from_numpy(theirs.actions)), rtol=1e-6)
    policy.interface = RobotInterface()  # from here on, it was trained in a simulator with -1..1
    met = choose_chunks(ServedPolicy.from_policy(policy, *SERVED), inputs(), seeded())
    np.testing.assert_array_equal(met[0].actions, scaled_ones[0].actions)
    policy.interface, policy.units_known = None, False
    with pytest.raises(UserError, match=r"nothing says the units of the policy's actions.* set action_low and"):
        ServedPolicy.from_policy(policy, *SERVED)
    policy.units_known, policy.action_range = True, None
    policy.statistics = ActionStatistics.from_arrays(np.array([[-2.9], [2.9]]))
    with pytest.raises(UserError, match=r"go from -2\.8.* to 2\.8.*, but only -1\.\.1 can be served"):
        ServedPolicy.from_policy(policy, *SERVED)


def test_only_entries_that_become_actions_differ_in_a_flow(closing):
    plain = closing(moved(LeRobotFlowPolicy(LeRobotFlowConfig("anything", noise_level=0.4))))
    ranged = moved(LeRobotFlowPolicy(LeRobotFlowConfig("anything", noise_level=0.4, action_low=[-3], action_high=[5])))
    first, second = (made.act(inputs(), seeded()) for made in (plain, ranged))
    assert torch.equal(first.decisions, second.decisions)
    assert torch.equal(first.logp, second.logp)
    raw = 2 * first.decisions.unflatten(2, (4, 2))[:, -1, :, :1]
    torch.testing.assert_close(second.actions, (2 * (raw + 3) / 8 - 1).clamp(-1, 1))
    # the demonstrations of the gain 0.4, see test_the_cloning_loss_is_that_of_flow_matching
    wanted = (2 * (0.8 * GAP + 3) / 8 - 1).expand(3, 4, 1)
    loss, _ = moved(ranged, gain=0.4, shift=0.0).bc_loss(inputs(), wanted, torch.ones(3, 4), seeded())
    assert float(loss.detach()) < 1e-6
    ranged.close()


def test_nothing_is_scaled_twice(policy, tmp_path):
    policy.statistics = ActionStatistics.from_arrays(np.array([[0.0], [1.0]]))
    with pytest.raises(UserError, match=r"acting.scale is 'bounds_q99', but model.options.action_low and action_high"):
        action_scale(policy, ActingSettings(scale="bounds_q99"))
    options = {"folder": "anything", "action_low": [LEAST], "action_high": [MOST]}
    config = clone(
        tmp_path,
        demonstrate(tmp_path / "demos"),
        model=ActionPolicyConfig(kind="lerobot", options=options),
        acting=ActingSettings(scale="bounds_q99"),
    )
    with pytest.raises(UserError, match=r"set acting.scale=none, or leave them out"):
        CloneRecipe(config)


def test_a_range_of_another_size_ends_the_command_with_its_name(tmp_path, capsys):
    config = Path(configuration(tmp_path, "anything", None, 1))
    text = config.read_text()
    config.write_text(text.replace("options: {folder", "options: {action_low: [0, 0], folder"))
    assert main(["evaluate", str(config)]) == 2
    assert "model.options.action_low has 2 entries, but the actions of" in capsys.readouterr().err
    config.write_text(text.replace("options: {folder", "options: {action_low: [2], folder"))
    assert main(["evaluate", str(config)]) == 2
    assert "model.options: entry 0 of action_low is 2" in capsys.readouterr().err


def test_the_bounds_of_the_environment_are_used_only_if_given():
    row = GymRow(Ball(), horizon=5, image_key="top")
    assert [bound.tolist() for bound in row.action_bounds] == [LOW, HIGH]
    config = ActionPolicyConfig(kind="lerobot", options={"folder": "anything", "action_box": True})
    with pytest.raises(UserError, match="action_box is true, but the simulator does not report the bounds"):
        load_action_policy(config, LineSim(), 0)
    sim = LineSim()
    sim.action_bounds = [[LEAST], [MOST]]
    made = load_action_policy(config, sim, 0)
    assert made.action_range == ActionRange((LEAST,), (MOST,))
    flow = load_action_policy(dataclasses.replace(config, kind="lerobot_flow"), sim, 0)
    assert flow.action_range == made.action_range
    made.close()
    flow.close()
    with pytest.raises(UserError, match=r"action_low is \[0.0\], but it has no effect while action_box is True"):
        check_config(LeRobotPolicyConfig("anything", action_box=True, action_low=[0.0]))
    with pytest.raises(UserError, match="action_box needs a simulator"):
        LeRobotPolicy(LeRobotPolicyConfig("anything", action_box=True))


def test_bounds_of_another_size_from_a_worker_are_refused():
    assert problem_in_hello({**GOOD, "action_bounds": [[0.0] * GOOD["action_size"], [1.0] * GOOD["action_size"]]}) == ""
    assert "action_bounds" in problem_in_hello({**GOOD, "action_bounds": [[0.0], [1.0], [2.0]]})
    assert "action_bounds" in problem_in_hello({**GOOD, "action_bounds": "any"})


def test_a_critic_changes_neither_units_nor_past(policy):
    policy.past = 2
    both = PolicyWithCritic(policy, StateCritic(3, 8))
    assert (both.action_range, both.past) == (policy.action_range, 2)
