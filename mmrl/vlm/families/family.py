"""A model family and how its file is found, and what Qwen2-VL and its successors share."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from mmrl.core.payload import to_device
from mmrl.vlm.families import MEDIA_TOKENS

TEXT, IMAGE, VIDEO = range(3)
"""Values of the token types."""
MERGERS = (
    *("merger", "merger_list", "deepstack_merger_list", "patch_merger", "connector", "aligner", "qformer", "resampler"),
    *("multi_modal_projector", "mm_projector", "projector", "vision_projector", "visual_projector", "resampler_model"),
    *("vision_projection", "image_projection", "image_to_text_projection", "embed_vision", "vision_adapter"),
    *("high_res_vision_proj", "visual_embeddings_table", "image_newline", "view_separator"),
)
"""Names of these modules in transformers."""
TokenTables = Callable[[Mapping[str, Any]], tuple[Tensor, Tensor]]
"""Maps a processor's output for one prompt to the types (P,) and positions (3, P) of its tokens."""


@dataclass(frozen=True)
class VlmFamily:
    """Differences between model families; the defaults read them from the model's configuration and signatures."""

    joins_media: bool = False
    """Whether the vision tower takes the media of several prompts in one call, as patches with their grids."""
    fits_frames: bool = False
    """Whether the frames of videos keep the size that qwen-vl-utils gives them; else the processor resizes them."""
    media_tokens: tuple[str, ...] = ()
    """Tokens not allowed in responses, in addition to those in the configuration."""
    thinking_switch: str = "enable_thinking"
    """Chat template variable that controls whether the model thinks before it answers (`model.thinking`)."""
    mergers: tuple[str, ...] = MERGERS
    """Modules that turn features of the vision tower into tokens of the language model."""
    points: str = ""
    """Coordinate space (of `mmrl.gui`) in which its released models write points; empty if they write none."""
    image_factor: int = 0
    """Image sides are multiples of this many pixels in its released models (patch size times merge size); 0 if images
    have one fixed size."""

    def sizes(self, config: Any) -> tuple[int, int, float | None]:
        """Pixels on a side of a patch, patches on a side of an image token, and positions of a second of video."""
        vision = getattr(config, "vision_config", None)
        patch = getattr(vision, "patch_size", None) or 14
        merge = getattr(vision, "spatial_merge_size", None) or 1
        return int(patch if isinstance(patch, int) else patch[0]), int(merge), None

    def token_tables(self, network: Any) -> TokenTables:
        """How the types and positions of a prompt's tokens are found.

        Positions are those of the model's `get_rope_index` where it has one; else tokens are counted, the same along
        all three axes.
        """
        config, find = network.config, getattr(network.base_model, "get_rope_index", None)

        def tables(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
            ids = inputs["input_ids"][0]
            types = torch.full_like(ids, TEXT)
            for kind, name in ((IMAGE, "image_token_id"), (VIDEO, "video_token_id")):
                if (token := getattr(config, name, None)) is not None:
                    types[ids == token] = kind
            if "mm_token_type_ids" in inputs:  # GLM-4.1V has one token for images and videos
                types[(types == IMAGE) & (inputs["mm_token_type_ids"][0] == VIDEO)] = VIDEO
            if find is None:
                return types, torch.arange(len(ids)).expand(3, -1)
            grids = {name: inputs[name] for name in ("image_grid_thw", "video_grid_thw") if name in inputs}
            positions, _ = find(inputs["input_ids"], mm_token_type_ids=types[None], **grids)
            return types, positions[:, 0]

        return tables

    def token_inputs(self, types: Tensor, is_prompt: Tensor, accepted: Collection[str]) -> dict[str, Tensor]:
        """Arguments of the model's forward with one entry per token.

        Args:
            types: (B, L), 0 for text, 1 for images, 2 for videos.
            is_prompt: (B, L) bool, tokens of the prompt; the others belong to the response.
            accepted: names of the arguments of the model's forward.
        """
        named = {"token_type_ids": (types == IMAGE).long(), "mm_token_type_ids": types}
        return {name: value for name, value in named.items() if name in accepted}

    def media_layout(self, visual: Any, grids: Tensor, device: torch.device) -> dict[str, Tensor]:
        """Arguments of the vision tower that it would derive from the grids with waits for the device; may be none."""
        return {}

    def banned(self, config: Any) -> set[int]:
        """Image, video and audio tokens from the configuration; the model would look for their features."""
        names = [name for name in config.to_dict() if name.endswith(("_token_id", "_token_index"))]
        text = ("bos_", "eos_", "pad_", "sep_", "unk_", "mask_", "decoder_")
        found = (getattr(config, name, None) for name in names if not name.startswith(text))
        return {token for token in found if isinstance(token, int) and token >= 0}


@functools.cache
def known_families() -> Mapping[str, VlmFamily]:
    """Families that have a file, by `model_type`; the folder is read once."""
    names = [module.name for module in pkgutil.iter_modules(importlib.import_module(__package__).__path__)]
    modules = {name: importlib.import_module(f"{__package__}.{name}") for name in names}
    return {name: module.FAMILY for name, module in modules.items() if hasattr(module, "FAMILY")}


def family_of(model_type: str) -> VlmFamily:
    """The family of a transformers `model_type`; the default if it has no file."""
    if "." in model_type:  # kosmos-2.5
        return VlmFamily()
    name = f"{__package__}.{model_type}"
    try:
        found: VlmFamily = importlib.import_module(name).FAMILY
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return VlmFamily()
    return found


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
        """Types from the processor, positions from the grids."""
        _, merge, seconds = self.sizes(network.config)
        return grid_tables(merge, seconds)

    def media_layout(self, visual: Any, grids: Tensor, device: torch.device) -> dict[str, Tensor]:
        """Positions, indices and boundaries of images and windows, from grids (n, 3) on the host.

        Boundaries stay on the host, where the layers split their input; only flash attention reads them on the device.
        """
        helpers, merge = vars(sys.modules[type(visual).__module__]), visual.spatial_merge_size
        own = {"spatial_merge_size": merge}
        boundaries, _ = helpers["get_vision_attention_seqlens"](grids, visual.config)
        found = {"position_ids": helpers["get_vision_position_ids"](grids, merge)}
        ends = {"cu_seqlens": boundaries}
        if "get_vision_window_index" in helpers:
            sizes = {"window_size": visual.window_size, "patch_size": visual.patch_size}
            found["window_index"], ends["cu_window_seqlens"] = helpers["get_vision_window_index"](grids, **own, **sizes)
        if "get_vision_interpolation_indices_and_weights" in helpers:
            interpolate = helpers["get_vision_interpolation_indices_and_weights"]
            options = {"mode": visual.interpolation_mode, "align_corners": visual.interpolation_align_corners}
            indices, weights = interpolate(grids, visual.num_grid_per_side, **options, **own)
            found |= {"interp_indices": indices, "interp_weights": weights}
        if "flash" in (visual.config._attn_implementation or ""):
            found |= ends
            ends = {}
        return {name: to_device(value, device) for name, value in found.items()} | ends


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
            raise ValueError(f"{count} {name} tokens follow one another, but their grid of patches is {grid}.")
        parts.append(start + _grid_positions(grid, merge_size, step))
        start += max(grid[1], grid[2]) // merge_size
    return torch.cat(parts, 1)


def split_frames(video_grids: Tensor) -> Tensor:
    """Grids of videos as one grid per frame, for Qwen3-VL."""
    frames = video_grids.repeat_interleave(video_grids[:, 0], 0)
    frames[:, 0] = 1
    return frames


def _grid_positions(grid: Sequence[int], merge_size: int, step: float | Tensor) -> Tensor:
    """(3, n) positions of the tokens of a grid, from 0."""
    time = (torch.arange(grid[0]) * step).long()
    height, width = (torch.arange(side // merge_size) for side in grid[1:])
    return torch.stack(torch.meshgrid(time, height, width, indexing="ij")).flatten(1)
