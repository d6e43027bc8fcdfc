"""Qwen2-VL (arXiv 2409.12191)."""

from __future__ import annotations

from typing import Any

from mmrl.vlm.families.family import QwenVl


class Qwen2Vl(QwenVl):
    """Frames of a video are one position apart, regardless of the time between them."""

    def sizes(self, config: Any) -> tuple[int, int, float | None]:
        """As in the vision configuration, with one position a frame."""
        return (*super().sizes(config)[:2], 1.0)


FAMILY = Qwen2Vl(points="rel1000", image_factor=28)
