"""TSPO: a small agent that picks frames of a long video for a video model, trained from rewards.

Agent, picks, recipe and data builder by name; importing the package loads none of them.
"""

from __future__ import annotations

from mmrl.entries import lazy_names

_NAMES = {
    "mmrl.vlm.tspo.agent": ("TemporalAgent",),
    "mmrl.vlm.tspo.tspo_config": ("TspoConfig",),
    "mmrl.vlm.tspo.features": ("ClipEncoder", "FeatureStore"),
    "mmrl.vlm.tspo.picking": (
        "FramePicker",
        "PickedFrames",
        "bin_max_frames",
        "draw_picks",
        "load_frame_picker",
        "pick_logprobs",
        "top_frames",
        "uniform_frames",
    ),
    "mmrl.vlm.tspo.tspo_recipe": ("TspoRecipe",),
    "mmrl.vlm.tspo.splice": ("build_spliced",),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
