"""Critique-RL: verdicts, rewards of both stages, and the code of the paper."""

import dataclasses
import math

import pytest

from mmrl.contrib.language.critique_rl import (
    CritiqueRlConfig,
    CritiqueRlRecipe,
    critique_reward,
    read_verdict,
    revising_evaluation,
)
from mmrl.fields import check_config
from mmrl.rewards import RewardConfig
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.vlm.critic.revision import RevisionConfig
from mmrl.vlm.data.prompt import VlmPayload
from tests.golden.numbers import assert_agrees, load
from tests.vlm.runs import run_config

LETTERS = RewardConfig(name="tests/vlm/user_reward.py:letters", isolate=False)


def test_rewards_are_those_of_the_authors():
    golden = load("critique_rl")
    (peer,), given = golden.peers, golden.inputs
    verdicts = [read_verdict(text) if "Correctness" in text else None for text in given["critiques"]]
    rows = list(zip(verdicts, given["before"], given["after"], strict=True))
    assert_agrees([critique_reward(verdict, was) for verdict, was, _ in rows], peer, "first")
    for gain in ("refine", "correct", "delta"):
        assert_agrees([critique_reward(*row, gain=gain) for row in rows], peer, gain)


def test_an_unknown_answer_has_no_reward():
    assert math.isnan(critique_reward(True, math.nan))
    assert math.isnan(critique_reward(True, 1.0, math.nan))


@pytest.mark.parametrize(
    ("critique", "verdict"),
    [
        ("<think>77= 38!</think>number 2", False),
        ("<think>77=</think>none", True),
        ("<think>77=</think>", None),
        ("Fine. Correctness of the final answer: Correct", True),
        ("Correctness of the final answer: Correct. Correctness of the final answer: Wrong", None),
    ],
)
def test_a_verdict_is_a_line_or_a_list_of_errors(critique, verdict):
    assert read_verdict(critique) is verdict


def test_both_stages_score_critiques_of_the_answers(tmp_path, tiny_folders, monkeypatch, closing):
    config = run_config(CritiqueRlConfig, tmp_path, tiny_folders["qwen2_5_vl"], tasks_per_step=2)
    config.eval_data, config.rewards = {}, [LETTERS]
    config.evaluation.revision = RevisionConfig(critique_template="{{ question }} {{ answer }}?")
    config.evaluation.samples = 0
    config.critique.discrimination_steps = 1
    check_config(config, "")
    recipe = closing(CritiqueRlRecipe(config))
    rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
    payload = VlmPayload.of(rollouts)
    assert all(task.answer in prompt.text for task, prompt in zip(payload.tasks, payload.prompts, strict=True))
    seen = []
    verdicts = iter([True, False] * rollouts.num_rows)
    monkeypatch.setattr("mmrl.contrib.language.critique_rl.read_verdict", lambda _: next(verdicts))
    monkeypatch.setattr(recipe, "_right", lambda tasks, answers, step: seen.append(answers) or right(answers))
    first = recipe.score(rollouts, Step(0))
    assert first.reward.tolist() == [1.0, -1.0] * (rollouts.num_rows // 2)
    assert [len(answers) for answers in seen] == [2]
    second = recipe.score(rollouts, Step(1))
    assert len(seen[-1]) == rollouts.num_rows
    assert second.reward.tolist() == pytest.approx([1.2, -1.0] * (rollouts.num_rows // 2))
    assert set(second.reward_terms) == {"unrevised", "revised", "verdict"}


def right(answers):
    from mmrl.rewards import RewardResult

    return [1.0] * len(answers), RewardResult([1.0] * len(answers), {})


CHANGES = [{"greedy": False, "samples": 1}, {"samples": 2}, {"temperature": 0.5}, {"by": ["a"]}]


@pytest.mark.parametrize("change", CHANGES)
def test_protocols_of_other_evaluations_are_refused(change, tmp_path, tiny_folders):
    config = run_config(CritiqueRlConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    config.rewards, config.evaluation = [LETTERS], revising_evaluation()
    config.validate()
    config.evaluation = dataclasses.replace(config.evaluation, **change)
    with pytest.raises(ValueError, match=r"before and after revision|temperature is 0\.5, but it has no effect"):
        config.validate()
