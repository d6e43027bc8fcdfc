"""Agents that act in environments: actions, environment pool, episodes, recipes, demonstrations.

Importing the package loads none of them, only what is taken from it: `from mmrl.agents import EnvPool, parse_answer`.
"""

from __future__ import annotations

from mmrl.lazy import lazy_names

_NAMES = {
    "mmrl.agents.actions": ("Action", "ActionConfig", "ParsedAnswer", "parse_answer", "write_answer"),
    "mmrl.agents.arpo": ("ArpoConfig", "ArpoRecipe", "ReplayBuffer", "ReplayConfig", "needs_replay"),
    "mmrl.agents.cloning": ("AgentCloneConfig", "AgentCloneRecipe"),
    "mmrl.agents.conversation": ("ConversationConfig", "Writer"),
    "mmrl.agents.digirl": ("DigirlConfig", "DigirlRecipe"),
    "mmrl.agents.env_pool": ("EnvPool", "EnvironmentConfig", "TurnResult"),
    "mmrl.agents.environment": ("Environment", "Observation", "Outcome"),
    "mmrl.agents.episode": ("Episode", "EpisodeConfig"),
    "mmrl.agents.evaluation": ("AgentEvaluationConfig",),
    "mmrl.agents.experts": ("ExpertEpisode", "run_expert", "write_episodes"),
    "mmrl.agents.films": ("Video", "draw_frames", "write_videos"),
    "mmrl.agents.filters": ("instruction_advantages", "keep_best", "paper_advantages", "step_threshold"),
    "mmrl.agents.gym_env": ("GymEnvironment",),
    "mmrl.agents.recipe": ("AgentConfig", "AgentRecipe", "AgentRewardConfig"),
    "mmrl.agents.runner": ("EpisodeRunner",),
    "mmrl.agents.selection": ("TaskSelector", "build_tasks", "measure_tasks", "write_tasks"),
    "mmrl.agents.tasks": ("AgentTask", "TaskSetConfig", "list_tasks"),
    "mmrl.agents.vl_dac": ("VlDacConfig", "VlDacRecipe"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
