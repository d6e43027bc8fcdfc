"""Every method on a model of another family that sees images: tiny SmolVLM2 on the tests' questions and screens."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from mmrl.agents.agent_evaluation import AgentEvaluationConfig
from mmrl.agents.agent_recipe import AgentConfig
from mmrl.agents.environments.agent_tasks import TaskSetConfig
from mmrl.agents.environments.environment import Action, ActionConfig, ParsedAnswer
from mmrl.agents.rollout.conversation import ConversationConfig
from mmrl.gui.grounding.aepo import AepoConfig
from mmrl.recipes import RECIPES
from mmrl.rewards import RewardConfig
from mmrl.rewards.reward_loading import load_function
from mmrl.training.run import train
from mmrl.vlm.engine.vlm_sampler import SamplerConfig
from mmrl.vlm.methods.apo import ApoConfig
from mmrl.vlm.methods.papo import PapoConfig
from mmrl.vlm.methods.reg_grpo import RegGrpoConfig
from mmrl.vlm.methods.sft import SftConfig
from tests.agents import runs as agents
from tests.gui import screens
from tests.vlm.pairs import pair_config
from tests.vlm.runs import run_config
from tests.vlm.tspo.builders import needle_config

CONFIGS = Path(__file__).parents[3] / "configs"


def on_questions(kind: type[Any]) -> Callable[[Path, Path], Any]:
    def config(folder: Path, model: Path) -> Any:
        made = run_config(kind, folder, model)
        if hasattr(made, "rewards"):
            made.rewards[0] = RewardConfig(name="tests.vlm.user_reward:code_points", isolate=False)
        return made

    return config


def aepo(folder: Path, model: Path) -> Any:
    config = screens.run_config(AepoConfig, folder, model)
    config.grounding = dataclasses.replace(config.grounding, space="rel1000")
    config.rewards = [RewardConfig(name="tests.vlm.user_reward:code_points", isolate=False)]
    return config


def agent(folder: Path, model: Path) -> Any:
    parts = {
        "eval_data": {"heldout": TaskSetConfig(seeds=2, first_seed=100)},
        "conversation": ConversationConfig(system="Walk. {actions}"),
        "evaluation": AgentEvaluationConfig(records=2, videos=1),
    }
    return agents.run_config(AgentConfig, folder, model, workers=2, **parts)


def tspo(folder: Path, model: Path) -> Any:
    config = needle_config(folder)
    config.picks.count, config.eval_data = 3, {"same": config.data}
    config.answerer.kind, config.answerer.train = "vlm", True
    config.answerer.model.path = str(model)
    config.answerer.sampler = SamplerConfig(max_new_tokens=3)
    config.answerer.reward = RewardConfig(name="tests.vlm.user_reward:code_points", isolate=False)
    return config


METHODS: dict[str, tuple[str, Callable[[Path, Path], Any]]] = {
    "papo": ("papo", on_questions(PapoConfig)),
    "apo": ("apo", on_questions(ApoConfig)),
    "reg_grpo": ("reg_grpo", on_questions(RegGrpoConfig)),
    "sft": ("sft", on_questions(SftConfig)),
    "preference": ("preference", pair_config),
    "aepo": ("aepo", aepo),
    "agent": ("agent", agent),
    "tspo": ("tspo", tspo),
}


def acts(self: Any, text: str) -> ParsedAnswer:
    return ParsedAnswer((Action("right" if sum(map(ord, text)) % 3 else "left", {}, text),))


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name == "papo" else pytest.mark.slow) for name in METHODS]
)
def test_two_steps_train_evaluate_and_save(method, tiny_generic, tmp_path, monkeypatch):
    monkeypatch.setattr(ActionConfig, "parse", acts)
    recipe, make = METHODS[method]
    config = make(tmp_path, tiny_generic["smolvlm"])
    config.validate()
    run_dir = train(RECIPES[recipe], config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    steps = [row for row in rows if "optim/grad_norm" in row]
    assert len(steps) == 2
    assert all(row["optim/grad_norm"] > 0 for row in steps)
    evaluations = [json.loads(line) for line in (run_dir / "evaluations.jsonl").open()]
    assert any(isinstance(value, float) and math.isfinite(value) for value in evaluations[-1].values())
    assert (run_dir / "checkpoints/step-000002/model").is_dir()


@pytest.mark.parametrize(
    ("file", "sizes", "answer"),
    [
        ("vlm/hints_sft.yaml", {}, "<answer>"),
        ("vlm/readings_sft.yaml", {}, "<answer>"),
        ("vlm/needle_sft.yaml", {}, "7"),
        ("vlm/digits_video_sft.yaml", {}, "7"),
        ("gui/icons_sft.yaml", {"patch_size": 16, "max_pixels": 128 * 128}, 'disk", "point_2d": ['),
        ("agents/grid_clone.yaml", {}, "<action>"),
        ("agents/grid_see.yaml", {"max_pixels": 84 * 84}, "left"),
    ],
)
def test_worlds_build_smolvlm_by_its_name(tmp_path, file, sizes, answer):
    from transformers import AutoConfig, AutoProcessor

    model = OmegaConf.to_container(OmegaConf.load(CONFIGS / file))["model"]
    options = model["build_options"] | sizes | {"family": "smolvlm"}
    load_function(model["build"], what="model.build")(str(tmp_path), **options)
    config, processor = AutoConfig.from_pretrained(tmp_path), AutoProcessor.from_pretrained(tmp_path)
    assert config.model_type == "smolvlm"
    assert config.vision_config.image_size**2 == options["max_pixels"]
    assert len(processor.tokenizer.encode(answer, add_special_tokens=False)) == 1
