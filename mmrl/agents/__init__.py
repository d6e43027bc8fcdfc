"""Agents that act in environments: actions, environment pool, episodes, recipes, demonstrations.

Importing the package loads none of them, only what is taken from it: `from mmrl.agents import EnvPool, parse_answer`.
"""

from __future__ import annotations

from mmrl.entries import lazy_names

_NAMES = {
    "mmrl.agents.methods.arpo": ("ArpoConfig", "ArpoRecipe", "ReplayBuffer", "ReplayConfig", "needs_replay"),
    "mmrl.agents.methods.clone": ("AgentCloneConfig", "AgentCloneRecipe"),
    "mmrl.agents.environments.env_pool": ("EnvPool", "EnvironmentConfig", "TurnResult"),
    "mmrl.agents.environments.environment": (
        "Action",
        "ActionConfig",
        "Environment",
        "Observation",
        "StepOutcome",
        "ParsedAnswer",
        "parse_answer",
        "write_answer",
    ),
    "mmrl.agents.environments.native_calls": ("NativeAnswer", "ToolCall", "read_native"),
    "mmrl.agents.rollout.conversation": ("ConversationConfig", "Writer"),
    "mmrl.agents.rollout.episodes": ("Episode", "EpisodeConfig"),
    "mmrl.agents.agent_evaluation": ("AgentEvaluationConfig",),
    "mmrl.agents.environments.experts": ("ExpertEpisode", "run_expert", "write_episodes"),
    "mmrl.agents.environments.videos": ("Video", "draw_frames", "write_videos"),
    "mmrl.agents.methods.digirl": (
        "DigirlConfig",
        "DigirlRecipe",
        "instruction_advantages",
        "keep_best",
        "paper_advantages",
        "step_threshold",
    ),
    "mmrl.agents.environments.gym": ("GymEnvironment",),
    "mmrl.agents.agent_recipe": ("AgentConfig", "AgentRecipe", "AgentRewardConfig"),
    "mmrl.agents.rollout.runner": ("EpisodeRunner",),
    "mmrl.agents.selection": ("TaskSelector", "build_tasks", "measure_tasks", "write_tasks"),
    "mmrl.agents.environments.agent_tasks": ("AgentTask", "TaskSetConfig", "list_tasks"),
    "mmrl.agents.methods.vl_dac": ("VlDacConfig", "VlDacRecipe"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
