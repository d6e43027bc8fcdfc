"""Held-out judge for images of shapes: a small counting network, whereas the reward's detector follows rules.

A policy that only exploits a gap in the rules raises the reward but not the judge; reporting both makes this visible.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from diffusion.toy.shapes import COLOURS, SHAPES, Scene, ShapeGroup, all_scenes, render_dataset
from diffusion.toy.shapes.geneval import metadata_rows
from mmrl.errors import UserError
from mmrl.files import read_json_object, replaced, write_atomically

LOOKS: tuple[tuple[str, str], ...] = tuple(itertools.product(COLOURS, SHAPES))
"""The 12 pairs of colour and shape, in the order of the network's outputs."""
COUNT_CLASSES = 4
"""0, 1, 2, and 3 or more of a look."""
WIDTHS = (24, 48, 64)
EPOCHS, BATCH, LEARNING_RATE = 12, 64, 4e-3
EMPTY_SHARE = 0.03
NOISE = 6.0
WEIGHTS_FILE, SETTINGS_FILE = "judge.safetensors", "judge.json"


@dataclass(frozen=True)
class _Examples:
    """Images (N, 3, S, S) uint8 and the count class of each look (N, 12) int64."""

    pixels: Tensor
    counts: Tensor


class ShapesJudge:
    """Counts the objects of every colour and shape: images (B, 3, S, S) in -1..1 to logits (B, 12, 4)."""

    def __init__(self, network: nn.Module, size: int, seed: int) -> None:
        self.network = network.eval().requires_grad_(False)
        self.size = size
        self.seed = seed

    @classmethod
    def fit(cls, seed: int = 0, *, images: int = 5000, size: int = 32) -> ShapesJudge:
        """Train a judge on fresh renders; the defaults take about 40 seconds on one core."""
        if images < BATCH:
            raise UserError(f"images={images} must be at least {BATCH}")
        examples = _render_examples(images, size, seed)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed)
            network = _network()
            _train(network, examples, torch.Generator().manual_seed(seed))
        return cls(network, size, seed)

    @torch.no_grad()
    def probabilities(self, images: Sequence[NDArray[np.uint8]]) -> Tensor:
        """Probabilities (B, 12, 4) float32 that images (H, W, 3) uint8 have 0, 1, 2, or 3 and more of each look.

        Images of another size than the judge's are resampled.
        """
        if not len(images):
            return torch.zeros(0, len(LOOKS), COUNT_CLASSES)
        pixels = torch.cat([_resampled(image, self.size) for image in images])
        logits = torch.cat([self.network(_normalised(part)) for part in pixels.split(256)])
        return logits.softmax(-1)

    def score(self, images: Sequence[NDArray[np.uint8]], metadatas: Sequence[Mapping[str, Any]]) -> list[float]:
        """Probability that every look has the number of objects required by its description in GenEval's format.

        Positions are not judged.
        """
        if len(images) != len(metadatas):
            raise ValueError(f"there are {len(images)} images and {len(metadatas)} descriptions")
        if not len(images):
            return []
        wanted = torch.stack([wanted_counts(metadata) for metadata in metadatas])
        chosen = self.probabilities(images).gather(-1, wanted[..., None]).squeeze(-1)
        return chosen.prod(-1).tolist()

    def save(self, folder: Path | str) -> Path:
        """Write weights and settings to a folder."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.network.state_dict(), folder / WEIGHTS_FILE)
        write_atomically(folder / SETTINGS_FILE, json.dumps({"size": self.size, "seed": self.seed}) + "\n")
        return folder

    @classmethod
    def load(cls, folder: Path | str) -> ShapesJudge:
        """Load a saved judge."""
        from safetensors.torch import load_file

        folder = Path(folder)
        missing = [name for name in (WEIGHTS_FILE, SETTINGS_FILE) if not (folder / name).is_file()]
        if missing:
            raise UserError(
                f"no judge at {folder}, expected {WEIGHTS_FILE} and {SETTINGS_FILE}; {missing[0]} is missing"
            )
        settings = read_json_object(folder / SETTINGS_FILE)
        network = _network()
        try:
            network.load_state_dict(load_file(folder / WEIGHTS_FILE))
            return cls(network, int(settings["size"]), int(settings["seed"]))
        except Exception as error:  # safetensors and torch each raise their own kinds
            raise UserError(f"the judge at {folder} is damaged: {type(error).__name__}: {error}") from error


def shapes_judge(
    prompts: Sequence[str],
    completions: Sequence[NDArray[np.uint8]],
    *,
    path: str,
    metadata: Sequence[Mapping[str, Any] | None] | None = None,
    seed: int = 0,
    images: int = 5000,
    **_: Any,
) -> list[float]:
    """Score images with a judge that is trained once and stored in a folder; for evaluation, not for training.

    `metadata` is in GenEval's format; if missing, it is read from the caption. Options: `path`, folder of the judge,
    which is created if missing, and `seed` and number of `images` for its training.
    """
    return _kept_judge(path, seed, images).score(completions, metadata_rows(prompts, metadata))


def wanted_counts(metadata: Mapping[str, Any]) -> Tensor:
    """Count class (12,) int64 of each look in a description; 0 if it is not asked for."""
    counts = torch.zeros(len(LOOKS), dtype=torch.int64)
    for wanted in metadata["include"]:
        look = LOOKS.index((wanted["color"], wanted["class"]))
        counts[look] += int(wanted["count"])
    return counts.clamp(max=COUNT_CLASSES - 1)


@functools.lru_cache(maxsize=4)
def _kept_judge(path: str, seed: int, images: int) -> ShapesJudge:
    folder = Path(path)
    if folder.exists():
        return ShapesJudge.load(folder)
    judge = ShapesJudge.fit(seed, images=images)
    with replaced(folder) as draft:  # other processes may fit the same one at the same time
        judge.save(draft)
    return judge


def _network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after, stride in zip((3, *WIDTHS), WIDTHS, (2, 2, 1), strict=False):
        layers += [nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.ReLU()]
    answers = len(LOOKS) * COUNT_CLASSES
    # averaged over positions rather than flattened: a shape counts the same anywhere in the image
    layers += [nn.Conv2d(WIDTHS[-1], 2 * answers, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    layers += [nn.BatchNorm1d(2 * answers), nn.Linear(2 * answers, 2 * answers), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2 * answers, answers), nn.Unflatten(1, (len(LOOKS), COUNT_CLASSES)))


def _train(network: nn.Sequential, examples: _Examples, generator: torch.Generator) -> None:
    steps = EPOCHS * (len(examples.pixels) // BATCH)
    optimiser = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=steps)
    for rows in _minibatches(len(examples.pixels), generator):
        pixels = examples.pixels[rows]
        noise = NOISE * torch.randn(pixels.shape, generator=generator)
        logits = network(_normalised(pixels + noise))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), examples.counts[rows].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()


def _minibatches(count: int, generator: torch.Generator) -> Iterator[Tensor]:
    for _ in range(EPOCHS):
        yield from torch.randperm(count, generator=generator)[: count // BATCH * BATCH].split(BATCH)


def _render_examples(count: int, size: int, seed: int) -> _Examples:
    """Renders of captions and of other mixtures, and some images of the background alone."""
    rng = np.random.default_rng([seed, 1])
    pools = [all_scenes([kind]) for kind in ("single", "two", "count")] + [_mixed_scenes()]
    scenes = [pool[rng.integers(len(pool))] for pool in itertools.islice(itertools.cycle(pools), count)]
    images, _ = render_dataset(scenes, count, size=size, seed=seed)
    counts = torch.stack([wanted_counts(scene.metadata) for scene in scenes])
    empty = rng.random(count) < EMPTY_SHARE
    images[empty] = rng.integers(220, 252, (int(empty.sum()), 1, 1, 1), dtype=np.uint8)
    counts[torch.from_numpy(empty)] = 0
    return _Examples(torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), counts)


def _mixed_scenes() -> list[Scene]:
    """Scenes that no caption of the task asks for, so that a colour does not predict the shape next to it."""
    groups = [ShapeGroup(colour, shape, count) for colour, shape in LOOKS for count in (1, 2)]
    pairs = itertools.permutations(groups, 2)
    return [Scene(pair) for pair in pairs if pair[0].shape != pair[1].shape and pair[0].count + pair[1].count <= 3]


def _normalised(pixels: Tensor) -> Tensor:
    return pixels.float() / 127.5 - 1.0


def _resampled(image: NDArray[np.uint8], size: int) -> Tensor:
    """An image as a batch of one (1, 3, size, size) float32."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
    if pixels.shape[-2:] == (size, size):
        return pixels
    return nn.functional.interpolate(pixels, (size, size), mode="bilinear", antialias=True, align_corners=False)
