"""Tasks at a table for 3D flow: scenes, arms, physics, and demonstrations with their true flow.

Importing this package does not import mujoco; that happens when a scene is built.
"""

from __future__ import annotations

from mmrl.lazy import lazy_names

_NAMES = {
    "robotics.scenes.objects.criteria": ("Outcome", "SceneState"),
    "robotics.scenes.objects.demonstrations": ("DemonstrationConfig", "demonstrations", "instructed_clips", "videos"),
    "robotics.scenes.objects.demonstrator": ("Demonstration", "Demonstrator"),
    "robotics.scenes.objects.scene": ("FLOW_ARMS", "FlowScene", "HELD_OUT_ARMS", "SceneConfig"),
    "robotics.scenes.objects.tabletop": ("FlowTabletop",),
    "robotics.scenes.objects.tasks": ("FLOW_TASKS", "FlowTask"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
