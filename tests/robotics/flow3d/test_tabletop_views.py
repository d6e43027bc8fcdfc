"""First images and ideal flow of tabletop episodes, and the simulator's poses of their objects."""

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.flow3d.geometry import apply_pose, inverse_pose
from robotics.flow3d.methods.clip_sets import ClipSetConfig, load_clips
from robotics.flow3d.reward.tabletop_views import MOVING_TASKS, TabletopViews, tabletop_clips
from robotics.scenes.batch import BatchSettings, TabletopBatch
from robotics.scenes.experts import Expert
from robotics.scenes.tabletop_tasks import TASKS
from robotics.sim.episodes import EpisodeSpec

pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")


def specs(*tasks):
    return [EpisodeSpec(name, TASKS[name].instruction, 3) for name in tasks]


def test_the_image_is_that_of_the_episode_and_the_flow_ends_at_the_goal(backend):
    with TabletopViews(image_size=48) as views:
        clips = {episode.task: views.clip(episode, num_frames=5, grid=3) for episode in specs(*MOVING_TASKS)}
    settings = BatchSettings(image_size=(48, 48))
    with TabletopBatch(list(MOVING_TASKS), settings=settings, workers=1) as sim:
        begun = sim.reset(specs(*MOVING_TASKS))
        state = sim.full_state()
    for row, (task, clip) in enumerate(clips.items()):
        np.testing.assert_array_equal(clip.observation.rgb, begun.observation.images[row])
        assert clip.observation.instruction == TASKS[task].instruction
        assert clip.flow.shape == (5, 3, 3, 4)
        first, second, goal = state[row, 10:13], state[row, 14:17], state[row, 18:21]
        # query points lie on the object that is acted on
        assert np.linalg.norm(clip.points_world_m - first, axis=-1).max() < (0.12 if task == "drawer" else 0.05)
        way = (clip.flow_world_m[-1] - clip.points_world_m).mean(0)
        wanted = {
            "push": [*(goal - first)[:2], 0.0],
            "pick_place": goal - first + [0, 0, 0.025],
            "stack": second - first + [0, 0, 0.05],
        }
        if task in wanted:
            np.testing.assert_allclose(way, wanted[task], atol=2e-3)
        else:
            assert np.linalg.norm(way) == pytest.approx(0.11, abs=1e-3)
            assert way[0] < -0.09  # towards the arm
        assert clip.visible.mean() > 0.5


def test_poses_are_those_of_the_objects_while_an_expert_moves_them():
    with TabletopBatch(["pick_place", "drawer"], settings=BatchSettings(image_size=None), workers=1) as sim:
        begun = sim.reset(specs("pick_place", "drawer"))
        experts = [Expert("pick_place"), Expert("drawer")]
        poses = begun.object_poses
        start = poses.copy()
        for _ in range(45):
            if len(sim.live) < 2:
                break
            state = sim.full_state()
            actions = np.stack([expert.act(one) for expert, one in zip(experts, state, strict=True)])
            result = sim.step_chunk(actions[:, None])
            poses = result.object_poses
            # sensors are one physics step of 4 ms behind, in which nothing moves farther than this
            if len(sim.live) == 2:
                np.testing.assert_allclose(poses[:, :3, 3], sim.full_state()[:, 10:13], atol=5e-3)
    moved = apply_pose(poses @ inverse_pose(start), start[:, None, :3, 3])[:, 0] - start[:, :3, 3]
    assert np.linalg.norm(moved, axis=-1).max() > 0.05
    np.testing.assert_allclose(np.linalg.det(poses[:, :3, :3]), 1.0, atol=1e-9)


def test_clips_for_a_world_model(backend):
    options = {"tasks": ["push", "drawer"], "layouts": 2, "image_size": 48, "num_frames": 2, "grid": 2}
    function = "robotics.flow3d.reward.tabletop_views:tabletop_clips"
    clips = load_clips(ClipSetConfig(function=function, options=options), "data")
    assert [clip.meta["task"] for clip in clips] == ["push", "drawer"] * 2
    again = tabletop_clips(**options)
    for one, other in zip(clips, again, strict=True):
        np.testing.assert_array_equal(one.flow, other.flow)
    with pytest.raises(UserError, match="the task reach does not move an object"):
        tabletop_clips(["reach"], layouts=1)
