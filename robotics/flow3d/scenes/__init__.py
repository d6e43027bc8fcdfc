"""Tasks at a table for 3D flow: scenes, arms, physics, and demonstrations with their true flow.

Importing this package does not import mujoco; that happens when a scene is built.
"""

from __future__ import annotations

from mmrl.lazy import lazy_names

_NAMES = {
    "robotics.flow3d.scenes.arms": ("FLOW_ARMS", "HELD_OUT_ARMS"),
    "robotics.flow3d.scenes.demonstrations": ("DemonstrationConfig", "demonstrations", "instructed_clips", "videos"),
    "robotics.flow3d.scenes.demonstrator": ("Demonstration", "Demonstrator"),
    "robotics.flow3d.scenes.scene": ("FlowScene", "SceneConfig"),
    "robotics.flow3d.scenes.tabletop": ("FlowTabletop",),
    "robotics.flow3d.scenes.criteria": ("Outcome", "SceneState"),
    "robotics.flow3d.scenes.tasks": ("FLOW_TASKS", "FlowTask"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
