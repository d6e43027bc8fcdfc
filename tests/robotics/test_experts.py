from dataclasses import replace

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.robot_commands import experts
from robotics.scenes.arms import ARMS
from robotics.scenes.batch import BatchSettings, TabletopBatch
from robotics.scenes.expert_check import replay_experts, replay_line
from robotics.scenes.experts import EXPERTS, Expert
from robotics.scenes.tabletop import PROPRIO_SIZE, STATE_SIZE
from robotics.scenes.tabletop_tasks import SPLITS, TASKS
from robotics.sim.episodes import EpisodeSpec

pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")


def solved(task: str, arm: str, split: str, count: int, noise: float = 0.0) -> float:
    """Share of the layouts that the expert solves within the horizon."""
    expert = Expert(task, noise)
    episodes = [EpisodeSpec(task, TASKS[task].instruction, layout, split) for layout in range(count)]
    done = np.zeros(count, bool)
    with TabletopBatch([task], arm, BatchSettings(image_size=None)) as sim:
        sim.reset(episodes)
        while len(sim.live):
            result = sim.step_chunk(expert.act(sim.full_state())[:, None])
            done[result.rows] |= result.success
            assert not result.failed.any()
    return float(done.mean())


def test_there_is_an_expert_for_every_task():
    assert set(EXPERTS) == set(TASKS)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("task", sorted(set(TASKS) - {"reach_green"}))
def test_experts_solve_a_few_layouts_of_both_splits(task, arm):
    assert [solved(task, arm, split, 3) for split in SPLITS] == [1.0, 1.0]


@pytest.mark.parametrize("task", ["push", "pick_place"])
def test_experts_recover_from_noise(task):
    assert solved(task, "panda", "train", 6, noise=0.15) >= 5 / 6


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("task", TASKS)
def test_experts_solve_95_of_100(task, arm, split):
    assert solved(task, arm, split, 50) >= 0.95


def test_doing_nothing_solves_no_task():
    """Initial states do not determine the experts' actions."""
    tasks = list(TASKS)
    with TabletopBatch(tasks, settings=BatchSettings(image_size=None, horizon=10)) as sim:
        sim.reset([EpisodeSpec(task, "", layout) for task in tasks for layout in range(3)])
        result = sim.step_chunk(np.zeros((len(sim.live), 10, 5)))
    assert not result.success.any()


def test_actions_are_in_range_and_repeat():
    states = np.random.default_rng(0).normal(0.3, 0.2, (7, STATE_SIZE)).astype(np.float32)
    for task in EXPERTS:
        actions = Expert(task).act(states)
        assert actions.shape == (7, 5)
        assert actions.dtype == np.float32
        assert np.abs(actions).max() <= 1.0
        assert set(np.abs(actions[:, 4])) == {1.0}
        assert np.array_equal(actions[3], Expert(task).act(states[3], {"success": False}))


def test_noise_disturbs_the_motion_and_not_the_gripper():
    states = np.full((200, STATE_SIZE), 0.3)
    clean = Expert("reach").act(states)
    noisy = Expert("reach", noise=0.05, seed=1).act(states)
    inside = (np.abs(clean) < 0.8).all(axis=0)[:4]
    spread = (noisy - clean)[:, :4][:, inside].std()
    assert spread == pytest.approx(0.05, rel=0.2)
    assert np.array_equal(noisy[:, 4], clean[:, 4])
    assert np.array_equal(noisy, Expert("reach", noise=0.05, seed=1).act(states))
    assert not np.array_equal(noisy, Expert("reach", noise=0.05, seed=2).act(states))


def test_mistakes_are_named():
    with pytest.raises(UserError, match="no expert for 'fly'; available for: reach"):
        Expert("fly")
    with pytest.raises(UserError, match="noise is -1"):
        Expert("reach", noise=-1)
    with pytest.raises(UserError, match="full state of 22 entries"):
        Expert("reach").act(np.zeros(PROPRIO_SIZE))


@pytest.mark.slow
def test_a_motion_opens_its_own_drawer_and_fewer_of_those_that_stand_further_apart():
    with TabletopBatch(["drawer", "drawer_wide"], settings=BatchSettings(image_size=None)) as sim:
        near, wide = (replay_experts(sim, task, 10) for task in sim.tasks())
        with pytest.raises(UserError, match="episodes is 1; a replay needs at least 2"):
            replay_experts(sim, "drawer", 1)
    assert near.shape == wide.shape == (10, 10)
    assert near.diagonal().all()
    assert wide.diagonal().all()
    assert not np.isnan([near, wide]).any()
    assert wide.sum() < near.sum() < 60


def test_the_command_reports_the_success_of_a_single_motion():
    lines: list[str] = []
    assert experts("tabletop", 3, ["tasks=[reach]"], lines.append, replay=True)
    at = next(row for row, line in enumerate(lines) if line.startswith("reach"))
    assert lines[at].split() == ["reach", "3", "of", "3"]
    assert lines[at + 1].startswith("  replayed in the other episodes: 0.")
    with pytest.raises(UserError, match="--episodes is 1; --replay needs at least 2"):
        experts("tabletop", 1, ["tasks=[reach]"], lines.append, replay=True)


def test_replays_of_a_simulator_with_few_layouts_and_failures(monkeypatch):
    """Batches of two give the same results as one batch, and a failed environment does not count as a miss."""
    with TabletopBatch(["drawer"], settings=BatchSettings(image_size=None)) as sim:
        whole = replay_experts(sim, "drawer", 3)
        sim.capacity = 2
        assert np.array_equal(replay_experts(sim, "drawer", 3), whole)
        step = sim.step_chunk

        def failing(actions):
            result = step(actions)
            return replace(result, failed=result.rows == 0) if np.shape(actions)[1] > 1 else result

        monkeypatch.setattr(sim, "step_chunk", failing)
        broken = replay_experts(sim, "drawer", 3)
    assert np.isnan(broken).tolist() == 3 * [[True, False, True]]  # the first of each batch
    assert np.array_equal(broken[:, 1], whole[:, 1])
    assert replay_line(broken).endswith("; 6 of 9 replays without a result")
    assert replay_line(np.full((2, 2), np.nan)).endswith("every environment failed")
