"""Agents that are language models, in environments without pictures."""

import json
from pathlib import Path

import pytest
import torch

from mmrl.agents.agent_evaluation import AgentEvaluationConfig
from mmrl.agents.agent_recipe import AgentConfig, AgentRecipe
from mmrl.agents.environments.agent_tasks import TaskSetConfig
from mmrl.agents.environments.environment import Action, ActionConfig, ParsedAnswer
from mmrl.agents.monitor import tabulate_failed_answers
from mmrl.agents.rollout.conversation import ConversationConfig
from mmrl.agents.rollout.runner import Fork
from mmrl.errors import UserError
from mmrl.recipes import RECIPES
from mmrl.runs.records import read_warnings
from mmrl.training.processes import Streams
from mmrl.training.run import train
from mmrl.vlm.engine.vlm_sampler import SamplerConfig
from tests.agents.runs import TALK, run_config


def make_config(folder: Path, model: Path, *, pictures: bool = False, **changes) -> AgentConfig:
    parts = {
        "recipe": "agent",
        "eval_data": {"heldout": TaskSetConfig(seeds=2, first_seed=100)},
        "conversation": ConversationConfig(),
        "actions": ActionConfig(format="text"),
        "sampler": SamplerConfig(max_new_tokens=4, stop=[*"aeiou"]),
        "evaluation": AgentEvaluationConfig(records=1, videos=1),
    }
    return run_config(AgentConfig, folder, model, TALK, {"pictures": pictures}, workers=2, **parts | changes)


def test_a_language_model_trains_on_words_alone(tmp_path, language_model):
    run_dir = train(RECIPES["agent"], make_config(tmp_path, language_model))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert rows[0]["optim/grad_norm"] > 0
    assert rows[0]["episode/turns"] > 1
    found = [json.loads(line) for line in (run_dir / "evaluations.jsonl").open()]
    assert all(row["episode/no_result/greedy"] == 0 for row in found)
    assert list((run_dir / "videos").glob("*.mp4"))  # of the words


@pytest.mark.parametrize(("on_error", "ending", "turns"), [("terminate", "cut", 1), ("noop", "truncated", 3)])
def test_an_answer_that_is_cut_executes_nothing(tmp_path, language_model, on_error, ending, turns, closing):
    config = make_config(tmp_path, language_model)
    config.sampler.stop, config.actions.on_parse_error, config.episode.max_turns = [], on_error, 3
    config.reward.format = 0.5
    recipe = closing(AgentRecipe(config))
    episodes = recipe.draw_groups(recipe.policy, recipe.train_tasks[:1], Streams(0))[0]
    assert all(episode.finish == "length" for episode in episodes), "so short an answer of this model never ends"
    assert [(episode.ending, episode.errors) for episode in episodes] == [(ending, ["cut"] * turns)] * len(episodes)
    assert all(episode.rewards == [0.0] * turns and not episode.unreadable for episode in episodes)
    assert tabulate_failed_answers(episodes, torch.zeros(len(episodes), 400)).sum(1).tolist() == [turns] * len(episodes)
    again = Fork(episodes[0], 1).answer(0)
    assert config.actions.parse(again.text, cut=again.finish == "length").error == "cut", (
        "a branch repeats nothing else"
    )


@pytest.mark.parametrize(("on_error", "format", "warns"), [("terminate", 0, 1), ("noop", 0, 1), ("terminate", 9, 0)])
def test_a_run_in_which_silence_pays_says_so(tmp_path, language_model, monkeypatch, on_error, format, warns):
    def all_but_every_fifth(self, text, cut=False, tools=()):
        said.append(text)
        return ParsedAnswer((Action("say", {"text": text}),)) if len(said) % 5 else ParsedAnswer(error="empty")

    said = []
    monkeypatch.setattr(ActionConfig, "parse", all_but_every_fifth)
    config = make_config(tmp_path, language_model)
    config.environment.factory = config.environment.factory.replace(":Talk", ":Costly")
    config.actions.on_parse_error, config.reward.format, config.trainer.steps = on_error, format, 1
    run_dir = train(RECIPES["agent"], config)
    (row,) = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert 0 < row["episode/unreadable"] == row["episode/empty"] < 1
    assert (row["episode/below_silence"] > 0) == bool(warns)
    assert sum("doing nothing pays off" in text for text in read_warnings(run_dir)) == warns


def test_pictures_need_another_model(tmp_path, language_model):
    with pytest.raises(UserError, match=r"an observation of the environment has an image, but .* only reads text"):
        train(RECIPES["agent"], make_config(tmp_path / "a", language_model, pictures=True))
    kept = ConversationConfig(history_images=2)
    with pytest.raises(UserError, match=r"conversation\.history_images is 2, but .* only reads text"):
        train(RECIPES["agent"], make_config(tmp_path / "b", language_model, conversation=kept))
