"""Evaluation in closed loop: episodes in the scenes, runs of a planner in physics, and metrics.

episodes = list_episodes(FlowEpisodesConfig(arms=["panda", "ur5e"], episodes=20))
with EpisodeRunner(settings, model) as runner:
    rows = [runner.run(episode) for episode in episodes]
print(loop_metrics(rows)["success/closed_loop"])
"""

from __future__ import annotations

from mmrl.entries import lazy_names

_NAMES = {
    "robotics.flow3d.closed_loop.flow_episodes": (
        "FlowEpisode",
        "FlowEpisodesConfig",
        "LoopConfig",
        "TrueFlow",
        "list_episodes",
    ),
    "robotics.flow3d.closed_loop.measure": ("FlowLoopMeasure", "evaluate_flow", "loop_metrics"),
    "robotics.flow3d.closed_loop.closed_loop_recipe": ("Flow3dEvaluation", "Flow3dEvaluationConfig"),
    "robotics.flow3d.closed_loop.runner": ("FlowEpisodeRunner",),
    "robotics.flow3d.plan.judge": ("VerifierConfig",),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
