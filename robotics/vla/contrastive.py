"""A small image encoder that learns what an episode changed in the scene, from unlabelled episodes of a policy.

Late in episodes of one initial state, pictures differ in what happened to the objects and in where the arm is. Two late
frames of one episode share the first and not the second, so an encoder that recognises the episode by them learns the
objects. What the arm's position alone tells is explained away by a second network that sees only the robot's state:

    z(x, x_0) = MLP of 8 keypoints of a small CNN over the frame x beside its difference to the episode's first frame,
    logit_ij  = -|z(a_i) - z(b_j)|^2 - |h(s(a_i)) - h(s(b_j))|^2,      a_i, b_i two late frames of episode i,
    loss      = mean of the cross-entropies of the rows and of the columns, with i = j as the right answer,

over episodes of one initial state (symmetric InfoNCE). h is dropped after training. Seeds differ more than other
choices do, so several are trained and the one with the lowest loss on held-out episodes is kept.

Source: InfoNCE: arXiv 1807.03748, its symmetric form: CLIP, arXiv 2103.00020; keypoints (spatial softmax): arXiv
1504.00702.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mmrl.errors import UserError
from mmrl.fields import bounded, check_config, check_fields
from mmrl.files import read_json_object, replaced, write_atomically
from robotics.vla.encoder import KEYPOINT_SHARPNESS, expected_places

if TYPE_CHECKING:
    from numpy.typing import NDArray

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
KIND = "mmrl_contrastive_encoder"
NORM_GROUPS = 4
SMALLEST_STD = 1e-6
FEWEST_EPISODES = 2
"""Episodes of an initial state of which one can be told from the others."""
HELD_OUT_DRAWS = 16
"""Pairs of late frames of each held-out episode; with a single one the choice between seeds is mostly luck."""


@dataclass(frozen=True)
class ContrastiveEncoderConfig:
    """Sizes of a contrastive encoder; the defaults have 17 thousand parameters."""

    side: int = bounded(32, at_least=8)
    """Longer side in pixels to which larger frames are reduced, by averages over areas."""
    channels: int = bounded(16, at_least=1, multiple_of=NORM_GROUPS)
    """Channels after the first convolution, a multiple of 4; the next two have twice as many."""
    keypoints: int = bounded(8, at_least=1)
    """Keypoints of a frame."""
    hidden: int = bounded(64, at_least=1)
    """Width of the MLP on their places."""
    size: int = bounded(8, at_least=1)
    """Entries of the latent."""


@dataclass(frozen=True)
class ContrastiveTraining:
    """How a contrastive encoder is trained."""

    steps: int = bounded(1000, at_least=1)
    """Optimiser steps of each seed."""
    batch: int = bounded(32, at_least=FEWEST_EPISODES)
    """Episodes a step, all of one initial state."""
    late: float = bounded(0.6, above=0, at_most=1)
    """Share of an episode, at its end, that late frames are taken from; at least two frames. With the last third alone
    the arm hardly moves between them, and encoders learned its pose by heart."""
    seeds: int = bounded(3, at_least=1)
    """Encoders that are trained, of which one is kept."""
    held_out: float = bounded(0.2, above=0, below=1)
    """Share of each initial state's episodes by whose loss it is chosen."""
    learning_rate: float = bounded(1e-3, above=0, finite=True)
    """Peak learning rate of AdamW, after a warm-up of a tenth of the steps; then a cosine to 0."""
    seed: int = 0
    """First seed of the weights and of the choice of frames."""


@dataclass(frozen=True)
class LateFrames:
    """What training needs of an episode."""

    first: NDArray[np.uint8]
    """(H, W, 3), its first frame."""
    frames: NDArray[np.uint8]
    """(L >= 2, H, W, 3), its late frames."""
    states: NDArray[np.float32]
    """(L, S), the robot's states at these frames."""
    label: Hashable
    """Its initial state."""

    @classmethod
    def of(cls, film: NDArray[np.uint8], path: NDArray[np.float32], label: Hashable, late: float) -> Self | None:
        """Late frames of an episode; None where it has fewer than two frames.

        Args:
            film: (F, H, W, 3).
            path: (P, S) states, evenly spaced over the same time; each frame gets the nearest.
            label: its initial state.
            late: share of the episode that counts as late.
        """
        count = len(film)
        if count < FEWEST_EPISODES:
            return None
        places = np.arange(count - max(2, math.ceil(late * count)), count)
        nearest = np.rint(places * (len(path) - 1) / (count - 1)).astype(np.int64)
        return cls(film[0], film[places], path[nearest], label)


class ContrastiveEncoder(nn.Module):
    """Latents of frames seen beside the first frame of their episode."""

    def __init__(self, config: ContrastiveEncoderConfig) -> None:
        super().__init__()
        check_fields(config, "encoder")
        self.config = config
        narrow, wide = config.channels, 2 * config.channels
        self.features = nn.Sequential(
            *_convolution(6, narrow, 2), *_convolution(narrow, wide, 2), *_convolution(wide, wide, 1)
        )
        self.maps = nn.Conv2d(wide, config.keypoints, 1)
        # with nearly equal scores every keypoint is the middle of the image, and learning starts slowly
        nn.init.normal_(self.maps.weight, std=KEYPOINT_SHARPNESS / wide**0.5)
        self.head = _mlp(2 * config.keypoints, config.hidden, config.size)

    def forward(self, frames: Tensor, first: Tensor) -> Tensor:
        """Embed frames.

        Args:
            frames: (B, H, W, 3) uint8.
            first: (B, H, W, 3) uint8, the first frame of each one's episode.

        Returns:
            (B, size) float32.
        """
        now, begun = (self._reduced(part.permute(0, 3, 1, 2).float() / 255) for part in (frames, first))
        seen = torch.cat([2 * now - 1, 2 * (now - begun)], 1)
        found: Tensor = self.head(expected_places(self.maps(self.features(seen))))
        return found

    def _reduced(self, images: Tensor) -> Tensor:
        height, width = images.shape[2:]
        share = self.config.side / max(height, width)
        if share >= 1:
            return images
        return functional.adaptive_avg_pool2d(images, (max(1, round(share * height)), max(1, round(share * width))))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write weights and sizes; the folder is created if it is missing."""
        from safetensors.torch import save_file

        place = Path(folder)
        with replaced(place / WEIGHTS_FILE) as draft:
            save_file({name: weight.detach().cpu().contiguous() for name, weight in self.state_dict().items()}, draft)
        write_atomically(place / CONFIG_FILE, json.dumps({"model_type": KIND, **asdict(self.config)}, indent=2) + "\n")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Read what `save_pretrained` wrote, in evaluation mode on the CPU."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        place = Path(folder)
        saved = read_json_object(place / CONFIG_FILE)
        if saved.pop("model_type", None) != KIND:
            raise UserError(f"{place / CONFIG_FILE} does not describe a contrastive encoder ({KIND})")
        try:
            config = ContrastiveEncoderConfig(**saved)
            check_config(config)
            encoder = cls(config)
            encoder.load_state_dict(load_file(place / WEIGHTS_FILE))
        except (OSError, SafetensorError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(f"the contrastive encoder in {place} cannot be read: {error}") from error
        return encoder.eval()


def contrastive_loss(latents: tuple[Tensor, Tensor], arm: tuple[Tensor, Tensor]) -> Tensor:
    """Symmetric InfoNCE of two views of B episodes.

    Args:
        latents: (B, E) of one late frame of each episode, and of another.
        arm: (B, H) of the robot's states at these frames.
    """
    logits = -_squared_distances(*latents) - _squared_distances(*arm)
    right = torch.arange(len(logits), device=logits.device)
    return (functional.cross_entropy(logits, right) + functional.cross_entropy(logits.T, right)) / 2


def train_contrastive_encoder(
    episodes: Sequence[LateFrames],
    config: ContrastiveEncoderConfig | None = None,
    training: ContrastiveTraining | None = None,
) -> tuple[ContrastiveEncoder, list[float]]:
    """Train encoders with several seeds and keep the one with the lowest loss on held-out episodes."""
    sizes, how = config or ContrastiveEncoderConfig(), training or ContrastiveTraining()
    check_fields(how, "training")
    mean, std = _state_scale(episodes)
    kept, chosen = _split(episodes, how.held_out)
    best, losses = None, []
    for seed in range(how.seed, how.seed + how.seeds):
        encoder, arm = _train(kept, sizes, how, seed, (mean, std))
        losses.append(_held_out_loss(chosen, encoder, arm, (mean, std)))
        if best is None or losses[-1] < min(losses[:-1]):
            best = encoder
    assert best is not None
    return best, losses


def _train(
    groups: list[list[LateFrames]],
    sizes: ContrastiveEncoderConfig,
    how: ContrastiveTraining,
    seed: int,
    scale: tuple[Tensor, Tensor],
) -> tuple[ContrastiveEncoder, nn.Module]:
    draws = np.random.default_rng(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = ContrastiveEncoder(sizes).train()
        arm = _mlp(len(scale[0]), sizes.hidden, sizes.size)
    weights = [*encoder.parameters(), *arm.parameters()]
    optimiser = torch.optim.AdamW(weights, lr=how.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate_at(step, how.steps))
    chances = np.array([len(group) for group in groups], float)
    for _ in range(how.steps):
        group = groups[draws.choice(len(groups), p=chances / chances.sum())]
        picked = draws.choice(len(group), min(how.batch, len(group)), replace=False)
        loss = _loss_of([group[place] for place in picked], encoder, arm, scale, draws)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        schedule.step()
    return encoder.eval(), arm


@torch.no_grad()
def _held_out_loss(
    groups: list[list[LateFrames]], encoder: ContrastiveEncoder, arm: nn.Module, scale: tuple[Tensor, Tensor]
) -> float:
    """Mean over initial states and over draws of two late frames, the same for every seed, less what chance gives."""
    draws = np.random.default_rng(0)
    found = [
        _loss_of(group, encoder, arm, scale, draws).item() - math.log(len(group))
        for _ in range(HELD_OUT_DRAWS)
        for group in groups
    ]
    return float(np.mean(found))


def _loss_of(
    episodes: Sequence[LateFrames],
    encoder: ContrastiveEncoder,
    arm: nn.Module,
    scale: tuple[Tensor, Tensor],
    draws: np.random.Generator,
) -> Tensor:
    pairs = [draws.choice(len(episode.frames), 2, replace=False) for episode in episodes]
    first = torch.from_numpy(np.stack([episode.first for episode in episodes]))
    views, states = [], []
    for side in range(2):
        late = [episode.frames[pair[side]] for episode, pair in zip(episodes, pairs, strict=True)]
        views.append(encoder(torch.from_numpy(np.stack(late)), first))
        at = np.stack([episode.states[pair[side]] for episode, pair in zip(episodes, pairs, strict=True)])
        states.append(arm((torch.from_numpy(at) - scale[0]) / scale[1]))
    return contrastive_loss((views[0], views[1]), (states[0], states[1]))


def _split(episodes: Sequence[LateFrames], share: float) -> tuple[list[list[LateFrames]], list[list[LateFrames]]]:
    """Episodes to train on and to choose by, of each initial state that has enough of them; the last are held out."""
    by_label: dict[Hashable, list[LateFrames]] = {}
    for episode in episodes:
        by_label.setdefault(episode.label, []).append(episode)
    kept, chosen = [], []
    for group in by_label.values():
        apart = max(FEWEST_EPISODES, round(share * len(group)))
        if len(group) - apart >= FEWEST_EPISODES:
            kept.append(group[:-apart])
            chosen.append(group[-apart:])
    if not kept:
        raise UserError(
            f"a contrastive encoder compares episodes of one initial state, at least {2 * FEWEST_EPISODES} of them; "
            f"of the {len(episodes)} given the largest has {max(map(len, by_label.values()), default=0)}"
        )
    return kept, chosen


def _state_scale(episodes: Sequence[LateFrames]) -> tuple[Tensor, Tensor]:
    moments = np.concatenate([episode.states for episode in episodes]) if len(episodes) else np.zeros((1, 1))
    std = moments.std(0)
    return torch.from_numpy(moments.mean(0)).float(), torch.from_numpy(np.where(std > SMALLEST_STD, std, 1.0)).float()


def _squared_distances(a: Tensor, b: Tensor) -> Tensor:
    return (a[:, None] - b[None]).square().sum(-1)


def _convolution(into: int, out: int, stride: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(into, out, 3, stride, padding=1), nn.GroupNorm(NORM_GROUPS, out), nn.GELU()


def _mlp(into: int, hidden: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(into, hidden), nn.GELU(), nn.Linear(hidden, out))


def _rate_at(step: int, steps: int) -> float:
    warm = max(1, steps // 10)
    return (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
