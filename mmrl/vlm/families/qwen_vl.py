"""The parts that Qwen2-VL and its successors share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmrl.vlm.families import MEDIA_TOKENS
from mmrl.vlm.families.family import Family, TokenTables
from mmrl.vlm.families.positions import rotary_positions, split_frames


@dataclass(frozen=True)
class QwenVl(Family):
    """Positions along time, height and width, computed here, so that prompts can be encoded without the model."""

    joins_media: bool = True
    fits_frames: bool = True
    media_tokens: tuple[str, ...] = MEDIA_TOKENS

    def sizes(self, config: Any) -> tuple[int, int, float | None]:
        """As in the vision configuration."""
        vision = config.vision_config
        seconds = getattr(vision, "tokens_per_second", None)
        return int(vision.patch_size), int(vision.spatial_merge_size), seconds

    def token_tables(self, network: Any) -> TokenTables:
        """Types as the processor says, positions from the grids."""
        _, merge, seconds = self.sizes(network.config)
        return grid_tables(merge, seconds)


def grid_tables(merge_size: int, tokens_per_second: float | None) -> TokenTables:
    """Token tables of Qwen-VL; `tokens_per_second` is None if timestamps separate the frames of a video."""

    def tables(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        types, videos, steps = inputs["mm_token_type_ids"][0], inputs.get("video_grid_thw"), []
        if videos is not None and tokens_per_second is not None:
            seconds = inputs.get("second_per_grid_ts")
            steps = [tokens_per_second * s for s in ([1] * len(videos) if seconds is None else seconds)]
        elif videos is not None:
            videos = split_frames(videos)
        return types, rotary_positions(types, merge_size, inputs.get("image_grid_thw"), videos, steps)

    return tables
