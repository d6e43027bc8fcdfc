"""Recipes and metrics of single papers for agents; loads none of the modules that it names."""

from __future__ import annotations

from mmrl.entries import RecipeEntry

RECIPES = (
    RecipeEntry(
        "agentic_branching",
        "mmrl.contrib.agents.agentic_branching:BranchingRecipe:BranchingConfig",
        "episodes that branch from others where the agent becomes uncertain after an observation",
        "Dong et al., ARPO, arXiv 2507.19849; allocation: entropy, AEPO, arXiv 2510.14545",
    ),
    RecipeEntry(
        "agent_revision",
        "mmrl.contrib.agents.agent_revision:AgentRevisionRecipe:AgentRevisionConfig",
        "the policy's own failures, revised from the first error on by the environment's expert (Agent-R in outline)",
        "Yuan et al., Agent-R, arXiv 2501.11425",
        supervised=True,
    ),
    RecipeEntry(
        "vl_dac_repo",
        "mmrl.agents.methods.vl_dac:VlDacRecipe:VlDacConfig",
        "VL-DAC with the constants of its public code",
        "Bredis et al., VL-DAC, arXiv 2508.04280; corl-team/VL-DAC configs/miniworld_qwen2vl.yaml",
        preset="mmrl.contrib.agents.vl_dac_repo:repo_preset",
    ),
    RecipeEntry(
        "tapo",
        "mmrl.agents.agent_recipe:AgentRecipe:AgentConfig",
        "DAPO on answers that search and run programs in tags, with the reward of the whole text (TAPO)",
        "Wu et al., TAPO, arXiv 2510.07038; Goer17/TAPO recipe/tapo",
        preset="mmrl.contrib.agents.tapo:tapo_preset",
    ),
    RecipeEntry(
        "archer",
        "mmrl.contrib.agents.archer:ArcherRecipe:ArcherConfig",
        "off-policy critics of whole answers with target networks; a token-level actor answers stored turns again",
        "Zhou et al., ArCHer, arXiv 2402.19446",
    ),
    RecipeEntry(
        "refuel",
        "mmrl.contrib.agents.refuel:RefuelRecipe:RefuelConfig",
        "dialogues resampled from a random turn on; regression on the difference of their future rewards (REFUEL)",
        "Gao et al., REFUEL, arXiv 2410.04612",
    ),
    RecipeEntry(
        "hnpg",
        "mmrl.contrib.agents.hnpg:HnpgRecipe:HnpgConfig",
        "natural-gradient steps with critics of whole answers that learn from own and from recorded episodes",
        "Zhou et al., HNPG, arXiv 2311.08384",
    ),
)
EXTENDS = "mmrl.agents"

METRICS = {
    "refuel/learnt": "Fraction of the step's pairs of dialogues that are trained: both rewards are known.",
    "revision/failed": "Fraction of the step's tasks that the policy failed in at least one attempt.",
    "episode/branched": "Fraction of the step's episodes that branched from another one.",
    "archer/stored": "Episodes that are stored.",
    "archer/critic_loss": "Sum of the four squared errors of the critics in their last update of the step.",
    "archer/q": "Mean value that the critics give the policy's own answers to the drawn turns.",
    "archer/v": "Mean value that the critics give the drawn turns.",
    "archer/advantage": "Mean advantage of the policy's own answers to the drawn turns.",
    "archer/advantage_std": "Standard deviation of these advantages.",
}
