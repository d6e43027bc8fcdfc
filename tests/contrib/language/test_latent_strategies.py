"""LSPO in outline: strategies of utterances, the game between them, and pairs."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmrl.agents.toy.haggle import stance_payoff
from mmrl.contrib.language import latent_strategies
from mmrl.contrib.language.latent_strategies import build_strategy_pairs, clusters_of, regret_matching
from mmrl.errors import UserError
from mmrl.vlm.engine.rows import text_prompt

WORDS = ["firm", "warm", "quick", "what"]


@pytest.mark.parametrize(
    ("table", "first", "second"),
    [
        ([[0, 1, -1], [-1, 0, 1], [1, -1, 0]], [1 / 3] * 3, [1 / 3] * 3),
        ([[2, -1], [-1, 1]], [2 / 5, 3 / 5], [2 / 5, 3 / 5]),  # p (2) - (1 - p) = -p + (1 - p)
        ([[3, 2], [1, 0]], [1, 0], [0, 1]),
    ],
)
def test_regret_matching_finds_the_mixture_that_nobody_leaves(table, first, second):
    found = regret_matching(np.array(table, dtype=float), steps=4000)
    np.testing.assert_allclose(found[0], first, atol=0.04)
    np.testing.assert_allclose(found[1], second, atol=0.04)


def test_near_states_are_one_strategy():
    states = np.array([[0.0, 0], [0.1, 0], [5, 5], [5, 5.1], [9, 0]])
    a, b, c = clusters_of(states, 3)[[0, 2, 4]]
    assert clusters_of(states, 3).tolist() == [a, a, b, b, c]
    assert len({a, b, c}) == 3
    assert clusters_of(states[:1], 3).tolist() == [0]


@pytest.fixture
def talk(monkeypatch):
    """A model that says some words in each role, each with a state of its own."""
    said = [["firm", "firm", "quick", "what"], ["warm", "firm", "warm", "firm"]]
    roles = iter(said)
    policy = SimpleNamespace(
        encode=lambda task: text_prompt(torch.tensor([9])),
        encode_answer=lambda prompt, text: [WORDS.index(text)],
        last_states=lambda prompts: torch.eye(4)[torch.stack([prompt.input_ids[-1] for prompt in prompts])],
    )
    monkeypatch.setattr(latent_strategies, "load_policy", lambda config: policy)
    monkeypatch.setattr(latent_strategies, "sample", lambda *_: SimpleNamespace(texts=next(roles)))
    return said


def test_utterances_of_better_strategies_are_preferred(talk, tmp_path):
    game = {"model": "m", "prompts": ["You buy.", "You sell."], "payoff": "mmrl.agents.toy.haggle:stance_payoff"}
    rows = [json.loads(line) for line in build_strategy_pairs(tmp_path / "pairs.jsonl", **game).open()]
    assert {row["rejected"] for row in rows if row["role"] == 0} >= {"what"}
    assert all(row["chosen"] != "what" for row in rows)
    assert all(row["score_chosen"] > row["score_rejected"] for row in rows)
    assert {row["prompt"] for row in rows} <= {"You buy.", "You sell."}


def test_a_game_without_better_strategies_or_roles_is_refused(talk, tmp_path):
    game = {"model": "m", "payoff": f"{__file__}:draw"}
    with pytest.raises(UserError, match="no strategy does better"):
        build_strategy_pairs(tmp_path / "pairs.jsonl", prompts=["You buy.", "You sell."], **game)
    with pytest.raises(UserError, match="prompts has 1 entries; a game has two roles"):
        build_strategy_pairs(tmp_path / "pairs.jsonl", prompts=["You buy."], **game)


def draw(first, second):
    return 0.0


def test_stances_are_a_fair_game():
    assert [stance_payoff("firm", other) for other in WORDS] == [0, 1, -1, 1]
    assert all(stance_payoff(a, b) == -stance_payoff(b, a) for a in WORDS for b in WORDS)
