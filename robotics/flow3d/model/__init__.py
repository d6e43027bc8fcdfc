"""The world model: how the points of an object will move, given an image and an instruction.

A diffusion model over 3D flow (`FlowWorldModel`), three networks for it, and its training (`flow3d`).
Importing the package loads none of its modules, only what is taken from it.
"""

from __future__ import annotations

from mmrl.entries import lazy_names

_NAMES = {
    "robotics.flow3d.methods.awm": ("Flow3dAwmConfig", "Flow3dAwmRecipe"),
    "robotics.flow3d.metrics": (
        "FlowErrors",
        "draw_flow",
        "flow_errors",
    ),
    "robotics.flow3d.methods.flow3d_recipe": ("Flow3dConfig", "Flow3dRecipe"),
    "robotics.flow3d.model.world_model_settings": ("FlowModelConfig",),
    "robotics.flow3d.model.world_model": ("FlowWorldModel",),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
