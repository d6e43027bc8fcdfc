"""Qwen3-VL (arXiv 2511.21631)."""

from mmrl.vlm.families.family import QwenVl

FAMILY = QwenVl(points="rel1000", image_factor=32)
