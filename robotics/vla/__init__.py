"""Vision-language-action policies and their training with SRPO.

Importing the package loads none of its modules, only what is taken from it:
`from robotics.vla import ProgressSettings, progress_rewards`.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "robotics.vla.latents": (
        "LATENTS",
        "EmbeddedTrajectories",
        "LatentConfig",
        "TrajectoryLatent",
        "VideoLatent",
        "make_latent",
        "state_statistics",
    ),
    "robotics.vla.progress": ("ProgressOutcome", "ProgressSettings", "SuccessMemory", "progress_rewards"),
    "robotics.vla.video_encoder": ("VideoEncoder", "VideoEncoderConfig", "VideoTraining", "train_video_encoder"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
