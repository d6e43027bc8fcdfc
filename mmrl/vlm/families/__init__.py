"""Differences between model families: files are named after transformers' `model_type`; most families need none."""

MEDIA_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>")
"""Qwen-VL's image and video tokens, which no response may contain: a model would look for their features."""
