"""The reward of following a flow: hand-made paths, cached and failing predictions, and training with it."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from mmrl.config import load_run
from mmrl.errors import RunError, UserError
from mmrl.training.recipe import Step
from mmrl.training.run import train
from mmrl.training.trainer import collect_metrics
from robotics.episodes.payload import EpisodePayload
from robotics.flow3d.clip import FlowEncoding, Observation
from robotics.flow3d.geometry import intrinsics, make_pose
from robotics.flow3d.model.world_model import FlowWorldModel
from robotics.flow3d.model.world_model_settings import BodyConfig, ConditionConfig, FlowModelConfig
from robotics.flow3d.reward.following import FlowFollowing, FlowRewardConfig
from robotics.methods.grpo import RobotGrpoRecipe
from robotics.policies.base.encoder import Vocabulary
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.opening import SimConfig
from tests.robotics.test_robot_configs import CONFIGS
from tests.robotics.test_robot_recipes import collected, grpo
from tests.robotics.tiny_runs import TWO_STEPS, save_tiny_policy

VIEW = "tests.robotics.test_flow_following:table_view"
TRACKER = "tests.robotics.test_flow_following:follow_red"
TEXT = "push the red cube into the blue zone"
SPECS = [EpisodeSpec("right", "go right", layout) for layout in range(3)]
SIDE_M = 0.1
QUOTES = "''"
"""An empty text on the command line."""


def table_view(episode) -> Observation:
    """Seen from 1 m above: x of the world is u, and the object lies under the middle."""
    mask = np.zeros((32, 32), np.bool_)
    mask[14:18, 14:18] = True
    pose = make_pose(np.diag([1.0, -1.0, -1.0]), np.array([0.0, 0.0, 1.0]))
    K = intrinsics((32, 32), fov_x_rad=1.0)
    return Observation(np.zeros((32, 32, 3), np.uint8), np.ones((32, 32), np.float32), K, pose, "go right", mask)


def follow_red(frames, observation, points):
    """The position of the point on the line, from the red column of its image; every third episode is lost."""
    column = frames[:, 0, :, 0].argmax(1)
    if column[-1] % 3 == 0:
        raise RuntimeError("lost it")
    start = np.array([[0.0, 0.0, 0.0]] * (points.shape[0] ** 2))
    return start + np.stack([(column - 16) / 20, 0 * column, 0 * column], -1)[:, None]


class OneWay:
    """A world model that moves every point 10 cm along x, in even steps, and fails on request."""

    encoding = FlowEncoding(num_frames=4, grid=2)

    def __init__(self, fails=()) -> None:
        self.calls, self.fails = [], set(fails)

    def predict(self, observation, points, samples=1, seed=0):
        self.calls.append(seed)
        if len(self.calls) in self.fails:
            raise RuntimeError("no idea")
        step_px = SIDE_M * observation.K[0, 0] / 4  # at 1 m
        flow = np.stack([np.concatenate([points, np.ones((2, 2, 1))], -1)] * 4)
        flow[..., 0] += step_px * np.arange(1, 5)[:, None, None]
        return flow[None]


def following(model, **changes) -> FlowFollowing:
    config = FlowRewardConfig(view=VIEW, tracker="", **changes)
    found = FlowFollowing(dataclasses.replace(config, model=""), SimConfig(tasks=["push"]), ["push"], 0)
    found._model = model
    return found


def paths(*ways, success=()) -> EpisodePayload:
    """Episodes whose object moves along some positions (x, y) in metres, one row each."""
    poses = [make_pose(np.eye(3), np.array([(x + 0.4, y, 0.02) for x, y in [(0.0, 0.0), *way]])) for way in ways]
    count = len(ways)
    none = torch.zeros(count, dtype=torch.bool)
    won = torch.tensor([row in success for row in range(count)])
    zeros = torch.zeros(count, 1)
    return EpisodePayload(
        episodes=SPECS[:1],
        states=zeros[..., None],
        decisions=zeros,
        steps=torch.ones(count, 1, dtype=torch.int64),
        success=won,
        terminated=won,
        failed=none,
        last_reward=zeros[:, 0],
        chunk_returns=zeros,
        last_state=zeros,
        object_poses=list(poses),
    )


@pytest.fixture
def near_views(monkeypatch):
    """No renderer: the first images are those of `table_view`."""
    monkeypatch.setattr("robotics.flow3d.reward.following._open_views", lambda sim, tasks: None)


def test_rewards_by_hand(near_views):
    along = [(0.025, 0.0), (0.05, 0.0), (0.075, 0.0), (0.1, 0.0)]
    beside = [(0.0, 0.04), (0.0, 0.04)]
    still = [(0.0, 0.0)] * 5
    payload = paths(along, still, beside, along, success=[3])
    for distance, share in (("mean", 1), ("sum", 2)):
        found = following(OneWay(), beta_per_m=5.0, distance=distance).score(payload, [0] * 4)
        np.testing.assert_allclose(found.reward, [1.0, 0.0, -5 * 0.04 * share, 2.0], atol=1e-6)
        np.testing.assert_allclose(found.reached, [1.0, 0.0, 0.0, 1.0])
        np.testing.assert_allclose(found.off_m, [0.0, 0.0, 0.04, 0.0], atol=1e-6)
    nothing = following(OneWay()).score(paths([]), [0])
    assert (nothing.reward[0], nothing.reached[0], math.isnan(nothing.off_m[0])) == (0.0, 0.0, True)


def test_a_flow_is_predicted_once_for_each_initial_state_and_failures_are_counted(near_views):
    model = OneWay(fails=[2])
    found = following(model)
    payload = paths(*[[(0.1, 0.0)]] * 6)
    payload.episodes = SPECS
    for _ in range(2):
        scores = found.score(payload, [0, 0, 1, 1, 2, 2])
        assert np.isnan(scores.reward).tolist() == [False, False, True, True, False, False]
    assert len(model.calls) == len(set(model.calls)) == 3
    assert found.failures == {"predictions": 1}
    payload.failed[0] = True
    assert math.isnan(found.score(payload, [0, 0, 1, 1, 2, 2]).reward[0])


def test_a_simulator_without_poses_needs_a_tracker(near_views):
    payload = paths([(0.1, 0.0)])
    payload.object_poses = []
    with pytest.raises(UserError, match=r"does not report the object's pose; set flow\.tracker"):
        following(OneWay()).score(payload, [0])


def test_settings_that_cannot_work_are_refused(tmp_path):
    with pytest.raises(UserError, match="the task reach does not move an object"):
        FlowFollowing(FlowRewardConfig(), SimConfig(tasks=["reach"]), ["push", "reach"], 0)
    with pytest.raises(UserError, match=r"set flow\.model and flow\.view"):
        FlowFollowing(FlowRewardConfig(), SimConfig(kind="gymnasium", env="x:y"), ["x"], 0)
    with pytest.raises(UserError, match=r"sim\.image_size is 0"):
        FlowFollowing(FlowRewardConfig(tracker=TRACKER), SimConfig(image_size=0), ["push"], 0)
    with pytest.raises(UserError, match="flow is set, but it has no effect while reward is None"):
        grpo(tmp_path, flow=FlowRewardConfig(grid=3))


def world_model(folder, text=TEXT):
    """A tiny untrained model, which predicts no motion."""
    config = FlowModelConfig(
        FlowEncoding(num_frames=3, grid=2, z_min_m=0.5, z_max_m=1.3, target="displacement", visibility="none"),
        BodyConfig(width=16, blocks=1, heads=2),
        ConditionConfig(width=16, heads=2, image_px=32),
    )
    FlowWorldModel(config, Vocabulary.from_texts([text])).save_pretrained(folder)
    return folder


def test_a_real_robot_provides_its_own_first_image_and_tracker(tmp_path):
    flow = FlowRewardConfig(model=str(world_model(tmp_path / "model", "go right")), view=VIEW, tracker=TRACKER)
    recipe = RobotGrpoRecipe(grpo(tmp_path, reward="flow", flow=flow))
    rollouts = collected(recipe)
    lost = rollouts.reward.isnan()
    assert lost.any()
    assert (~lost).any()
    # nothing is predicted to move, so what moved is off by its way
    assert (rollouts.reward_terms["flow_off_m"][~lost] > 0.05).all()
    assert collect_metrics(recipe, rollouts, Step())["flow/failed_tracks"] == int(lost.sum())
    again = RobotGrpoRecipe(grpo(tmp_path, reward="flow", flow=flow))
    again.load_state_dict(recipe.state_dict())
    assert again._following.failures["tracks"] == int(lost.sum())
    recipe._following._tracker = lambda *given: 1 / 0
    with pytest.raises(RunError, match="no episode of this step could be compared"):
        recipe.score(rollouts, Step())


@pytest.mark.parametrize("source", ["model", "truth"])
def test_the_tabletop_configuration_takes_two_steps(source, tmp_path, backend):
    overrides = [
        *TWO_STEPS,
        f"output_dir={tmp_path / 'run'}",
        f"model.path={save_tiny_policy(tmp_path / 'policy', ['touch the red cube', TEXT])}",
        f"flow.model={world_model(tmp_path / 'model') if source == 'model' else QUOTES}",
    ]
    entry, config = load_run(CONFIGS[0].with_name("tabletop_flow_reward.yaml"), overrides)
    run_dir = train(entry, config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["flow/failed_predictions"] == 0 for row in rows)
    assert all(0 <= row["reward/flow_reached"] <= 1 and row["reward/flow_off_m"] >= 0 for row in rows)
