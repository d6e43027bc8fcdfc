"""LeRobot policies with several consecutive observations: their inputs, here and in lerobot's own `select_action`.

The slow test needs an environment with lerobot, see `test_lerobot_policy.py`.
"""

import copy
import json
import logging
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch

from mmrl.cli import main
from mmrl.errors import UserError
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from robotics.episodes.collect import ActingSettings, run_episodes
from robotics.episodes.demonstrations import Transition
from robotics.methods.clone import CloneRecipe
from robotics.policies.base.action_policy import PolicyInputs
from robotics.policies.lerobot.gaussian import LeRobotPolicy, LeRobotPolicyConfig
from robotics.policies.policy_loading import ActionPolicyConfig, check_fit, load_action_policy
from robotics.serving.observations import ServeConfig
from robotics.serving.opening import ServedPolicy
from robotics.serving.queue import choose_chunks
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.opening import SimConfig, open_sim
from tests.robotics import fake_lerobot, lerobot_rows
from tests.robotics.ball_env import HIGH, LOW, Ball
from tests.robotics.lerobot_process import run_peer
from tests.robotics.line_demos import demonstrate
from tests.robotics.test_cloning import clone

BALL = f"{Path(__file__).with_name('ball_env.py')}:make"
EPISODES = [EpisodeSpec("Ball", "", layout) for layout in (3, 8)]
PARTS = ("images", "state", "views")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def sim_config(**changes):
    adapter = {"task": "Ball", "image_key": "top"}
    sizes = {"image_size": 64, "views": ["side"], "horizon": 23, "workers": 2}
    return SimConfig(kind="gymnasium", env=BALL, options={"adapter": adapter, **changes}, **sizes)


@pytest.fixture
def policy(served, closing):
    return closing(LeRobotPolicy(LeRobotPolicyConfig("row", action_low=LOW, action_high=HIGH)))


def batch(**changes):
    rng = np.random.default_rng(0)
    sizes = {"images": (64, 64, 3), "state": (2,), "views": (1, 64, 64, 3)}
    parts = {}
    for name, size in sizes.items():
        values = rng.uniform(0, 200, (2, fake_lerobot.ROW, *size))
        values = torch.from_numpy(values.astype(np.float32 if name == "state" else np.uint8))
        parts |= {name: values[:, -1], f"past_{name}": values[:, :-1]}
    return PolicyInputs(instructions=("", ""), **{**parts, **changes})


def own_loop(layout, steps, goal=1e9):
    """An episode as lerobot runs it: a queue of observations, chunks used up, actions in the environment's units."""
    env, seen, chosen = Ball(goal), [], []
    observation, _ = env.reset(seed=layout)
    queue, waiting = deque(maxlen=fake_lerobot.ROW), deque()
    for _ in range(steps):
        parts = {"images": observation["top"], "state": observation["place"], "views": observation["side"][None]}
        seen.append({name: part.copy() for name, part in parts.items()})
        queue.append(seen[-1])
        while len(queue) < fake_lerobot.ROW:
            queue.append(seen[-1])
        if not waiting:
            rows = [np.stack([each[name] for each in queue]) for name in PARTS]
            waiting.extend(fake_lerobot.choose(*rows))
        chosen.append(waiting.popleft())
        observation, *_ = env.step(chosen[-1])
    return np.stack([each["state"] for each in seen]), np.stack(chosen)


# ---- a stand-in for lerobot ----


def test_an_evaluation_is_the_loop_with_a_queue_in_the_environments_own_units(served, caplog):
    with open_sim(sim_config(goal=1e9)) as sim:
        config = ActionPolicyConfig(kind="lerobot", options={"folder": "row", "action_box": True})
        policy = load_action_policy(config, sim, 0)
        check_fit(policy, sim)
        assert (policy.past, policy.settings.action_box) == (2, False)
        assert (policy.settings.action_low, policy.settings.action_high) == (LOW, HIGH)
        found = run_episodes(policy, sim, EPISODES, ActingSettings(), seeded(), greedy=True)
        policy.close()
    for row, episode in enumerate(EPISODES):
        states, actions = own_loop(episode.layout, 23)
        assert len(np.unique(actions[::4, 0].round(3))) == 6, "the chunks do not differ"
        own = (found.actions[row] + 1) / 2 * (np.array(HIGH) - LOW) + LOW
        np.testing.assert_allclose(own, actions, atol=2e-2, rtol=1e-4)
        np.testing.assert_allclose(found.payload.states[row], states[::4], rtol=1e-4)
    assert "consecutive observations" not in caplog.text


def test_a_loop_without_a_past_repeats_the_observation_and_says_so_once(policy, caplog):
    given = batch()
    before = {f"past_{name}": getattr(given, name)[:, None].repeat_interleave(2, 1) for name in PARTS}
    repeated = policy.act(batch(**before), seeded(), greedy=True).actions
    assert "in a row" not in caplog.text
    alone = batch(**dict.fromkeys(before))
    with caplog.at_level(logging.WARNING):
        assert torch.equal(policy.act(alone, seeded(), greedy=True).actions, repeated)
        policy.act(alone, seeded(), greedy=True)
    assert caplog.text.count("takes 3 consecutive observations but gets only the current one") == 1
    assert not torch.equal(policy.act(given, seeded(), greedy=True).actions, repeated)


def test_a_robot_that_sends_its_last_observations_is_served_the_chunks_of_the_loop_with_a_queue(policy):
    config = ServeConfig(view_keys=["side"], image_key="top", state_key="place", prompt="go")
    server = ServedPolicy.from_policy(policy, config, (64, 64), 2)
    env = Ball(1e9)
    observation, _ = env.reset(seed=3)
    recent = deque([copy.deepcopy(observation)] * fake_lerobot.ROW, maxlen=fake_lerobot.ROW)
    found = []
    while len(found) < 20:
        message = {name: np.stack([seen[name] for seen in recent]) for name in ("top", "side", "place")}
        for action in choose_chunks(server, server.format.read(message), seeded())[0].actions:
            found.append(action)  # without a simulator, the robot's units are those of the data
            observation, *_ = env.step(found[-1])
            recent.append(copy.deepcopy(observation))  # the environment changes it in place
    np.testing.assert_allclose(found, own_loop(3, len(found))[1], atol=2e-2, rtol=1e-4)


def test_scoring_needs_no_past(policy):
    given = batch()
    choice = policy.act(given, seeded())
    alone = batch(**{f"past_{name}": None for name in PARTS})
    assert torch.equal(policy.log_probs(alone, choice.decisions)[0], choice.logp)


def test_a_past_of_another_length_is_refused(policy):
    longer = {f"past_{name}": getattr(batch(), f"past_{name}")[:, :1] for name in PARTS}
    with pytest.raises(UserError, match="of 2 previous control steps; got past_images 1, past_views 1"):
        policy.act(batch(**longer), seeded())
    with pytest.raises(UserError, match="past_images missing, past_views 2, past_state 2"):
        policy.act(batch(past_images=None), seeded())


def test_runs_train_and_evaluate_with_a_past(served, tmp_path, caplog):
    text = f"""
recipe: robot_grpo
output_dir: {tmp_path}/run
sim: {{kind: gymnasium, env: "{BALL}", image_size: 64, views: [side], horizon: 9, workers: 4,
  options: {{adapter: {{task: Ball, image_key: top}}}}}}
model: {{kind: lerobot, options: {{folder: row, action_box: true, std: 0.2}}}}
reward: potential
data: {{layouts: 4}}
eval_data: {{held_out: {{split: held_out, layouts: 2}}}}
evaluation: {{every: 0, greedy: true, swapped: true, samples: 0, videos: 0}}
trainer: {{steps: 2, tasks_per_step: 2, samples_per_task: 4, threads: 1}}
tracking: {{quiet: true, tensorboard: false}}
"""
    (tmp_path / "run.yaml").write_text(text)
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    assert "in a row" not in caplog.text
    (about, *_) = (tmp_path / "run/episodes").glob("held_out-greedy-*.json")
    conditions = json.loads(about.read_text())
    assert conditions["past"] == 2
    assert conditions["action_range"] == {"low": LOW, "high": HIGH}


def test_demonstrations_include_past_observations_of_the_episode(tmp_path, closing):
    path = demonstrate(tmp_path / "demos", episodes=2, camera="front")
    config = clone(tmp_path, path, demonstrations={"camera": "front"}, model=ActionPolicyConfig(chunk=2))
    recipe = closing(CloneRecipe(config))
    demos = recipe.demonstrations
    transitions = [Transition(0, 0), Transition(1, 1), Transition(1, 4)]
    found = demos.observations(transitions, 3)
    steps = [(0, [0, 0, 0]), (1, [0, 0, 0]), (1, [1, 2, 3])]
    for row, (episode, places) in enumerate(steps):
        assert np.array_equal(found.past_state[row], demos.states[episode][places])
        assert np.array_equal(found.past_images[row], demos.images[episode][places])
    assert found.past_views is None
    plain = demos.observations(transitions)
    assert torch.equal(plain.images, found.images) and plain.past_state is None  # noqa: PT018
    assert recipe.rollout(recipe.policy, transitions, Streams(0), Step()).payload.inputs.past_state is None
    recipe.policy.past = 3
    inputs = recipe.rollout(recipe.policy, transitions, Streams(0), Step()).payload.inputs
    assert torch.equal(inputs.past_images, found.past_images)


def test_the_cloning_loss_sees_the_past(policy):
    actions, mask = torch.zeros(2, 4, 2), torch.ones(2, 4)
    with_past = policy.bc_loss(batch(), actions, mask, seeded())[0]
    alone = policy.bc_loss(batch(**{f"past_{name}": None for name in PARTS}), actions, mask, seeded())[0]
    rows = torch.stack(
        [torch.from_numpy(fake_lerobot.choose(*(_row(batch(), name)[at] for name in PARTS))) for at in (0, 1)]
    )
    base = 2 * (rows - torch.tensor(LOW)) / (torch.tensor(HIGH) - torch.tensor(LOW)) - 1
    wanted = -torch.distributions.Normal(base.float(), 0.1).log_prob(actions).sum(-1).mean()
    torch.testing.assert_close(with_past.detach(), wanted, rtol=1e-4, atol=1e-3)
    assert not torch.isclose(with_past, alone)


def _row(given, name):
    return torch.cat([getattr(given, f"past_{name}"), getattr(given, name)[:, None]], 1).numpy()


# ---- lerobot itself ----


@pytest.fixture(scope="module")
def built(lerobot, tmp_path_factory):
    """Folder of policies that lerobot built and saved."""
    folder = tmp_path_factory.mktemp("rows")
    run_peer(lerobot, lerobot_rows, "build", folder)
    return folder


def each_step(sim, actions):
    """Observations before every action of some episodes, (T, B, ...)."""
    seen = [sim.reset(EPISODES).observation]
    seen += [sim.step_chunk(actions[:, step : step + 1]).observation for step in range(actions.shape[1] - 1)]
    return {name: np.stack([getattr(observation, name) for observation in seen]) for name in PARTS}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 3])
def test_evaluations_choose_the_actions_of_lerobots_select_action(lerobot, built, rows, tmp_path, caplog):
    seeds, arrays = [], tmp_path / "arrays.npz"
    options = {"folder": str(built / f"row{rows}"), "python": lerobot, "action_box": True}
    with open_sim(sim_config(goal=1e9)) as sim:
        policy = load_action_policy(ActionPolicyConfig(kind="lerobot", options=options), sim, 0)
        check_fit(policy, sim)
        assert (policy.past, policy.chunk) == (rows - 1, lerobot_rows.CHUNK)
        predict = policy.predict
        policy.predict = lambda batch, seed: (seeds.append(seed), predict(batch, seed))[1]
        found = run_episodes(policy, sim, EPISODES, ActingSettings(), seeded(4), greedy=True)
        actions = np.stack(found.actions)
        shown = each_step(sim, actions)
        np.savez(arrays, **shown, seeds=seeds)
        run_peer(lerobot, lerobot_rows, "select", built / f"row{rows}", arrays)
        with np.load(arrays) as answers:
            wanted = answers["actions"].swapaxes(0, 1)
        own = (actions + 1) / 2 * (np.array(HIGH) - LOW) + LOW
        assert np.ptp(wanted[..., 0]) > 50, "the actions hardly change"
        np.testing.assert_allclose(own, wanted, atol=0.02)
        assert "in a row" not in caplog.text
        # the same noise with the present observation repeated, as without a past, gives other actions
        seeds.clear()
        policy.past = 0
        alone = run_episodes(policy, sim, EPISODES, ActingSettings(), seeded(4), greedy=True)
        assert np.abs(np.stack(alone.actions) - actions).max() > 0.01
    policy.close()


@pytest.mark.slow
def test_policies_of_other_queues_are_refused(lerobot, built):
    with pytest.raises(
        UserError, match=r"policy of type vqbet, whose predictions read a queue.*only diffusion is supported"
    ):
        LeRobotPolicy(LeRobotPolicyConfig(str(built / "vqbet"), python=lerobot))
