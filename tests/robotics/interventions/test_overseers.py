"""Who has control at each step: take-over and hand-back of a person, and the rules of a scripted overseer."""

import dataclasses

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.episodes.collect import ActingSettings
from robotics.interventions.devices import FAILURE, GRIPPER, QUIT, REDO, SUCCESS, TAKE_OVER, DeviceInput
from robotics.interventions.overseers import OverseerConfig, Person, ScriptedOverseer, Verdict, axes_of
from robotics.interventions.watched import intervention_rewards, run_watched
from robotics.sim.episodes import EpisodeSpec
from tests.robotics.interventions.scripted import AlwaysPolicy, ExpertLine, FakeDevice, pressed
from tests.robotics.line_sim import LineSim

RIGHT = EpisodeSpec("right", "go right", 0)
IDLE = DeviceInput()


class Arm(ExpertLine):
    """The line as an arm of three entries, of which only the first one moves it."""

    action_size, action_names = 3, ("dx", "dyaw", "gripper")


def watch(inputs, policy=None, sim=None, note=None, recalled=(), **config):
    person = Person(FakeDevice(inputs), OverseerConfig(kind="keyboard", **config))
    policy = policy or AlwaysPolicy(-0.1)
    # the poll at the start of an episode drops what was pressed before it
    person.device.inputs.insert(0, IDLE)
    policy.sim = sim = sim or ExpertLine()
    (episode,) = run_watched(policy, sim, [RIGHT], person, ActingSettings(), [0], note=note, recalled=recalled)
    return episode, person


def test_one_press_takes_over_and_the_next_one_hands_back():
    episode, _ = watch([IDLE, pressed(TAKE_OVER, x=0.5), pressed(x=0.25), pressed(TAKE_OVER), IDLE])
    assert episode.by_person[:6] == [False, True, True, False, False, False]
    np.testing.assert_allclose(np.array(episode.actions[:5])[:, 0], [-0.1, 0.5, 0.25, -0.1, -0.1], rtol=1e-6)
    assert episode.starts == 1


def test_only_the_step_before_a_take_over_is_punished():
    """By hand, from the rule of RLIF, arXiv 2311.12996."""

    def paid(owners):
        return intervention_rewards(np.array([owner == "h" for owner in owners])).tolist()

    assert paid("pphhp") == [0, -1, 0, 0, 0]
    assert paid("phphh") == [-1, 0, -1, 0, 0]
    # nobody was in control before, and the end of an episode takes over from nobody
    assert paid("hhpp") == [0, 0, 0, 0]
    assert paid("p") == [0]
    episode, _ = watch([IDLE, pressed(TAKE_OVER, x=0.5), pressed(x=0.25), pressed(TAKE_OVER), IDLE])
    found = intervention_rewards(np.array(episode.by_person))
    assert found[0] == -1
    assert found.sum() == -episode.starts


def test_two_presses_within_a_control_step_change_nothing():
    episode, _ = watch([pressed(TAKE_OVER, TAKE_OVER, x=1.0), IDLE])
    assert not any(episode.by_person)
    assert episode.starts == 0


def test_an_axis_without_control_moves_nothing():
    episode, _ = watch([pressed(x=1.0)] * 3)
    np.testing.assert_allclose(np.array(episode.actions)[:, 0], -0.1, rtol=1e-6)


class ForwardArm(Arm):
    """Velocities of -0.1 to 0.3, a locked joint, and a gripper from 0 to 100."""

    action_bounds = (np.array([-0.1, 0.0, 0.0]), np.array([0.3, 0.0, 100.0]))


def test_axes_at_rest_are_no_motion_in_the_units_of_the_environment():
    episode, _ = watch(
        [pressed(TAKE_OVER), pressed(x=0.25), pressed(x=1.0)], AlwaysPolicy(0.2, 0.0, -0.2), ForwardArm()
    )
    low, high = ForwardArm.action_bounds
    commands = (np.array(episode.actions)[:3] + 1) / 2 * (high - low) + low
    # the gripper, 40% open, is not dropped
    np.testing.assert_allclose(commands, [[0.0, 0.0, 40.0], [0.05, 0.0, 40.0], [0.2, 0.0, 40.0]], atol=1e-6)


def test_every_episode_begins_with_the_policy_in_control():
    device = FakeDevice([IDLE, pressed(TAKE_OVER, x=1.0)])
    person, sim, policy = Person(device), ExpertLine(), AlwaysPolicy(-0.1)
    first = run_watched(policy, sim, [RIGHT], person, ActingSettings(), [0])[0]
    assert all(first.by_person)
    # a press between the episodes belongs to neither
    device.inputs = [pressed(TAKE_OVER)]
    second = run_watched(policy, sim, [RIGHT], person, ActingSettings(), [0])[0]
    assert not any(second.by_person)


def test_taking_over_in_the_last_control_step_counts_as_an_intervention():
    horizon = LineSim.horizon
    episode, _ = watch([IDLE] * (horizon - 1) + [pressed(TAKE_OVER)])
    assert episode.by_person == [False] * (horizon - 1) + [True]
    assert (len(episode), episode.starts) == (horizon, 1)


def test_the_gripper_keeps_its_command_through_a_take_over():
    policy = AlwaysPolicy(0.0, 0.0, 0.7)
    inputs = [IDLE, pressed(TAKE_OVER), pressed(GRIPPER), IDLE, pressed(TAKE_OVER), IDLE]
    episode, _ = watch(inputs, policy, Arm())
    grips = np.array(episode.actions)[:6, 2]
    # the policy's command is continued, then opened, and then the policy's again
    np.testing.assert_allclose(grips, [0.7, 0.7, -1.0, -1.0, 0.7, 0.7], rtol=1e-6)


def test_a_gripper_press_without_control_does_nothing():
    episode, _ = watch([pressed(GRIPPER), pressed(TAKE_OVER)], AlwaysPolicy(0.0, 0.0, 0.7), Arm())
    assert np.array(episode.actions)[1, 2] == np.float32(0.7)


@pytest.mark.parametrize(("press", "success"), [(SUCCESS, True), (FAILURE, False)])
def test_a_person_ends_the_episode(press, success):
    episode, _ = watch([IDLE, pressed(press)])
    assert (len(episode), episode.success, episode.terminated) == (2, success, True)


@pytest.mark.parametrize("press", [QUIT, REDO])
def test_quit_and_redo_stop_before_the_control_step(press):
    noted = []
    episode, _ = watch([IDLE, pressed(press)], note=noted.append)
    assert (len(episode), len(noted), episode.press) == (1, 1, press)


def test_the_policy_plans_anew_after_an_intervention():
    policy = AlwaysPolicy(-0.1, chunk=4)
    watch([IDLE, pressed(TAKE_OVER), pressed(TAKE_OVER), IDLE], policy)
    # its chunk of four is dropped at the person's step
    assert policy.seen[:3] == [0, 2, 6]


def test_recalled_steps_are_executed_again_and_the_person_goes_on():
    inputs = [IDLE, pressed(TAKE_OVER, x=0.3), pressed(x=0.4), pressed(x=0.2), pressed(TAKE_OVER), IDLE]
    noted = []
    whole, _ = watch(inputs, note=noted.append)
    again, _ = watch(inputs[3:], recalled=noted[:3])
    assert again.by_person == whole.by_person
    np.testing.assert_array_equal(again.actions, whole.actions)
    np.testing.assert_array_equal(again.states, whole.states)


def test_a_recalled_step_is_executed_even_if_the_policy_would_do_something_else():
    steps = [Verdict(np.array([[0.5]], np.float32), np.array([False]))]
    episode, _ = watch([], recalled=steps)
    np.testing.assert_allclose(np.array(episode.actions[:2])[:, 0], [0.5, -0.1], rtol=1e-6)


def test_a_recalled_press_still_ends_the_episode():
    noted = []
    whole, _ = watch([IDLE, pressed(SUCCESS)], note=noted.append)
    again, _ = watch([], recalled=noted)
    assert (len(again), again.success) == (len(whole), True) == (2, True)


# ---- axes ----


def test_axes_follow_the_names_of_the_actions():
    assert axes_of(Arm()) == [("x", 1.0), ("yaw", 1.0), ("gripper", 1.0)]
    assert axes_of(Arm(), ["-y", "none", "gripper"]) == [("y", -1.0), ("none", 1.0), ("gripper", 1.0)]


def test_a_reversed_axis_and_a_speed_scale_the_motion():
    episode, _ = watch([pressed(TAKE_OVER, x=1.0)], axes=["-x"], speed=0.5)
    assert episode.actions[0][0] == -0.5


def test_unknown_axes_are_refused():
    with pytest.raises(UserError, match=r"does not name the 1 entries of its actions.*overseer.axes"):
        axes_of(LineSim())
    with pytest.raises(UserError, match="lists 1 axes, but an action has 3 entries"):
        axes_of(Arm(), ["x"])
    with pytest.raises(UserError, match="has 'u'; allowed: x, y, z"):
        axes_of(Arm(), ["x", "u", "z"])
    with pytest.raises(UserError, match="one episode at a time, not 2"):
        Person(FakeDevice()).begin(ExpertLine(), [RIGHT, RIGHT], [0, 1])


# ---- scripts ----


def scripted(policy, layouts=4, **config):
    overseer = ScriptedOverseer(OverseerConfig(**{"flip": 0.0, "duration": 2, **config}))
    specs = [EpisodeSpec("right", "go right", layout) for layout in range(layouts)]
    return run_watched(policy, ExpertLine(), specs, overseer, ActingSettings(), list(range(layouts)))


def test_distance_leaves_the_expert_alone_and_corrects_its_opposite():
    assert not any(any(one.by_person) for one in scripted(AlwaysPolicy(0.5)))
    wrong = scripted(AlwaysPolicy(-0.5))
    for one in wrong:
        # too little is known at the first step; from then on it never agrees
        assert one.by_person == [False] + [True] * (len(one) - 1)
        assert one.success
    assert all(one.starts == 1 for one in wrong)


def test_random_acts_for_whole_segments_at_its_rate():
    episodes = scripted(AlwaysPolicy(-0.1), layouts=60, kind="random", rate=0.4)
    segments = [one.by_person[start : start + 2] for one in episodes for start in range(0, len(one) - 1, 2)]
    assert all(len(set(segment)) == 1 for segment in segments)
    share = np.mean([segment[0] for segment in segments])
    # three standard deviations of the share of 0.4
    assert abs(share - 0.4) < 3 * np.sqrt(0.24 / len(segments))


def test_a_flip_contradicts_the_rule():
    episodes = scripted(AlwaysPolicy(0.5), flip=1.0)
    assert all(all(one.by_person[1:3]) for one in episodes)


@pytest.mark.parametrize("quality", [0.9, 0.5])
def test_quality_is_the_share_of_interventions_by_the_expert(quality):
    episodes = scripted(AlwaysPolicy(-0.5), layouts=300, quality=quality)
    first = [one.actions[1][0] for one in episodes]
    share = np.mean([action == 0.5 for action in first])
    assert abs(share - quality) < 3 * np.sqrt(quality * (1 - quality) / len(first))


def test_an_episode_does_not_depend_on_those_beside_it():
    alone = scripted(AlwaysPolicy(-0.1), layouts=1, kind="random", rate=0.5, quality=0.5)[0]
    together = scripted(AlwaysPolicy(-0.1), layouts=5, kind="random", rate=0.5, quality=0.5)[0]
    assert alone.by_person == together.by_person
    np.testing.assert_array_equal(alone.actions, together.actions)


def test_a_simulator_without_an_expert_is_refused():
    overseer = ScriptedOverseer(OverseerConfig())
    with pytest.raises(UserError, match="LineSim has no scripted expert"):
        overseer.begin(LineSim(), [RIGHT], [0])
    with pytest.raises(UserError, match="a scripted overseer is one of distance, random"):
        ScriptedOverseer(dataclasses.replace(OverseerConfig(), kind="keyboard"))
