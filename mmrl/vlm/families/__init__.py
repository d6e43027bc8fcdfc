"""Differences between families of models: a file here is named after transformers' `model_type`, most need none."""

MEDIA_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>")
"""Qwen-VL's tokens of images and videos, which no answer may hold: a model would look for their features."""
