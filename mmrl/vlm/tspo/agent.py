"""The temporal agent of TSPO: scores each candidate frame of a video for a question, from frozen CLIP features.

Shapes: N videos, T candidate frames of the longest one, D width of the features, w frames of a window.

Source: arXiv 2508.04369, section 3; Hui-design/TSPO model/temporal_agent.py. The public module has an unused output
layer (with it, the 3.5 million weights of the paper) and computes all T * T attention weights; here the layer is left
out and only the w weights inside each window are computed, so that time and memory grow with T.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.files import expanded, read_json_object, replaced
from mmrl.hub.building import base_entries, base_path, sort_header
from mmrl.runs.export import model_folder

OUTSIDE = -1e6
"""Attention score of frames outside the window, as in the public code."""
COSINE_EPS = 1e-6


class TemporalAgent(nn.Module):
    """Windowed self-attention over the frames, then the cosine between each frame and the question.

    X = F + PE,  context = attention(X) in a window,  E = MLP(context) + F,  S = cos(E, q) + cos(F, q)

    Args:
        width: width D of the embeddings, even and a multiple of heads.
        heads: attention heads.
        window: frames w that a frame attends to, half of them before it.

    Raises:
        UserError: the sizes do not fit together.
    """

    def __init__(self, width: int, heads: int = 8, window: int = 12) -> None:
        super().__init__()
        if min(width, heads, window) < 1 or width % 2 or width % heads:
            raise UserError(
                f"an agent of width {width}, with {heads} heads and a window of {window} frames, cannot be built: the "
                "width must be even and a multiple of the number of heads, and all values at least 1"
            )
        self.width = width
        self.heads = heads
        self.window = window
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, frames: Tensor, text: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Score frames.

        Args:
            frames: (N, T, D) frame embeddings, padded behind each video's own frames.
            text: (N, D) embedding of each question.
            lengths: (N,) int64, frames of each video; None: all have T.

        Returns:
            (N, T) scores in [-2, 2], undefined on padding.

        Gradient: into the weights; the features are data.
        """
        if lengths is None:
            lengths = torch.full((frames.shape[0],), frames.shape[1], dtype=torch.int64, device=frames.device)
        features = frames.detach()
        context = self._context(features + _encodings(frames, lengths), lengths)
        events = self.mlp(context) + features
        question = text.detach()[:, None]
        return _cosine(events, question) + torch.cosine_similarity(features, question, dim=-1)

    def _context(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Attention output (N, T, D) of each frame over its window."""
        back, total = self.window // 2, x.shape[1]
        query = self.query(x).unflatten(-1, (self.heads, -1)) / math.sqrt(self.width // self.heads)
        keys, values = (_padded(layer(x), back, self.window - 1 - back, self.heads) for layer in (self.key, self.value))
        scores = torch.stack([(query * keys[:, i : i + total]).sum(-1) for i in range(self.window)], -1)
        frame = torch.arange(total, device=lengths.device)[:, None] - back
        frame = frame + torch.arange(self.window, device=lengths.device)  # (T, w), the frames of each window
        inside = (frame >= 0) & (frame < lengths[:, None, None])
        scores = scores.masked_fill(~inside[:, :, None], max(OUTSIDE, torch.finfo(scores.dtype).min))
        weights = scores.softmax(-1)
        parts = (weights[..., i, None] * values[:, i : i + total] for i in range(self.window))
        return functools.reduce(torch.add, parts).flatten(-2)


def positional_encoding(total: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sines and cosines (T, D) of t / T times 10000^(-2k / D), so that videos of all lengths span the same range.

    Source: Hui-design/TSPO model/temporal_agent.py `positional_encoding` (t / T where transformers have t).
    """
    time = torch.arange(total, dtype=dtype)[:, None] / max(total, 1)
    rate = torch.exp(torch.arange(0, width, 2, dtype=dtype) * (-math.log(10000.0) / width))
    return torch.stack([(time * rate).sin(), (time * rate).cos()], -1).flatten(1)


def _encodings(frames: Tensor, lengths: Tensor) -> Tensor:
    """Encodings (N, T, D), each of its video's own length."""
    found = torch.zeros_like(frames)
    for row, length in enumerate(lengths.tolist()):
        found[row, :length] = positional_encoding(length, frames.shape[2], frames.dtype).to(frames.device)
    return found


def _padded(x: Tensor, before: int, after: int, heads: int) -> Tensor:
    """(N, before + T + after, heads, D / heads)."""
    return nn.functional.pad(x, (0, 0, before, after)).unflatten(-1, (heads, -1))


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine over the last axis, with a constant added to the denominator as in the public code."""
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1) + COSINE_EPS)


CONFIG_FILE = "agent.json"
WEIGHTS_FILE = "agent.safetensors"
KIND = "tspo_agent"


@dataclass(frozen=True)
class AgentSettings:
    """Settings that affect which frames are picked, in addition to the agent's weights."""

    encoder: str
    """CLIP folder or hub id."""
    fps: float
    """Candidate frames per second."""
    max_frames: int
    """Maximum number of candidates; 0 = no limit."""
    count: int
    """Frames picked in training."""


def save_agent(agent: TemporalAgent, settings: AgentSettings, folder: Path) -> None:
    """Write an agent to a folder: agent.safetensors and agent.json."""
    from safetensors.torch import save_file

    content = {
        "kind": KIND,
        "width": agent.width,
        "heads": agent.heads,
        "window": agent.window,
        "encoder": base_entries(settings.encoder, folder),
        "fps": settings.fps,
        "max_frames": settings.max_frames,
        "count": settings.count,
    }
    with replaced(folder) as draft:
        draft.mkdir(parents=True)
        file = draft / WEIGHTS_FILE
        save_file({name: weight.detach().cpu().contiguous() for name, weight in agent.state_dict().items()}, file)
        sort_header(file)
        (draft / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_agent(folder: Path | str) -> tuple[TemporalAgent, AgentSettings]:
    """Load an agent that `save_agent` wrote, or the best one of a run."""
    path = expanded(model_folder(str(folder)))
    content = read_json_object(path / CONFIG_FILE)
    try:
        if content["kind"] != KIND:
            raise ValueError(f"its kind is {content['kind']!r}, not {KIND!r}")
        agent = TemporalAgent(int(content["width"]), int(content["heads"]), int(content["window"]))
        settings = AgentSettings(
            base_path(content["encoder"], path),
            float(content["fps"]),
            int(content["max_frames"]),
            int(content["count"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path / CONFIG_FILE} does not describe an agent: {type(error).__name__}: {error}") from error
    load_agent_weights(agent, path)
    return agent, settings


def load_agent_weights(agent: TemporalAgent, folder: Path) -> None:
    """Load the weights of a folder into an agent of the same sizes, bit for bit."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / WEIGHTS_FILE
    try:
        weights: dict[str, torch.Tensor] = load_file(file)
        agent.load_state_dict(weights)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise UserError(
            f"{file} does not contain this agent's weights: {' '.join(str(error).split())[:300]}"
        ) from error
