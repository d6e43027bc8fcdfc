"""Configurations of small real runs of agents for the tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmrl.agents.environments.agent_tasks import TaskSetConfig
from mmrl.agents.environments.env_pool import EnvironmentConfig
from mmrl.agents.environments.environment import Action, ActionConfig, ParsedAnswer
from mmrl.agents.rollout.conversation import ConversationConfig
from mmrl.runs.tracking import TrackingConfig
from mmrl.training.settings import CheckpointConfig, TrainerConfig
from mmrl.vlm.engine.vlm_sampler import SamplerConfig
from mmrl.vlm.model.model_config import ModelConfig

CORRIDOR = f"{Path(__file__).with_name('corridor.py')}:Corridor"
TALK = f"{Path(__file__).with_name('talk.py')}:Talk"


def by_length(self: ActionConfig, text: str, cut: bool = False, tools: Sequence[Any] = ()) -> ParsedAnswer:
    """An action for every answer of an untrained model; none if the answer begins with a digit."""
    if text[:1].isdigit():
        return ParsedAnswer(error="no_action", detail="begins with a digit")
    return ParsedAnswer((Action("right" if sum(map(ord, text)) % 3 else "left", {}, text),))


def run_config(
    kind: type[Any],
    folder: Path,
    model: Path,
    factory: str = CORRIDOR,
    kwargs: dict[str, Any] | None = None,
    workers: int = 3,
    steps: dict[str, Any] | None = None,
    **parts: Any,
) -> Any:
    """A two-step run of a recipe on two tasks; `steps` are options of its trainer."""
    trainer = {"steps": 2, "tasks_per_step": 2, "samples_per_task": 3, "learning_rate": 1e-3} | (steps or {})
    usual = {
        "recipe": "test",
        "data": TaskSetConfig(seeds=4),
        "conversation": ConversationConfig(system="Walk."),
        "actions": ActionConfig(format="tag", on_parse_error="noop"),
        "sampler": SamplerConfig(max_new_tokens=5),
        "trainer": TrainerConfig(**trainer),
        "checkpoint": CheckpointConfig(every=1),
        "tracking": TrackingConfig(quiet=True, tensorboard=False, strict=True),
    }
    return kind(
        output_dir=str(folder / "run"),
        model=ModelConfig(path=str(model)),
        environment=EnvironmentConfig(factory, kwargs or {}, workers=workers),
        **{name: part for name, part in usual.items() if name in kind.__dataclass_fields__} | parts,
    )
