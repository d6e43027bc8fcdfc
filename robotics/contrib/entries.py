"""Recipes of single papers for robots; does not import the modules it refers to."""

from __future__ import annotations

from mmrl.entries import Paper, RecipeEntry

RECIPES = (
    RecipeEntry(
        "props",
        "robotics.contrib.props:PropsRecipe:PropsConfig",
        "PPO whose episodes are sampled in waves, each corrected for what the step has sampled too often (PROPS)",
        "Corrado and Hanna, PROPS, arXiv 2311.08290; NicholasCorrado/PROPS",
    ),
    RecipeEntry(
        "tgpo",
        "robotics.contrib.tgpo:TgpoRecipe:TgpoConfig",
        "a signal temporal logic formula, split into timed subgoals that a policy observes and is rewarded for (TGPO)",
        "Meng et al., TGPO, arXiv 2510.00225",
    ),
)
EXTENDS = "robotics"
POLICIES = {
    "mixture": ("robotics.contrib.pmoe:MixtureActionPolicy", "robotics.contrib.pmoe:MixturePolicyConfig"),
    "beso": ("robotics.contrib.beso:BesoPolicy", "robotics.contrib.beso:BesoPolicyConfig"),
}
"""Classes and options of policies with an observation encoder, by kind."""
METRICS = {"props/kl": "Divergence of the corrected sampling policy from the policy at the end of the last correction."}
PAPERS = (
    Paper(
        "BESO",
        code="robotics.contrib.beso:BesoPolicy",
        source="Reuss et al., BESO, arXiv 2304.02532; intuitive-robots/beso",
        page="robot_policies.md#beso",
        names=("goal-conditioned imitation with score-based diffusion",),
        lacking="goals that are later observations of play data, and its transformer over past observations",
    ),
    Paper(
        "PMOE",
        code="robotics.contrib.pmoe:MixtureActionPolicy",
        source="Ren et al., PMOE, arXiv 2104.09122; quantumiracle/Popular-RL-Algorithms",
        page="offpolicy.md#pmoe",
        names=("probabilistic mixture-of-experts",),
        lacking="PPO with a mixture",
    ),
    Paper(
        "PROPS",
        ("props",),
        ("proximal robust on-policy sampling",),
        lacking="batches of earlier steps in the update, and waves of single control steps",
    ),
)
