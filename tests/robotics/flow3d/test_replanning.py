"""Replanning in physics: a dropped object is picked up again if the planner may observe."""

import pytest

pytest.importorskip("mink")
pytest.importorskip("cv2")
from robotics.flow3d.closed_loop.flow_episodes import TrueFlow
from robotics.flow3d.objects.tabletop import FlowTabletop
from robotics.flow3d.plan.execution import ExecutionSettings
from robotics.flow3d.plan.planner import FlowPlanner
from robotics.flow3d.plan.planner_config import PlannerConfig
from robotics.flow3d.plan.result import Failure


def run(robot, execution):
    robot.reset(4)
    config = PlannerConfig(flow_scale_m=0.01, execution=execution)
    return FlowPlanner(TrueFlow(robot), robot.arm, config=config).run(robot)


@pytest.fixture(scope="module")
def slippery():
    with FlowTabletop(task="place_red", actor="panda", lose_after_m=0.06) as robot:
        yield robot


def test_a_dropped_object_is_not_placed_without_replanning(slippery):
    result = run(slippery, ExecutionSettings())
    assert result.executed
    assert len(result.rounds) == 1
    assert slippery.success().failed == ("on the pad",)


def test_what_the_gripper_loses_is_taken_up_again_after_a_second_look(slippery):
    result = run(slippery, ExecutionSettings(look_again=True, chunk=2, replans=3))
    assert result.executed, (result.failure, result.detail)
    assert len(result.rounds) == 2
    assert slippery.success().success, slippery.success().failed


def test_without_new_plans_the_loss_is_the_reason(slippery):
    result = run(slippery, ExecutionSettings(look_again=True, chunk=2, replans=0))
    assert result.failure is Failure.OBJECT_DROPPED
