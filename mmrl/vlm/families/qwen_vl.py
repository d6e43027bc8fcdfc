"""What Qwen2-VL and its successors share, such as positions of image tokens by coordinates: the rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from mmrl.vlm.families import MEDIA_TOKENS
from mmrl.vlm.families.family import IMAGE, TEXT, VIDEO, TokenTables, VlmFamily


@dataclass(frozen=True)
class QwenVl(VlmFamily):
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


def rotary_positions(
    token_types: Tensor,
    merge_size: int,
    image_grids: Tensor | None = None,
    video_grids: Tensor | None = None,
    frame_steps: Sequence[float | Tensor] = (),
) -> Tensor:
    """Positions (3, P) int64 of a prompt's tokens along time, height and width, from their types (P,) int64.

    A text token has the same position on all three axes, one more than the largest before it. The tokens of an image
    form a grid that starts there; the text after it continues behind the longer side of the grid. The first response
    token has the position `positions.max() + 1`.

    `image_grids` (images, 3) and `video_grids` (videos, 3) int64 are patches along time, height and width in the order
    of the tokens; Qwen3-VL, which has timestamps between frames, needs one grid a frame (`split_frames`). `frame_steps`
    are positions from one frame of a video to the next, 1 where a video has none; in Qwen2.5-VL the tokens a second
    times the seconds a frame. The tower merges `merge_size` patches on a side into one token.

    Source: Qwen2-VL, arXiv 2409.12191, section 2.1; huggingface/transformers `get_rope_index` of both models.
    """
    grids = {IMAGE: iter([] if image_grids is None else image_grids.tolist())}
    grids[VIDEO] = iter([] if video_grids is None else video_grids.tolist())
    steps = iter(frame_steps)
    parts: list[Tensor] = []
    start = 0
    for kind, run in groupby(token_types.tolist()):
        count = len(list(run))
        if kind == TEXT:
            parts.append(torch.arange(start, start + count).expand(3, -1))
            start += count
            continue
        grid = next(grids[kind], None)
        step = next(steps, 1.0) if kind == VIDEO else 1.0
        if grid is None or grid[0] * (grid[1] // merge_size) * (grid[2] // merge_size) != count:
            name = {IMAGE: "image", VIDEO: "video"}[kind]
            raise ValueError(f"{count} {name} tokens stand in a row, but their grid of patches is {grid}.")
        parts.append(start + _grid_positions(grid, merge_size, step))
        start += max(grid[1], grid[2]) // merge_size
    return torch.cat(parts, 1)


def split_frames(video_grids: Tensor) -> Tensor:
    """Grids of videos as one grid a frame, for Qwen3-VL."""
    frames = video_grids.repeat_interleave(video_grids[:, 0], 0)
    frames[:, 0] = 1
    return frames


def _grid_positions(grid: Sequence[int], merge_size: int, step: float | Tensor) -> Tensor:
    """(3, n) positions of the tokens of a grid, from 0."""
    time = (torch.arange(grid[0]) * step).long()
    height, width = (torch.arange(side // merge_size) for side in grid[1:])
    return torch.stack(torch.meshgrid(time, height, width, indexing="ij")).flatten(1)
