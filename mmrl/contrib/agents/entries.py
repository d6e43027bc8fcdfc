"""Recipes and metrics from single papers for agents; imports none of the modules that it names."""

from __future__ import annotations

from mmrl.entries import RecipeEntry

RECIPES = (
    RecipeEntry(
        "agentic_branching",
        "mmrl.contrib.agents.agentic_branching:BranchingRecipe:BranchingConfig",
        "episodes that branch from others at observations that make the agent uncertain",
        "Dong et al., ARPO, arXiv 2507.19849; allocation: entropy, AEPO, arXiv 2510.14545",
    ),
    RecipeEntry(
        "agent_revision",
        "mmrl.contrib.agents.agent_revision:AgentRevisionRecipe:AgentRevisionConfig",
        "the policy's failures, revised by the environment's expert from the first error on (simplified Agent-R)",
        "Yuan et al., Agent-R, arXiv 2501.11425",
        supervised=True,
    ),
    RecipeEntry(
        "vl_dac_repo",
        "mmrl.agents.methods.vl_dac:VlDacRecipe:VlDacConfig",
        "VL-DAC with the hyperparameters of its public code",
        "Bredis et al., VL-DAC, arXiv 2508.04280; corl-team/VL-DAC configs/miniworld_qwen2vl.yaml",
        preset="mmrl.contrib.agents.vl_dac_repo:repo_preset",
    ),
    RecipeEntry(
        "tapo",
        "mmrl.agents.agent_recipe:AgentRecipe:AgentConfig",
        "DAPO on responses that search and run programs in tags, with one reward for the whole text (TAPO)",
        "Wu et al., TAPO, arXiv 2510.07038; Goer17/TAPO recipe/tapo",
        preset="mmrl.contrib.agents.tapo:tapo_preset",
    ),
    RecipeEntry(
        "archer",
        "mmrl.contrib.agents.archer:ArcherRecipe:ArcherConfig",
        "off-policy critics of whole responses with target networks; a token-level actor re-answers stored turns",
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
        "natural-gradient steps with critics of whole responses that learn from new and recorded episodes",
        "Zhou et al., HNPG, arXiv 2311.08384",
    ),
)
EXTENDS = "mmrl.agents"

METRICS = {
    "refuel/learnt": "Fraction of the step's dialogue pairs that are trained, because both rewards are known.",
    "revision/failed": "Fraction of the step's tasks that the policy failed at least once.",
    "episode/branched": "Fraction of the step's episodes that branched from another one.",
    "archer/stored": "Episodes that are stored.",
    "archer/critic_loss": "Sum of the four squared errors of the critics in their last update of the step.",
    "archer/q": "Mean critic value of the policy's new responses to the drawn turns.",
    "archer/v": "Mean critic value of the states of the drawn turns.",
    "archer/advantage": "Mean advantage of the policy's new responses to the drawn turns.",
    "archer/advantage_std": "Standard deviation of the advantages of the policy's new responses to the drawn turns.",
}
