"""The latent of a contrastive encoder that is trained on the first episodes of the run itself, then frozen."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mmrl.errors import UserError
from mmrl.fields import bounded, check_config
from robotics.vla.contrastive import (
    ContrastiveEncoder,
    ContrastiveEncoderConfig,
    ContrastiveTraining,
    LateFrames,
    train_contrastive_encoder,
)
from robotics.vla.latent_rows import RowLatent, check_frames

if TYPE_CHECKING:
    from numpy.typing import NDArray

LOGGER = logging.getLogger("mmrl")


@dataclass
class ContrastiveSettings:
    """Settings of the contrastive latent."""

    path: str = ""
    """Folder of a trained `ContrastiveEncoder`; empty = one is trained on the run's first episodes."""
    episodes: int = bounded(256, at_least=4)
    """Episodes of the run that it is trained on; until then failures earn nothing."""
    steps: int = bounded(1000, at_least=1)
    """Optimiser steps of each seed."""
    seeds: int = bounded(3, at_least=1)
    """Encoders that are trained; the one with the lowest loss on held-out episodes is kept."""
    seed: int = 0
    """The first of them."""
    late: float = bounded(0.6, above=0, at_most=1)
    """Share of an episode, at its end, that training takes frames from."""
    batch_size: int = bounded(64, at_least=1)
    """Trajectories at once."""
    cache: int = bounded(4096, at_least=0)
    """Latents in the cache."""


class ContrastiveLatent(RowLatent):
    """Latent of the last frame beside the first one; the arm is explained away, see `robotics.vla.contrastive`."""

    def __init__(self, settings: ContrastiveSettings) -> None:
        check_config(settings, "latent")
        self.settings = settings
        self._encoder = ContrastiveEncoder.from_pretrained(settings.path) if settings.path else None
        config = ContrastiveEncoderConfig() if self._encoder is None else self._encoder.config
        self.fit_episodes = 0 if settings.path else settings.episodes
        super().__init__(config.size, settings.batch_size, settings.cache)

    @property
    def ready(self) -> bool:
        """Whether there is an encoder."""
        return self._encoder is not None

    def fit(
        self,
        frames: Sequence[NDArray[np.uint8] | None],
        states: Sequence[NDArray[np.float32]],
        labels: Sequence[Hashable],
    ) -> None:
        """Train the encoder; see `RowLatent.fit`."""
        how = ContrastiveTraining(
            steps=self.settings.steps, seeds=self.settings.seeds, seed=self.settings.seed, late=self.settings.late
        )
        films = [
            LateFrames.of(film, path, label, how.late)
            for film, path, label in zip(frames, states, labels, strict=True)
            if film is not None
        ]
        self._encoder, losses = train_contrastive_encoder([film for film in films if film is not None], training=how)
        LOGGER.info(
            "contrastive encoder trained on %d episodes; held-out loss of its seeds, 0 without any use: %s",
            len(films),
            ", ".join(f"{loss:.2f}" for loss in losses),
        )

    def state_dict(self) -> dict[str, Any]:
        """Weights of an encoder that was trained here."""
        return {} if self.settings.path or self._encoder is None else {"encoder": self._encoder.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        if "encoder" in state:
            self._encoder = ContrastiveEncoder(ContrastiveEncoderConfig()).eval()
            self._encoder.load_state_dict(state["encoder"])

    def _prepare(self, frames: NDArray[np.uint8] | None, states: NDArray[np.float32]) -> NDArray[Any]:
        return check_frames(frames)[[0, -1]]

    @torch.no_grad()
    def _compute(self, given: list[NDArray[Any]]) -> NDArray[np.float32]:
        if self._encoder is None:
            raise UserError("the contrastive encoder has not been trained yet; call `fit`")
        pairs = torch.from_numpy(np.stack(given))
        return np.asarray(self._encoder(pairs[:, 1], pairs[:, 0]).numpy(), np.float32)
