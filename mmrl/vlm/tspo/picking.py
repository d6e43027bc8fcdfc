"""Picking frames, and the log-probability of a pick.

In training, T_s of T candidates are drawn without replacement: the T_s largest of logits + Gumbel noise, in the order
of these sums (Gumbel top-k). Four log-probabilities of such a draw are offered:

* `mean_marginal`: log softmax(logits) at each picked frame, without noise, as in the public code; each pick is a
  decision and a row is the mean over its picks, so the gradient's scale does not depend on T_s.
* `sum_marginal`: the same, a row being their sum.
* `noisy_product`: log softmax(logits + noise) at each picked frame, a row being their sum; eq. 5 of the paper.
* `plackett_luce`: the exact probability of the order in which the noise ranked the frames, where each pick is drawn
  from the frames that are left. The public code sorts the picks by time first and so loses the order.

Shapes: B rows, T candidate frames, K picks.

Source: arXiv 2508.04369, section 3.2; Hui-design/TSPO model/utils.py `gumbel_softmax`, model/temporal_agent.py
`inference_ts`; Kool et al., Stochastic Beams and Where to Find Them, arXiv 1903.06059 (Gumbel top-k).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.vlm.tspo.agent import AgentSettings, TemporalAgent, load_agent
from mmrl.vlm.tspo.features import ClipEncoder, FeatureStore
from mmrl.vlm.tspo.needle_tasks import open_candidates

if TYPE_CHECKING:
    from PIL.Image import Image


LOGPROBS = ("mean_marginal", "sum_marginal", "noisy_product", "plackett_luce")
NEVER = -1e30
"""Logit of a frame that cannot be picked; finite, so that no gradient becomes NaN."""


def temperature_at(step: int, steps: int, start: float = 0.025, end: float = 0.01) -> float:
    """Temperature that scores are divided by, falling linearly over a run.

    Source: Hui-design/TSPO src/open_tspo/trainer/tspo_trainer.py (`score_tau`).
    """
    return start - (start - end) / max(steps, 1) * step


def gumbel_noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draws from the standard Gumbel distribution, float32."""
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
    return -(-uniform.log()).log().float()


def draw_picks(logits: Tensor, noise: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The frames with the largest sums of logit and noise, largest first.

    Args:
        logits: (B, T); `NEVER` on padding.
        noise: (B, T) Gumbel draws; zeros for the likeliest frames.
        counts: (B,) int64, picks of each row, at most its number of frames.

    Returns:
        Picks (B, K) int64 in the order of the draw, 0 on padding, and the mask (B, K) float.
    """
    most = int(counts.max())
    picks = (logits + noise).topk(most, dim=1).indices
    mask = torch.arange(most, device=picks.device) < counts[:, None]
    return picks * mask, mask.to(logits.dtype)


def pick_logprobs(form: str, logits: Tensor, picks: Tensor, mask: Tensor, noise: Tensor | None = None) -> Tensor:
    """Log-probability of each pick.

    Args:
        form: one of `LOGPROBS`; `mean_marginal` and `sum_marginal` differ only in how a row adds its picks up.
        logits: (B, T) scores over temperature; `NEVER` on padding.
        picks: (B, K) int64, frames in the order of the draw.
        mask: (B, K), 1 on picks and 0 on padding.
        noise: (B, T), what the picks were drawn with; for `noisy_product` only.

    Returns:
        (B, K) nats, 0 on padding.

    Gradient: through logits.
    """
    if form not in LOGPROBS:
        raise ValueError(f"unknown log-probability '{form}'; available: {', '.join(LOGPROBS)}")
    if form == "plackett_luce":
        logp = _plackett_luce(logits, picks, mask)
    else:
        if form == "noisy_product":
            if noise is None:
                raise ValueError("noisy_product needs the noise that the picks were drawn with")
            logits = logits + noise
        logp = logits.log_softmax(1).gather(1, picks)
    return torch.where(mask > 0, logp, 0.0)


def _plackett_luce(logits: Tensor, picks: Tensor, mask: Tensor) -> Tensor:
    """s_k - logsumexp of all frames that pick k was drawn from: the picks from k on, and the frames never picked."""
    chosen = torch.where(mask > 0, logits.gather(1, picks), 0.0)
    ever = torch.zeros_like(logits).scatter_reduce(1, picks, mask.to(logits.dtype), "amax") > 0
    others = logits.masked_fill(ever, NEVER).logsumexp(1)
    count = picks.shape[1]
    later = torch.ones(count, count, dtype=torch.bool, device=logits.device).triu()
    real = (mask > 0)[:, None] & later
    real = real | torch.eye(count, dtype=torch.bool, device=logits.device)  # padding has at least itself
    remaining = chosen[:, None].masked_fill(~real, float("-inf")).logsumexp(2)
    return chosen - torch.logaddexp(remaining, others[:, None])


def top_frames(scores: Tensor, count: int) -> Tensor:
    """The frames with the largest scores.

    Args:
        scores: (T,).
        count: wanted picks; fewer come back if there are fewer frames.

    Returns:
        (K,) int64, rising.
    """
    return scores.topk(min(count, len(scores))).indices.sort().values


def bin_max_frames(scores: Tensor, count: int) -> Tensor:
    """The best frame of each part of the video; used by the public code for Video-MME.

    Every frame belongs to the nearest of `count` evenly spaced places (at equal distance to the earlier one).

    Args:
        scores: (T,).
        count: wanted picks; fewer come back if there are fewer frames.

    Returns:
        (K,) int64, rising.
    """
    total = len(scores)
    count = min(count, total)
    places = torch.tensor([total - 1] if count == 1 else [round(i * (total - 1) / (count - 1)) for i in range(count)])
    nearest = (torch.arange(total)[:, None] - places).abs().argmin(1)
    best = [int(scores.masked_fill(nearest.to(scores.device) != part, -torch.inf).argmax()) for part in range(count)]
    return torch.tensor(best, device=scores.device)


def uniform_frames(total: int, count: int) -> Tensor:
    """Evenly spaced frames, including the first and the last, as video models sample them.

    Returns:
        (K,) int64, rising; fewer than `count` if there are fewer frames.
    """
    return torch.from_numpy(np.linspace(0, total - 1, min(count, total), dtype=np.int64))


METHODS: dict[str, Callable[[Tensor, int], Tensor]] = {"topk": top_frames, "bin-max": bin_max_frames}
"""Functions of scores (T,) and a number of picks that choose the frames of an evaluation, by name."""


@dataclass(frozen=True)
class PickedFrames:
    """Frames of a video, in chronological order."""

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
            raise UserError(f"unknown method {method!r}; available: {', '.join(METHODS)}")
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
            f"the agent in {folder} needs embeddings of width {agent.width}, but {clip.path} has width {clip.width}"
        )
    return FramePicker(agent, settings, FeatureStore(clip, cache))
