"""The closed loop with a robot without physics: the object reaches its goal, and every failure has a name."""

import dataclasses
import json

import numpy as np
import pytest

pytest.importorskip("mink")
pytest.importorskip("cv2")
from PIL import Image

from mmrl.errors import ConfigError, RunError, UserError
from robotics.flow3d.flow_model import FixedFlow, clip_of_points
from robotics.flow3d.geometry import apply_pose, inverse_pose, lift, project
from robotics.flow3d.objects.tabletop import FlowTabletop
from robotics.flow3d.plan.execution import ExecutionSettings, drift_of
from robotics.flow3d.plan.grasps import Grasp
from robotics.flow3d.plan.planner import FlowPlanner
from robotics.flow3d.plan.planner_config import PlannerConfig
from robotics.flow3d.plan.result import Failure, GeometricVerifier, PredicateVerifier, Verdict
from robotics.flow3d.plan.vlm import ChatEndpoint, VlmVerifier
from tests.robotics.flow3d.bench_arms import BenchArm
from tests.robotics.flow3d.drawn import CENTRE, SIDE_PX, drawn_sphere
from tests.robotics.flow3d.fake_robot import FakeRobot, StraightModel, clip_to

GOAL = np.array([0.45, 0.12, 0.03])
LOOK = PlannerConfig(execution=ExecutionSettings(look_again=True, replans=2))


def from_above(surface, _):
    """One grasp from above at the middle, closing along y."""
    place = (surface.points_m.min(0) + surface.points_m.max(0)) / 2
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = np.diag([1.0, -1.0, -1.0]), [*place[:2], 0.035]
    return [Grasp(T, 1.0, 0.07, "user")]


def planner(flow, arm=None, verifier=None, config=None, grasps=(from_above,), **options):
    config = config or PlannerConfig()
    return FlowPlanner(flow, arm or BenchArm("panda"), verifier, grasps, config, **options)


class Scripted:
    """A verifier with given verdicts."""

    def __init__(self, *verdicts):
        self.verdicts, self.seen = list(verdicts), []

    def verify(self, before, after, instruction, meta):
        self.seen.append((after, instruction, meta))
        return self.verdicts.pop(0)


NO, YES, UNKNOWN = Verdict(False, 0.2, "no"), Verdict(True, 0.9, "yes"), Verdict(None, 0.0, "down: nobody there")


@pytest.mark.parametrize("name", ["panda", "ur5e"])
def test_object_gets_where_the_flow_ends_with_proposed_grasps(name, tmp_path):
    arm = BenchArm(name)
    robot = FakeRobot(arm)
    result = planner(StraightModel(GOAL), arm, GeometricVerifier(), grasps=("primitive",)).run(robot)
    assert result.executed, (result.failure, result.detail)
    assert result.released
    assert np.linalg.norm(robot.centre - GOAL) < 0.012
    assert result.instruction == "move the ball"
    assert [each.verdict.ok for each in result.tries] == [True]
    assert all(np.array_equal(sent, kept) for sent, kept in zip(robot.paths, result.joint_paths, strict=True))
    folder = result.save(tmp_path / "plan")
    told = json.loads((folder / "plan.json").read_text())
    assert told["executed"]
    assert told["rounds"][0][0]["chosen"]
    after = np.asarray(Image.open(folder / "round_0_try_0_after.png"))
    assert np.array_equal(after, result.tries[0].after)
    with np.load(folder / "plan.npz") as arrays:
        assert arrays["T_world_grip_0"].shape == (8, 4, 4)
        assert arrays["flow_0_0"].shape == (8, 4, 4, 4)
    assert (folder / "round_0.ply").read_bytes().startswith(b"ply\n")


def test_a_given_flow_is_carried_out_as_clip_array_or_points_in_space():
    clip = clip_to(GOAL)
    cloud = clip_of_points(clip.observation, clip.points_cam_m[:14], clip.flow_cam_m[:, :14])
    assert cloud.flow.shape == (8, 4, 4, 4)
    assert cloud.flow[:, 3, 2:, 3].max() == 0
    for flow in (clip, clip.flow, cloud):
        robot = FakeRobot(BenchArm("panda"))
        result = planner(flow).run(robot, "Somewhere else")
        assert result.executed, (result.failure, result.detail)
        assert np.linalg.norm(robot.centre - GOAL) < 0.012
        assert result.instruction == "Somewhere else"
    with pytest.raises(UserError, match=r"must be \(T, N, N, 4\)"):
        FixedFlow(np.zeros((8, 16, 3)))
    with pytest.raises(UserError, match="in front of the camera"):
        clip_of_points(clip.observation, -clip.points_cam_m, clip.flow_cam_m)


def test_samples_are_drawn_until_one_is_accepted():
    model, verifier = StraightModel(GOAL, spread_m=0.02), Scripted(NO, NO, YES)
    robot = FakeRobot(BenchArm("panda"))
    result = planner(model, verifier=verifier).run(robot, seed=8)
    assert model.seeds == [8, 9, 10]
    assert result.rounds[0].chosen is result.tries[2]
    assert np.linalg.norm(robot.centre - GOAL - [0, 0.04, 0]) < 0.012
    after, instruction, meta = verifier.seen[0]
    assert instruction == "move the ball"
    assert after.shape == (SIDE_PX, SIDE_PX, 3)
    np.testing.assert_allclose(meta.motion.T_t_0_world[-1, :3, 3], GOAL - CENTRE, atol=0.003)


def test_rejected_samples_the_best_is_taken_or_nothing():
    scored = [Verdict(False, score, "no") for score in (0.1, 0.4, 0.3, 0.2)]
    arm = BenchArm("panda")
    result = planner(StraightModel(GOAL), arm, Scripted(*scored)).run(FakeRobot(arm))
    assert result.executed
    assert result.rounds[0].chosen is result.tries[1]
    robot = FakeRobot(arm)
    stopped = planner(StraightModel(GOAL), arm, Scripted(*scored), PlannerConfig(when_rejected="stop")).run(robot)
    assert (stopped.failure, stopped.detail) == (Failure.VERIFIER_REJECTS, "no")
    assert len(stopped.tries) == 4
    assert robot.paths == []


def test_a_verifier_that_is_down_is_asked_once():
    arm = BenchArm("panda")
    result = planner(StraightModel(GOAL), arm, Scripted(UNKNOWN)).run(FakeRobot(arm))
    assert (result.failure, result.detail) == (Failure.VERIFIER_DOWN, "down: nobody there")
    assert len(result.tries) == 1
    relaxed = PlannerConfig(when_unverified="best")
    assert planner(StraightModel(GOAL), arm, Scripted(UNKNOWN), relaxed).run(FakeRobot(arm)).executed
    broken = planner(StraightModel(GOAL), arm, PredicateVerifier(lambda T: 1 / 0)).run(FakeRobot(arm))
    assert "ZeroDivisionError" in broken.detail


def seeing(**changes):
    """A robot with a faulty camera."""
    robot = FakeRobot(BenchArm("panda"))
    robot.observe = lambda: dataclasses.replace(drawn_sphere(), **changes)
    return robot


def broken(name, error):
    def fail(*_):
        raise error

    robot = FakeRobot(BenchArm("panda"))
    setattr(robot, name, fail)
    return robot


def giving(name, value):
    """A robot one of whose methods returns a value."""
    robot = FakeRobot(BenchArm("panda"))
    setattr(robot, name, lambda: value)
    return robot


def stuck():
    """An arm that is blocked."""
    robot = FakeRobot(BenchArm("panda"))
    robot.move = lambda _: False
    return robot


def flow_of(value, row=0):
    """The flow to the goal with one channel overwritten."""
    flow = clip_to(GOAL).flow.copy()
    flow[..., row] = value
    return flow


def clip_with_points(depth_m):
    """The clip to the goal with another depth of one query point."""
    clip = clip_to(GOAL)
    points = clip.points.copy()
    points[0, 0, 2] = depth_m
    return dataclasses.replace(clip, points=points)


class Sideways:
    """Predicts that all points move sideways, 4 pixels per frame."""

    def predict(self, observation, points, samples=1, seed=0):
        flow = np.repeat(np.concatenate([points, np.ones((*points.shape[:2], 1))], -1)[None], 4, axis=0)
        flow[..., 0] += 4.0 * np.arange(1, 5)[:, None, None]
        return np.repeat(flow[None], samples, axis=0)


FEW = np.zeros((SIDE_PX, SIDE_PX), bool)
FEW[40, 40:44] = True
LINE = np.zeros((SIDE_PX, SIDE_PX), bool)
LINE[100, 40:60] = True


@pytest.mark.parametrize(
    ("failure", "robot", "flow"),
    [
        (Failure.NO_OBSERVATION, lambda: broken("observe", RunError("no image")), None),
        (Failure.NO_OBSERVATION, lambda: giving("observe", None), None),
        (Failure.NO_OBSERVATION, lambda: seeing(T_world_cam=np.full((4, 4), np.nan)), None),
        (Failure.NO_MOVING_OBJECT, lambda: seeing(mask=np.zeros((SIDE_PX, SIDE_PX), bool)), None),
        (Failure.NO_MOVING_OBJECT, lambda: seeing(mask=None), None),
        (Failure.NO_MOVING_OBJECT, lambda: seeing(), StraightModel(CENTRE, frames=1)),
        (Failure.MISSING_DEPTH, lambda: seeing(depth_m=np.zeros((SIDE_PX, SIDE_PX), np.float32)), None),
        (Failure.TOO_FEW_POINTS, lambda: seeing(mask=FEW), None),
        (Failure.TOO_FEW_POINTS, lambda: seeing(), flow_of(0.0, 3)),
        (Failure.DEGENERATE_GEOMETRY, lambda: seeing(), flow_of(np.nan)),
        (Failure.DEGENERATE_GEOMETRY, lambda: seeing(), clip_with_points(np.nan)),
        (Failure.DEGENERATE_GEOMETRY, lambda: seeing(), clip_with_points(0.0)),
        (Failure.DEGENERATE_GEOMETRY, lambda: seeing(mask=LINE), Sideways()),
        (Failure.MODEL_FAILED, lambda: seeing(), None),
        (Failure.UNREACHABLE, lambda: seeing(), StraightModel([0.3, 1.3, 0.3])),
        (Failure.ROBOT_FAILED, lambda: broken("move", OSError("cable")), None),
        (Failure.ROBOT_FAILED, lambda: giving("joint_rad", np.zeros(8)), None),
        (Failure.ROBOT_FAILED, lambda: giving("joint_rad", np.full(7, np.nan)), None),
        (Failure.GRASP_MISSED, lambda: FakeRobot(BenchArm("panda"), misses=9), None),
        (Failure.ARM_STALLED, lambda: stuck(), None),
    ],
)
def test_what_goes_wrong_has_a_name(failure, robot, flow):
    model = StraightModel(GOAL) if flow is None else flow
    if failure is Failure.MODEL_FAILED:
        model.predict = lambda *_: [np.zeros((8, 3, 3, 4))]
    result = planner(model, config=PlannerConfig(samples=2)).run(robot())
    assert result.failure is failure, (result.failure, result.detail)
    assert result.detail
    assert not result.executed


def test_one_missed_grasp_is_followed_by_another():
    arm = BenchArm("panda")
    robot = FakeRobot(arm, misses=1)

    def two(surface, opening):
        (first,) = from_above(surface, opening)
        T = first.T_world_grip.copy()
        T[:3, :3] = T[:3, :3] @ np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])
        return [first, dataclasses.replace(first, T_world_grip=T)]

    result = planner(StraightModel(GOAL), arm, grasps=(two,)).run(robot)
    assert result.executed, (result.failure, result.detail)
    assert np.linalg.norm(robot.centre - GOAL) < 0.012


def test_other_proposers_are_asked_where_none_of_the_first_can_be_used():
    asked = []

    def remembered(name, found):
        return lambda surface, opening: asked.append(name) or (from_above(surface, opening) if found else [])

    for first, expected in ((True, ["first"]), (False, ["first", "other"])):
        asked.clear()
        grasps, otherwise = (remembered("first", first),), (remembered("other", True),)
        result = planner(clip_to(GOAL), grasps=grasps, otherwise=otherwise).run(FakeRobot(BenchArm("panda")))
        assert result.executed, (result.failure, result.detail)
        assert asked == expected
    nothing = planner(clip_to(GOAL), grasps=(), otherwise=()).run(FakeRobot(BenchArm("panda")))
    assert nothing.failure is Failure.NO_GRASP


def test_only_grasps_at_the_chosen_part_are_taken_and_without_a_part_it_ends():
    def right(observation, mask):
        assert mask.sum() > 50
        return CENTRE + np.array([0, 0.05, 0])

    two = dict.fromkeys(("left", "right"))

    def sides(surface, opening):
        for name, way in zip(two, (-0.012, 0.012), strict=True):
            (grasp,) = from_above(surface, opening)
            grasp.T_world_grip[1, 3] += way
            two[name] = grasp
        return list(two.values())

    result = planner(clip_to(GOAL), grasps=(sides,), part=right).run(FakeRobot(BenchArm("panda")))
    assert result.executed, (result.failure, result.detail)
    assert {plan.grasp.T_world_grip[1, 3] for plan in result.rounds[0].chosen.plans} == {
        two["right"].T_world_grip[1, 3]
    }
    far = planner(clip_to(GOAL), grasps=(sides,), part=lambda *_: CENTRE + 0.2).run(FakeRobot(BenchArm("panda")))
    assert (far.failure, "of the chosen part" in far.detail) == (Failure.NO_GRASP, True)
    for part in (lambda *_: 1 / 0, lambda *_: None, lambda *_: np.full(3, np.nan)):
        for verifier in (None, GeometricVerifier()):
            unknown = planner(StraightModel(GOAL), part=part, verifier=verifier).run(FakeRobot(BenchArm("panda")))
            assert unknown.failure is Failure.NO_PART
            assert len(unknown.tries) == 1


def test_a_simulator_draws_the_outcome_and_its_errors_end_nothing():
    seen = []

    def replay(T_t_0_world):
        seen.append(T_t_0_world)
        return np.full((SIDE_PX, SIDE_PX, 3), 7, np.uint8)

    config, verifier = PlannerConfig(renderer="replay"), Scripted(YES)
    result = planner(clip_to(GOAL), config=config, verifier=verifier, replay=replay).run(FakeRobot(BenchArm("panda")))
    assert result.executed
    assert (result.tries[0].after == 7).all()
    np.testing.assert_allclose(seen[0], result.tries[0].motion.T_t_0_world[-1])
    broken = planner(clip_to(GOAL), config=config, verifier=verifier, replay=lambda _: 1 / 0)
    failed = broken.run(FakeRobot(BenchArm("panda")))
    assert (failed.failure, "cannot be rendered: ZeroDivisionError" in failed.detail) == (Failure.VERIFIER_DOWN, True)
    with pytest.raises(UserError, match="needs the argument replay"):
        planner(clip_to(GOAL), config=config, verifier=verifier)


@pytest.mark.parametrize(
    ("answer", "ok", "failure"),
    [
        (503, None, Failure.VERIFIER_DOWN),
        ({"content": None, "refusal": "not allowed"}, None, Failure.VERIFIER_DOWN),
        ("I think so!", False, Failure.VERIFIER_REJECTS),
    ],
)
def test_an_endpoint_that_is_down_refuses_or_talks_nonsense_ends_the_loop(chat_server, answer, ok, failure):
    chat_server.answers += [answer] * 2
    config = PlannerConfig(samples=2, when_rejected="stop")
    verifier = VlmVerifier(ChatEndpoint(chat_server.url, "judge", timeout_s=60.0))
    robot = FakeRobot(BenchArm("panda"))
    result = planner(StraightModel(GOAL), config=config, verifier=verifier).run(robot)
    assert result.failure is failure
    assert result.detail
    assert [each.verdict.ok for each in result.tries] == [ok] * len(result.tries)
    assert robot.paths == [], "nothing moved"


def test_a_dropped_object_is_grasped_with_a_new_plan():
    arm = BenchArm("panda")
    robot = FakeRobot(arm, slip_after=1)
    result = planner(StraightModel(GOAL), arm, config=LOOK).run(robot)
    assert result.executed, (result.failure, result.detail)
    assert len(result.rounds) == 2
    assert result.drifts_m[0] > 0.03
    assert np.linalg.norm(robot.centre - GOAL) < 0.012


def test_a_drifting_object_is_replanned_in_the_hand():
    arm = BenchArm("panda")
    robot = FakeRobot(arm, slip_after=1, nudge_m=(0.0, 0.0, -0.045))
    result = planner(StraightModel(GOAL), arm, config=LOOK).run(robot)
    assert result.executed, (result.failure, result.detail)
    assert len(result.rounds) == 2
    assert result.rounds[1].plan.grasp.source == "in the hand"
    assert np.linalg.norm(robot.centre - GOAL) < 0.015
    assert max(result.drifts_m[1:]) < 0.01


def test_without_plans_left_it_ends_with_the_fingers_open():
    arm = BenchArm("panda")
    robot = FakeRobot(arm, slip_after=1)
    given = planner(clip_to(GOAL), arm, config=LOOK).run(robot)
    assert given.failure is Failure.OBJECT_DROPPED
    assert robot.held is None
    assert len(given.rounds) == 1
    unwatched = planner(clip_to(GOAL), arm).run(FakeRobot(arm, slip_after=1))
    assert unwatched.executed, "nobody looks"


@pytest.mark.parametrize(("release", "opened"), [("always", True), ("never", False), ("unless_tilted", True)])
def test_fingers_open_at_the_end_as_asked(release, opened):
    config = PlannerConfig(execution=ExecutionSettings(release=release))
    robot = FakeRobot(BenchArm("panda"))
    result = planner(clip_to(GOAL), config=config).run(robot)
    assert result.executed
    assert result.released == opened
    assert (robot.held is None) == opened


def test_settings_are_checked_before_anything_is_built():
    with pytest.raises(ConfigError, match=r"planner\.samples is 0"):
        planner(StraightModel(GOAL), config=PlannerConfig(samples=0))
    with pytest.raises(ConfigError, match=r"planner\.execution\.chunk is 0"):
        planner(StraightModel(GOAL), config=PlannerConfig(execution=ExecutionSettings(chunk=0)))
    with pytest.raises(UserError, match="'suction'; available: primitive, antipodal"):
        planner(StraightModel(GOAL), grasps=("suction",))
    with pytest.raises(UserError, match="flow is a str"):
        planner("flow")


def test_drift_is_zero_for_another_view_of_the_same_surface():
    rng = np.random.default_rng(0)
    whole = rng.normal(size=(600, 3))
    whole = 0.04 * whole / np.linalg.norm(whole, axis=-1, keepdims=True)
    front, side = whole[whole[:, 0] > 0], whole[whole[:, 1] > 0]
    assert drift_of(side, front) < 0.006
    assert drift_of(side + np.array([0, 0, 0.2]), front) > 0.1


@pytest.mark.parametrize(
    ("task", "actor", "seed"),
    [
        ("place_red", "ur5e", 0),
        pytest.param("insert_blue", "ur5e", 5, marks=pytest.mark.slow),
        pytest.param("pour", "gen3", 1, marks=pytest.mark.slow),
        ("open_red", "panda", 0),
    ],
)
def test_true_flow_does_every_task_in_physics(task, actor, seed):
    with FlowTabletop(task=task, actor=actor) as robot:
        robot.reset(seed)
        config = PlannerConfig(flow_scale_m=0.01)
        result = FlowPlanner(TrueFlow(robot), robot.arm, GeometricVerifier(), config=config).run(robot)
        assert result.executed, (result.failure, result.detail)
        assert robot.success().success, robot.success().failed


class TrueFlow:
    """Motion of the query points under the task's scripted motion."""

    def __init__(self, robot, frames=8):
        self.robot, self.frames = robot, frames

    def predict(self, observation, points, samples=1, seed=0):
        ideal = self.robot.ideal_motion(self.frames + 1)
        T_world_cam = observation.T_world_cam
        world = apply_pose(T_world_cam, lift(points, observation.K).reshape(-1, 3))
        moved = apply_pose(inverse_pose(T_world_cam), apply_pose(ideal[1:] @ inverse_pose(ideal[0]), world))
        uvz = project(moved, observation.K).reshape(self.frames, *points.shape)
        return np.repeat(np.concatenate([uvz, np.ones((*uvz.shape[:-1], 1))], -1)[None], samples, axis=0)
