"""Further tiny runs in which options matter that the first run of a recipe leaves idle."""

import copy
import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmrl.config import from_values
from mmrl.core.blocks import BLOCKS
from mmrl.errors import UserError
from mmrl.recipes import RECIPES
from mmrl.training.objectives import SCORES
from tests.contracts.domains import domain_of
from tests.contracts.options import Leaf, walk_config, with_changes


@dataclasses.dataclass(frozen=True)
class Variant:
    """A change of a recipe's tiny run, and the options that are walked in it."""

    keys: tuple[str, ...]
    """Beginnings of their keys; those of evaluation sets and of the evaluation's own parts need not be named apart."""
    changes: dict[str, Any] | Callable[[Any, Path], Any]
    """Values by key, or a function of configuration and folder."""
    recipes: tuple[str, ...] = ()
    """Recipes that have it; empty: every recipe that takes the changes."""

    def make(self, config: Any, folder: Path) -> Any:
        """The changed configuration."""
        return self.changes(config, folder) if callable(self.changes) else with_changes(config, self.changes)

    def matches(self, leaf: Leaf) -> bool:
        """Whether the option is walked in this run."""
        return any(leaf.key.startswith(key) or f".{key}" in leaf.key for key in self.keys)


_KEPT: list[Any] = []  # folders that are deleted with the process
IMAGES = tuple(name for name, entry in RECIPES.items() if entry.target.startswith("diffusion."))
EDITORS = tuple(name for name in IMAGES if name not in ("diffusion_dpo", "flow_pretrain"))
ROBOTS = ("robot_grpo", "robot_ppo", "robot_distil", "srpo", "robot_clone")
EXACT_KL = {"kind": "full", "coef": 0.1}
KL = {"kind": "k3", "coef": 0.1}
MOVING_WINDOW = {
    "sampler.window": 1,
    "sampler.window_high": 3,
    "sampler.window_schedule": "progressive",
    "sampler.window_every": 1,
    "trainer.steps": 4,
}
PROBED = {"augmentation.measure": "probe", "augmentation.traces": 8, "trainer.tasks_per_step": 4}
"""Of so many questions one is hard, and of so many traces one is better, whatever the tiny model answers."""
TINY_ENCODER = {"width": 32, "heads": 2, "layers": 1, "channels": 8, "keypoints": 4}


@functools.cache
def _long_vlm() -> Path:
    from mmrl.vlm.toy.tiny import build_tiny_vlm
    from tests.vlm.builders import CORPUS

    folder = tempfile.TemporaryDirectory(prefix="long-vlm-")
    _KEPT.append(folder)
    return build_tiny_vlm(Path(folder.name) / "model", corpus=CORPUS, vision_depth=1, max_positions=1024)


def _videos(config: Any, folder: Path) -> Any:
    from mmrl.vlm.data.dataset import DataConfig
    from tests.vlm.test_video_training import write_video_questions

    path = str(write_video_questions(folder / "clips"))
    config.model.path = str(_long_vlm())
    config.data, config.eval_data = DataConfig(path=path), {"held": DataConfig(path=path)}
    return config


def _prompt_table(config: Any, folder: Path) -> Any:
    """Prompts with their columns, in place of lines of text."""
    path = folder / "prompts.jsonl"
    path.write_text('{"prompt": "a red circle"}\n{"prompt": "a blue square"}\n', encoding="utf-8")
    for data in (getattr(config, "data", None), config.eval_data["held"]):
        if data is not None:
            data.path = str(path)
    return config


def _edits(config: Any, folder: Path) -> Any:
    """Images to edit, by a tiny Kontext."""
    from diffusion.models.diffusion_policy import DiffusionLora, PipelineConfig
    from tests.diffusion.edits import write_edits
    from tests.diffusion.families.cases import CASES

    case = CASES["kontext"]
    lora = DiffusionLora(rank=2, alpha=4)
    config.model = PipelineConfig(
        path=str(case.build(folder / "kontext")), lora=lora, height=32, width=24, **case.model
    )
    config.sampler.guidance = 1.0
    path = str(write_edits(folder / "edits.jsonl", ["a red circle", "a blue square"], (50, 40)))
    config.data.path = config.eval_data["held"].path = path
    return config


def _scored_apart(config: Any, folder: Path) -> Any:
    from mmrl.rewards import RewardConfig

    config.rewards = [RewardConfig(name="tests/vlm/user_reward.py:letters", isolate=False), RewardConfig(name="exact")]
    return config


def _critic(config: Any, folder: Path) -> Any:
    from mmrl.training.objectives import ObjectiveConfig

    config.objective = ObjectiveConfig(preset="ppo")
    return config


def _self_critic(config: Any, folder: Path) -> Any:
    from mmrl.vlm.critic.self_critic import SelfCriticConfig

    config.evaluation.self_critic = SelfCriticConfig(n=2)
    return config


def _revision(config: Any, folder: Path) -> Any:
    from mmrl.vlm.critic.revision import RevisionConfig

    config.evaluation.revision = RevisionConfig()
    return config


def _several_teachers(config: Any, folder: Path) -> Any:
    from tests.vlm.runs import add_columns

    texts = ("7", "3 4 <answer>7</answer>", "<think>3 4</think><answer>3</answer>")
    given = [{"model": f"teacher {number}", "text": text} for number, text in enumerate(texts)]
    add_columns(Path(config.data.path), teacher_responses=given)
    config.sampler.max_new_tokens = 32
    return config


def _frozen_teacher(config: Any, folder: Path) -> Any:
    config.teacher.path = str(_long_vlm())
    return config


def _answerer(config: Any, folder: Path) -> Any:
    from tests.contracts.domains import tiny_vlm

    config.answerer.kind, config.answerer.model.path = "vlm", str(tiny_vlm())
    config.answerer.sampler.max_new_tokens = 4
    config.answerer.reward.name = "tests/vlm/user_reward.py:letters"
    config.answerer.reward.isolate = False
    return config


def _trained_answerer(config: Any, folder: Path) -> Any:
    config = _answerer(config, folder)
    config.answerer.train = True
    return config


def _adapted_answerer(config: Any, folder: Path) -> Any:
    config = _trained_answerer(config, folder)
    config.answerer.model.lora.enabled = True
    return config


def _tabletop(config: Any, folder: Path) -> Any:
    from robotics.episodes.payload import EpisodeSetConfig
    from robotics.policies.policy_loading import ActionPolicyConfig
    from robotics.sim.opening import SimConfig

    config.sim = SimConfig(tasks=["reach"], image_size=32, horizon=4, workers=1)
    encoder = {**TINY_ENCODER, "image_size": [32, 32]}
    config.model = ActionPolicyConfig(kind="small", chunk=2, options={"bins": 16, "encoder": encoder})
    config.eval_data = {"held": EpisodeSetConfig(tasks=["reach"], layouts=1)}
    if config.recipe == "robot_clone":
        config.demonstrations.path = str(_tabletop_demonstrations())
        config.demonstrations.camera = "front"
        return config
    if hasattr(config, "teacher"):
        config.teacher = copy.deepcopy(config.model)
    config.data = EpisodeSetConfig(tasks=["reach"], layouts=20)
    config.trainer.tasks_per_step, config.trainer.samples_per_task = 2, 2
    if hasattr(config, "latent"):
        config.latent.options = {}
    if hasattr(config, "teacher"):
        options = {"bins": 16, "encoder": encoder | {"width": 64}}
        config.teacher = dataclasses.replace(config.model, options=options)
    return config


def _exact_teacher(config: Any, folder: Path) -> Any:
    config = _randomised(config, folder)
    config.distil.divergence = 1.0
    return config


@functools.cache
def _tabletop_demonstrations() -> Path:
    from robotics.toy.tabletop_demos import build_demonstrations

    folder = tempfile.TemporaryDirectory(prefix="tabletop-")
    _KEPT.append(folder)
    return build_demonstrations(f"{folder.name}/demos", episodes=1, image_size=32)


def _randomised(config: Any, folder: Path) -> Any:
    from robotics.sim.randomization import RandomizationConfig
    from tests.robotics.test_randomization import PARTS

    config = _tabletop(config, folder)
    config.sim.randomization = from_values(RandomizationConfig, PARTS, "randomization")
    config.eval_data["held"].randomized = True
    return config


def _tabletop_states(config: Any, folder: Path) -> Any:
    from robotics.policies.policy_loading import ActionPolicyConfig

    config = _randomised(config, folder)
    config.sim.image_size, config.sim.state = 0, "full"
    config.model = ActionPolicyConfig("", "squashed", 2, {"encoder": {**TINY_ENCODER, "image_size": None}})
    return config


def _policy(kind: str, **options: Any) -> Callable[[Any, Path], Any]:
    def change(config: Any, folder: Path) -> Any:
        from robotics.policies.policy_loading import ActionPolicyConfig

        encoder = {**TINY_ENCODER, "image_size": None}
        config.model = ActionPolicyConfig(kind=kind, chunk=2, options={"encoder": encoder, **options})
        return config

    return change


def _vlm_policy(config: Any, folder: Path) -> Any:
    from robotics.policies.policy_loading import ActionPolicyConfig
    from tests.contracts.domains import tiny_vlm

    config = _tabletop(config, folder) if hasattr(config, "data") else config
    config.model = ActionPolicyConfig(kind="vlm", chunk=2, options={"vlm": {"path": str(tiny_vlm())}})
    return config


def _followed(config: Any, folder: Path) -> Any:
    from robotics.flow3d.reward.following import FlowRewardConfig
    from tests.robotics.test_flow_following import TRACKER, VIEW, world_model

    path = str(world_model(folder / "model", "go right"))
    config.reward, config.flow = "flow", FlowRewardConfig(model=path, view=VIEW, tracker=TRACKER)
    return config


def _closed_loop(config: Any, folder: Path) -> Any:
    from robotics.flow3d.closed_loop.flow_episodes import FlowEpisodesConfig, LoopConfig
    from robotics.flow3d.plan.judge import VerifierConfig
    from robotics.flow3d.plan.planner_config import PlannerConfig

    tasks = {"tasks": ["open_red"], "arms": ["ur5e"]}
    config.episodes = {"unseen": FlowEpisodesConfig(**tasks, episodes=1, image_size=64)}
    config.loop = LoopConfig(VerifierConfig("none"), planner=PlannerConfig(samples=1), language_swap=False)
    return config


def _motion_unet(config: Any, folder: Path) -> Any:
    from robotics.flow3d.methods.flow3d_recipe import WorldModelConfig
    from tests.robotics.flow3d.model.builders import tiny_config

    config.model = WorldModelConfig(**vars(tiny_config("unet_motion")))
    config.data.options = config.eval_data["held"].options = {"side": 4}
    return config


def _latent(kind: str, **options: Any) -> Callable[[Any, Path], Any]:
    def change(config: Any, folder: Path) -> Any:
        config.latent.kind, config.latent.options = kind, options
        return config

    return change


def _blocks(recipe: str) -> list[Variant]:
    """A run for each kind of block that finds there what it needs; answers to one question have no turns."""
    lacks = SCORES.keys() - domain_of(recipe).scores
    return [
        Variant(
            (f"objective.{part}.",),
            {**NEEDED.get(kind, {}), f"objective.{part}": {"kind": kind, **EXTRA.get(kind, {})}},
            (recipe,),
        )
        for part, table in BLOCKS.items()
        for kind, block in table.items()
        if not block.needs & lacks
    ]


EXTRA: dict[str, dict[str, Any]] = {
    **{kind: {"coef": 0.1} for kind in (*BLOCKS["kl"], *BLOCKS["entropy"])},
    "fixed_length": {"length": 4},
}
"""Options of a block that it cannot do without."""
MOVING = {"trainer.epochs": 4, "trainer.learning_rate": 0.1}
CRITIC = {"objective.preset": "ppo", **MOVING}
WHOLE_ROWS = {"objective.ratio": {"kind": "sequence_product"}, **MOVING}
NEEDED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gae", "squared_error"), CRITIC),
    "gspo": {"objective.ratio": {"kind": "sequence"}, **MOVING},
    "group_regression": WHOLE_ROWS,
    "vespo": WHOLE_ROWS,
}
"""Further changes without which a block is refused, or clips nothing."""

VARIANTS = [
    Variant(("trainer.", "objective.", "reference."), {"trainer.epochs": 2, "trainer.schedule": "linear"}),
    Variant(("trainer.", "objective."), {"trainer.minibatches_per_step": 2, "trainer.epochs": 2}),
    Variant(("objective.clip.",), {"trainer.epochs": 4, "trainer.learning_rate": 0.1}),
    Variant(("model.lora.", "reference.kind"), {"model.lora.enabled": True}),
    Variant(("objective.", "reference.", "step.", "awm."), {"objective.kl": KL}),
    Variant(("reference.",), {"reference.kind": "ema", "objective.kl": KL}),
    Variant(("objective.", "reference.", "step.", "awm."), {"objective.kl": EXACT_KL}),
    Variant(("reference.",), {"reference.kind": "ema", "objective.kl": EXACT_KL}),
    Variant(("reference.",), {"reference.kind": "ema"}, ("preference", "diffusion_dpo")),
    Variant(("objective.scaling.",), {"objective.scaling": {"whiten": "rows"}}),
    Variant(("evaluation.samples", "evaluation.temperature"), {"evaluation.samples": 2}),
    # image questions and their answers
    Variant(("adaptive_kl.",), {"adaptive_kl.target": 0.01, "objective.kl": KL}),
    Variant(("video.",), _videos, ("vlm", "papo", "apo", "reg_grpo", "sft")),
    Variant(("model.critic.", "objective."), _critic, ("vlm",)),
    Variant(("rewards[].",), _scored_apart, ("vlm",)),
    Variant(("evaluation.self_critic.",), _self_critic, ("vlm",)),
    Variant(("evaluation.revision.",), _revision, ("vlm",)),
    Variant(("papo.",), {"papo.schedule": "annealing"}),
    Variant(("papo.",), {"papo.entropy_policy": 0.1}),
    Variant(("distil.",), {"distil.divergence": 1.0, "distil.on_policy": 0.5}, ("distil",)),
    Variant(("teacher.",), _frozen_teacher, ("distil",)),
    Variant(("distil.", "sim.", "data.", "evaluation."), _exact_teacher, ("robot_distil",)),
    Variant(("teachers.",), _several_teachers, ("multi_teacher",)),
    Variant(("augmentation.",), PROBED),
    Variant(("augmentation.",), PROBED | {"augmentation.hint_place": "answer"}),
    Variant(("objective.", "chosen_", "rejected_"), {"objective.preset": "sppo"}, ("preference",)),
    Variant(("objective.", "chosen_", "rejected_"), {"objective.preset": "refuel"}, ("preference",)),
    Variant(("objective.likelihood.",), {"objective.likelihood": {"kind": "nll", "coef": 0.1}}, ("preference",)),
    Variant(("max_side_tokens",), {"max_side_tokens": 20}),
    Variant(("grounding.",), {"grounding.think": True}),
    # masked-diffusion language models
    Variant(("likelihood.",), {"objective.preset": "bgpo"}, ("masked",)),
    # frames of videos
    Variant(("answerer.",), _answerer, ("tspo",)),
    Variant(("answerer.", "objective.", "system_prompt"), _trained_answerer, ("tspo",)),
    Variant(("answerer.model.lora.",), _adapted_answerer, ("tspo",)),
    Variant(("picks.",), {"picks.general_count": 2}),
    # agents
    Variant(("replay.",), {"replay.max_std": 10.0, "replay.max_mean": 10.0, "trainer.steps": 4}),
    Variant(("digirl.",), {"digirl.advantage": "code", "digirl.threshold": "auto"}),
    Variant(("digirl.",), {"digirl.quantile": 0.5, "digirl.threshold": "auto"}),
    Variant(("objective.",), {"warmup_updates": 0}, ("vl_dac",)),
    # images
    Variant(("data.", "eval_data.<name>."), _prompt_table, IMAGES),
    Variant(("image_key", "max_image_pixels"), _edits, EDITORS),
    Variant(("sampler.",), {"sampler.solver": "sa_solver"}),
    Variant(("sampler.",), {"sampler.window": 1, "sampler.random_share": 1.0}),
    Variant(("sampler.",), {"sampler.window": 1, "sampler.window_high": 3}),
    Variant(("sampler.",), {"sampler.window": 0}, ("flow_grpo_fast", "flow_dppo")),
    Variant(("sampler.",), MOVING_WINDOW, ("mix_grpo",)),
    Variant(("sampler.",), MOVING_WINDOW | {"sampler.window_restart": False}, ("mix_grpo",)),
    Variant(("sampler.",), {"sampler.guidance": 3.0}),
    Variant(("awm.",), {"awm.ema_coef": 0.1}),
    Variant(("timesteps.",), {"timesteps.times": "uniform", "timesteps.fraction": 0.9}),
    Variant(("timesteps.", "evaluation.sampler.steps"), {"timesteps.times": "discrete"}),
    Variant(("awm.",), {"awm.ema_coef": 0.1, "awm.off_policy": True, "trainer.steps": 4}),
    Variant(("nft.",), {"trainer.steps": 4}, ("diffusion_nft",)),
    Variant(("nft.",), {"trainer.steps": 4, "nft.loss": "group_preference"}, ("diffusion_nft",)),
    Variant(("nft.",), {"trainer.steps": 4, "nft.loss": "centred_reward"}, ("diffusion_nft",)),
    Variant(("shaping.",), {"shaping.kind": "minmax"}),
    Variant(("critic.",), {"critic.warmup_updates": 1}),
    Variant(("history.",), {"history.min_count": 1, "history.size": 2, "trainer.steps": 4}),
    Variant(("filter.",), {"filter.kind": "fifa", "filter.keep": 3}, ("diffusion_dpo",)),
    Variant(("filter.",), {"filter.kind": "random", "filter.keep": 3}, ("diffusion_dpo",)),
    # robots
    Variant(("sim.", "acting.", "logp_level", "data.", "model.options.", "evaluation."), _tabletop, ROBOTS),
    Variant(("sim.randomization.", "data."), _randomised, ROBOTS),
    Variant(("sim.", "acting.", "data.", "model.options.", "evaluation."), _tabletop_states, ("robot_sac",)),
    Variant(("model.options.", "acting.", "logp_level"), _policy("gaussian"), ("robot_grpo", "robot_clone")),
    Variant(("model.options.", "acting.", "logp_level"), _policy("flow"), ("robot_grpo", "robot_clone")),
    Variant(("model.options.",), _policy("flow", noise="learned"), ("robot_grpo", "robot_clone")),
    Variant(("model.options.", "acting.", "logp_level"), _policy("small", bins=16), ("robot_grpo", "robot_clone")),
    Variant(("model.options.",), _vlm_policy, ("robot_grpo",)),
    Variant(("flow.",), _followed, ("robot_grpo",)),
    Variant(("progress.",), {"trainer.steps": 4}, ("srpo",)),
    # flows of points
    Variant(("model.body.unet.",), _motion_unet, ("flow3d",)),
    Variant(("model.process.",), {"model.process.kind": "ddim"}, ("flow3d",)),
    Variant(("episodes.", "loop."), _closed_loop, ("flow3d",)),
    *_blocks("vlm"),
]


def try_variants(name: str, folder: Path) -> list[tuple[Variant, Any]]:
    """The further runs of a recipe, each with its configuration, or the text of the error where that is refused.

    A run that names the recipe must not be refused.
    """
    found, base = [], walk_config(name, folder)
    for variant in VARIANTS:
        if variant.recipes and name not in variant.recipes:
            continue
        try:
            config = variant.make(copy.deepcopy(base), folder)
            config.validate()
        except (UserError, ValueError, AttributeError) as error:  # refused, or no such option
            if variant.recipes:
                raise AssertionError(f"{name} refuses its run with {variant.changes}: {error}") from error
            config = f"{type(error).__name__}: {error}"
        found.append((variant, config))
    return found


def variants_of(name: str, folder: Path) -> list[tuple[Variant, Any]]:
    """The further runs of a recipe that its configuration takes."""
    return [(variant, config) for variant, config in try_variants(name, folder) if not isinstance(config, str)]
