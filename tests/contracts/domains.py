"""The domains that train policies, each with a run so small that a step takes a fraction of a second."""

import dataclasses
import functools
import importlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.recipes import CONTRIB, find_recipe
from mmrl.runs.tracking import TrackingConfig
from mmrl.training.processes import make_accelerator, seed_everything
from mmrl.training.settings import BaseTrainerConfig, CheckpointConfig, TrainerConfig
from mmrl.training.trainer import Trainer

_KEPT: list[Any] = []  # folders that are deleted with the process


@dataclass(frozen=True)
class Domain:
    """A domain whose recipe takes any objective that its policies support."""

    recipe: str
    """Recipe of `mmrl.recipes.RECIPES` that leaves the objective to its configuration."""
    recipe_module: str
    """Module whose SCORES says what the room's policies score."""
    make_config: Callable[[str, Path], Any]
    """A run of a recipe of this room, by its name, in a folder."""
    needs: tuple[str, ...] = ()
    """Modules without which the room is skipped."""

    @property
    def scores(self) -> frozenset[str]:
        module: ModuleType = importlib.import_module(self.recipe_module)
        return frozenset(module.SCORES)


def domain_of(recipe: str) -> Domain:
    """The domain of a recipe; of one of contrib, that of the package which it extends."""
    rooms = {domain.recipe_module.rpartition(".")[0]: domain for domain in (*DOMAINS.values(), *OTHERS)}
    target = find_recipe(recipe).target
    for package in CONTRIB:
        if target.startswith(f"{package}."):
            extended = importlib.import_module(f"{package}.entries").EXTENDS
            target = f"{extended}." if extended in rooms else f"{extended}.methods."
    return rooms[max((room for room in rooms if target.startswith(f"{room}.")), key=len)]


def make_low(name: str, precision: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Configuration of a recipe in bf16 or fp16, without evaluations; skips what has none and missing modules."""
    if name in ("hnpg", *ONE_PROCESS):
        pytest.skip("natural-gradient steps and critics of a replay use full precision")
    domain = domain_of(name)
    for module in domain.needs:
        pytest.importorskip(module)
    config = domain.make_config(name, folder)
    config.trainer.mixed_precision = precision
    config.evaluation.at_start = config.evaluation.at_end = False
    config.validate()
    monkeypatch.setattr("mmrl.training.optimizer.START", 1.0)  # some have gradients above 1e5
    seed_everything(0)
    return config


def run(config: Any, folder: Path, steps: int, resume: bool = False) -> tuple[Trainer, list[float]]:
    """Train for so many steps in all, without evaluations; returns the trainer and the losses of the steps taken."""
    config.trainer.steps = steps
    accelerator = make_accelerator(config.trainer.mixed_precision)
    trainer = Trainer(find_recipe(config.recipe).load_recipe_class()(config), config, folder, accelerator, None)
    if resume:
        trainer.resume()
    losses: list[float] = []
    if trainer.recipe.updates is not None:  # its loss is not over the rows of a step
        update = trainer.updater.update

        def counted(*args: Any, **options: Any) -> dict[str, float]:
            metrics = update(*args, **options)
            losses.append(metrics["loss/critic"])
            return metrics

        trainer.updater.update = counted  # type: ignore[method-assign]
    loss = trainer.recipe.loss

    def noted(*args: Any, **options: Any) -> Any:
        output = loss(*args, **options)
        losses.append(float(output.loss.detach()))
        return output

    trainer.recipe.loss = noted
    trainer.run()
    trainer.recipe.close()
    return trainer, losses


def weights(trainer: Trainer) -> torch.Tensor:
    """All trained weights as one vector."""
    return torch.cat([p.detach().flatten() for p in trainer.policy.parameters() if p.requires_grad])


@functools.cache
def tiny_vlm() -> Path:
    from mmrl.vlm.toy.tiny import build_tiny_vlm
    from tests.vlm.builders import CORPUS

    folder = tempfile.TemporaryDirectory(prefix="tiny-vlm-")
    _KEPT.append(folder)
    return build_tiny_vlm(Path(folder.name) / "model", corpus=CORPUS, vision_depth=1, max_positions=256)


@functools.cache
def tiny_masked() -> Path:
    from mmrl.vlm.toy.signs import build_model, build_problems

    folder = tempfile.TemporaryDirectory(prefix="tiny-masked-")
    _KEPT.append(folder)
    build_problems(Path(folder.name) / "problems.jsonl", count=6)
    return build_model(Path(folder.name) / "model", mask=True, hidden=24, layers=1, max_positions=64)


def _of_unequal_length(number: int, row: dict[str, Any]) -> None:
    row["chosen"] = f"<answer>{'7' * (1 + number % 3)}</answer>"


def _vlm(name: str, folder: Path) -> Any:
    from mmrl.rewards import RewardConfig
    from mmrl.vlm.critic.revision import RevisionConfig
    from mmrl.vlm.model.model_config import CriticSettings
    from tests.vlm.pairs import write_pairs
    from tests.vlm.runs import add_columns, run_config

    entry = find_recipe(name)
    config = run_config(entry.load_config_class(), folder, tiny_vlm(), tasks_per_step=2, samples_per_task=3)
    config.recipe, config.eval_data = name, {}
    if hasattr(config, "teacher"):
        config.teacher.prompt = "{question} {answer}"
    if hasattr(config, "steering"):
        config.steering.share = 1.0  # groups of one size
    if hasattr(config, "scaffold"):
        config.scaffold.warmup_steps = 0
    if hasattr(config, "window"):
        config.window = 3
    if name == "contrastive":
        add_columns(Path(config.data.path), query="What is 7?", negative="What is 8?")
    if hasattr(config, "rubric"):
        config.rubric.interval, config.rubric.meta = 1, "tests/contrib/language/test_meta_reward.py:longer"
    if hasattr(config, "meaning"):
        config.meaning.by = "exact"  # no judge
    if hasattr(config, "soft"):
        config.sampler.top_k = 3
    if hasattr(config, "guidance"):
        config.model.critic = CriticSettings(hidden=[8], stop_gradient=True)
    if name in ("scaffolded", "multi_teacher"):
        add_columns(Path(config.data.path), hints=["3", "7"], teacher_responses=[{"model": "a", "text": "7"}])
    scored = getattr(config, "scoring", config)
    scored.sampler.max_new_tokens = 4
    scored.rewards = [RewardConfig(name="tests/vlm/user_reward.py:letters", isolate=False)]
    if hasattr(config, "critique"):  # whose tiny critics judge all alike: revisions tell them apart
        config.rewards = [RewardConfig(name="tests/vlm/user_reward.py:rarely", isolate=False)]
        config.critique.discrimination_steps, config.trainer.tasks_per_step = 0, 4
        config.evaluation.samples = 0
        config.evaluation.revision = RevisionConfig(critique_template="{{ answer }}! {{ question }}")
    if hasattr(config, "hierarchy"):
        config.hierarchy.budgets, config.trainer.samples_per_task = [3, 1], 4
    if name == "online_preference":
        config.trainer.samples_per_task = 2
    if name == "preference":
        config.data.path = str(write_pairs(folder / "pairs", _of_unequal_length))
    return config


def _masked(name: str, folder: Path) -> Any:
    from mmrl.masked.masked_config import InpaintingConfig, MaskedScoring
    from mmrl.masked.masked_sampler import MaskedSampling
    from mmrl.rewards import RewardConfig
    from mmrl.vlm.data.dataset import DataConfig
    from mmrl.vlm.model.model_config import ModelConfig

    sampling = MaskedSampling(max_new_tokens=8, block=8, steps=2)
    rewards = [RewardConfig(name="tests/vlm/user_reward.py:letters", isolate=False)]
    parts: dict[str, Any] = {
        "trainer": TrainerConfig(steps=2, tasks_per_step=2, samples_per_task=3, learning_rate=1e-3),
        "sampler": sampling,
        "rewards": rewards,
        "inpainting": InpaintingConfig(replacements=1, min_chunk=1, max_chunk=2, free=2),
    }
    if find_recipe(name).supervised:
        parts = {
            "trainer": BaseTrainerConfig(steps=2, tasks_per_step=2, learning_rate=1e-3),
            "evaluation": MaskedScoring(
                sampler=MaskedSampling(24, 24, 2), rewards=[*rewards, RewardConfig(name="exact")]
            ),
        }
    return find_recipe(name).load_config_class()(
        recipe=name,
        output_dir=str(folder / "run"),
        model=ModelConfig(path=str(tiny_masked())),
        data=DataConfig(path=str(tiny_masked().with_name("problems.jsonl"))),
        checkpoint=CheckpointConfig(every=1),
        tracking=TrackingConfig(quiet=True, tensorboard=False),
        **parts,
    )


def _tspo(name: str, folder: Path) -> Any:
    from tests.vlm.tspo.builders import needle_config

    return needle_config(folder)


def _gui(name: str, folder: Path) -> Any:
    from mmrl.gui.toy.icons import build_icons
    from mmrl.vlm.data.dataset import DataConfig

    config = _vlm(name, folder)
    screens = build_icons(folder / "screens.jsonl", count=4, worked=True)
    config.data = DataConfig(path=str(screens))
    config.grounding.template = "{instruction}"
    return config


def _agents(name: str, folder: Path) -> Any:
    from mmrl.agents.environments.agent_tasks import TaskSetConfig
    from mmrl.agents.environments.env_pool import EnvironmentConfig
    from mmrl.agents.environments.environment import ActionConfig
    from mmrl.vlm.engine.vlm_sampler import AnswerSampling, SamplerConfig
    from mmrl.vlm.model.model_config import ModelConfig

    parts: dict[str, Any] = {
        "sampler": SamplerConfig(max_new_tokens=4, stop=[*"aeiou"]),  # an answer that is cut does nothing
        "trainer": TrainerConfig(steps=2, tasks_per_step=2, samples_per_task=3, learning_rate=1e-3),
    }
    if find_recipe(name).supervised:
        parts = {"trainer": BaseTrainerConfig(steps=2, tasks_per_step=2, learning_rate=1e-3)}
    config = find_recipe(name).load_config_class()(
        recipe=name,
        output_dir=str(folder / "run"),
        model=ModelConfig(path=str(tiny_vlm())),
        environment=EnvironmentConfig(factory=f"{Path(__file__).parents[1]}/agents/talk.py:Talk", workers=2),
        data=TaskSetConfig(seeds=6, options={"answer": "e"}),
        actions=ActionConfig(format="text"),
        checkpoint=CheckpointConfig(every=1),
        tracking=TrackingConfig(quiet=True, tensorboard=False),
        **parts,
    )
    if hasattr(config, "revision"):
        config.revision.thought = ""  # which this format has none of
        config.evaluation.sampler = AnswerSampling(max_new_tokens=4, stop=[*"aeiou"])
    if hasattr(config, "branching"):
        config.branching.initial = 1  # of the three
    if hasattr(config, "refuel"):
        config.trainer.samples_per_task = 2
    if hasattr(config, "digirl"):
        config.digirl.threshold = "-2"  # below every advantage, so that each step has something to learn from
        config.digirl.batch_episodes = 2
    if hasattr(config, "archer"):
        config.archer.warmup_steps, config.archer.turns = 0, 12
        config.archer.critic.hidden, config.archer.critic.updates = 16, 4
    if hasattr(config, "hnpg"):
        config.hnpg.path, config.hnpg.turns = str(recorded(folder)), 12
        config.hnpg.critic.hidden, config.hnpg.critic.updates = 16, 4
        config.trainer = TrainerConfig(
            steps=2, tasks_per_step=2, samples_per_task=3, learning_rate=1.0, max_grad_norm=0.0
        )
    return config


def recorded(folder: Path) -> Path:
    """A folder of episodes that somebody else played."""
    said = [("aei", 0.6), ("xyz", 0.0), ("ou", 1.0)]
    rows = [
        {"task": {}, "seed": n, "reward": r, "turns": [{"answer": a, "text": f"{t} said"} for t in (0, 1)]}
        for n, (a, r) in enumerate(said)
    ]
    path = folder / "recorded"
    path.mkdir(parents=True, exist_ok=True)
    (path / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _diffusion(name: str, folder: Path) -> Any:
    from tests.diffusion.runs import run_config

    if find_recipe(name).supervised:
        return _pretraining(name, folder)
    if name == "diffusion_dpo":
        from tests.diffusion.pairs import dpo_config

        return dpo_config(folder)
    config = run_config(name, folder, tasks_per_step=2, samples_per_task=2)
    config.eval_data = {}
    config.sampler.steps = 3
    config.sampler.window = min(config.sampler.window, 2)  # the last step of `cps` has no gradient
    if hasattr(config, "timesteps"):
        config.timesteps.count = 2
    if hasattr(config, "critic"):
        config.critic.warmup_updates = 0
    return config


def _pretraining(name: str, folder: Path) -> Any:
    from diffusion.data.captioned_images import ImageDataConfig, write_images
    from diffusion.diffusion_config import GivenEvaluationConfig
    from diffusion.models.diffusion_policy import DiffusionLora, PipelineConfig
    from mmrl.rewards import RewardConfig
    from tests.diffusion.runs import tiny_model

    folder.mkdir(parents=True, exist_ok=True)
    images = np.random.RandomState(0).randint(0, 256, (4, 32, 32, 3), np.uint8)
    captions = ["a red circle", "a blue square", "a green triangle", "a red square"]
    write_images(folder / "images.npz", images, captions)
    return find_recipe(name).load_config_class()(
        recipe=name,
        output_dir=str(folder / "run"),
        model=PipelineConfig(path=str(tiny_model()), lora=DiffusionLora(enabled=False), max_sequence_length=1),
        images=ImageDataConfig(path=str(folder / "images.npz")),
        evaluation=GivenEvaluationConfig(
            rewards=[RewardConfig(name="caption_colour")],
            heldout_rewards=[RewardConfig(name="jpeg_incompressibility")],
        ),
        trainer=BaseTrainerConfig(steps=2, tasks_per_step=4),
        checkpoint=CheckpointConfig(every=1),
        tracking=TrackingConfig(quiet=True, tensorboard=False),
    )


def _robotics(name: str, folder: Path) -> Any:
    from robotics.episodes.payload import EpisodeSetConfig
    from robotics.policies.policy_loading import ActionPolicyConfig
    from robotics.sim.opening import SimConfig
    from tests.robotics.line_demos import BLIND

    trainer = TrainerConfig(steps=2, tasks_per_step=2, samples_per_task=4, learning_rate=0.02, threads=1)
    settings = {
        "recipe": name,
        "output_dir": str(folder / "run"),
        "sim": SimConfig(kind="tests.robotics.line_sim:open_line"),
        "model": ActionPolicyConfig(kind="tests.robotics.line_policies:make_walker", chunk=1, options={"bias": 0.1}),
        "trainer": trainer,
        "checkpoint": CheckpointConfig(every=1),
        "tracking": TrackingConfig(quiet=True, tensorboard=False),
    }
    kind = find_recipe(name).load_config_class()
    if name == "robot_hg_dagger":
        from tests.robotics.interventions.scripted import dagger

        small = {"steps": 2, "tasks_per_step": 4}
        return dagger(
            folder / "run", demonstrate_line(folder), trainer=small, eval_data={}, checkpoint=CheckpointConfig(every=1)
        )
    if name == "robot_rlif":
        from tests.robotics.offpolicy.line_sac import rlif_config

        config = rlif_config(folder / "run", demonstrate_line(folder), checkpoint=CheckpointConfig(every=1))
        config.trainer.steps = 2
        return config
    if name == "robot_success":
        from tests.robotics.rewards.lit import lit_config

        return lit_config(folder / "run", folder / "episodes", checkpoint=CheckpointConfig(every=1))
    if find_recipe(name).supervised:
        return kind(**(settings | _cloning(folder)))
    config = kind(**settings, data=EpisodeSetConfig(tasks=["right"], layouts=20))
    if name in ("robot_grpo", "robot_distil"):
        config.reward = "potential"
    if name == "robot_distil":
        config.teacher = dataclasses.replace(config.model, options={"bias": 0.6})
    if hasattr(config, "tgpo"):
        config.tgpo.formula = "eventually[2:12](abs(state_0 - state_1) < 0.1) and always(state_0 < 9)"
        config.model = ActionPolicyConfig(kind="gaussian", chunk=2, options={"encoder": BLIND})
    if name == "robot_ppo":
        config.reward.success, config.reward.potential = 1.0, 1.0
    if hasattr(config, "latent"):
        config.latent.kind, config.latent.frames = "state", "chunk"
        config.latent.options = {"mean": [0.0, 0.0], "std": [0.3, 0.3]}
    return config


def demonstrate_line(folder: Path) -> Path:
    """Demonstrations on the line, made once in a folder."""
    from tests.robotics.line_demos import demonstrate

    found = folder / "demonstrations"
    return found if found.exists() else demonstrate(found)


def _cloning(folder: Path) -> dict[str, Any]:
    from robotics.episodes.demonstrations import DemonstrationConfig
    from robotics.policies.policy_loading import ActionPolicyConfig
    from tests.robotics.line_demos import BLIND

    demos = demonstrate_line(folder)
    return {
        "model": ActionPolicyConfig(chunk=2, options={"bins": 16, "encoder": BLIND}),
        "demonstrations": DemonstrationConfig(path=str(demos), camera=""),
        "trainer": BaseTrainerConfig(steps=2, tasks_per_step=2, learning_rate=0.02, threads=1),
    }


def _offpolicy(name: str, folder: Path) -> Any:
    from robotics.offpolicy.prior import PriorConfig
    from tests.robotics.offpolicy.line_sac import improving_config, make_base, rlpd_config, sac_config

    kept = CheckpointConfig(every=1)
    if name == "robot_sac":
        config = sac_config(folder / "run", checkpoint=kept)
    elif name == "robot_rlpd":
        prior = PriorConfig(path=str(demonstrate_line(folder)))
        config = rlpd_config(folder / "run", checkpoint=kept, prior=prior, warmup_steps=6)
        config.sac.demo_bc, config.sac.demo_bc_updates = 1.0, 1000
    else:
        base = make_base(folder / "base", "flow")
        kind = {"robot_residual": "residual", "robot_dsrl": "steered"}[name]
        config = improving_config(folder / "run", base, kind, checkpoint=kept)
    config.trainer.steps = 2
    return config


def _flow3d(name: str, folder: Path) -> Any:
    if name == "flow3d_awm":
        from robotics.flow3d.methods.samples import ExplorationConfig
        from tests.robotics.flow3d.model.test_awm import RIGHT, awm_config

        score = dataclasses.replace(RIGHT, value="score")  # of yes and no a scene often has one kind, and then no step
        return awm_config(folder, verifiers=[score], exploration=ExplorationConfig(shift_cm=2.0, turn_deg=5.0))
    from robotics.flow3d.methods.clip_sets import ClipSetConfig
    from robotics.flow3d.methods.flow3d_recipe import WorldModelConfig
    from tests.robotics.flow3d.model.builders import tiny_config

    return find_recipe(name).load_config_class()(
        recipe=name,
        output_dir=str(folder / "run"),
        model=WorldModelConfig(**vars(tiny_config())),
        data=ClipSetConfig(function="tests.robotics.flow3d.model.synthetic:make_clips"),
        trainer=BaseTrainerConfig(steps=2, tasks_per_step=4, learning_rate=1e-2),
        checkpoint=CheckpointConfig(every=1),
        tracking=TrackingConfig(quiet=True, tensorboard=False),
    )


DOMAINS = {
    "vlm": Domain("vlm", "mmrl.vlm.vlm_config", _vlm),
    "agents": Domain("agent", "mmrl.agents.agent_recipe", _agents),
    "masked": Domain("masked", "mmrl.masked.masked_config", _masked),
    "diffusion": Domain("flow_grpo", "diffusion.diffusion_config", _diffusion, needs=("diffusers",)),
    "robotics": Domain("robot_grpo", "robotics.methods.robot_recipe", _robotics),
}

ONE_PROCESS = ("robot_sac", "robot_rlpd", "robot_rlif", "robot_residual", "robot_dsrl")
"""Recipes that refuse more than one process; `tests/robotics/offpolicy/test_sac_recipe.py` has the refusal."""
OFFPOLICY = Domain("robot_grpo", "robotics.offpolicy.sac", _offpolicy)
"""Its updates come from a replay, without an objective; simulator, policy and evaluation are those of robot_grpo."""
FLOW3D = Domain("flow3d", "robotics.flow3d.methods.flow3d_recipe", _flow3d)
"""Its recipes learn from given clips, without an objective, or with the loss of AWM."""
TSPO = Domain("tspo", "mmrl.vlm.tspo.tspo_config", _tspo)
"""Its decisions are frames; the objectives are tried on tokens alone."""
GUI = Domain("aepo", "mmrl.gui.grounding.aepo", _gui)
"""Its recipes are those of the vlm room with other questions, so the objectives are tried there alone."""
PEOPLE = Domain("robot_hg_dagger", "robotics.interventions.hg_dagger", _robotics)
"""It learns from a person's corrections, without an objective."""
JUDGES = Domain("robot_success", "robotics.rewards.success_recipe", _robotics)
"""It learns from labelled frames, without a simulator."""
OTHERS = (GUI, FLOW3D, TSPO, PEOPLE, OFFPOLICY, JUDGES)
