"""Qwen3-VL with mixtures of experts (arXiv 2511.21631)."""

from mmrl.vlm.families.family import QwenVl

FAMILY = QwenVl(points="rel1000", image_factor=32)
