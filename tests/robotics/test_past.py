"""Past observations: simulators return those of single steps, and policies receive them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from robotics.episodes.collect import ActingSettings, FirstImages, inputs_of, run_episodes
from robotics.policies.base.action_policy import PolicyInputs
from robotics.policies.small import SmallVlaPolicy
from robotics.scenes.batch import BatchSettings, TabletopBatch
from robotics.scenes.envs import TabletopEnv
from robotics.scenes.experts import Expert
from robotics.serving.acting import PolicyActor
from robotics.sim.episodes import EpisodeSpec, begin_episodes, keeps_past
from robotics.sim.opening import SimConfig, open_sim
from robotics.sim.randomization import RandomizationConfig, read_randomization
from robotics.sim.scene_worker import SceneWorker
from robotics.sim.subprocess_sim import SubprocessSettings, SubprocessSim
from tests.robotics.line_sim import LineSim
from tests.robotics.test_play import tiny_policy

BALL = f"{Path(__file__).with_name('ball_env.py')}:make"
PARTS = ("state", "images", "views")
CHUNKS = (1, 3, 2, 5, 1, 1, 4, 8, 8)
TABLE = [EpisodeSpec("reach", "", 4), EpisodeSpec("push", "", 0), EpisodeSpec("reach", "", 2)]
NOISE = {"position_m": 0.01, "image": 6.0}


def table(**options):
    pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")
    sizes = {"image_size": 16, "views": ["wrist"], "workers": 2}
    return open_sim(SimConfig(tasks=["reach", "push"], **{**sizes, **options}))


def ball(workers):
    adapter = {"task": "Ball", "image_key": "top"}
    sizes = {"image_size": 8, "views": ["side"], "horizon": 30, "workers": workers}
    return open_sim(SimConfig(kind="gymnasium", env=BALL, options={"adapter": adapter}, **sizes))


def balls(count):
    return [EpisodeSpec("Ball", "", layout) for layout in range(count)]


def step_by_step(sim, episodes, choose, steps=30):
    """A simulator's outputs after each control step: by row the observations, the actions, and (steps, 4) results."""
    begun = sim.reset(episodes)
    seen = [[{name: getattr(begun.observation, name)[row] for name in PARTS}] for row in range(len(episodes))]
    actions, results = [[] for _ in episodes], [[] for _ in episodes]
    for step in range(steps):
        if not len(sim.live):
            break
        chosen = choose(sim, step)
        result = sim.step_chunk(chosen[:, None])
        for place, row in enumerate(result.rows):
            seen[row].append({name: getattr(result.observation, name)[place] for name in PARTS})
            actions[row].append(chosen[place])
            results[row].append((result.rewards[place, 0], result.success[place], result.truncated[place]))
    return seen, actions, results


def chunks_of(sim, episodes, actions, past):
    """The results of chunks of the same actions, with the control steps gone by before and after each."""
    result = begin_episodes(sim, episodes, past)
    gone, found = np.zeros(len(episodes), int), []
    found.append((result, gone.copy(), gone.copy()))
    for length in CHUNKS:
        if not len(sim.live):
            break
        rows, before = sim.live, gone.copy()
        filled = [(actions[row] + [actions[row][-1]] * length)[gone[row] : gone[row] + length] for row in rows]
        result = sim.step_chunk(np.array(filled))
        gone[rows] += result.steps
        found.append((result, before, gone.copy()))
    return found


def check_past(sim, episodes, choose, past, steps=30):
    seen, actions, results = step_by_step(sim, episodes, choose, steps)
    ended_inside = 0
    for result, before, after in chunks_of(sim, episodes, actions, past):
        over = result.terminated | result.truncated
        for place, row in enumerate(result.rows):
            observed, told = result.observation, results[row][before[row] : after[row]]
            assert result.rewards[place, : after[row] - before[row]].tolist() == [reward for reward, *_ in told]
            ended_inside += bool(over[place] and result.steps[place] < result.rewards.shape[1])
            for name in PARTS:
                assert np.array_equal(getattr(observed, name)[place], seen[row][after[row]][name])
                own = getattr(observed, f"past_{name}")[place]
                assert own.shape == (past, *seen[row][0][name].shape)
                wanted = [seen[row][max(0, after[row] - past + back)][name] for back in range(past)]
                assert np.array_equal(own, np.zeros_like(own) if over[place] else np.stack(wanted))
    return ended_inside, results


# ---- simulators ----


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("past", [1, 3])
@pytest.mark.parametrize("randomised", [False, True])
def test_past_observations_at_the_table_equal_those_of_single_steps_bit_for_bit(past, randomised):
    draws = {"observation_delay": [1, 3], "action_delay": [1, 2], "sensor_noise": NOISE, "mass": [0.5, 2.0]}
    config = read_randomization(draws) if randomised else RandomizationConfig()
    rng, experts = np.random.default_rng(0), {"reach": Expert("reach")}

    def choose(sim, step):
        moves = rng.uniform(-1, 1, (len(sim.live), 5))
        for place, (row, state) in enumerate(zip(sim.live, sim.full_state(), strict=True)):
            if TABLE[row].task == "reach":
                moves[place] = experts["reach"].act(state[None])[0]
        return moves

    with table(randomization=config) as sim:
        ended, results = check_past(sim, TABLE, choose, past, steps=33)
    assert any(row[-1][1] for row in results), "no episode is solved"
    assert ended, "no episode ends inside a chunk"


def test_the_past_of_states_alone():
    with table(image_size=0, views=[]) as sim:
        begun = begin_episodes(sim, TABLE, 2).observation
        assert begun.past_images is None and begun.past_views is None  # noqa: PT018
        assert np.array_equal(begun.past_state, np.repeat(begun.state[:, None], 2, 1))


@pytest.mark.usefixtures("backend")
def test_only_the_control_steps_of_the_past_are_drawn(monkeypatch):
    drawn, draw = [], SceneWorker.draw
    monkeypatch.setattr(SceneWorker, "draw", lambda *given: (drawn.append(1), draw(*given))[1])
    for past, each in ((0, [1, 1, 1]), (2, [3, 3, 1])):
        with table() as sim:
            begin_episodes(sim, TABLE[:1], past)
            for length, wanted in zip((8, 3, 1), each, strict=True):
                drawn.clear()
                sim.step_chunk(np.zeros((1, length, 5)))
                assert len(drawn) == wanted


@pytest.mark.usefixtures("backend")
def test_rows_that_begin_again_at_the_table_have_a_new_past():
    with table() as sim:
        begin_episodes(sim, TABLE, 2)
        sim.step_chunk(np.ones((3, 5, 5)))
        begun = sim.restart({1: EpisodeSpec("push", "", 7)}).observation
        assert np.array_equal(begun.past_images, np.repeat(begun.images[:, None], 2, 1))
        found = sim.step_chunk(np.ones((3, 1, 5))).observation
        assert np.array_equal(found.past_state[1], np.repeat(begun.state, 2, 0))
        assert not np.array_equal(found.past_state[0, 0], found.past_state[0, 1])


@pytest.mark.parametrize("past", [1, 3])
def test_past_observations_of_a_gymnasium_environment_equal_those_of_single_steps(past):
    rng = np.random.default_rng(1)
    with ball(3) as sim:
        ended, results = check_past(sim, balls(3), lambda sim, step: rng.uniform(-1, 1, (len(sim.live), 2)), past)
        assert [len(row) for row in results] == [30] * 3
        assert ended == 3
        fast = lambda sim, step: np.ones((len(sim.live), 2))  # noqa: E731
        ended, results = check_past(sim, balls(3), fast, past)
        assert all(row[-1][1] for row in results)


def test_without_a_past_nothing_of_it_is_observed_or_drawn():
    with ball(1) as sim:
        for result in (begin_episodes(sim, balls(1), 2), sim.reset(balls(1)), sim.step_chunk(np.zeros((1, 4, 2)))):
            found = [getattr(result.observation, f"past_{name}") is None for name in PARTS]
        assert found == [True] * 3
    fakes = Path(__file__).with_name("fake_envs.py")
    for past, wanted in ((0, 1), (2, 3)):
        with SubprocessSim(SubprocessSettings(f"{fakes}:counting", workers=1)) as sim:
            sim.reset([EpisodeSpec("walk", "", 0)], past=past)
            first = sim.expert_actions()[0, 0]
            sim.step_chunk(np.zeros((1, 6, 2)))
            assert sim.expert_actions()[0, 0] - first == wanted


def test_a_past_of_another_shape_is_a_failure():
    fakes = Path(__file__).with_name("fake_envs.py")
    with SubprocessSim(SubprocessSettings(f"{fakes}:make", workers=1, images=False)) as sim:
        sim.reset([EpisodeSpec("walk", "", 0)])
        sim._past = 2  # the worker was not asked for it
        result = sim.step_chunk(np.zeros((1, 3, 2)))
    assert result.reasons[0] == "raised: past_state has the shape None; expected (2, 4)"


# ---- what policies are given ----


def observation():
    with ball(3) as sim:
        sim.reset(balls(3), past=2)
        return sim.step_chunk(np.ones((3, 4, 2))).observation


def test_rows_of_an_observation_and_of_inputs_keep_their_past():
    seen = observation()
    inputs = inputs_of(seen, balls(3), torch.device("cpu"))
    chosen, part = seen.of([0, 2]), inputs.select([0, 2])
    for name in PARTS:
        past = getattr(seen, f"past_{name}")
        assert np.array_equal(getattr(chosen, f"past_{name}"), past[[0, 2]])
        assert np.array_equal(getattr(part, f"past_{name}"), past[[0, 2]])
        again = PolicyInputs.concat([inputs.select([0]), inputs.select([1, 2])])
        assert torch.equal(getattr(again, f"past_{name}"), getattr(inputs, f"past_{name}"))
    with pytest.raises(ValueError, match=r"past_state must be \(B, P, S\); got \(3, 2\)"):
        PolicyInputs(None, inputs.state, inputs.instructions, past_state=inputs.state)
    with pytest.raises(ValueError, match=r"past_images must be \(B, P, H, W, 3\) uint8"):
        PolicyInputs(inputs.images, None, inputs.instructions, past_images=inputs.images)
    with pytest.raises(ValueError, match="past_views has 2 rows, but there are 3 instructions"):
        PolicyInputs(None, None, inputs.instructions, past_views=inputs.past_views[:2])


def test_images_of_another_episode_replace_past_ones_too():
    seen = observation()
    with ball(3) as sim:
        shown = FirstImages(sim, balls(3)[::-1])
    swapped = shown.replace_in(seen.of([0, 2]))
    assert np.array_equal(swapped.past_images, np.repeat(swapped.images[:, None], 2, 1))
    assert np.array_equal(swapped.past_views, np.repeat(swapped.views[:, None], 2, 1))
    assert np.array_equal(swapped.past_state, seen.past_state[[0, 2]])
    assert not np.array_equal(swapped.past_images, seen.past_images[[0, 2]])


@pytest.mark.usefixtures("backend")
def test_playing_gives_a_policy_the_past_that_an_evaluation_gives_it(tmp_path, monkeypatch):
    policy, given, act = tiny_policy(tmp_path / "policy"), [], SmallVlaPolicy.act
    monkeypatch.setattr(SmallVlaPolicy, "past", 2)
    monkeypatch.setattr(
        SmallVlaPolicy, "act", lambda self, batch, *rest, **more: _kept(given, batch, act(self, batch, *rest, **more))
    )
    settings = BatchSettings((32, 32), camera="front", state="proprio", horizon=10)
    episode = EpisodeSpec("reach", "touch the red cube", 5, "held_out")
    with TabletopBatch(["reach"], settings=settings) as sim:
        run_episodes(policy.eval(), sim, [episode], ActingSettings(), torch.Generator(), greedy=True)
    evaluated, actor = list(given), PolicyActor(tmp_path / "policy")
    given.clear()
    env = TabletopEnv("reach", horizon=10, split="held_out", **actor.options)
    observation, _ = env.reset(options={"layout": 5})
    actor.reset(0)
    ended = False
    while not ended:
        observation, _, *ends, _ = env.step(actor.act(env, observation))
        ended = any(ends)
    env.close()
    assert len(given) == len(evaluated) > 1
    for played, shown in zip(given, evaluated, strict=True):
        np.testing.assert_allclose(played.past_state.cpu(), shown.past_state.cpu(), atol=1e-5)
        assert played.past_images.shape == shown.past_images.shape == (1, 2, 32, 32, 3)
        difference = (played.past_images.int().cpu() - shown.past_images.int().cpu()).abs()
        assert difference.float().mean() < 1  # the actions of a policy differ in their last bits


def _kept(given, batch, choice):
    given.append(batch)
    return choice


def test_a_simulator_of_ones_own_may_keep_none():
    sim = LineSim()
    assert not keeps_past(sim)
    assert begin_episodes(sim, [EpisodeSpec("right", "", 0)], 2).observation.past_state is None
    with ball(1) as kept:
        assert keeps_past(kept)
        with pytest.raises(UserError, match="unknown task"):
            begin_episodes(kept, [EpisodeSpec("other", "", 0)], 1)
