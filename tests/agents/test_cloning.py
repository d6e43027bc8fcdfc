"""Cloning an expert: its answers as rollouts, scored as if the policy had written them, and a warm start that writes
actions.
"""

import json
from pathlib import Path

import pytest
import torch

from mmrl.agents.environments import experts
from mmrl.agents.environments.agent_tasks import TaskSetConfig
from mmrl.agents.environments.environment import ActionConfig
from mmrl.agents.methods import clone as cloning
from mmrl.agents.methods.clone import AgentCloneConfig, AgentCloneRecipe, CloneEvaluationConfig
from mmrl.agents.rollout.conversation import ConversationConfig
from mmrl.agents.rollout.episodes import AgentPayload, EpisodeConfig
from mmrl.errors import UserError
from mmrl.recipes import RECIPES
from mmrl.training.processes import Streams
from mmrl.training.recipe import NoUsableTasksError, Step
from mmrl.training.run import train
from mmrl.training.settings import BaseTrainerConfig
from mmrl.training.trainer import collect_metrics
from mmrl.vlm.engine.vlm_sampler import AnswerSampling
from tests.agents.runs import CORRIDOR, run_config
from tests.rounding import assert_equal_up_to_rounding

GRID = "mmrl.agents.toy.grid:GridWorld"


def make_config(tmp_path, model, factory=GRID, kwargs=None, **changes) -> AgentCloneConfig:
    parts = {
        "recipe": "agent_clone",
        "data": TaskSetConfig(seeds=8),
        "actions": ActionConfig(format="tag"),
        "trainer": BaseTrainerConfig(steps=2, tasks_per_step=4, learning_rate=1e-3),
        "evaluation": CloneEvaluationConfig(videos=0, sampler=AnswerSampling(max_new_tokens=5)),
    }
    kwargs = {"size": 3, "cell": 28, "min_distance": 2, "max_distance": 3} if kwargs is None else kwargs
    config = run_config(AgentCloneConfig, tmp_path, model, factory, kwargs, workers=1, **parts | changes)
    config.validate()
    return config


@pytest.fixture
def recipes(closing):
    return lambda config: closing(AgentCloneRecipe(config))


def played(recipe, number=0):
    rollouts = recipe.batch(recipe.policy, recipe.train_tasks[:4], Streams(number), Step(number))
    return rollouts, AgentPayload.of(rollouts)


def test_the_answers_are_the_experts_and_alone_are_trained(tmp_path, folder, recipes):
    recipe = recipes(make_config(tmp_path, folder))
    rollouts, payload = played(recipe)
    tokenizer = recipe.policy.processor.tokenizer
    for row, episode in enumerate(payload.episodes):
        for turn, answer in enumerate(episode.answers):
            own = (rollouts.turn[row] == turn) & (rollouts.mask[row] > 0)
            text = tokenizer.decode(payload.response_ids[row][own])
            assert text == answer + tokenizer.eos_token
            assert answer.startswith("<action>")
        assert episode.success
        assert len(payload.inserts[row]) == len(episode.answers) - 1
    assert rollouts.reward.tolist() == [1.0] * 4


def test_the_episodes_of_a_step_share_a_writer(tmp_path, folder, recipes, monkeypatch):
    """It encodes a screen that several of them see once."""
    recipe = recipes(make_config(tmp_path, folder))
    make, made = recipe.writer, []
    monkeypatch.setattr(recipe, "writer", lambda policy: made.append(policy) or make(policy))
    played(recipe)
    assert len(made) == 1


def test_a_window_of_images_equals_a_separate_prompt(tmp_path, folder, recipes):
    recipe = recipes(make_config(tmp_path, folder, conversation=ConversationConfig(system="", history_images=1)))
    rollouts, payload = played(recipe)
    with torch.no_grad():
        logp = recipe.scores(recipe.policy, rollouts, frozenset({"logp"})).logp
        last = [episode.trajectory.contexts[-1] for episode in payload.episodes]
        states = recipe.policy.encode_prefix([context.prompt for context in last]).last_state
        expected = recipe.policy.next_logp(states, 1.0)
    for row, context in enumerate(last):
        assert len([leaf for leaf in context.prompt.parts if "image_grid_thw" in leaf.media]) == 1
        token = payload.response_ids[row, context.start]
        assert_equal_up_to_rounding(logp[row, context.start], expected[row, token])


def test_random_actions_replace_the_experts(tmp_path, folder, recipes):
    recipe = recipes(make_config(tmp_path, folder, random_actions=1.0, episode=EpisodeConfig(max_turns=3)))
    _, first = played(recipe)
    _, again = played(recipe)
    assert [episode.answers for episode in first.episodes] == [episode.answers for episode in again.episodes]
    _, later = played(recipe, 1)
    assert [episode.answers for episode in first.episodes] != [episode.answers for episode in later.episodes]
    assert all(len(episode.answers) <= 3 for episode in later.episodes)
    assert not all(episode.success for episode in first.episodes)


def test_an_expert_that_fails_costs_its_episode_and_not_the_run(tmp_path, folder, recipes, monkeypatch, hanging):
    monkeypatch.setattr(experts, "MOST_TURNS", 20)
    guide = f"{Path(__file__).with_name('fake_envs.py')}:Guide"
    config = make_config(tmp_path, folder, factory=guide, kwargs={})
    config.environment.step_timeout_s = 2.0
    recipe = recipes(config)
    rollouts, payload = played(recipe)  # seeds 0 to 3
    assert [episode.task.seed for episode in payload.episodes] == [0]
    assert rollouts.reward.tolist() == [6.0]
    assert collect_metrics(recipe, rollouts, Step())["episode/turns"] == 3.0
    assert {kind: recipe.pool.counts[kind] for kind in ("raised", "crashed", "hung")} == {
        "raised": 1,
        "crashed": 1,
        "hung": 1,
    }
    with pytest.raises(NoUsableTasksError, match="malformed: expert returned a str"):
        recipe.rollout(recipe.policy, recipe.train_tasks[4:5], Streams(0), Step())
    with pytest.raises(NoUsableTasksError, match="did not finish the episode"):
        recipe.rollout(recipe.policy, recipe.train_tasks[5:6], Streams(0), Step())
    assert recipe.rollout(recipe.policy, recipe.train_tasks[6:8], Streams(0), Step()).num_rows == 2


def test_a_clone_writes_actions(tmp_path, folder):
    """Twenty steps on two tasks: the loss falls, and its answers can be parsed."""
    trainer = BaseTrainerConfig(steps=20, tasks_per_step=2, learning_rate=1e-2, schedule="cosine")
    splits = {"heldout": TaskSetConfig(seeds=3, first_seed=100)}
    run_dir = train(RECIPES["agent_clone"], make_config(tmp_path, folder, trainer=trainer, eval_data=splits))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert rows[-1]["loss/nll"] < 0.3 * rows[0]["loss/nll"]
    found = json.loads((run_dir / "result.json").read_text())
    assert found["status"] == "done"


def test_a_task_is_played_once_on_request(tmp_path, folder, recipes, monkeypatch):
    plays = []
    play = cloning.run_expert
    monkeypatch.setattr(cloning, "run_expert", lambda env, *rest: plays.append(rest[1]) or play(env, *rest))
    again = recipes(make_config(tmp_path, folder))
    once = recipes(make_config(tmp_path, folder, play_once=True))
    for recipe, count in ((again, 8), (once, 4)):
        plays.clear()
        (_, first), (_, second) = played(recipe), played(recipe)
        assert len(plays) == count
        assert list(map(torch.equal, first.response_ids, second.response_ids)) == [True] * 4


def test_what_cannot_be_cloned_is_refused(tmp_path, folder):
    with pytest.raises(UserError, match="without an expert to clone"):
        AgentCloneRecipe(make_config(tmp_path, folder, factory=CORRIDOR, kwargs={}))
