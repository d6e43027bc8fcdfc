"""Recipes and metrics of agents; imports none of the modules that it names."""

from __future__ import annotations

from mmrl.entries import RecipeEntry

RECIPES = (
    RecipeEntry(
        "agent",
        "mmrl.agents.agent_recipe:AgentRecipe:AgentConfig",
        "an agent that acts over several turns with images and text, with any objective of the catalogue",
        "objective: see `mmrl list objectives`",
    ),
    RecipeEntry(
        "arpo",
        "mmrl.agents.methods.arpo:ArpoRecipe:ArpoConfig",
        "GRPO over an agent's trajectories, with past successes replayed into groups that have none",
        "ARPO for GUI agents, github.com/dvlab-research/ARPO",
    ),
    RecipeEntry(
        "agent_clone",
        "mmrl.agents.methods.clone:AgentCloneRecipe:AgentCloneConfig",
        "supervised warm start of an agent, cloning the environment's expert",
        "maximum likelihood",
        supervised=True,
    ),
    RecipeEntry(
        "vl_dac",
        "mmrl.agents.methods.vl_dac:VlDacRecipe:VlDacConfig",
        "PPO over tokens with a critic over environment steps that warms up first (the paper's hyperparameters)",
        "Bredis et al., VL-DAC, arXiv 2508.04280",
    ),
    RecipeEntry(
        "digirl",
        "mmrl.agents.methods.digirl:DigirlRecipe:DigirlConfig",
        "filtered likelihood of an agent's steps, offline then online: two critics, curriculum, filtered cloning",
        "Bai et al., DigiRL, arXiv 2406.11896",
    ),
)
SCORES = (
    "values",
    "turns",
    "anchors",
    "information_gain",
    "entropy",
    "entropy_old",
    "collision",
    "logp_ref",
    "logp_rollout",
    "tokens",
    "probabilities",
    "durations",
)
"""Scores that an agent's policy gives besides log-probabilities."""
PLAN = "mmrl.vlm.vlm_plan:footprint"
PREVIEW = "mmrl.agents.agent_recipe:preview"
READER = "mmrl.agents.environments.agent_tasks:list_tasks"
"""Functions for `mmrl train --dry-run`."""
BUILDS_ON = "mmrl.vlm"
"""Package whose metrics the recipes have too."""

TITLES = {"Decisions per sample": "Tokens per episode"}
METRICS = {
    "response/length_mean": "Mean number of sampled decisions in an episode: the tokens of all its responses.",
    "response/length_max": "Maximum number of sampled decisions in an episode of the step.",
    "time/environment": "Seconds of the rollout in which nothing was sampled because all episodes waited.",
    "sampler/idle": "Fraction of the training episodes' time in which the policy neither read nor wrote tokens.",
    "episode/turns": "Mean number of turns of the step's episodes.",
    "episode/unreadable": (
        "Fraction of the step's responses without a readable action or with an invalid tool call, not counting "
        "truncated ones."
    ),
    "episode/empty": "Fraction of the step's responses that are empty.",
    "episode/cut": (
        "Fraction of the step's responses truncated at the length limit: environments execute nothing of them, and "
        "agent programs get their text without calls."
    ),
    "episode/calls": "Tool calls per response.",
    "episode/tool_errors/<kind>": "Tool calls per response that ended in an error of a kind, such as timeout.",
    "episode/below_silence": "Fraction of the step's action-only episodes that earned less than doing nothing.",
    "episode/refused": "Actions per turn that the environment could not execute.",
    "episode/turns/<greedy|sampled>": "Mean number of turns of the evaluation's episodes.",
    "episode/unreadable/<greedy|sampled>": "Mean number of responses per episode without a readable action.",
    "episode/cut/<greedy|sampled>": "Mean number of responses per episode that were truncated at the length limit.",
    "episode/refused/<greedy|sampled>": "Mean number of actions per episode that the environment could not execute.",
    "episode/overflow/<greedy|sampled>": (
        "Fraction of the evaluation's episodes that ended because a turn does not fit in the model's context."
    ),
    "episode/no_result/<greedy|sampled>": (
        "Evaluation episodes that were lost because their environment failed or their conversation grew too long."
    ),
    "episode/top_action": "Fraction of the step's actions that equal the most frequent one, arguments included.",
    "time/env_step_p50": "Median seconds of the step's actions in the environment, rounded to two digits.",
    "time/env_step_p90": "90th percentile of the seconds of the step's actions in the environment, likewise.",
    "env/overflow": "Training episodes so far that ended because a turn does not fit in the model's context.",
    "env/failed": "Training episodes so far without a result because their environment failed.",
    "replay/groups_without_success": "Groups of the step in which all trajectories earned a low reward.",
    "replay/injected": "Groups of the step that received a stored trajectory.",
    "replay/age": "Mean steps since the replayed trajectories of the step were sampled.",
    "replay/stored": "Trajectories in the buffer.",
    "replay/added": "Trajectories stored so far.",
    "replay/expired": "Stored trajectories dropped so far because they were too old.",
    "replay/evicted": "Stored trajectories dropped so far because the buffer was full.",
    "replay/memory_mb": "Size of the buffer in 10^6 bytes, in each process.",
    "replay/ratio/<fresh|replayed>": "Mean importance ratio of the loss, over fresh or over replayed tokens.",
    "replay/log_ratio/<fresh|replayed>": (
        "Mean log-probability now minus the one at sampling, over fresh or over replayed tokens, in nats."
    ),
    "replay/kl/<fresh|replayed>": (
        "KL (k3) between the sampling policy and the current one, over fresh or over replayed tokens, in nats."
    ),
    "digirl/stored": "Episodes that are stored.",
    "digirl/return": "Mean sum of rewards of the stored episodes.",
    "digirl/kept_episodes": "Fraction of the stored episodes that the instruction filter keeps.",
    "digirl/kept_steps": "Fraction of the steps of the kept episodes that the step filter keeps.",
    "digirl/instruction_loss": "Cross-entropy of the instruction critic in its last update of the step.",
    "digirl/instruction_value": (
        "Mean probability of success that the instruction critic predicts for the stored episodes."
    ),
    "digirl/step_loss": "Sum of the four cross-entropies of the step critic in its last update of the step.",
}
