"""Configurations in which a policy can only collapse are called so by step ten, in the log and in the report."""

import json

import pytest

from mmrl.agents.agent_evaluation import AgentEvaluationConfig
from mmrl.agents.agent_recipe import AgentRewardConfig
from mmrl.agents.environments.environment import ActionConfig
from mmrl.agents.rollout.episodes import EpisodeConfig
from mmrl.recipes import RECIPES
from mmrl.training.run import train
from mmrl.vlm.engine.vlm_sampler import SamplerConfig
from tests.agents.runs import TALK
from tests.agents.test_text import make_config
from tests.agents.test_tool_runs import scripted


def run(folder, model, steps, refuses=False, **changes):
    """Step of each warning of a run, by kind, and the folder."""
    config = make_config(
        folder,
        model,
        episode=EpisodeConfig(max_turns=4),
        evaluation=AgentEvaluationConfig(greedy=False, samples=0),
        sampler=SamplerConfig(max_new_tokens=2),
    )
    config.environment.factory, config.environment.isolate = TALK.replace(":Talk", ":Guess"), False
    config.trainer.steps, config.trainer.tasks_per_step, config.trainer.samples_per_task = steps, 1, 4
    config.environment.kwargs = {"refuses": refuses}
    config.checkpoint.every, config.eval_data = 0, {}
    for name, value in changes.items():
        setattr(config, name, value)
    run_dir = train(RECIPES["agent"], config)
    file = run_dir / "warnings.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {row["kind"]: row["step"] for row in map(json.loads, lines)}, run_dir


def said(*texts):
    """Answers of four turns, the same in all; one text for each of the two environments."""
    return [(lambda row: f"{texts[row % len(texts)]}<|im_end|>", "eos")] * 4


def test_a_policy_that_may_find_out_that_silence_pays_is_warned_at_the_first_step(
    tmp_path, language_model, monkeypatch
):
    """Other words than numbers cost a tenth each, and an empty answer ends the episode for nothing."""
    scripted(monkeypatch, *said("no", ""))
    found, run_dir = run(tmp_path, language_model, 1)
    assert found == {"silence_pays": 1}
    page = (run_dir / "report.html").read_text()
    assert "Warning: doing nothing pays off: 25% of a step" in page
    # a penalty that outweighs the whole episode
    found, _ = run(tmp_path / "paid", language_model, 1, reward=AgentRewardConfig(invalid_turn=-0.5))
    assert found == {}


@pytest.mark.parametrize(
    ("answers", "options", "alarms"),
    [
        (None, {}, {"cut"}),
        (
            None,
            {"actions": ActionConfig("tag", on_parse_error="noop"), "reward": AgentRewardConfig(format=0.5)},
            {"cut"},
        ),
        (said(""), {}, {"unreadable"}),
        (said("no"), {"refuses": True}, {"refused", "one_action"}),
        (said("no"), {}, {"one_action"}),
    ],
)
def test_a_collapsed_policy_is_called_so_by_step_ten(tmp_path, language_model, monkeypatch, answers, options, alarms):
    if answers:
        scripted(monkeypatch, *answers)
    found, _ = run(tmp_path, language_model, 5, **options)
    own = {"silence_pays", "unreadable", "more_unreadable", "cut", "refused", "one_action", "no_success", "collapsed"}
    assert {kind: step for kind, step in found.items() if kind in own} == dict.fromkeys(alarms, 5)
