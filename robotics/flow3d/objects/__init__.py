"""Tasks at a table for 3D flow: scenes, arms, physics, and demonstrations with their true flow.

Importing this package does not import mujoco; that happens when a scene is built.
"""

from __future__ import annotations

from mmrl.entries import lazy_names

_NAMES = {
    "robotics.flow3d.objects.criteria": ("CriteriaOutcome", "SceneState"),
    "robotics.flow3d.objects.demonstrations": (
        "FlowDemonstrationConfig",
        "demonstrations",
        "instructed_clips",
        "videos",
    ),
    "robotics.flow3d.objects.demonstrator": ("FlowDemonstration", "Demonstrator"),
    "robotics.flow3d.objects.scene": ("FLOW_ARMS", "FlowScene", "HELD_OUT_ARMS", "SceneConfig"),
    "robotics.flow3d.objects.tabletop": ("FlowTabletop",),
    "robotics.flow3d.objects.flow_tasks": ("FLOW_TASKS", "FlowTask"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
