"""Vision-language-action policies and their training with SRPO.

Importing the package loads none of its modules, only what is taken from it:
`from robotics.vla import ProgressSettings, progress_rewards`.
"""

from __future__ import annotations

from mmrl.lazy import lazy_names

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
    "robotics.vla.progress": ("ProgressOutcome", "SuccessMemory", "progress_rewards"),
    "robotics.vla.progress_settings": ("ProgressSettings",),
    "robotics.vla.video_encoder": ("VideoEncoder", "VideoEncoderConfig", "VideoTraining", "train_video_encoder"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
