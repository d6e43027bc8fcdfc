"""A trained agent as a small folder: its weights, its sizes, and the CLIP that it was trained with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from mmrl.errors import UserError
from mmrl.files import expanded, read_json_object, replaced
from mmrl.hub.saved_files import base_entries, base_path, sort_header
from mmrl.vlm.tspo.agent import TemporalAgent

CONFIG_FILE = "agent.json"
WEIGHTS_FILE = "agent.safetensors"
KIND = "tspo_agent"


@dataclass(frozen=True)
class AgentSettings:
    """Settings that picked frames depend on, further to the agent's weights."""

    encoder: str
    """CLIP folder or hub id."""
    fps: float
    """Candidate frames a second."""
    max_frames: int
    """Most candidates; 0 = no limit."""
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
    """Load an agent that `save_agent` wrote."""
    path = expanded(folder)
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
        raise UserError(f"{file} does not hold this agent's weights: {' '.join(str(error).split())[:300]}") from error
