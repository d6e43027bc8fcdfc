"""An OpenVLA-OFT model folder: settings, weights, tokenizer, action head for L1 regression, and state projector.

Shapes: B rows, K control steps, D entries of an action, S state entries, C hidden units of the language model, W of the
head.

Source: OpenVLA-OFT, arXiv 2502.19645; moojink/openvla-oft prismatic/models/action_heads.py (L1RegressionActionHead),
    projectors.py (ProprioProjector); experiments/robot/openvla_utils.py, vla-scripts/finetune.py (files).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from mmrl.errors import UserError
from mmrl.fields import bounded, check_config, choice, rare
from mmrl.files import expanded, read_json_object, replaced
from robotics.policies.base.action_policy import PolicyInputs
from robotics.policies.base.action_statistics import ActionStatistics, libero_gripper
from robotics.policies.base.saved import check_sizes, make_config, read_config
from robotics.policies.openvla.prismatic import Prismatic, load_prismatic

Part = TypeVar("Part", bound=nn.Module)

HEAD, PROJECTOR = "action_head", "proprio_projector"
"""Prefixes of the file names."""
BLOCKS = 2
"""Number of residual blocks of an action head."""
PARALLEL = "module."
"""Name prefix of weights from data-parallel training. OpenVLA-OFT writes it and reads files with and without it."""
DIFFUSION = "noise_predictor."
"""Name prefix of a diffusion head's weights."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ATTENTION = ("bidirectional", "causal")
BOUNDS = {"q99": {}, "min_max": {"q01": "min", "q99": "max"}}
GRIPPERS = ("as_data", "libero")
TRAINED = ("language_model", "all")
EMPTY_ID = 29871
"""Llama 2's empty piece, the last token of every prompt in the training data."""
CROP = 0.9
"""Fraction of an image's area that is kept."""
REFUSED = {"noisy_action_projector--*": "a diffusion head", "vision_backbone--*": "FiLM"}


class ActionHead(nn.Module):
    """Maps states of the language model to actions with residual blocks for each control step.

    Source: moojink/openvla-oft prismatic/models/action_heads.py, with the names of the weights there.
    """

    def __init__(self, size: int, hidden: int, width: int) -> None:
        super().__init__()
        self.size = size
        self.model = _Residual(size * hidden, width, size)

    def forward(self, states: Tensor) -> Tensor:
        """(B, K D, C) -> (B, K, D); the D states of a control step are concatenated."""
        # step-major tokens: D neighbouring states belong to one control step
        found: Tensor = self.model(states.unflatten(1, (-1, self.size)).flatten(2))
        return found


class StateProjector(nn.Module):
    """Maps a normalised state to an embedding of the language model.

    Source: moojink/openvla-oft prismatic/models/projectors.py, with the names of the weights there.
    """

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size, hidden)
        self.fc2 = nn.Linear(hidden, hidden)

    def forward(self, states: Tensor) -> Tensor:
        """(B, S) -> (B, C)."""
        found: Tensor = self.fc2(functional.gelu(self.fc1(states)))
        return found


def find_part(folder: Path, name: str) -> Path | None:
    """The file of a part of the model, or None; raises UserError if there are several."""
    found = sorted(folder.glob(f"{name}--*_checkpoint.pt"))
    if len(found) > 1:
        raise UserError(f"{folder} has several files {name}: {', '.join(file.name for file in found)}; keep one")
    return found[0] if found else None


def load_head(file: Path, size: int, hidden: int) -> ActionHead:
    """Load an action head."""
    weights = read_part(file)
    if any(name.startswith(DIFFUSION) for name in weights):
        raise UserError(f"{file} is a diffusion head; only action tokens and L1 regression are supported")
    last = weights.get("model.fc2.weight")
    if last is None or last.dim() != 2:
        raise UserError(f"{file} is not an OpenVLA-OFT action head: it has no model.fc2.weight")
    if len(last) != size:
        raise UserError(f"{file} predicts actions of {len(last)} entries, but the statistics have {size}")
    # without memory: `assign` puts the read tensors in
    with torch.device("meta"):
        made = ActionHead(size, hidden, last.shape[1])
    return fill_part(made, weights, file, assign=True)


def load_projector(file: Path, size: int, hidden: int) -> StateProjector:
    """Load a projector of the state."""
    weights = read_part(file)
    first = weights.get("fc1.weight")
    if first is None or first.dim() != 2:
        raise UserError(f"{file} is not an OpenVLA-OFT projector: it has no fc1.weight")
    if first.shape[1] != size:
        raise UserError(f"{file} reads a state of {first.shape[1]} entries, but the statistics have {size}")
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
    """Read weights by name, without the prefix `module.` from data-parallel training."""
    if not file.is_file():
        raise UserError(f"file not found: {file}")
    try:
        # `weights_only`: a checkpoint is a pickle, which could run code
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, zipfile and pickle each raise their own
        raise UserError(f"{file} cannot be read ({type(error).__name__}); it must contain only weights") from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise UserError(f"{file} contains no named weights")
    return {str(name).removeprefix(PARALLEL): value for name, value in found.items()}


def write_part(part: nn.Module, file: Path) -> None:
    """Write the weights of a part with the names used by OpenVLA-OFT's training."""
    write_tensors({PARALLEL + name: value for name, value in part.state_dict().items()}, file)


def write_tensors(weights: dict[str, Tensor], file: Path) -> None:
    """Write tensors by name; equal tensors give identical files."""
    values = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    with replaced(file) as draft, draft.open("wb") as opened_draft:  # a stream, because torch stores a file name
        torch.save(values, opened_draft)


class _Residual(nn.Module):
    """A linear layer, residual blocks and another linear layer, each preceded by a LayerNorm."""

    def __init__(self, size: int, width: int, out: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(size)
        self.fc1 = nn.Linear(size, width)
        self.mlp_resnet_blocks = nn.ModuleList(_Block(width) for _ in range(BLOCKS))
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, out)

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


@dataclass
class OpenVlaConfig:
    """The model folder, and how its model is used."""

    folder: str = rare("")
    """Folder of the model: config.json, safetensors, tokenizer and preprocessor_config.json."""
    chunk: int = rare(bounded(8, at_least=1))
    """K, control steps that the model was trained to predict at once: 8 for LIBERO, 25 for ALOHA, 5 for Bridge."""
    unnorm_key: str | None = rare(None)
    """Name of the dataset whose statistics convert tokens to actions; None if the folder has only one."""
    bounds: str = rare(choice("q99", tuple(BOUNDS)))
    """Bounds of actions and state that map to -1 and 1: q99, the 1% and 99% quantiles of the data (LIBERO, Bridge),
    or min_max (ALOHA)."""
    gripper: str = rare(choice("as_data", GRIPPERS))
    """libero: the last entry, from 0 (closed) to 1 (open) in the data, becomes -1 to open or 1 to close, see
    `libero_gripper`."""
    num_images_in_input: int = rare(bounded(1, at_least=1))
    """Number of cameras the model was trained with: 1 for `sim.camera`, 2 for it and one view, such as the wrist's."""
    center_crop: bool = rare(True)
    """Keep the inner 90% of an image, for models trained with random crops like the published ones."""
    attention: str = rare(choice("bidirectional", ATTENTION))
    """bidirectional, as in OpenVLA-OFT's fork of transformers, or causal, for models trained without the fork."""
    dtype: str = choice("float32", tuple(DTYPES))
    """Precision of the weights and activations; log-probabilities are float32 either way."""
    train: str = rare(choice("language_model", TRAINED))
    """language_model: train the language model, the projectors and the action head; all: the vision backbones too."""
    gradient_checkpointing: bool = rare(False)
    """Recompute the language model's activations in the backward pass to save memory."""
    label_smoothing: float = rare(bounded(0.0, at_least=0, below=1))
    """Fraction of the cloning target that is spread over all bins; an error if the folder has an action head."""
    std: float = rare(bounded(0.1, above=0))
    """For folders with an action head: initial standard deviation of each action entry, on the scale -1..1."""

    def validate(self) -> None:
        """Reject an empty folder; raises ValueError."""
        if not self.folder:
            raise ValueError("folder is empty; set model.options.folder to the folder of an OpenVLA-OFT model")


def read_saved_config(path: Path | str) -> OpenVlaConfig:
    """Configuration of a saved policy, with the folder where it is now."""
    entries = {key: value for key, value in read_config(Path(path)).items() if key != "kind"}
    check_sizes(entries, Path(path))
    return make_config(OpenVlaConfig, {**entries, "folder": str(path)}, f"{path}/policy.json")


class OpenVlaFolder:
    """An OpenVLA-OFT folder, without its weights."""

    def __init__(self, config: OpenVlaConfig) -> None:
        check_config(config)
        self.settings = config
        self.path = expanded(config.folder)
        _refuse(self.path)
        entries = read_json_object(self.path / "config.json")
        self.bins = int(entries.get("n_action_bins", 256))
        self._vision = entries["image_sizes"]
        self._key, self._known = _statistics(self.path, entries, config.unnorm_key)
        self.statistics = self.read_statistics("action")
        """Statistics of the actions; with `min_max`, the bounds replace the quantiles."""
        self._images = _ImageScale(self.path)
        self._texts = _tokenizer(self.path)

    def read_statistics(self, part: str) -> ActionStatistics:
        """Statistics of `unnorm_key` by `bounds`."""
        if part not in self._known:
            raise UserError(f"the statistics of {self._key!r} in {self.path} have no part {part!r}")
        found = self._known[part]
        missing = [name for name in ("q01", "q99", "min", "max", "mean", "std") if name not in found]
        if missing:
            raise UserError(f"the {part} statistics of {self._key!r} in {self.path} have no {', '.join(missing)}")
        # bounds under the names that ActionStatistics scales by
        chosen = {name: found[of] for name, of in BOUNDS[self.settings.bounds].items()}
        return ActionStatistics.from_lerobot({part: {**found, **chosen}}, part, mask=found.get("mask"))

    def load(self) -> Prismatic:
        """Load the model and mark its trainable weights; raises UserError, see `load_prismatic`."""
        model = load_prismatic(self.path, self.dtype)
        if model.vocabulary <= EMPTY_ID:
            raise UserError(f"{self.path} has {model.vocabulary} ids; prompts end with Llama 2's id {EMPTY_ID}")
        if self.settings.train == "language_model":
            model.vision_backbone.requires_grad_(False)
        if self.settings.gradient_checkpointing:
            model.language_model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def look(self, batch: PolicyInputs, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """Model inputs: pixels (B, 3 n m, H, W) of m images for each of the n backbones, and B prompts (P,) int64."""
        if batch.images is None:
            # the main camera first, as in training
            raise UserError(f"{self.path} needs images, but the observations have none")
        images = [batch.images, *(() if batch.views is None else batch.views.unbind(1))]
        wanted = self.settings.num_images_in_input
        if len(images) != wanted:
            raise UserError(
                f"{self.path} uses {wanted} images (num_images_in_input), but the observations have {len(images)}, "
                "including sim.views"
            )
        parts = [self._images(image, self._vision, self.settings.center_crop) for image in images]
        pixels = torch.cat(parts, 1).to(device, self.dtype)
        return pixels, [self._prompt(text).to(device) for text in batch.instructions]

    def to_sim(self, actions: Tensor) -> Tensor:
        """Convert the gripper of predicted actions (..., D) by `gripper`."""
        return actions if self.settings.gripper == "as_data" else libero_gripper(actions)

    def from_sim(self, actions: Tensor) -> Tensor:
        """Convert the gripper of demonstrated actions (..., D) back, to 0..1 for `gripper: libero`."""
        if self.settings.gripper == "as_data":
            return actions
        return torch.cat([actions[..., :-1], (1 - actions[..., -1:]) / 2], -1)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return DTYPES[self.settings.dtype]

    def _prompt(self, text: str) -> Tensor:
        ids = list(self._texts(f"In: What action should the robot take to {text.lower()}?\nOut:")["input_ids"])
        return torch.tensor(ids if ids[-1] == EMPTY_ID else [*ids, EMPTY_ID])


class _ImageScale:
    """Preprocesses images for each backbone, using the values in preprocessor_config.json."""

    def __init__(self, folder: Path) -> None:
        entries = read_json_object(folder / "preprocessor_config.json")
        strategy = entries.get("image_resize_strategy")
        if strategy != "resize-naive":
            raise UserError(f"{folder} resizes images by {strategy!r}; supported: 'resize-naive'")
        self.means = torch.tensor(entries["means"])
        self.stds = torch.tensor(entries["stds"])

    def __call__(self, images: Tensor, sizes: Sequence[int], crop: bool) -> Tensor:
        """(B, H, W, 3) uint8 -> (B, 3 n, size, size) float32."""
        size = int(sizes[0])
        # Pillow works on the CPU
        rows = images.cpu()
        if rows.shape[1:3] != (size, size):
            # Lanczos, as in OpenVLA-OFT's evaluation; another filter shifts what the model sees
            images_pil = [Image.fromarray(row.numpy()).resize((size, size), Image.Resampling.LANCZOS) for row in rows]
            rows = torch.stack([torch.from_numpy(np.array(image)) for image in images_pil])
        if crop:
            # after resizing, in the order of the public code
            rows = _centre(rows)
        shares = rows.permute(0, 3, 1, 2).float() / 255
        parts = [
            (shares - mean[:, None, None]) / std[:, None, None] for mean, std in zip(self.means, self.stds, strict=True)
        ]
        return torch.cat(parts, 1)


def _centre(images: Tensor) -> Tensor:
    """Crop (B, H, W, 3) uint8 to the inner area and resize it back, bilinear with aligned corners as in TensorFlow."""
    count, height, width, _ = images.shape
    # side sqrt(0.9), since 90% of the area is kept
    steps = math.sqrt(CROP) * torch.linspace(-1, 1, height), math.sqrt(CROP) * torch.linspace(-1, 1, width)
    rows, columns = torch.meshgrid(*steps, indexing="ij")
    grid = torch.stack([columns, rows], -1).expand(count, -1, -1, -1)
    pixels = images.permute(0, 3, 1, 2).float() / 255
    found = functional.grid_sample(pixels, grid, mode="bilinear", align_corners=True)
    # TensorFlow's conversion to uint8 scales by 255.5 and truncates
    return (found.clamp(0, 1) * 255.5).to(torch.uint8).permute(0, 2, 3, 1)


def _statistics(folder: Path, entries: dict[str, Any], key: str | None) -> tuple[str, dict[str, Any]]:
    """Name and statistics of a dataset; the only one when `key` is None."""
    file = folder / "dataset_statistics.json"
    known = read_json_object(file) if file.is_file() else entries.get("norm_stats") or {}
    if key is None and len(known) == 1:
        key = next(iter(known))
    if key is None or key not in known:
        given, names = "is empty" if key is None else f"is {key!r}", ", ".join(known) or "nothing"
        raise UserError(f"model.options.unnorm_key {given}; {folder} has statistics of: {names}")
    return key, known[key]


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} has no tokenizer that transformers can load: {error}") from error
    tokenizer.split_special_tokens = True  # an instruction that contains </s> means these characters
    return tokenizer


def _refuse(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not an OpenVLA model: it has no config.json")
    for pattern, what in REFUSED.items():
        found = sorted(file.name for file in folder.glob(pattern))
        if found:
            raise UserError(
                f"{folder} has {', '.join(found)}, so it is a model with {what}; only action tokens and L1 "
                "regression are supported, both without FiLM"
            )
