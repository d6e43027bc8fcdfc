"""Observation encoder of the small policies: a transformer over image, instruction, state and learned queries.

Shapes: B rows, W width, Q queries, N observation tokens, P pixels of a feature map, L words of an instruction.

The image stem is designed for small datasets: the instruction scales and shifts its features (FiLM), and in addition to
4 x 4 patch tokens it returns keypoints, the positions where learned features are strongest, because grasping depends on
positions. Rows do not depend on the rest of the batch, and there is no dropout, so the same weights give the same
numbers in sampling and training.

Source: FiLM, arXiv 1709.07871, as in BC-Z, arXiv 2202.02005; keypoints (spatial softmax): arXiv 1504.00702; sines and
cosines of doubling frequencies: NeRF, arXiv 2003.08934, eq. 4.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmrl.core.payload import take_rows
from mmrl.errors import UserError
from mmrl.fields import bounded, check_config, rare
from mmrl.files import parse_json, read_file, write_atomically
from robotics.policies.base.action_policy import PolicyInputs
from robotics.policies.base.action_statistics import MOVES, STATE_LIMIT, ActionRange, ActionStatistics, StateStatistics
from robotics.policies.base.saved import (
    build_fitting,
    make_config,
    read_config,
    read_units,
    read_weights,
    write_config,
    write_weights,
)
from robotics.sim.interface import RobotInterface

WORD = re.compile(r"[a-z0-9]+")
PADDING, UNKNOWN = 0, 1
PATCHES = 4
"""Number of patch tokens per side."""
KEYPOINT_SHARPNESS = 5.0
"""Standard deviation over positions of the keypoint scores at initialisation."""
GROUPS = 8
"""Number of groups in the group norms."""
VOCABULARY_FILE = "vocabulary.json"


def octave_code(positions: Tensor, octaves: int = 4) -> Tensor:
    """Encode positions (..., n) in -1..1 with sines and cosines of 2^k pi, k < octaves: (..., n (1 + 2 octaves))."""
    angles = positions[..., None] * (math.pi * 2.0 ** torch.arange(octaves, device=positions.device))
    return torch.cat([positions[..., None], angles.sin(), angles.cos()], -1).flatten(-2)


def octave_size(numbers: int, octaves: int = 4) -> int:
    """Output size of `octave_code`."""
    return numbers * (1 + 2 * octaves)


class Vocabulary:
    """A list of words; a word's number is its index plus 2, because 0 is padding and 1 is unknown."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.unknown: Counter[str] = Counter()
        """Counts of words that are not in the list."""
        self._number = {word: number for number, word in enumerate(self.words, start=UNKNOWN + 1)}

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> Self:
        """All words of some texts, in alphabetical order."""
        # sorted, so that the same texts give the same numbers in any order
        return cls(sorted({word for text in texts for word in WORD.findall(text.lower())}))

    def __len__(self) -> int:
        """Number of words, with padding and unknown."""
        return len(self.words) + UNKNOWN + 1

    def encode(self, texts: Sequence[str], length: int) -> Tensor:
        """Words (N, length) int64 of N texts, right-padded with 0; a text without words becomes one unknown word."""
        numbers = torch.full((len(texts), length), PADDING)
        for row, text in enumerate(texts):
            words = WORD.findall(text.lower())
            if len(words) > length:
                raise UserError(f"the instruction {text!r} has {len(words)} words; at most {length} are supported")
            if not words:  # attention over padding only would be NaN
                numbers[row, 0] = UNKNOWN
                continue
            self.unknown.update(self.unknown_words(text))
            numbers[row, : len(words)] = torch.tensor([self._number.get(word, UNKNOWN) for word in words])
        return numbers

    def unknown_words(self, text: str) -> list[str]:
        """Words of a text that are not in the list, in order and with repetitions."""
        return [word for word in WORD.findall(text.lower()) if word not in self._number]

    def save(self, path: Path | str) -> None:
        """Write the words as JSON."""
        write_atomically(Path(path), json.dumps(self.words) + "\n")

    def check_same(self, path: Path | str) -> None:
        """Check that a saved vocabulary has the same words; raises UserError."""
        if Vocabulary.load(path).words != self.words:
            raise UserError(f"the words in {path} differ from this policy's vocabulary")

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Load a saved vocabulary; raises UserError if the file is missing or damaged."""
        if not Path(path).is_file():
            raise UserError(f"vocabulary {path} not found")
        try:
            words = parse_json(read_file(path))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise UserError(f"{path} must contain a list of words")
        return cls(words)


@dataclass
class EncoderConfig:
    """Sizes of the observation encoder."""

    image_size: tuple[int, int] | None = rare(bounded((64, 64), at_least=32, multiple_of=32))
    """Height and width in pixels, multiples of 32; None for a policy without images."""
    state_size: int | None = rare(bounded(None, at_least=1))
    """Number of state entries; None for a policy without a state."""
    width: int = bounded(128, at_least=1)
    """Width of the transformer, a multiple of 8 * heads."""
    layers: int = bounded(3, at_least=1)
    """Blocks of the transformer."""
    heads: int = rare(bounded(4, at_least=1))
    """Attention heads."""
    channels: int = bounded(48, at_least=1, multiple_of=GROUPS)
    """Feature maps of the image stem, a multiple of 8."""
    keypoints: int = rare(bounded(32, at_least=0))
    """Number of keypoints; 0 = none."""
    octaves: int = bounded(0, at_least=0)
    """Number of frequencies of sines and cosines added to the keypoints' positions, for policies that have to locate
    objects to within a centimetre; 0 = only the positions."""
    condition_queries: bool = False
    """Also add the instruction, the state and the keypoints to the queries. Otherwise the queries can only attend to
    them, which the blocks have to learn first."""
    words: int = rare(bounded(32, at_least=1))
    """Maximum number of words in an instruction."""

    def __post_init__(self) -> None:
        if isinstance(self.image_size, list):
            self.image_size = tuple(self.image_size)  # JSON has lists only

    def validate(self) -> None:
        """Check that the sizes fit together; raises UserError."""
        if self.image_size is not None and not (isinstance(self.image_size, tuple) and len(self.image_size) == 2):
            raise UserError(f"image_size={self.image_size!r:.80} must be a height and a width in pixels")
        if self.image_size is None and self.state_size is None:
            raise UserError("the policy has neither images nor a state as input; set image_size or state_size")
        if self.width % (8 * self.heads):
            raise UserError(f"width={self.width} must be a multiple of 8 * heads={8 * self.heads}")


class StateScale(nn.Module):
    """Standardises states with statistics that are saved with the weights."""

    mean: Tensor
    std: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))

    def set(self, statistics: StateStatistics) -> None:
        """Set the statistics of a dataset; raises UserError if its states have a different size."""
        if statistics.size != len(self.mean):
            raise UserError(f"the statistics have {statistics.size} state entries, but the policy has {len(self.mean)}")
        self.mean.copy_(torch.as_tensor(statistics.mean))
        # constant entries are only shifted: dividing by a tiny deviation would blow up any change in the simulator
        std = torch.as_tensor(statistics.std)
        self.std.copy_(std.where(std > MOVES, 1.0))

    def forward(self, state: Tensor) -> Tensor:
        """Scale (B, S) states."""
        return ((state.float() - self.mean) / self.std).clamp(-STATE_LIMIT, STATE_LIMIT)


class ObservationEncoder(nn.Module):
    """Encodes observations into the outputs of Q learned queries."""

    def __init__(self, config: EncoderConfig, vocabulary: Vocabulary, queries: int) -> None:
        super().__init__()
        check_config(config, "encoder")
        self.config = config
        self.vocabulary = vocabulary
        width = config.width
        self.instruction = InstructionEncoder(len(vocabulary), config.words, width, config.heads)
        self.stem = None if config.image_size is None else _ImageStem(config)
        self.scale = None if config.state_size is None else StateScale(config.state_size)
        self.state = None if config.state_size is None else nn.Linear(config.state_size, width)
        self.queries = nn.Parameter(torch.randn(queries, width) * 0.02)
        self.blocks = nn.ModuleList(EncoderBlock(width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, batch: PolicyInputs) -> Tensor:
        """Encode B rows: (B, Q, W), normalised.

        Gradient: into all weights.
        """
        batch = batch.to(self.queries.device)
        text = self._instructions(batch.instructions)
        tokens = [text[:, None]]
        if self.stem is not None:
            tokens.append(self.stem(self._images(batch), text))
        if self.state is not None and self.scale is not None:
            tokens.append(self.state(self.scale(self._states(batch)))[:, None])
        queries = self.queries.expand(len(batch), -1, -1)
        if self.config.condition_queries:
            queries = queries + self._condition(tokens)
        # queries last: the final block only computes its tail
        hidden = torch.cat([*(token.to(text.dtype) for token in tokens), queries.to(text.dtype)], 1)
        for block in self.blocks[:-1]:
            hidden = block(hidden)
        return self.norm(self.blocks[-1](hidden, tail=queries.shape[1]))

    def scale_states(self, statistics: StateStatistics) -> None:
        """Set the state statistics of a dataset; does nothing without a state input."""
        if self.scale is not None:
            self.scale.set(statistics)

    def _condition(self, tokens: list[Tensor]) -> Tensor:
        """Sum (B, 1, W) of the tokens of instruction, keypoints and state, given the tokens of `forward` in order."""
        alone = [part for part in tokens if part.shape[1] == 1]  # instruction and state; the image has several
        # of the image only the keypoints; its patches are left to attention
        if self.stem is not None and self.config.keypoints:
            alone.append(tokens[1][:, -1:])  # the stem puts the keypoints after the patches
        return torch.stack(alone).sum(0)

    def _instructions(self, texts: tuple[str, ...]) -> Tensor:
        """(B, W); each distinct text is encoded once."""
        distinct = list(dict.fromkeys(texts))
        words = self.vocabulary.encode(distinct, self.config.words).to(self.queries.device)
        number = {text: place for place, text in enumerate(distinct)}
        index = torch.tensor([number[text] for text in texts], device=self.queries.device)
        return take_rows(self.instruction(words), index)

    def _images(self, batch: PolicyInputs) -> Tensor:
        size = tuple(self.config.image_size or ())
        found = None if batch.images is None else tuple(batch.images.shape[1:3])
        if batch.images is None or found != size:
            raise UserError(f"the policy expects images of {size} pixels, got {found or 'none'}")
        return batch.images

    def _states(self, batch: PolicyInputs) -> Tensor:
        found = None if batch.state is None else batch.state.shape[1]
        if batch.state is None or found != self.config.state_size:
            raise UserError(f"the policy expects a state of {self.config.state_size} entries, got {found or 'none'}")
        return batch.state


class StateEncoder(nn.Module):
    """Encodes a state and an instruction into the outputs (B, K, W) for K control steps."""

    def __init__(self, config: EncoderConfig, vocabulary: Vocabulary, queries: int) -> None:
        super().__init__()
        if config.state_size is None:
            raise UserError("the policy has neither images nor a state as input; set image_size or state_size")
        self.config = config
        self.vocabulary = vocabulary
        self.queries = queries
        self.scale = StateScale(config.state_size)
        widths = [config.width] * (config.layers - 1) + [config.width * queries]
        self.state = nn.Linear(config.state_size, widths[0])
        self.words = nn.Embedding(len(vocabulary), widths[0], padding_idx=PADDING)
        self.layers = nn.ModuleList(nn.Linear(config.width, width) for width in widths[1:])

    def forward(self, batch: PolicyInputs) -> Tensor:
        """Encode B rows.

        Gradient: into all weights.
        """
        batch = batch.to(self.state.weight.device)
        found = None if batch.state is None else batch.state.shape[1]
        if batch.state is None or found != self.config.state_size:
            raise UserError(f"the policy expects a state of {self.config.state_size} entries, got {found or 'none'}")
        hidden = (self.state(self.scale(batch.state)) + self._instructions(batch.instructions)).relu()
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return hidden.unflatten(-1, (self.queries, self.config.width))

    def scale_states(self, statistics: StateStatistics) -> None:
        """Set the state statistics of a dataset."""
        self.scale.set(statistics)

    def _instructions(self, texts: tuple[str, ...]) -> Tensor:
        """(B, W), the mean of the word vectors; each distinct text is encoded once."""
        distinct = list(dict.fromkeys(texts))
        words = self.vocabulary.encode(distinct, self.config.words).to(self.state.weight.device)
        real = (words != PADDING).sum(1, keepdim=True)
        means = self.words(words).sum(1) / real
        if len(distinct) == 1:
            return means
        number = {text: place for place, text in enumerate(distinct)}
        return take_rows(means, torch.tensor([number[text] for text in texts], device=means.device))


class InstructionEncoder(nn.Module):
    """Encodes words to one vector; texts are padded to a fixed length so that they do not depend on each other."""

    def __init__(self, entries: int, length: int, width: int, heads: int) -> None:
        super().__init__()
        self.words = nn.Embedding(entries, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.block = EncoderBlock(width, heads)

    def forward(self, words: Tensor) -> Tensor:
        """(n, L) int64 -> (n, W)."""
        real = words != PADDING
        # padding must not change the vector: texts of a batch may differ in length
        hidden = self.block(self.words(words) + self.places, real=real)
        weight = real[..., None].to(hidden.dtype)
        return (hidden * weight).sum(1) / weight.sum(1)


class _ImageStem(nn.Module):
    """Encodes images (B, H, W, 3) uint8 to 16 patch tokens and, with keypoints, one keypoint token."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        channels = config.channels
        width = config.width
        self.octaves = config.octaves
        self.first = nn.Conv2d(3, channels // 2, 5, stride=2, padding=2)
        self.second = nn.Conv2d(channels // 2, channels, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(GROUPS, channels)
        self.film = nn.Linear(width, 2 * channels)
        # zero at initialisation, so that features do not depend on the instruction at first
        nn.init.zeros_(self.film.weight)
        nn.init.zeros_(self.film.bias)
        self.third = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.patches = nn.Linear(4 * channels, width)
        self.places = nn.Parameter(torch.randn(PATCHES**2, width) * 0.02)
        self.keypoints = nn.Conv2d(channels, config.keypoints, 1) if config.keypoints else None
        self.keypoint_token = (
            nn.Linear(octave_size(2 * config.keypoints, config.octaves), width) if config.keypoints else None
        )
        if self.keypoints is not None:
            # with nearly equal scores, every keypoint would be the centre of the image, and learning would start slowly
            nn.init.normal_(self.keypoints.weight, std=KEYPOINT_SHARPNESS / config.channels**0.5)

    def forward(self, images: Tensor, text: Tensor) -> Tensor:
        pixels = images.permute(0, 3, 1, 2).to(self.places.dtype) / 255 - 0.5
        features = self.norm(self.second(functional.gelu(self.first(pixels))))
        scale, shift = self.film(text)[:, :, None, None].chunk(2, 1)
        features = functional.gelu(features * (1 + scale) + shift)  # 1 + scale: FiLM starts as the identity
        # each patch is 2 x 2 positions of the coarser map, concatenated
        # pooled to a fixed 8 x 8, so that the number of tokens does not depend on the image size
        coarse = functional.adaptive_avg_pool2d(functional.gelu(self.third(features)), 2 * PATCHES)
        tokens = self.patches(functional.pixel_unshuffle(coarse, 2).flatten(2).transpose(1, 2)) + self.places
        if self.keypoints is None or self.keypoint_token is None:
            return tokens
        found = octave_code(expected_places(self.keypoints(features)), self.octaves)
        return torch.cat([tokens, self.keypoint_token(found)[:, None]], 1)


class EncoderBlock(nn.Module):
    """Pre-norm transformer block without dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.between = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor, real: Tensor | None = None, tail: int | None = None) -> Tensor:
        """(B, N, W) -> (B, N, W), or only the last `tail` tokens; `real` (B, N) marks the tokens to attend to."""
        q, k, v = self.qkv(self.before(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if tail is not None:  # the last block: only the queries are read, so nothing else is computed
            q, hidden = q[:, :, -tail:], hidden[:, -tail:]
        allowed = None if real is None else real[:, None, None]
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        hidden = hidden + self.out(seen.transpose(1, 2).flatten(2))
        return hidden + self.narrow(functional.gelu(self.wide(self.between(hidden))))


def expected_places(maps: Tensor) -> Tensor:
    """Expected positions (B, 2k) in -1..1 under the softmax of each map of scores (B, k, h, w)."""
    # float32 softmax over thousands of positions
    weight = maps.float().flatten(2).softmax(-1).unflatten(-1, maps.shape[2:])
    rows = torch.linspace(-1, 1, maps.shape[2], device=maps.device)
    columns = torch.linspace(-1, 1, maps.shape[3], device=maps.device)
    return torch.cat([(weight.sum(3) * rows).sum(-1), (weight.sum(2) * columns).sum(-1)], 1)


class EncodedPolicy(nn.Module):
    """Mixin for an `ActionPolicy` with an `ObservationEncoder`, constructed as `cls(config, vocabulary, seed)`.

    The seed initialises the weights; the global generator is not used. Numbers out of range raise UserError.
    """

    kind: ClassVar[str]
    """Key of `robotics.policies.base.action_policy.SAVED_POLICIES`."""
    config_class: ClassVar[type[Any]]
    """Dataclass of the configuration, with a field `encoder`."""
    config: Any
    vocabulary: Vocabulary
    encoder: ObservationEncoder | StateEncoder
    statistics: ActionStatistics | None
    action_size: int
    action_bounds: ActionRange | None
    interface: RobotInterface | None

    @classmethod
    def build(cls, config: Any, instructions: Iterable[str], seed: int = 0) -> Self:
        """Create a policy whose vocabulary is the words of some instructions."""
        return cls(config, Vocabulary.from_texts(instructions), seed)

    def scale_states(self, statistics: StateStatistics) -> None:
        self.encoder.scale_states(statistics)

    def features(self, batch: PolicyInputs) -> Tensor:
        """The mean (B, W) of the encoder's outputs."""
        return self.encoder(batch).mean(1)

    def save_pretrained(self, path: Path | str) -> None:
        folder = Path(path)
        write_config(folder, self.kind, self.config, self)
        self.vocabulary.save(folder / VOCABULARY_FILE)
        write_weights(self, folder)

    def load_weights(self, path: Path | str) -> None:
        self.vocabulary.check_same(Path(path) / VOCABULARY_FILE)
        read_weights(self, Path(path))
        # action bounds and interface are saved next to the weights, not among them
        read_units(Path(path), self)

    @classmethod
    def from_pretrained(cls, path: Path | str) -> Self:
        """Load what `save_pretrained` wrote."""
        return open_encoded(cls, Path(path))


def open_encoded(policy_class: Any, folder: Path, part: Callable[[Path], Any] | None = None) -> Any:
    """Open a folder with a configuration and a vocabulary as a policy.

    Args:
        policy_class: its `kind`, its `config_class` with a field `encoder`, and its constructor.
        folder: of `save_pretrained`.
        part: opens a further argument of the constructor from the folder.

    Raises:
        UserError: the folder has another kind of policy, or its files do not fit each other.
    """
    entries = read_config(folder)
    kind = entries.pop("kind", None)
    if kind != policy_class.kind:
        raise UserError(f"{folder} contains a policy of kind {kind!r}, not {policy_class.kind!r}")
    # a copy: the entries are consumed below
    sizes = dict(entries)
    encoder = make_config(EncoderConfig, entries.pop("encoder", {}), f"encoder in {folder}")
    config = make_config(policy_class.config_class, entries | {"encoder": encoder}, str(folder))
    words, further = Vocabulary.load(folder / VOCABULARY_FILE), [] if part is None else [part(folder)]
    # sizes are checked against the weight file before memory is allocated
    policy = build_fitting(lambda: policy_class(config, words, *further), sizes, folder)
    policy.load_weights(folder)
    return policy
