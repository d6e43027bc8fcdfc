"""OpenVLA-OFT folders with action tokens, evaluated and improved: the policies of SimpleVLA-RL and SRPO.

Shapes: B rows, K control steps, D entries of an action, T = K D tokens, H x W pixels.

The model is that of the folder, by code of this package (`prismatic`); the folder's own Python files are not run. One
pass predicts the T tokens of a chunk as the last 256 ids of the vocabulary, at its first 32000 of 32064 rows. They are
bins of -1..1; with `acting.scale: bounds_q99` the statistics of the training data (`norm_stats` in config.json, or
dataset_statistics.json) turn them into actions. A saved policy is a folder that OpenVLA's code loads again.

Source: OpenVLA-OFT, arXiv 2502.19645; moojink/openvla-oft experiments/robot/openvla_utils.py, robot_utils.py;
    SimpleVLA-RL, arXiv 2509.09674; PRIME-RL/SimpleVLA-RL verl/workers/rollout/rob_rollout.py, actor/dp_rob.py.

Differences: images that are not of the model's size are resized by PIL's Lanczos filter, there by TensorFlow's after a
pass through JPEG; no state, so folders with a projector of the state are refused, and so are those with
a regression or diffusion head, whose actions have no likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from mmrl.errors import UserError
from mmrl.fields import bounded, check_config, choice
from mmrl.files import expanded, read_json_object
from robotics.vla.action_tokens import ActionTokenizer
from robotics.vla.policy import ActionChoice, PolicyInputs, TokenPolicy
from robotics.vla.prismatic import load_prismatic, save_prismatic
from robotics.vla.saved import make_config, read_config, read_statistics, write_config
from robotics.vla.statistics import ActionStatistics, libero_gripper

__all__ = ["OpenVlaConfig", "OpenVlaPolicy"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ATTENTION = ("bidirectional", "causal")
BOUNDS = {"q99": {}, "min_max": {"q01": "min", "q99": "max"}}
GRIPPERS = ("as_data", "libero")
TRAINED = ("language_model", "all")
EMPTY_ID = 29871
"""Llama 2's empty piece, the last token of every prompt of the training data."""
CROP = 0.9
"""Share of an image's area that is kept."""
OTHER_HEADS = ("action_head--*", "proprio_projector--*", "noisy_action_projector--*", "vision_backbone--*")


@dataclass
class OpenVlaConfig:
    """Which folder, and how its model is used."""

    folder: str = ""
    """Folder of the model: config.json, safetensors, tokenizer and preprocessor_config.json."""
    chunk: int = bounded(8, at_least=1)
    """K, control steps that the model learned to predict at once: 8 for LIBERO, 25 for ALOHA, 5 for Bridge."""
    unnorm_key: str | None = None
    """Name of the dataset whose statistics turn tokens into actions; None where the folder has only one."""
    bounds: str = choice("q99", tuple(BOUNDS))
    """What -1 and 1 stand for: q99, the quantiles 1 % and 99 % of the data (LIBERO, Bridge), or min_max (ALOHA)."""
    gripper: str = choice("as_data", GRIPPERS)
    """libero: the last entry, 0 closed to 1 open in the data, becomes -1 to open or 1 to close, by `libero_gripper`."""
    num_images_in_input: int = bounded(1, at_least=1)
    """Cameras that the model learned to see: 1 for `sim.camera`, 2 for a view beside it, such as the wrist's."""
    center_crop: bool = True
    """Keep the inner 90 % of an image, for models that learned from random crops, as the published ones."""
    attention: str = choice("bidirectional", ATTENTION)
    """bidirectional, as OpenVLA-OFT's fork of transformers, or causal, for models trained without the fork."""
    dtype: str = choice("float32", tuple(DTYPES))
    """Precision of the weights and activations; log-probabilities are float32 either way."""
    train: str = choice("language_model", TRAINED)
    """What learns: the language model with the projector, or all, the vision backbones too."""
    gradient_checkpointing: bool = False
    """Compute the language model's activations again in the backward pass, to save memory."""
    label_smoothing: float = bounded(0.0, at_least=0, below=1)
    """Share of the cloning target that is spread over all bins."""

    def validate(self) -> None:
        """Refuse an empty folder; raises ValueError."""
        if not self.folder:
            raise ValueError("folder is empty; name the folder of an OpenVLA-OFT model, model.options.folder")


class OpenVlaPolicy(TokenPolicy):
    """Image and instruction to K * D action tokens by the model of an OpenVLA-OFT folder.

        policy = OpenVlaPolicy(OpenVlaConfig("openvla-oft-libero", unnorm_key="libero_10_no_noops", gripper="libero"))
        choice = policy.act(batch, torch.Generator().manual_seed(0))

    Args:
        config: which folder, and how its model is used.

    Raises:
        UserError: the folder is no such model, or its statistics do not fit.
    """

    def __init__(self, config: OpenVlaConfig) -> None:
        check_config(config)
        folder = expanded(config.folder)
        _refuse_other_heads(folder)
        entries = read_json_object(folder / "config.json")
        statistics = _statistics(folder, entries, config)
        tokenizer = ActionTokenizer(int(entries.get("n_action_bins", 256)), "openvla")
        super().__init__(tokenizer, config.chunk, statistics.size, config.label_smoothing)
        self.settings, self._folder, self.statistics = config, folder, statistics
        self.views = config.num_images_in_input - 1
        self.model = load_prismatic(folder, DTYPES[config.dtype])
        self.vision, self._images = entries["image_sizes"], _ImageScale(folder)
        self._texts = _tokenizer(folder)
        if self.model.vocabulary <= EMPTY_ID:
            raise UserError(f"{folder} has {self.model.vocabulary} ids; prompts end with Llama 2's id {EMPTY_ID}")
        if config.train == "language_model":
            self.model.vision_backbone.requires_grad_(False)
        if config.gradient_checkpointing:
            self.model.language_model.gradient_checkpointing_enable({"use_reentrant": False})

    def act(
        self, batch: PolicyInputs, generator: torch.Generator, temperature: float = 1.0, greedy: bool = False
    ) -> ActionChoice:
        """See `ActionPolicy.act`; actions are normalised, as `statistics` says."""
        choice = super().act(batch, generator, temperature, greedy)
        if self.settings.gripper == "as_data":
            return choice
        return ActionChoice(libero_gripper(choice.actions), choice.decisions, choice.logp)

    def logits(self, batch: PolicyInputs) -> Tensor:
        """See `TokenPolicy.logits`; (B, T, n) float32."""
        if batch.images is None:
            raise UserError(f"{self._folder} needs images, which the observations lack")
        images = [batch.images, *(() if batch.views is None else batch.views.unbind(1))]
        wanted = self.settings.num_images_in_input
        if len(images) != wanted:
            raise UserError(
                f"{self._folder} sees {wanted} images (num_images_in_input); the observations have {len(images)}, with "
                "those of sim.views"
            )
        parts = [self._images(image, self.vision, self.settings.center_crop) for image in images]
        pixels = torch.cat(parts, 1).to(self.device, self._dtype)
        prompts = [self._prompt(text).to(self.device) for text in batch.instructions]
        causal = self.settings.attention == "causal"
        return self.model.logits(pixels, prompts, self.decisions, self.tokenizer.bins, causal)

    def bc_loss(
        self, batch: PolicyInputs, actions: Tensor, mask: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """See `ActionPolicy.bc_loss`; actions in the units of `act`."""
        wanted = actions.clone()
        if self.settings.gripper == "libero":
            wanted[..., -1] = (1 - wanted[..., -1]) / 2
        return super().bc_loss(batch, wanted, mask, generator)

    def save_pretrained(self, path: Path | str) -> None:
        """Write a folder that OpenVLA's code loads again, with a policy.json of this package beside it."""
        save_prismatic(self.model, self._folder, Path(path))
        write_config(Path(path), "openvla", self.settings, self.statistics)

    def load_weights(self, path: Path | str) -> None:
        """See `ActionPolicy.load_weights`."""
        self.model.load_state_dict(load_prismatic(Path(path), self._dtype).state_dict())
        self.statistics = read_statistics(Path(path))

    @classmethod
    def from_pretrained(cls, path: Path | str) -> Self:
        """Open what `save_pretrained` wrote."""
        entries = {key: value for key, value in read_config(Path(path)).items() if key != "kind"}
        policy = cls(make_config(OpenVlaConfig, {**entries, "folder": str(path)}, f"{path}/policy.json"))
        policy.statistics = read_statistics(Path(path))
        return policy

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self.settings.dtype]

    def _prompt(self, text: str) -> Tensor:
        ids = list(self._texts(f"In: What action should the robot take to {text.lower()}?\nOut:")["input_ids"])
        return torch.tensor(ids if ids[-1] == EMPTY_ID else [*ids, EMPTY_ID])


class _ImageScale:
    """Images as each backbone takes them; numbers of preprocessor_config.json."""

    def __init__(self, folder: Path) -> None:
        entries = read_json_object(folder / "preprocessor_config.json")
        strategy = entries.get("image_resize_strategy")
        if strategy != "resize-naive":
            raise UserError(f"{folder} resizes images by {strategy!r}; supported: 'resize-naive'")
        self.means, self.stds = torch.tensor(entries["means"]), torch.tensor(entries["stds"])

    def __call__(self, images: Tensor, sizes: Sequence[int], crop: bool) -> Tensor:
        """(B, H, W, 3) uint8 -> (B, 3 n, size, size) float32."""
        size = int(sizes[0])
        rows = images.cpu()
        if rows.shape[1:3] != (size, size):
            rows = torch.stack([_resized(row.numpy(), size) for row in rows])
        if crop:
            rows = _centre(rows)
        shares = rows.permute(0, 3, 1, 2).float() / 255
        parts = [
            (shares - mean[:, None, None]) / std[:, None, None] for mean, std in zip(self.means, self.stds, strict=True)
        ]
        return torch.cat(parts, 1)


def _resized(pixels: np.ndarray[Any, Any], size: int) -> Tensor:
    return torch.from_numpy(np.array(Image.fromarray(pixels).resize((size, size), Image.Resampling.LANCZOS)))


def _centre(images: Tensor) -> Tensor:
    """Inner share of (B, H, W, 3) uint8 at the same size, bilinear with the corners on pixels, as TensorFlow's."""
    count, height, width, _ = images.shape
    steps = math.sqrt(CROP) * torch.linspace(-1, 1, height), math.sqrt(CROP) * torch.linspace(-1, 1, width)
    rows, columns = torch.meshgrid(*steps, indexing="ij")
    grid = torch.stack([columns, rows], -1).expand(count, -1, -1, -1)
    pixels = images.permute(0, 3, 1, 2).float() / 255
    found = functional.grid_sample(pixels, grid, mode="bilinear", align_corners=True)
    return (found.clamp(0, 1) * 255.5).to(torch.uint8).permute(0, 2, 3, 1)


def _statistics(folder: Path, entries: dict[str, Any], config: OpenVlaConfig) -> ActionStatistics:
    """Statistics of `unnorm_key`; with `min_max` the bounds stand in the place of the quantiles."""
    file = folder / "dataset_statistics.json"
    known = read_json_object(file) if file.is_file() else entries.get("norm_stats") or {}
    key = config.unnorm_key
    if key is None and len(known) == 1:
        key = next(iter(known))
    if key is None or key not in known:
        given, names = "is empty" if key is None else f"is {key!r}", ", ".join(known) or "nothing"
        raise UserError(f"model.options.unnorm_key {given}; {folder} has statistics of: {names}")
    action = known[key]["action"]
    missing = [name for name in ("q01", "q99", "min", "max", "mean", "std") if name not in action]
    if missing:
        raise UserError(f"the action statistics of {key!r} in {folder} have no {', '.join(missing)}")
    chosen = {name: action[of] for name, of in BOUNDS[config.bounds].items()}
    return ActionStatistics.from_lerobot({"action": {**action, **chosen}}, mask=action.get("mask"))


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} has no tokenizer that transformers loads: {error}") from error


def _refuse_other_heads(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is no OpenVLA model: it has no config.json")
    found = sorted(file.name for pattern in OTHER_HEADS for file in folder.glob(pattern))
    if found:
        raise UserError(f"{folder} has {', '.join(found)}; supported is the discrete variant, without parts of its own")
