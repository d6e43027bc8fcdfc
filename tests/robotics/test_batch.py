import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.scenes.batch import BatchSettings, TabletopBatch
from robotics.scenes.envs import TabletopEnv
from robotics.scenes.experts import Expert
from robotics.scenes.tabletop_tasks import TASKS
from robotics.sim.episodes import EpisodeSpec, RobotSim

pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")
STATES = BatchSettings(image_size=None)
# Tasks and splits in turn, so that rows of a scene do not lie side by side.
MIXED = [
    EpisodeSpec("push", "", 0),
    EpisodeSpec("reach", "", 4),
    EpisodeSpec("push", "", 1, "held_out"),
    EpisodeSpec("drawer", "", 0),
    EpisodeSpec("reach", "", 2),
    EpisodeSpec("push", "", 3),
]


def actions_for(rows: int, steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1.2, 1.2, (rows, steps, 5))


def alone(episode: EpisodeSpec, actions, **options):
    """States, rewards and ends of a TabletopEnv after each action."""
    env = TabletopEnv(episode.task, split=episode.split, **{"observation": "state", **options})
    first, _ = env.reset(options={"layout": episode.layout})
    seen, rewards, terminated, truncated = [first], [], False, False
    for action in np.clip(actions, -1, 1):
        observation, reward, terminated, truncated, _ = env.step(action)
        seen.append(observation)
        rewards.append(reward)
        if terminated or truncated:
            break
    env.close()
    return seen, rewards, terminated, truncated


def follow(sim: TabletopBatch, task: str, steps: int):
    expert, results = Expert(task), []
    for _ in range(steps):
        if len(sim.live):
            results.append(sim.step_chunk(expert.act(sim.full_state())[:, None]))
    return results


@pytest.mark.parametrize("arm", ["panda", "ur5e"])
def test_trajectories_are_those_of_the_environment_bit_for_bit(arm):
    actions = actions_for(len(MIXED), 12)
    dense = BatchSettings(image_size=None, reward="dense")
    with TabletopBatch(["push", "reach", "drawer"], arm, dense, workers=2) as sim:
        start = sim.reset(MIXED)
        assert start.rewards.shape == (6, 0)
        chunks = [sim.step_chunk(actions[sim.live, part]) for part in (slice(0, 5), slice(5, 12))]
    for row, episode in enumerate(MIXED):
        seen, rewards, *_ = alone(episode, actions[row], arm=arm, reward="dense")
        assert np.array_equal(start.observation.state[row], seen[0]["state"])
        assert np.array_equal(chunks[0].observation.state[row], seen[5]["state"])
        assert np.array_equal(chunks[1].observation.state[row], seen[12]["state"])
        assert np.array_equal(np.concatenate([chunk.rewards[row] for chunk in chunks]), rewards)


@pytest.mark.usefixtures("backend")
def test_images_are_those_of_the_environment():
    actions, settings = actions_for(3, 4), BatchSettings(image_size=(20, 28))
    episodes = [EpisodeSpec("pick_place", "", 0), EpisodeSpec("reach", "", 1), EpisodeSpec("pick_place", "", 2)]
    with TabletopBatch(["pick_place", "reach"], settings=settings, workers=2) as sim:
        start = sim.reset(episodes)
        chunk = sim.step_chunk(actions, record={2})
    for row, episode in enumerate(episodes):
        seen, *_ = alone(episode, actions[row], observation="rgb", image_size=(20, 28))
        assert np.array_equal(start.observation.images[row], seen[0]["rgb"])
        assert np.array_equal(chunk.observation.images[row], seen[4]["rgb"])
        if row == 2:
            assert list(chunk.frames) == [2]
            assert np.array_equal(chunk.frames[2], [step["rgb"] for step in seen[1:]])


def test_success_ends_a_row_and_chunks_end_with_it():
    with TabletopBatch(["reach"], settings=STATES) as sim:
        sim.reset([EpisodeSpec("reach", "", layout) for layout in range(3)])
        singles = follow(sim, "reach", 60)
        assert not len(sim.live)
        steps = [sum(1 for result in singles if row in result.rows) for row in range(3)]
        sim.reset([EpisodeSpec("reach", "", 1)])
        expert, plan = Expert("reach"), []
        env = TabletopEnv("reach", observation="state")
        observation, _ = env.reset(options={"layout": 1})
        for _ in range(steps[1]):
            plan.append(expert.act(observation["state"]))
            observation, *_ = env.step(plan[-1])
        chunk = sim.step_chunk([plan + [np.ones(5)] * 6])
    assert chunk.steps.tolist() == [steps[1]]
    assert chunk.success.tolist() == chunk.terminated.tolist() == [True]
    assert chunk.truncated.tolist() == [False]
    assert chunk.rewards[0].tolist() == [0.0] * (steps[1] - 1) + [1.0] + [0.0] * 6
    assert np.array_equal(chunk.observation.state[0], observation["state"])


def test_each_task_has_its_horizon():
    with TabletopBatch(["reach", "push"], settings=STATES) as sim:
        assert sim.horizon == max(TASKS[task].horizon for task in ("reach", "push")) == 100
        sim.reset([EpisodeSpec("push", "", 0), EpisodeSpec("reach", "", 0)])
        first = sim.step_chunk(np.zeros((2, 64, 5)))
        assert first.truncated.tolist() == [False, True]
        assert first.steps.tolist() == [64, 60]
        assert sim.live.tolist() == [0]
    with TabletopBatch(["reach", "push"], settings=BatchSettings(image_size=None, horizon=3)) as sim:
        sim.reset([EpisodeSpec("push", "", 0), EpisodeSpec("reach", "", 0)])
        assert sim.step_chunk(np.zeros((2, 8, 5))).truncated.tolist() == [True, True]
        assert not len(sim.live)


def test_resets_of_other_sizes_and_tasks_leave_no_trace():
    episodes = [EpisodeSpec("reach", "", 4), EpisodeSpec("push", "", 1)]
    actions = actions_for(2, 4)
    with TabletopBatch(["reach", "push", "stack"], settings=STATES) as fresh:
        fresh.reset(episodes)
        expected = fresh.step_chunk(actions).observation.state
    with TabletopBatch(["reach", "push", "stack"], settings=STATES) as sim:
        for used in ([EpisodeSpec("stack", "", 0)] * 3, [EpisodeSpec("reach", "", n) for n in range(4)], MIXED[:1]):
            sim.reset(used)
            sim.step_chunk(actions_for(len(used), 3, seed=1))
        sim.reset(episodes)
        assert np.array_equal(sim.step_chunk(actions).observation.state, expected)


def test_the_policy_may_be_given_less_than_the_expert():
    with TabletopBatch(["reach"], settings=BatchSettings(image_size=None, state="proprio")) as sim:
        assert sim.state_size == 10
        start = sim.reset([EpisodeSpec("reach", "", 0), EpisodeSpec("reach", "", 1)])
        assert start.observation.state.shape == (2, 10)
        assert np.array_equal(sim.full_state()[:, :10], start.observation.state)
        assert sim.full_state()[:, 10:].any(axis=1).all()
        follow(sim, "reach", 60)
        assert sim.full_state().shape == (0, 22)


def test_a_row_that_diverges_has_failed_and_is_counted():
    with TabletopBatch(["push", "reach"], settings=STATES) as sim:
        sim.reset(MIXED[:2] + MIXED[4:])
        group = next(group for group in sim._groups if group.scene.task.name == "push")
        group.rollout.data(1).qvel[0] = 1e12
        result = sim.step_chunk(actions_for(4, 3))
        assert result.failed.tolist() == [False, False, False, True]
        assert np.isnan(result.rewards[3]).all()
        assert result.steps.tolist() == [3, 3, 3, 0]
        assert not result.observation.state[3].any()
        assert not (result.success | result.terminated | result.truncated).any()
        assert list(result.reasons) == [3]
        assert sim.live.tolist() == [0, 1, 2]
        assert sim.counts["diverged"] == sim.counts["dropped"] == 1
        sim.step_chunk(actions_for(3, 3))


def test_it_fulfils_the_protocol():
    with TabletopBatch(["reach", "stack"], settings=STATES) as sim:
        checked: RobotSim = sim
        assert checked.tasks() == {"reach": "touch the red cube", "stack": "stack the red cube on the green cube"}
        assert (checked.action_size, checked.state_size, checked.image_size, checked.capacity) == (5, 22, None, None)
        described = checked.describe()
    assert described["control_hz"] == 10.0
    assert described["tasks"] == {"reach": 60, "stack": 80}
    assert described["renderer"] is None
    assert described["arm"] == "panda"
    assert set(sim.counts) == {"crashed", "hung", "raised", "restarted", "dropped", "diverged", "memory"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (BatchSettings(state="all"), "state is 'all'; allowed: full, proprio"),
        (BatchSettings(horizon=0), "horizon is 0"),
        (BatchSettings(image_size=None, reward="big"), "reward is 'big'"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(UserError, match=message):
        TabletopBatch(settings=settings)


def test_mistakes_are_named():
    with pytest.raises(UserError, match="tasks is empty"):
        TabletopBatch([])
    with pytest.raises(UserError, match="unknown task 'fly'"):
        TabletopBatch(["fly"])
    with TabletopBatch(["reach"], settings=STATES) as sim:
        with pytest.raises(UserError, match=r"call reset\(\) first"):
            sim.step_chunk(np.zeros((1, 1, 5)))
        with pytest.raises(UserError, match="no episodes"):
            sim.reset([])
        with pytest.raises(UserError, match="episode 1 has the task 'push', but this simulator runs reach"):
            sim.reset([EpisodeSpec("reach", "", 0), EpisodeSpec("push", "", 0)])
        with pytest.raises(UserError, match="layout is -1"):
            sim.reset([EpisodeSpec("reach", "", -1)])
        sim.reset([EpisodeSpec("reach", "", 0)])
        with pytest.raises(UserError, match="is nan"):
            sim.step_chunk(np.full((1, 2, 5), np.nan))
        with pytest.raises(UserError, match=r"shape \(2, 1, 5\)"):
            sim.step_chunk(np.zeros((2, 1, 5)))
        with pytest.raises(UserError, match="set image_size"):
            sim.step_chunk(np.zeros((1, 1, 5)), record={0})
        assert sim.step_chunk(np.zeros((1, 1, 5))).steps.tolist() == [1]
