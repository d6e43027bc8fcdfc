"""Agents that are language models, in environments without pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmrl.agents.environments.environment import ActionConfig
from mmrl.agents.environments.pool import EnvironmentConfig
from mmrl.agents.environments.tasks import TaskSetConfig
from mmrl.agents.evaluation import AgentEvaluationConfig
from mmrl.agents.recipe import AgentConfig
from mmrl.agents.rollout.episodes import ConversationConfig
from mmrl.errors import UserError
from mmrl.recipes import RECIPES
from mmrl.runs.tracking import TrackingConfig
from mmrl.training.run import train
from mmrl.training.settings import TrainerConfig
from mmrl.vlm.engine.sampler import SamplerConfig
from mmrl.vlm.model.config import ModelConfig

TALK = f"{Path(__file__).with_name('talk.py')}:Talk"


def make_config(folder: Path, model: Path, *, pictures: bool = False, **changes) -> AgentConfig:
    return AgentConfig(
        recipe="agent",
        output_dir=str(folder / "run"),
        model=ModelConfig(path=str(model)),
        environment=EnvironmentConfig(TALK, {"pictures": pictures}, workers=2),
        data=TaskSetConfig(seeds=4),
        eval_data={"heldout": TaskSetConfig(seeds=2, first_seed=100)},
        actions=ActionConfig(format="text"),
        sampler=SamplerConfig(max_new_tokens=4, stop=[*"aeiou"]),
        trainer=TrainerConfig(steps=2, tasks_per_step=2, samples_per_task=3, learning_rate=1e-3),
        evaluation=AgentEvaluationConfig(records=1, videos=1),
        tracking=TrackingConfig(quiet=True, tensorboard=False, strict=True),
        **changes,
    )


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


def test_pictures_need_another_model(tmp_path, language_model):
    with pytest.raises(UserError, match=r"an observation of the environment has an image, but .* reads text alone"):
        train(RECIPES["agent"], make_config(tmp_path / "a", language_model, pictures=True))
    kept = ConversationConfig(history_images=2)
    with pytest.raises(UserError, match=r"conversation\.history_images is 2, but .* reads text alone"):
        train(RECIPES["agent"], make_config(tmp_path / "b", language_model, conversation=kept))
