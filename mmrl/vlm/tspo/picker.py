"""Frames for any video model: a trained agent picks them from a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mmrl.errors import UserError
from mmrl.vlm.tspo.agent import AgentSettings, TemporalAgent, load_agent
from mmrl.vlm.tspo.features import ClipEncoder, FeatureStore
from mmrl.vlm.tspo.needle_tasks import open_candidates
from mmrl.vlm.tspo.picking import METHODS

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class PickedFrames:
    """Frames of a video, in the order of time."""

    numbers: list[int]
    """Their indices in the file."""
    seconds: list[float]
    """Their times from the start of the video."""
    images: list[Image]


class FramePicker:
    """Picks the frames of a video that a question needs.

    Args:
        agent: scores frames.
        settings: candidates and picks.
        store: embeds frames and questions.
    """

    def __init__(self, agent: TemporalAgent, settings: AgentSettings, store: FeatureStore) -> None:
        self.agent = agent.eval()
        self.settings = settings
        self.store = store

    @torch.no_grad()
    def pick(self, video: Path | str, question: str, count: int = 0, method: str = "topk") -> PickedFrames:
        """Pick frames.

        Args:
            video: file.
            question: the question without its options.
            count: most frames; 0 = as many as in training.
            method: topk, the best frames; bin-max, the best of each part of the video.

        Raises:
            UserError: unknown method.
            VideoError: the video cannot be read.
        """
        if method not in METHODS:
            raise UserError(f"there is no method {method!r}; there are: {', '.join(METHODS)}")
        candidates = open_candidates(str(video), self.settings.fps, self.settings.max_frames)
        features, text = self.store.frames(candidates), self.store.text(question)
        scores = self.agent(features[None], text[None])[0]
        picks = METHODS[method](scores, count or self.settings.count).tolist()
        images, seconds = candidates.images(picks), candidates.seconds
        return PickedFrames(
            [candidates.numbers[pick] for pick in picks],
            [seconds[pick] for pick in picks],
            [images[pick] for pick in picks],
        )


def load_frame_picker(
    folder: Path | str, encoder: str | None = None, cache: Path | str | None = None, device: str = "cpu"
) -> FramePicker:
    """Load a trained agent with its CLIP.

    Args:
        folder: of the agent, or of its run.
        encoder: CLIP folder or hub id; None takes the one that the agent was trained with.
        cache: folder in which features are kept; None keeps them in memory.
        device: of the CLIP.

    Raises:
        UserError: the agent or the CLIP cannot be loaded, or do not fit together.
    """
    agent, settings = load_agent(folder)
    clip = ClipEncoder(encoder or settings.encoder, device=device)
    if clip.width != agent.width:
        raise UserError(
            f"the agent in {folder} reads embeddings of width {agent.width}; {clip.path} gives {clip.width}"
        )
    return FramePicker(agent, settings, FeatureStore(clip, cache))
