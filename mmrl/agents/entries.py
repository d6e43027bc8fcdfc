"""Recipes and metrics of agents; loads none of the modules that it names."""

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
        "supervised warm start of an agent on the environment's own expert",
        "maximum likelihood",
        supervised=True,
    ),
    RecipeEntry(
        "vl_dac",
        "mmrl.agents.methods.vl_dac:VlDacRecipe:VlDacConfig",
        "PPO over tokens with a critic over environment steps that warms up first (the paper's constants)",
        "Bredis et al., VL-DAC, arXiv 2508.04280",
    ),
    RecipeEntry(
        "digirl",
        "mmrl.agents.methods.digirl:DigirlRecipe:DigirlConfig",
        "filtered likelihood of an agent's steps, offline then online: two critics, curriculum, filtered cloning",
        "Bai et al., DigiRL, arXiv 2406.11896",
    ),
)
PLAN = "mmrl.vlm.vlm_plan:footprint"
READER = "mmrl.agents.environments.agent_tasks:list_tasks"
"""Functions for `mmrl train --dry-run`."""

METRICS = {
    "time/environment": "Seconds that episodes waited for their environments.",
    "episode/turns": "Mean turns of the step's episodes.",
    "episode/unreadable": "Share of the step's answers in which no action could be read, not counting those cut.",
    "episode/empty": "Share of the step's answers that said nothing.",
    "episode/cut": "Share of the step's answers that were cut at the limit of their length, so not executed.",
    "episode/calls": "Calls of tools an answer.",
    "episode/below_silence": "Share of the step's episodes of actions alone that earned less than one without any.",
    "episode/refused": "Actions a turn that the environment could not execute.",
    "episode/turns/<greedy|sampled>": "Mean turns of the evaluation's episodes.",
    "episode/unreadable/<greedy|sampled>": "Mean answers of an episode in which no action could be read.",
    "episode/cut/<greedy|sampled>": "Mean answers of an episode that were cut at the limit of their length.",
    "episode/refused/<greedy|sampled>": "Mean actions of an episode that the environment could not execute.",
    "episode/no_result/<greedy|sampled>": "Evaluation episodes that failed with their environment or grew too long.",
    "env/episodes_overflown": "Training episodes so far whose conversation did not fit into the model any more.",
    "replay/groups_without_success": "Groups of the step in which all trajectories earned little.",
    "replay/injected": "Groups of the step that were given a stored trajectory.",
    "replay/age": "Mean steps since the replayed trajectories of the step were sampled.",
    "replay/stored": "Trajectories in the buffer.",
    "replay/added": "Trajectories that were stored so far.",
    "replay/expired": "Stored trajectories dropped so far for their age.",
    "replay/evicted": "Stored trajectories dropped so far because the buffer was full.",
    "replay/memory_mb": "Size of the buffer in 10^6 bytes, in each process.",
    "replay/ratio/<fresh|replayed>": "Mean importance ratio of the loss, over fresh or over replayed tokens.",
    "replay/log_ratio/<fresh|replayed>": "Mean log-prob now less that when sampled, of such tokens, in nats.",
    "replay/kl/<fresh|replayed>": "k3 between the policy that sampled and that now, on such tokens, in nats.",
    "digirl/stored": "Episodes that are stored.",
    "digirl/return": "Mean sum of rewards of the stored episodes.",
    "digirl/kept_episodes": "Share of the stored episodes that the instruction filter keeps.",
    "digirl/kept_steps": "Share of the steps of these episodes that the step filter keeps.",
    "digirl/instruction_loss": "Cross-entropy of the instruction critic in its last update of the step.",
    "digirl/instruction_value": "Mean probability of success that the instruction critic gives the stored episodes.",
    "digirl/step_loss": "Sum of the four cross-entropies of the step critic in its last update of the step.",
}
