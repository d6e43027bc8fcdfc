"""A judge scores responses by a rubric."""

import pytest

from mmrl.vlm.critic import flaws
from mmrl.vlm.critic.flaws import read_score, rubric_reward


def test_a_judge_scores_by_the_rubric(monkeypatch):
    asked, verdicts = [], iter(["Good work.\n7", "no idea"])
    monkeypatch.setattr(flaws, "ask_chat", lambda url, model, text, **_: asked.append(text) or next(verdicts))
    options = {"rubric": ["Be strict."], "url": "http://judge/v1", "model": "m"}
    assert rubric_reward(["Sum?"], ["3"], **options) == [0.7]
    assert all(text in asked[0] for text in ("Sum?", "3", "Be strict."))
    with pytest.raises(RuntimeError, match="no score from 0 to 10"):
        rubric_reward(["Sum?"], ["3"], **options)
    assert read_score("fine\nScore: 8.5/10") == 0.85
