"""Digit questions, clips, tiny models and the demos; the library does not import this package."""

DEMOS = {
    "vlm": ("mmrl.vlm.toy.demo", "runs/demo"),
    "text": ("mmrl.vlm.toy.text_demo", "runs/text-demo"),
    "video": ("mmrl.vlm.toy.video_demo", "runs/video-demo"),
    "sight": ("mmrl.vlm.toy.sight_demo", "runs/sight-demo"),
}
"""Module and run folder of each demo of `mmrl demo`."""
