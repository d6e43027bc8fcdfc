"""Qwen2.5-VL (arXiv 2502.13923)."""

from mmrl.vlm.families.family import QwenVl

FAMILY = QwenVl(points="abs_resized", image_factor=28)
