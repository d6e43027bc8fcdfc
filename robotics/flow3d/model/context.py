"""Tokens of image, instruction and query points that the networks attend to.

Shapes: B rows, L tokens, W width of a token, N x N query points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mmrl.core.payload import Payload, per_row, take_rows, to_device
from mmrl.errors import UserError
from mmrl.files import expanded
from mmrl.hub.compat import ensure_torchvision, quiet_transformers
from robotics.flow3d.clip import FlowEncoding, Observation
from robotics.flow3d.geometry import FloatArray, ImageArray
from robotics.flow3d.model.world_model_settings import ConditionConfig
from robotics.policies.base.encoder import (
    GROUPS,
    KEYPOINT_SHARPNESS,
    EncoderBlock,
    InstructionEncoder,
    Vocabulary,
    expected_places,
    octave_code,
    octave_size,
)

CODE_SIZE = 72
"""Size of a point's code in the paper's network."""
SIDE, DEPTHS = 224, 128
TEMPERATURE = 10000.0
TOWERS = "towers"
"""Name of the frozen towers, which are not saved with the weights."""
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass
class FlowInputs(Payload):
    """Conditions of B flows."""

    images: Tensor = per_row()
    """(B, S, S, 3) uint8 RGB."""
    points: Tensor = per_row()
    """(B, N, N, 3) float32 u, v, z of the query points, each normalised to -1..1."""
    instructions: list[str] = per_row()
    """Lower-cased."""

    def __len__(self) -> int:
        return len(self.instructions)


def make_inputs(
    observations: Sequence[Observation], points: Sequence[FloatArray], encoding: FlowEncoding, image_px: int
) -> FlowInputs:
    """Scenes as tensors; `points` has (N, N, 3) query points u, v, z of each."""
    # learned positions of the grid cells fit one N only
    wanted = (encoding.grid, encoding.grid, 3)
    for grid in points:
        if grid.shape != wanted:
            raise UserError(
                f"query points have the shape {grid.shape}; this model was trained with {wanted}, a grid of "
                f"{encoding.grid} x {encoding.grid} points u, v, z"
            )
    # each by the size of its own image, so that images of different sizes can share a batch
    normalised = [encoding.normalise(grid, seen.size_px) for grid, seen in zip(points, observations, strict=True)]
    return FlowInputs(
        images=torch.from_numpy(np.stack([_resized(seen.rgb, image_px) for seen in observations])),
        points=torch.from_numpy(np.stack(normalised)).float(),
        instructions=[seen.instruction.lower() for seen in observations],
    )


def _resized(rgb: ImageArray, side: int) -> ImageArray:
    from PIL import Image

    if rgb.shape[:2] == (side, side):
        return rgb
    # Pillow averages over the area of each pixel
    return np.asarray(Image.fromarray(rgb).resize((side, side), Image.Resampling.BICUBIC))


class Keypoints(nn.Module):
    """Expected positions of learned features in an image, as one token.

    With patches alone, a small network takes many times as long to learn where a goal is.

    Source: spatial softmax, Levine et al., arXiv 1504.00702; features scaled and shifted by the instruction (FiLM),
        arXiv 1709.07871. Not in 3DFlowAction, which has a pretrained CLIP.
    """

    def __init__(self, count: int, channels: int, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels // 2, 5, stride=2, padding=2)
        # two strides of 2: the map has a quarter of the image's side, fine enough for expected positions
        self.second = nn.Conv2d(channels // 2, channels, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(GROUPS, channels)
        self.film = nn.Linear(width, 2 * channels)
        self.scores = nn.Conv2d(channels, count, 1)
        # with nearly equal scores all keypoints are at the image's center, and learning starts slowly
        nn.init.normal_(self.scores.weight, std=KEYPOINT_SHARPNESS / channels**0.5)
        self.token = nn.Linear(octave_size(2 * count), width)

    def forward(self, pixels: Tensor, text: Tensor) -> Tensor:
        """Images (B, 3, S, S) in -1..1 and instructions (B, width) -> (B, width)."""
        features = self.norm(self.second(functional.gelu(self.first(pixels))))
        scale, shift = self.film(text)[:, :, None, None].chunk(2, 1)
        # 1 + scale, so that the instruction starts without effect
        features = functional.gelu(features * (1 + scale) + shift)
        found: Tensor = self.token(octave_code(expected_places(self.scores(features)).to(text.dtype)))
        return found


def clip_places(points: Tensor) -> Tensor:
    """Points (..., 3) in -1..1 in CLIP's coordinates: u, v in 0..224, z in 0..127 over the range of depths."""
    # back from -1..1 to fractions of the width, the height and the range of depths
    share = (points + 1) / 2
    scaled = share * torch.tensor([SIDE, SIDE, DEPTHS], dtype=points.dtype, device=points.device)
    return torch.cat([scaled[..., :2], scaled[..., 2:].clamp(0, DEPTHS - 1)], -1)


def corrected_code(places: Tensor, size: int = CODE_SIZE) -> Tensor:
    """Sines and cosines [sin u w, cos u w, sin v w, cos v w, sin z w, cos z w] with w_k = 10000^(-k / (size / 6 - 1)).

    Source: Hoyyyaard/3DFlowAction AnimateFlow.py, posemb_sincos_3d, as it is meant.
    """
    # 72 numbers are 6 of each: sine and cosine for three coordinates
    count = size // 6
    return _waves(places, TEMPERATURE ** (-torch.arange(count, device=places.device) / (count - 1)))


def repo_code(places: Tensor, size: int = CODE_SIZE, shape: tuple[int, int, int] = (SIDE, SIDE, DEPTHS)) -> Tensor:
    """The code that the released weights were trained with.

    `dim //  - 1` in its source is a division by -1, so w_k = 10000^(k / size), and the table that it is read from is
    built in another order of axes than it is read in, see `scrambled_places`. Each position still has its own code.
    `places` (..., 3) u, v, z are truncated to integers within the table.

    Source: Hoyyyaard/3DFlowAction AnimateFlow.py, posemb_sincos_3d.
    """
    # rising instead of falling, up to 4 radians per pixel: the code is not smooth, but still distinct
    frequencies = TEMPERATURE ** (torch.arange(size // 6, device=places.device) / size)
    return _waves(scrambled_places(places, shape).to(frequencies.dtype), frequencies)


def scrambled_places(places: Tensor, shape: tuple[int, int, int] = (SIDE, SIDE, DEPTHS)) -> Tensor:
    """The position (..., 3) whose code the released code reads for positions (..., 3), truncated to integers.

    Its table is written with depths first, then rows and columns, and read as if depths came last: entry [v, u, z] is
    number n = (v columns + u) depths + z, which was written for z' = n // (rows columns),
    v' = (n // columns) % rows, u' = n % columns.
    """
    # the axes as the released code names them; u runs over columns
    rows, columns, depths = shape
    last = torch.tensor([columns - 1, rows - 1, depths - 1], device=places.device)
    u, v, z = places.long().clamp(min=0).minimum(last).unbind(-1)
    number = (v * columns + u) * depths + z
    return torch.stack([number % columns, number // columns % rows, number // (rows * columns)], -1)


def _waves(places: Tensor, frequencies: Tensor) -> Tensor:
    angles = places[..., None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], -2).flatten(-3)


@dataclass(frozen=True)
class FlowContext:
    """Condition of the networks for B scenes, computed once for all sampling steps."""

    tokens: Tensor
    """(B, L, W)."""
    text: Tensor
    """(B, W) the instruction, with its keypoints in the image if there are any."""
    points: Tensor
    """(B, N, N, 3) query points in -1..1."""

    def of(self, scene: Tensor) -> FlowContext:
        """The context of rows, given the scene (R,) of each."""
        return FlowContext(take_rows(self.tokens, scene), take_rows(self.text, scene), self.points[scene])


class SmallContext(nn.Module):
    """Image patches conditioned on the instruction, and words of a small vocabulary; trained from scratch."""

    def __init__(self, config: ConditionConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.config = config
        self.vocabulary = vocabulary
        width = config.width
        self.instruction = InstructionEncoder(len(vocabulary), config.words, width, config.heads)
        # small, like a token: guidance subtracts what the network makes of it
        self.no_text = nn.Parameter(torch.randn(width) * 0.02)
        self.patch = nn.Linear(3 * config.patch_px**2, width)
        self.place = nn.Linear(octave_size(2), width)
        self.point = nn.Linear(octave_size(3), width)
        self.block = EncoderBlock(width, config.heads)
        self.keypoints = Keypoints(config.keypoints, config.channels, width) if config.keypoints else None
        self.norm = nn.LayerNorm(width)

    def forward(self, inputs: FlowInputs, keep_text: Tensor) -> FlowContext:
        """Encode B rows; the instruction is blanked if `keep_text` (B,) is False.

        Gradient: into all trainable weights.
        """
        # a learned vector replaces the text; guidance later starts from it
        text = torch.where(keep_text[:, None], self._texts(inputs.instructions), self.no_text)
        pixels = inputs.images.permute(0, 3, 1, 2).to(self.no_text.dtype) / 127.5 - 1
        # each patch's pixels become the channels of one token
        patches = functional.pixel_unshuffle(pixels, self.config.patch_px).flatten(2).transpose(1, 2)
        seen = self.block(self.patch(patches) + self.place(self._patch_code()) + text[:, None])
        points = self.point(octave_code(inputs.points.flatten(1, 2)))
        # the keypoints are part of the global condition
        whole = text if self.keypoints is None else text + self.keypoints(pixels, text)
        # keypoints also enter as a token, so that cross-attention can read them
        return FlowContext(self.norm(torch.cat([seen, whole[:, None], points], 1)), whole, inputs.points)

    def check_texts(self, texts: Sequence[str]) -> None:
        """Raise UserError for instructions that cannot be read completely."""
        # a copy, because the vocabulary counts unknown words
        Vocabulary(self.vocabulary.words).encode(texts, self.config.words)

    def _texts(self, texts: list[str]) -> Tensor:
        """(B, W); each distinct text is encoded once."""
        distinct = list(dict.fromkeys(texts))
        number = {text: index for index, text in enumerate(distinct)}
        words = to_device(self.vocabulary.encode(distinct, self.config.words), self.no_text.device)
        index = to_device(torch.tensor([number[text] for text in texts]), words.device)
        # the rows of a group share their instruction, so the encoder runs once per text
        return take_rows(self.instruction(words), index)

    def _patch_code(self) -> Tensor:
        """(patches, numbers) code of each patch's center, rows first."""
        side = self.config.image_px // self.config.patch_px
        middle = (torch.arange(side, device=self.no_text.device) + 0.5) / side * 2 - 1
        v, u = torch.meshgrid(middle, middle, indexing="ij")
        return octave_code(torch.stack([u, v], -1).flatten(0, 1))


class ClipContext(nn.Module):
    """Frozen CLIP towers as in the paper: 77 text tokens, 257 of the image and one for each query point.

    The image's class token is the pooled one, after the last norm; its patches are raw states. The projections of image
    and points start at zero, so that a pretrained network first sees its usual input.

    Source: Hoyyyaard/3DFlowAction AnimateFlow.py (AnimateFlow3D).
    """

    def __init__(self, config: ConditionConfig) -> None:
        super().__init__()
        self.config = config
        read: dict[str, Any] = _read_towers(config)
        # frozen: not trained, not saved, and without gradient in `forward`
        self.towers = nn.ModuleDict(read).requires_grad_(False)
        self.tokenizer = _read_tokenizer(config)
        text, seen = (read[name].config.hidden_size for name in ("text", "vision"))
        self.longest_text: int = read["text"].config.max_position_embeddings
        # the U-Net of Stable Diffusion reads tokens as wide as the text tower's; others need a projection
        self.text = nn.Identity() if text == config.width else nn.Linear(text, config.width)
        self.image = _zero_linear(seen, config.width)
        self.point = _zero_linear(CODE_SIZE, config.width)

    def train(self, mode: bool = True) -> ClipContext:
        """The towers are never in training mode."""
        super().train(mode)
        self.towers.eval()
        return self

    def forward(self, inputs: FlowInputs, keep_text: Tensor) -> FlowContext:
        """Encode B rows; the instruction is blanked if `keep_text` (B,) is False.

        Gradient: into all trainable weights.
        """
        # the empty text is CLIP's unconditional input
        kept = [text if keep else "" for text, keep in zip(inputs.instructions, keep_text.tolist(), strict=True)]
        with torch.no_grad():
            states, pooled = self._texts(kept)
            seen = self._image_states(inputs.images)
        code = repo_code if self.config.point_pe == "repo" else corrected_code
        # one token per query point, in grid order, as in the released model
        points = self.point(code(clip_places(inputs.points.flatten(1, 2))))
        tokens = torch.cat([self.text(states), self.image(seen), points], 1)
        return FlowContext(tokens, self.text(pooled), inputs.points)

    def check_texts(self, texts: Sequence[str]) -> None:
        """Raise UserError for instructions that cannot be read completely."""
        for text in dict.fromkeys(texts):
            # tokenised in full first: the tokeniser would cut a long text silently
            found = self.tokenizer(text, truncation=False, verbose=False).input_ids
            if len(found) > self.longest_text:
                # the end token is kept, so the text loses one more token
                lost = self.tokenizer.decode(found[self.longest_text - 1 : -1])
                raise UserError(
                    f"the instruction {text!r} has {len(found)} tokens; CLIP reads {self.longest_text}, so {lost!r} "
                    "would be dropped; shorten it"
                )

    def _texts(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Last states (B, 77, .) and the pooled one (B, .)."""
        self.check_texts(texts)
        tower = self.towers["text"]
        limits = {"padding": "max_length", "max_length": self.longest_text}
        found = self.tokenizer(texts, return_tensors="pt", **limits)
        out = tower(input_ids=found.input_ids.to(next(tower.parameters()).device))
        return out.last_hidden_state, out.pooler_output

    def _image_states(self, images: Tensor) -> Tensor:
        """(B, 1 + patches, .)."""
        # the images already have the tower's size, so no processor is needed
        tower = self.towers["vision"]
        pixels = images.permute(0, 3, 1, 2).float() / 255
        # the released weights were trained on images read by OpenCV and normalised as RGB
        if self.config.bgr:
            pixels = pixels.flip(1)
        mean, std = (pixels.new_tensor(numbers)[:, None, None] for numbers in (CLIP_MEAN, CLIP_STD))
        out = tower(pixel_values=((pixels - mean) / std).to(next(tower.parameters()).dtype))
        # the pooled state is the class token after the last norm; the raw one is dropped
        return torch.cat([out.pooler_output[:, None], out.last_hidden_state[:, 1:]], 1)


def make_context(config: ConditionConfig, vocabulary: Vocabulary) -> SmallContext | ClipContext:
    """The encoder of a configuration; clip does not read the vocabulary."""
    return ClipContext(config) if config.kind == "clip" else SmallContext(config, vocabulary)


def _read_towers(config: ConditionConfig) -> dict[str, Any]:
    ensure_torchvision()
    from transformers import CLIPTextModel, CLIPVisionModel

    with quiet_transformers():
        text = _read("text", expanded(config.text) / "text_encoder", CLIPTextModel)
        vision = _read("vision", expanded(config.vision), CLIPVisionModel)
    found = vision.config.image_size
    # resizing here would change what the tower was trained on
    if found != config.image_px:
        raise UserError(f"model.condition.image_px is {config.image_px}; the vision tower needs {found}")
    return {"text": text, "vision": vision}


def _read_tokenizer(config: ConditionConfig) -> Any:
    from transformers import CLIPTokenizer

    tokenizer = _read("text", expanded(config.text) / "tokenizer", CLIPTokenizer)
    tokenizer.split_special_tokens = True  # an instruction that spells a control token means its characters
    return tokenizer


def _read(name: str, folder: Path, kind: Any) -> Any:
    # a hub id has no folder here; transformers finds it in its cache
    source, options = str(folder), {}
    # the path is then a hub id, whose parts are subfolders
    if not folder.is_dir() and folder.name in ("text_encoder", "tokenizer") and not folder.parent.is_dir():
        source, options = str(folder.parent), {"subfolder": folder.name}
    try:
        if torch.get_default_device().type == "meta" and hasattr(kind, "config_class"):  # a plan reads no weights
            return kind._from_config(kind.config_class.from_pretrained(source, **options))
        return kind.from_pretrained(source, **options)
    except (OSError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"model.condition.{name}: no {kind.__name__} in {folder}: {reason}") from error


def _zero_linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    # a pretrained network must not see new inputs before it has learned to use them
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
