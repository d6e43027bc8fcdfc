"""The files that OpenVLA-OFT adds to a model: the action head of L1 regression and the projector of the state.

Shapes: B rows, K control steps, D entries of an action, S state entries, C hidden units of the language model, W of the
head.

Source: OpenVLA-OFT, arXiv 2502.19645; moojink/openvla-oft prismatic/models/action_heads.py (L1RegressionActionHead),
    projectors.py (ProprioProjector); experiments/robot/openvla_utils.py, vla-scripts/finetune.py (files).
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmrl.errors import UserError
from mmrl.files import replaced

Part = TypeVar("Part", bound=nn.Module)

HEAD, PROJECTOR = "action_head", "proprio_projector"
"""Prefixes of the names of the files."""
BLOCKS = 2
"""Residual blocks of an action head."""
PARALLEL = "module."
"""Prefix of the names of weights from data-parallel training, which OpenVLA-OFT writes; it reads both."""
DIFFUSION = "noise_predictor."
"""Prefix of the names of a diffusion head's weights."""


class ActionHead(nn.Module):
    """States of the language model to actions, by residual blocks for each control step.

    Source: moojink/openvla-oft prismatic/models/action_heads.py, with the names of the weights there.
    """

    def __init__(self, size: int, hidden: int, width: int) -> None:
        super().__init__()
        self.size = size
        self.model = _Residual(size * hidden, width, size)

    def forward(self, states: Tensor) -> Tensor:
        """(B, K D, C) -> (B, K, D), the D states of a control step side by side."""
        found: Tensor = self.model(states.unflatten(1, (-1, self.size)).flatten(2))
        return found


class StateProjector(nn.Module):
    """A normalised state to an embedding of the language model.

    Source: moojink/openvla-oft prismatic/models/projectors.py, with the names of the weights there.
    """

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(size, hidden), nn.Linear(hidden, hidden)

    def forward(self, states: Tensor) -> Tensor:
        """(B, S) -> (B, C)."""
        found: Tensor = self.fc2(functional.gelu(self.fc1(states)))
        return found


def find_part(folder: Path, name: str) -> Path | None:
    """The file of a part of the model, None without one; raises UserError if there are several."""
    found = sorted(folder.glob(f"{name}--*_checkpoint.pt"))
    if len(found) > 1:
        raise UserError(f"{folder} has several of {name}: {', '.join(file.name for file in found)}; keep one")
    return found[0] if found else None


def load_head(file: Path, size: int, hidden: int) -> ActionHead:
    """Load an action head."""
    weights = read_part(file)
    if any(name.startswith(DIFFUSION) for name in weights):
        raise UserError(f"{file} is a diffusion head; supported are action tokens and L1 regression")
    last = weights.get("model.fc2.weight")
    if last is None or last.dim() != 2:
        raise UserError(f"{file} is no action head of OpenVLA-OFT: it has no model.fc2.weight")
    if len(last) != size:
        raise UserError(f"{file} predicts actions of {len(last)} entries; the statistics are of {size}")
    with torch.device("meta"):
        made = ActionHead(size, hidden, last.shape[1])
    return fill_part(made, weights, file, assign=True)


def load_projector(file: Path, size: int, hidden: int) -> StateProjector:
    """Load a projector of the state."""
    weights = read_part(file)
    first = weights.get("fc1.weight")
    if first is None or first.dim() != 2:
        raise UserError(f"{file} is no projector of OpenVLA-OFT: it has no fc1.weight")
    if first.shape[1] != size:
        raise UserError(f"{file} reads a state of {first.shape[1]} entries; the statistics are of {size}")
    with torch.device("meta"):
        made = StateProjector(size, hidden)
    return fill_part(made, weights, file, assign=True)


def fill_part(part: Part, weights: dict[str, Tensor], file: Path, assign: bool) -> Part:
    """Load weights into a part."""
    try:
        part.load_state_dict(weights, assign=assign)
    except RuntimeError as error:  # other names or shapes
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"the weights in {file} do not fit this model: {reason}") from error
    return part


def read_part(file: Path) -> dict[str, Tensor]:
    """Read weights by name, without the `module.` that data-parallel training puts before them."""
    if not file.is_file():
        raise UserError(f"there is no file {file}")
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, zipfile and pickle each raise their own
        raise UserError(
            f"{file} cannot be read ({type(error).__name__}); it must hold weights and nothing else"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise UserError(f"{file} holds no weights by name")
    return {str(name).removeprefix(PARALLEL): value for name, value in found.items()}


def write_part(part: nn.Module, file: Path) -> None:
    """Write the weights of a part, with the names that OpenVLA-OFT's training gives them."""
    write_tensors({PARALLEL + name: value for name, value in part.state_dict().items()}, file)


def write_tensors(weights: dict[str, Tensor], file: Path) -> None:
    """Write tensors by name; equal ones are equal bytes."""
    values = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    with replaced(file) as draft, draft.open("wb") as opened_draft:  # a stream: a name would become part of the bytes
        torch.save(values, opened_draft)


class _Residual(nn.Module):
    """A linear layer, residual blocks and a linear layer, each after a LayerNorm."""

    def __init__(self, size: int, width: int, out: int) -> None:
        super().__init__()
        self.layer_norm1, self.fc1 = nn.LayerNorm(size), nn.Linear(size, width)
        self.mlp_resnet_blocks = nn.ModuleList(_Block(width) for _ in range(BLOCKS))
        self.layer_norm2, self.fc2 = nn.LayerNorm(width), nn.Linear(width, out)

    def forward(self, values: Tensor) -> Tensor:
        """(..., size) -> (..., out)."""
        found = functional.relu(self.fc1(self.layer_norm1(values)))
        for block in self.mlp_resnet_blocks:
            found = block(found)
        found = self.fc2(self.layer_norm2(found))
        return found


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, values: Tensor) -> Tensor:
        """(..., W) -> (..., W)."""
        changed: Tensor = self.ffn(values)
        return values + changed
