"""Reward functions of whole episodes: what they get, what they add, and what their failures cost."""

import contextlib
import json
from pathlib import Path

import pytest
import torch

from mmrl.agents.agent_evaluation import AgentEvaluationConfig
from mmrl.agents.agent_recipe import AgentConfig, AgentRecipe, AgentRewardConfig
from mmrl.agents.environments.agent_tasks import AgentTask, TaskSetConfig
from mmrl.agents.environments.environment import Action, ActionConfig, Observation, ParsedAnswer
from mmrl.agents.methods.digirl import DigirlConfig
from mmrl.agents.rollout.conversation import ConversationConfig, Writer
from mmrl.agents.rollout.episodes import AgentPayload
from mmrl.agents.rollout.storage import restore_episode, store_episode
from mmrl.errors import RunError, UserError
from mmrl.recipes import RECIPES
from mmrl.rewards import RewardConfig, RewardSum
from mmrl.rewards.answers import completion_text
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.training.run import train
from mmrl.training.trainer import collect_metrics
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig
from mmrl.vlm.model.model_config import ModelConfig
from tests.agents.my_judges import BRIGHTNESS
from tests.agents.runs import run_config

JUDGES = f"{Path(__file__).with_name('my_judges.py')}"


def judge(name: str, **options) -> RewardConfig:
    return RewardConfig(name=name, function=f"{JUDGES}:{name}", isolate=False, **options)


@pytest.fixture(autouse=True)
def _every_answer_steps(monkeypatch):
    monkeypatch.setattr(ActionConfig, "parse", lambda self, text, cut=False, tools=(): ParsedAnswer((Action("right"),)))


def make_config(folder, model, *rewards, kwargs=None, **changes) -> AgentConfig:
    goal = {"goal": "the right end"}
    parts = {
        "data": TaskSetConfig(seeds=4, options=goal, instruction="Go right."),
        "eval_data": {"heldout": TaskSetConfig(seeds=2, first_seed=100, options=goal)},
        "conversation": ConversationConfig(system="Walk.", history_images=1),
        "sampler": SamplerConfig(max_new_tokens=4),
        "evaluation": AgentEvaluationConfig(videos=0),
        "rewards": list(rewards),
    }
    kwargs = {"length": 2} | (kwargs or {})
    return run_config(AgentConfig, folder, model, kwargs=kwargs, steps={"steps": 1}, recipe="agent", **parts | changes)


def roll(config):
    config.validate()
    with contextlib.closing(AgentRecipe(config)) as recipe:
        rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
        return rollouts, recipe.score(rollouts, Step()), collect_metrics(recipe, rollouts, Step())


def test_a_judge_gets_every_turn_with_its_image_whatever_the_agent_still_sees(tmp_path, folder):
    """The agent's window holds one image; the corridor's images become brighter with every step."""
    seen = tmp_path / "seen.jsonl"
    config = make_config(tmp_path, folder, judge("record", options={"path": str(seen)}))
    rollouts, _, _ = roll(config)
    rows = [json.loads(line) for line in seen.open()]
    episodes = AgentPayload.of(rollouts).episodes
    assert len(rows) == len(episodes) == 6
    for row, episode in zip(rows, episodes, strict=True):
        system, first = row["prompt"]
        assert (system, first["role"]) == ({"role": "system", "content": "Walk."}, "user")
        assert first["content"] == [{"type": "image"}, {"type": "text", "text": "Go right.\nstep 0"}]
        assert [turn["role"] for turn in row["completion"]] == ["assistant", "user"] * 2
        assert [turn["content"] for turn in row["completion"][::2]] == episode.answers
        assert row["completion"][-1]["content"] == [{"type": "image"}, {"type": "text", "text": "step 2"}]
        assert row["bright_columns"] == [8, 16, 24], "one image a turn, and that after the last action"
        assert (row["goal"], row["environment_reward"], row["success"]) == ("the right end", 1.0, True)
        assert row["completion_lengths"] == sum(episode.trajectory.sampled)
        assert episode.transcript is None, "images are not kept longer than they are needed"


def test_their_weighted_sum_is_added_at_the_end_of_an_episode(tmp_path, folder):
    rewards = [judge(BRIGHTNESS, weight=0.5), judge("words", weight=0.0)]
    config = make_config(tmp_path, folder, *rewards, reward=AgentRewardConfig(environment=2.0))
    rollouts, scored, metrics = roll(config)
    episodes = AgentPayload.of(rollouts).episodes
    bright = torch.tensor([24 / 56] * 6)
    torch.testing.assert_close(scored.reward_terms[BRIGHTNESS], bright)
    assert scored.reward_terms["words"].tolist() == [episode.terms["words"] for episode in episodes]
    torch.testing.assert_close(scored.reward, 2.0 + 0.5 * bright)
    turns = scored.extras["decision_reward"]
    torch.testing.assert_close(turns.sum(1), scored.reward)
    assert bool((turns[:, :-1][scored.mask[:, 1:] > 0] == 0).all()), "nothing before the last token"
    assert metrics["episode/return"] == 1.0, "what the environment gave"
    kept = restore_episode(store_episode(episodes[0]))
    assert (kept.added_reward, kept.terms) == (episodes[0].added_reward, episodes[0].terms), "for replays"
    old = {name: value for name, value in store_episode(episodes[0]).items() if name not in ("added_reward", "terms")}
    assert restore_episode(old).added_reward == 0.0


def test_the_answer_of_the_last_action_reaches_reward_functions(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(
        ActionConfig,
        "parse",
        lambda self, text, cut=False, tools=(): ParsedAnswer((Action("finish", {"answer": "4"}),)),
    )
    _, scored, _ = roll(make_config(tmp_path, folder, judge("answers_four")))
    assert scored.reward_terms["answers_four"].tolist() == [1.0] * 6


def test_an_episode_that_cannot_be_judged_has_no_reward(tmp_path, folder):
    config = make_config(tmp_path, folder, judge("refuses_some"))
    _, scored, metrics = roll(config)
    assert torch.isnan(scored.reward).tolist() == [True, False, False] * 2
    assert float(scored.loss_mask[0].sum()) == 0
    assert metrics["reward/errors/sum/not_applicable"] == 2
    with pytest.raises(RunError, match="all rewards of this step failed: fails/raised: RuntimeError: no judge"):
        roll(make_config(tmp_path / "all", folder, judge("fails")))


def test_entries_of_tasks_with_the_names_of_arguments_are_passed_under_others(tmp_path, folder, caplog):
    options = {"goal": "the right end", "success": "wanted", "completions": ["a"]}
    config = make_config(tmp_path, folder, judge("has_both"), data=TaskSetConfig(seeds=4, options=options))
    config.eval_data = {}
    _, scored, _ = roll(config)
    assert scored.reward_terms["has_both"].tolist() == [1.0] * 6
    assert "data: rewards get the column 'success' as 'data_success'" in caplog.text


def test_a_run_measures_them_on_held_out_tasks(tmp_path, folder):
    config = make_config(tmp_path, folder, judge(BRIGHTNESS), RewardConfig(name=f"{JUDGES}:words", weight=0.1))
    run_dir = train(RECIPES["agent"], config)
    (row,) = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert row[f"reward/{BRIGHTNESS}"] == pytest.approx(24 / 56)
    found = [json.loads(line) for line in (run_dir / "evaluations.jsonl").open()]
    assert all(one[f"terms/{BRIGHTNESS}/greedy"] == pytest.approx(24 / 56) for one in found)


def test_what_cannot_be_scored_is_refused_before_a_model_is_loaded(tmp_path, folder):
    with pytest.raises(UserError, match=r"data: reward 'needs_map' needs map.* named .*goal.*success"):
        AgentRecipe(make_config(tmp_path, folder, judge("needs_map")))
    with pytest.raises(ValueError, match="a reward has the name 'format', which the recipe's own term uses"):
        make_config(tmp_path, folder, RewardConfig("format")).validate()
    with pytest.raises(UserError, match="digirl learns only from the environment's rewards"):
        DigirlConfig(model=ModelConfig(path=str(folder)), rewards=[judge("words")]).validate()


def test_an_unreadable_end_has_no_further_image_and_text_alone_is_plain(folder):
    policy = load_policy(ModelConfig(path=str(folder)))
    writer = Writer(policy, ConversationConfig(), "")
    conversation = writer.begin(AgentTask("t"), Observation("Where?"))
    writer.answer(conversation, [7, policy.eos_ids[0]])
    writer.follow(conversation, Observation("Go on."), "The answer could not be read: no action.")
    writer.answer(conversation, [7, policy.eos_ids[0]])
    for last, end in ((None, []), (Observation(), []), (Observation("Well."), [{"role": "user", "content": "Well."}])):
        found = writer.transcript(conversation, ["here", "there"], last)
        assert found.prompt == [{"role": "user", "content": "Where?"}]
        assert found.images == []
        assert found.completion == [
            {"role": "assistant", "content": "here"},
            {"role": "user", "content": "The answer could not be read: no action.\nGo on."},
            {"role": "assistant", "content": "there"},
            *end,
        ]


def test_rewards_of_answers_read_the_last_one():
    turns = [
        {"role": "assistant", "content": "<answer>6</answer>"},
        {"role": "user", "content": [{"type": "text", "text": "<answer>7</answer>"}]},
        {"role": "assistant", "content": "<answer>8</answer>"},
        {"role": "tool", "content": "<answer>7</answer>"},
    ]
    assert completion_text(turns) == "<answer>8</answer>"
    scored = RewardSum([RewardConfig("number")]).score(["q", "q"], [turns, turns], {"answer": [8, 7]})
    assert scored.total == [1.0, 0.0]
