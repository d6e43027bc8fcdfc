"""The recipes by name, as strings, so that listing them loads no room."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from dataclasses import dataclass
from typing import Any

from mmrl.errors import UserError


@dataclass(frozen=True)
class RecipeEntry:
    """Where a recipe lives and what it is."""

    name: str
    """Name used in `recipe:`."""
    module: str
    """Module that holds the two classes below."""
    recipe: str
    """Class of the recipe."""
    config: str
    """Dataclass of its configuration."""
    summary: str
    """One line for `mmrl list`."""
    citation: str
    """Paper or source."""
    supervised: bool = False
    """Whether it learns from given answers (`mmrl sft`) rather than from rewards."""
    trains: bool = True
    """False for a row of EVALUATIONS, which only `mmrl evaluate` takes."""
    preset: str = ""
    """`module:function` that returns a configuration with other defaults than the dataclass's own."""

    def load_config_class(self) -> type[Any]:
        """Import the room and return the configuration dataclass."""
        return getattr(importlib.import_module(self.module), self.config)  # type: ignore[no-any-return]

    def load_defaults(self) -> Any:
        """Import the room and return the configuration dataclass, of a preset the instance with its values."""
        if not self.preset:
            return self.load_config_class()
        module, _, function = self.preset.partition(":")
        return getattr(importlib.import_module(module), function)()

    def default_config(self) -> Any:
        """Import the room and return a configuration in which every value is the default."""
        defaults = self.load_defaults()
        return defaults() if isinstance(defaults, type) else defaults

    def load_recipe_class(self) -> type[Any]:
        """Import the room and return the recipe class."""
        return getattr(importlib.import_module(self.module), self.recipe)  # type: ignore[no-any-return]


def find_recipe(name: str, where: str = "configuration") -> RecipeEntry:
    """Look a recipe up by its name or by `module:RecipeClass:ConfigClass`."""
    found = RECIPES.get(name) or EVALUATIONS.get(name)
    if found is not None:
        return found
    if name.count(":") == 2:
        return _user_recipe(name, where)
    raise UserError(
        f"{where}: unknown recipe '{name}'; {_hint(name)}there are: {', '.join((*RECIPES, *EVALUATIONS))}, or "
        "module:Recipe:Config"
    )


def _hint(name: str) -> str:
    """The closest recipe, or where the closest objective of the catalogue belongs."""
    from mmrl.core.catalogue import CATALOGUE  # loads torch, which listing the recipes must not

    close = difflib.get_close_matches(name, [*RECIPES, *EVALUATIONS, *CATALOGUE], n=1)
    if not close:
        return ""
    if close[0] in RECIPES or close[0] in EVALUATIONS:
        return f"did you mean '{close[0]}'? "
    meant = "" if close[0] == name else f"did you mean '{close[0]}'? "
    return (
        f"{meant}{close[0]} is an objective: use recipe: vlm (robot_grpo for robots) with "
        f"objective: {{preset: {close[0]}}}; "
    )


def _user_recipe(name: str, where: str) -> RecipeEntry:
    module, recipe, config = name.split(":")
    entry = RecipeEntry(name, module, recipe, config, "user recipe", "-")
    try:
        supervised = not entry.load_recipe_class().uses_rewards
        entry.load_config_class()
    except (ImportError, AttributeError) as error:
        raise UserError(f"{where}: recipe '{name}' cannot be loaded: {error}") from error
    return dataclasses.replace(entry, supervised=supervised)


def _entries(*entries: RecipeEntry) -> dict[str, RecipeEntry]:
    return {entry.name: entry for entry in entries}


RECIPES: dict[str, RecipeEntry] = _entries(
    RecipeEntry(
        "vlm",
        "mmrl.vlm.recipe",
        "VlmRecipe",
        "VlmConfig",
        "any objective of the catalogue on a vision-language model",
        "objective: see `mmrl list objectives`",
    ),
    RecipeEntry(
        "papo",
        "mmrl.vlm.papo",
        "PapoRecipe",
        "PapoConfig",
        "implicit perception KL against a masked image, double entropy (PAPO_G, PAPO_D)",
        "Wang et al., Perception-Aware Policy Optimization, arXiv 2507.06448",
    ),
    RecipeEntry(
        "apo",
        "mmrl.vlm.apo",
        "ApoRecipe",
        "ApoConfig",
        "difficulty-weighted KL for positives (DADS), length penalty for negatives (STCR)",
        "View-R1 / Asymmetric Policy Optimization, arXiv 2506.21655",
    ),
    RecipeEntry(
        "reg_grpo",
        "mmrl.vlm.reg_grpo",
        "RegGrpoRecipe",
        "RegGrpoConfig",
        "regression on group advantages; hints for hard questions, noise on the pictures of easy ones",
        "DeepVideo-R1, arXiv 2506.07464",
    ),
    RecipeEntry(
        "aepo",
        "mmrl.gui.aepo",
        "AepoRecipe",
        "AepoConfig",
        "screen grounding with several answers and the adaptive exploration reward; naive RLVR by options",
        "InfiGUI-G1, arXiv 2508.05731",
    ),
    RecipeEntry(
        "grounding_sft",
        "mmrl.gui.grounding_sft",
        "GroundingSftRecipe",
        "GroundingSftConfig",
        "supervised warm start on worked answers to questions about screens",
        "maximum likelihood",
        supervised=True,
    ),
    RecipeEntry(
        "tspo",
        "mmrl.vlm.tspo.recipe",
        "TspoRecipe",
        "TspoConfig",
        "an agent that picks the frames of long videos for a video model, trained from rewards",
        "TSPO, arXiv 2508.04369",
    ),
    RecipeEntry(
        "sft",
        "mmrl.vlm.sft",
        "SftRecipe",
        "SftConfig",
        "supervised warm start on given completions, same loop and checkpoints",
        "maximum likelihood",
        supervised=True,
    ),
    RecipeEntry(
        "preference",
        "mmrl.vlm.preference",
        "PreferenceRecipe",
        "PreferenceRunConfig",
        "preference optimisation on pairs of answers, text and images: DPO, IPO, SLiC, RPO, SPPO, REFUEL",
        "Rafailov et al., DPO, arXiv 2305.18290; others: `mmrl list objectives`",
    ),
    RecipeEntry(
        "agent",
        "mmrl.agents.recipe",
        "AgentRecipe",
        "AgentConfig",
        "an agent that looks and acts over several turns, with any objective of the catalogue",
        "objective: see `mmrl list objectives`",
    ),
    RecipeEntry(
        "arpo",
        "mmrl.agents.arpo",
        "ArpoRecipe",
        "ArpoConfig",
        "GRPO over an agent's trajectories, with past successes replayed into groups that have none",
        "ARPO for GUI agents, github.com/dvlab-research/ARPO",
    ),
    RecipeEntry(
        "agent_clone",
        "mmrl.agents.cloning",
        "AgentCloneRecipe",
        "AgentCloneConfig",
        "supervised warm start of an agent on what the environment's own expert does",
        "maximum likelihood",
        supervised=True,
    ),
    RecipeEntry(
        "vl_dac",
        "mmrl.agents.vl_dac",
        "VlDacRecipe",
        "VlDacConfig",
        "PPO over tokens with a critic over environment steps, warmed up alone (the paper's constants)",
        "Bredis et al., VL-DAC, arXiv 2508.04280",
    ),
    RecipeEntry(
        "vl_dac_repo",
        "mmrl.agents.vl_dac",
        "VlDacRecipe",
        "VlDacConfig",
        "VL-DAC with the constants of its public code",
        "Bredis et al., VL-DAC, arXiv 2508.04280; corl-team/VL-DAC configs/miniworld_qwen2vl.yaml",
        preset="mmrl.agents.vl_dac:repo_preset",
    ),
    RecipeEntry(
        "digirl",
        "mmrl.agents.digirl",
        "DigirlRecipe",
        "DigirlConfig",
        "an agent's kept steps made likelier, offline then online: two critics, curriculum, filtered cloning",
        "Bai et al., DigiRL, arXiv 2406.11896",
    ),
    RecipeEntry(
        "ddpo",
        "diffusion.ddpo",
        "DdpoRecipe",
        "DdpoConfig",
        "policy gradient over denoising steps, reward statistics of each prompt",
        "Black et al., DDPO, arXiv 2305.13301",
    ),
    RecipeEntry(
        "flow_grpo",
        "diffusion.flow_grpo",
        "FlowGrpoRecipe",
        "FlowGrpoConfig",
        "GRPO over stochastic denoising steps with guidance",
        "Liu et al., Flow-GRPO, arXiv 2505.05470",
    ),
    RecipeEntry(
        "flow_grpo_fast",
        "diffusion.flow_grpo",
        "FlowGrpoRecipe",
        "FlowGrpoConfig",
        "Flow-GRPO on a window of three steps, without guidance",
        "yifan123/flow_grpo, fast presets",
        preset="diffusion.presets:flow_grpo_fast",
    ),
    RecipeEntry(
        "grpo_guard",
        "diffusion.grpo_guard",
        "GrpoGuardRecipe",
        "GrpoGuardConfig",
        "Flow-GRPO with ratios of one scale at all steps",
        "GRPO-Guard, arXiv 2510.22319",
    ),
    RecipeEntry(
        "dance_grpo",
        "diffusion.flow_grpo",
        "FlowGrpoRecipe",
        "FlowGrpoConfig",
        "GRPO over steps of constant noise from shared starts",
        "Xue et al., DanceGRPO, arXiv 2505.07818",
        preset="diffusion.presets:dance_grpo",
    ),
    RecipeEntry(
        "awm",
        "diffusion.awm",
        "AwmRecipe",
        "AwmConfig",
        "advantage-weighted matching of the policy's own images, any solver",
        "Xue et al., AWM, arXiv 2509.25050",
    ),
    RecipeEntry(
        "diffusion_nft",
        "diffusion.nft",
        "DiffusionNftRecipe",
        "DiffusionNftConfig",
        "two-sided matching around an old policy",
        "DiffusionNFT, arXiv 2509.16117",
    ),
    RecipeEntry(
        "orw_cfm_w2",
        "diffusion.orw_cfm",
        "OrwRecipe",
        "OrwConfig",
        "reward-weighted matching with a Wasserstein bound",
        "Fan et al., ORW-CFM-W2, ICLR 2025",
    ),
    RecipeEntry(
        "ac_flow",
        "diffusion.ac_flow",
        "AcFlowRecipe",
        "AcFlowConfig",
        "critic-weighted matching (a reconstruction)",
        "AC-Flow, arXiv 2510.18072",
    ),
    RecipeEntry(
        "flow_ppo",
        "diffusion.flow_ppo",
        "FlowPpoRecipe",
        "FlowPpoConfig",
        "PPO over stochastic denoising steps with AC-Flow's critic of the latents",
        "steps: Flow-GRPO, arXiv 2505.05470; credit: GAE, arXiv 1506.02438; the combination is the suite's own",
    ),
    RecipeEntry(
        "diffusion_dpo",
        "diffusion.dpo",
        "DiffusionDpoRecipe",
        "DiffusionDpoConfig",
        "Diffusion-DPO on pairs of images, with FiFA's filter of the pairs",
        "Wallace et al., Diffusion-DPO, arXiv 2311.12908; Yang et al., FiFA, arXiv 2410.10166",
    ),
    RecipeEntry(
        "flow_pretrain",
        "diffusion.pretrain",
        "PretrainRecipe",
        "PretrainConfig",
        "flow matching on captioned images, same loop and checkpoints",
        "Lipman et al., Flow Matching, arXiv 2210.02747",
        supervised=True,
    ),
    RecipeEntry(
        "flow3d",
        "robotics.flow3d.model.recipe",
        "Flow3dRecipe",
        "Flow3dConfig",
        "a world model of 3D flow: how the points of an object will move, same loop and checkpoints",
        "3DFlowAction, arXiv 2506.06199",
        supervised=True,
    ),
    RecipeEntry(
        "flow3d_awm",
        "robotics.flow3d.model.awm",
        "Flow3dAwmRecipe",
        "Flow3dAwmConfig",
        "a world model of 3D flow fine-tuned on a verifier's verdict, with the loss of AWM",
        "Xue et al., AWM, arXiv 2509.25050, on 3DFlowAction, arXiv 2506.06199",
    ),
    RecipeEntry(
        "robot_clone",
        "robotics.vla.cloning",
        "CloneRecipe",
        "CloneConfig",
        "behaviour cloning of a robot policy, same loop and checkpoints",
        "Pomerleau, ALVINN, 1988; action chunks as in ACT, arXiv 2304.13705",
        supervised=True,
    ),
    RecipeEntry(
        "robot_grpo",
        "robotics.vla.grpo",
        "RobotGrpoRecipe",
        "RobotGrpoConfig",
        "GRPO on episodes with success, a hand-written reward, or progress along a predicted 3D flow",
        "SimpleVLA-RL, arXiv 2509.09674",
    ),
    RecipeEntry(
        "robot_ppo",
        "robotics.vla.ppo",
        "RobotPpoRecipe",
        "RobotPpoConfig",
        "PPO on episodes with a critic of the simulator's full state and a reward for every chunk of actions",
        "Schulman et al., PPO, arXiv 1707.06347, with an asymmetric critic, arXiv 1710.06542",
    ),
    RecipeEntry(
        "srpo",
        "robotics.vla.srpo",
        "SrpoRecipe",
        "SrpoConfig",
        "failures rewarded by their distance to the policy's own successes",
        "SRPO, arXiv 2511.15605",
    ),
)

EVALUATIONS: dict[str, RecipeEntry] = _entries(
    RecipeEntry(
        "grounding_eval",
        "mmrl.gui.benchmarks.recipe",
        "GroundingEvaluation",
        "GroundingEvaluationConfig",
        "published GUI grounding benchmarks, greedy",
        "protocol of InfiXAI/InfiGUI-G1 eval/eval.py",
        trains=False,
    ),
    RecipeEntry(
        "flow3d_eval",
        "robotics.flow3d.closed_loop.recipe",
        "Flow3dEvaluation",
        "Flow3dEvaluationConfig",
        "a world model of 3D flow in closed loop, on arms, objects and backgrounds it has and has not seen",
        "3DFlowAction, arXiv 2506.06199",
        trains=False,
    ),
)
"""What `mmrl evaluate` runs and nothing trains."""
