"""The simulation engine: renderers, fast images, many scenes at once, and third-party simulators in workers.

`open_sim(SimConfig(...))` opens any of them as a `RobotSim`. The table scenes are in `robotics.scenes`. Importing this
package does not import mujoco; that happens when a model is loaded or an image is rendered.
"""

from __future__ import annotations

from mmrl.entries import lazy_names

_NAMES = {
    "mmrl.hub.video_writing": ("VideoRecorder", "write_mp4"),
    "robotics.sim.backends": ("Backend", "find_backend", "require_backend"),
    "robotics.sim.episodes": ("ChunkResult", "EpisodeSpec", "RobotObservation", "RobotSim"),
    "robotics.sim.opening": ("SimConfig", "open_sim"),
    "robotics.sim.randomization": ("RandomizationConfig",),
    "robotics.sim.rendering": ("FrameRenderer", "RenderSettings", "fast_visuals", "update_poses"),
    "robotics.sim.rollout": ("ImageRollout", "SceneTask"),
    "robotics.sim.interface": ("Chunk", "SceneObservation", "SceneSteps"),
    "robotics.sim.subprocess_sim": ("SubprocessSettings", "SubprocessSim"),
    "robotics.sim.suite_setup": ("open_suite", "setup_suite"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
