"""Rewards with user-provided weights: PickScore, CLIPScore, HPSv2 and the aesthetic score of CLIP, ImageReward.

Weights are a folder as written by transformers' `save_pretrained`, with tokenizer and image processor. Nothing is
downloaded, and files of tensors are read without running code in them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.files import expanded
from mmrl.hub.compat import ensure_torchvision, quiet_transformers
from mmrl.runs.export import foreign_model

PICKSCORE_SCALE = 26.0
CLIP_SCALE = 100.0
HPS_FILE, HPS_ARCHITECTURE = "HPS_v2.1_compressed.pt", "ViT-H-14"
WEIGHTS_FILE, CONFIG_FILE = "ImageReward.pt", "med_config.json"
HEAD_FILES = ("aesthetic_head.safetensors", "sac+logos+ava1-l14-linearMSE.pth")

Features = tuple[Tensor, Tensor]
"""Image and text features (B, D), float32, of length 1."""


def pickscore(
    prompts: Sequence[str],
    completions: Sequence[NDArray[np.uint8]],
    *,
    path: str,
    device: str = "cpu",
    batch: int = 16,
    **_: Any,
) -> list[float]:
    """Score human preference for an image (H, W, 3) uint8 given its prompt, cosine * the model's scale / 26.

    Options: `path`, folder of PickScore_v1 with its CLIP processor; `device`; `batch`, images at a time.

    Source: Pick-a-Pic, arXiv 2305.01569; scaled as in yifan123/flow_grpo flow_grpo/pickscore_scorer.py.
    """
    return [value / PICKSCORE_SCALE for value in _clip_logits(prompts, completions, path, device, batch)]


def clip_score(
    prompts: Sequence[str],
    completions: Sequence[NDArray[np.uint8]],
    *,
    path: str,
    device: str = "cpu",
    batch: int = 16,
    **_: Any,
) -> list[float]:
    """Score how well an image matches its prompt, cosine * the model's scale / 100; options as `pickscore`, CLIP L/14.

    Source: CLIPScore, arXiv 2104.08718; scaled as in yifan123/flow_grpo flow_grpo/clip_scorer.py.
    """
    return [value / CLIP_SCALE for value in _clip_logits(prompts, completions, path, device, batch)]


def image_similarity(
    prompts: Sequence[str],
    completions: Sequence[NDArray[np.uint8]],
    *,
    reference: Sequence[NDArray[np.uint8]],
    path: str,
    device: str = "cpu",
    batch: int = 16,
    **_: Any,
) -> list[float]:
    """Score the similarity of an edited image to its reference, the cosine of their CLIP image features.

    Options as for `pickscore`, with the folder of CLIP ViT-L/14.

    Source: yifan123/flow_grpo flow_grpo/rewards.py, image_similarity_score.
    """
    model = _load_clip(path, device)
    values: list[float] = []
    pairs = zip(_batches(prompts, completions, batch), _batches(prompts, reference, batch), strict=True)
    for own, other in pairs:
        values += (model.image_features(own[1]) * model.image_features(other[1])).sum(-1).tolist()
    return values


def hpsv2(
    prompts: Sequence[str],
    completions: Sequence[NDArray[np.uint8]],
    *,
    path: str,
    device: str = "cpu",
    batch: int = 16,
    **_: Any,
) -> list[float]:
    """Score human preference for an image given its prompt, as a plain cosine.

    Options as for `pickscore`; the folder contains the released HPS_v2.1_compressed.pt, which needs the package
    open_clip, or the same weights converted for transformers.

    Source: HPS v2, arXiv 2306.09341; tgxs002/HPSv2 hpsv2/img_score.py.
    """
    released = (expanded(path) / HPS_FILE).is_file()
    model = _load_open_clip(path, device) if released else _load_clip(path, device)
    values: list[float] = []
    for texts, images in _batches(prompts, completions, batch):
        image, text = model.features(texts, images)
        values += (image * text).sum(-1).tolist()
    return values


def aesthetic(
    prompts: Sequence[str],
    completions: Sequence[NDArray[np.uint8]],
    *,
    path: str,
    head: str | None = None,
    device: str = "cpu",
    batch: int = 16,
    **_: Any,
) -> list[float]:
    """Score how beautiful an image is, regardless of its content: a small linear network on CLIP's image features.

    Options: `path`, folder of CLIP ViT-L/14; `head`, file of the network's weights (default: one of `HEAD_FILES` in the
    folder); `device`; `batch`.

    Source: christophschuhmann/improved-aesthetic-predictor; kvablack/ddpo-pytorch ddpo_pytorch/aesthetic_scorer.py.
    """
    model, network = _load_clip(path, device), _load_head(path, head, device)
    values: list[float] = []
    for _texts, images in _batches(prompts, completions, batch):
        features = model.image_features(images)
        if network[0].in_features != features.shape[-1]:
            raise UserError(
                f"the aesthetic head takes {network[0].in_features} features, but the model at {path} has "
                f"{features.shape[-1]}; the released head belongs to CLIP ViT-L/14"
            )
        with torch.no_grad():
            values += network(features).squeeze(-1).tolist()
    return values


def image_reward(
    prompts: Sequence[str], completions: Sequence[NDArray[np.uint8]], *, path: str, device: str = "cpu", **_: Any
) -> list[float]:
    """Score human preference for an image given its prompt, standardised over the training images.

    Options: `path`, a folder with ImageReward.pt and med_config.json, and `device`. The package downloads the tokenizer
    bert-base-uncased unless it is in the Hugging Face cache.

    Source: ImageReward, arXiv 2304.05977; THUDM/ImageReward.
    """
    model = _load(path, device)
    pairs = zip(prompts, completions, strict=True)
    return [float(model.score(prompt, Image.fromarray(image))) for prompt, image in pairs]


class _TransformersClip:
    """CLIP of transformers with its processor."""

    def __init__(self, model: Any, processor: Any, device: str) -> None:
        self.model = model
        self.processor = processor
        self.device = device

    @torch.no_grad()
    def features(self, texts: Sequence[str], images: Sequence[Image.Image]) -> Features:
        """Features of B pairs; long texts are truncated."""
        length = self.model.config.text_config.max_position_embeddings
        inputs = self.processor(
            text=list(texts),
            images=list(images),
            padding=True,
            truncation=True,
            max_length=length,
            return_tensors="pt",
        ).to(self.device)
        output = self.model(**inputs)
        return _unit(output.image_embeds), _unit(output.text_embeds)

    @torch.no_grad()
    def image_features(self, images: Sequence[Image.Image]) -> Tensor:
        """Features of B images (B, D)."""
        # without text: the image tower alone
        pixels = self.processor.image_processor(images=list(images), return_tensors="pt").to(self.device)
        pooled = self.model.vision_model(**pixels).pooler_output
        return _unit(self.model.visual_projection(pooled))


class _OpenClip:
    """CLIP of open_clip with its image transform and tokenizer."""

    def __init__(self, model: Any, transform: Any, tokenizer: Any, device: str) -> None:
        self.model = model
        self.transform = transform
        self.tokenizer = tokenizer
        self.device = device

    @torch.no_grad()
    def features(self, texts: Sequence[str], images: Sequence[Image.Image]) -> Features:
        """Features of B pairs."""
        pixels = torch.stack([self.transform(image) for image in images]).to(self.device)
        tokens = self.tokenizer(list(texts)).to(self.device)
        return _unit(self.model.encode_image(pixels)), _unit(self.model.encode_text(tokens))


def _clip_logits(
    prompts: Sequence[str], completions: Sequence[NDArray[np.uint8]], path: str, device: str, batch: int
) -> list[float]:
    """Cosines times the model's scale."""
    model = _load_clip(path, device)
    # the model's learned temperature, about 100 for CLIP
    scale = float(model.model.logit_scale.detach().float().exp())
    values: list[float] = []
    for texts, images in _batches(prompts, completions, batch):
        image, text = model.features(texts, images)
        values += (scale * (image * text).sum(-1)).tolist()
    return values


def _batches(
    prompts: Sequence[str], completions: Sequence[NDArray[np.uint8]], batch: int
) -> list[tuple[list[str], list[Image.Image]]]:
    if batch < 1:
        raise UserError(f"batch={batch} must be at least 1")
    images = [Image.fromarray(image) for image in completions]
    starts = range(0, len(images), batch)
    return [(list(prompts[start : start + batch]), images[start : start + batch]) for start in starts]


def _unit(features: Tensor) -> Tensor:
    # float32 before the norm, since images are compared by small differences of a cosine
    return nn.functional.normalize(features.float(), dim=-1)


# loaded once per worker; a few, as several rewards may share one
@functools.lru_cache(maxsize=4)
def _load_clip(path: str, device: str) -> _TransformersClip:
    folder = Path(foreign_model(path, "a CLIP"))
    weights = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    if not (folder / "config.json").is_file() or not weights:
        raise UserError(
            f"weights not found at {path}, expected a folder with config.json, model.safetensors, the tokenizer and "
            "preprocessor_config.json of a CLIP model"
        )
    ensure_torchvision()
    from transformers import CLIPModel, CLIPProcessor

    with quiet_transformers():
        model: Any = CLIPModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        processor = CLIPProcessor.from_pretrained(folder, local_files_only=True)
    processor.tokenizer.split_special_tokens = True  # a prompt that spells a control token means its characters
    return _TransformersClip(model.eval().requires_grad_(False).to(device), processor, device)


@functools.lru_cache(maxsize=1)
def _load_open_clip(path: str, device: str) -> _OpenClip:
    try:
        import open_clip
    except ModuleNotFoundError as error:
        raise UserError(
            f"reward hpsv2: {HPS_FILE} needs the package open_clip; install it with pip install open_clip_torch, or "
            "pass a folder with weights converted for transformers"
        ) from error
    model, _, transform = open_clip.create_model_and_transforms(HPS_ARCHITECTURE, pretrained=None, device=device)
    # `weights_only`: a checkpoint is a pickle, which could run code
    stored = torch.load(expanded(path) / HPS_FILE, map_location=device, weights_only=True)
    model.load_state_dict(stored["state_dict"])
    return _OpenClip(model.eval(), transform, open_clip.get_tokenizer(HPS_ARCHITECTURE), device)


@functools.lru_cache(maxsize=4)
def _load_head(path: str, head: str | None, device: str) -> nn.Sequential:
    """The linear layers in order; the dropout between them has no effect in evaluation."""
    candidates = [expanded(head)] if head else [expanded(path) / name for name in HEAD_FILES]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise UserError(
            f"weights not found at {' or '.join(map(str, candidates))}, expected the head of the aesthetic predictor"
        )
    if file.suffix == ".safetensors":
        tensors: Mapping[str, Tensor] = load_file(file)
    else:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    # by their numbers: as texts, layers.10 would come before layers.2
    names = sorted(
        (name.removesuffix(".weight") for name in tensors if name.endswith(".weight")),
        key=lambda name: int(name.rpartition(".")[2]),
    )
    network = nn.Sequential(*(_linear(tensors[f"{name}.weight"], tensors[f"{name}.bias"]) for name in names))
    return network.eval().requires_grad_(False).to(device)


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.load_state_dict({"weight": weight.float(), "bias": bias.float()})
    return layer


@functools.lru_cache(maxsize=1)
def _load(path: str, device: str) -> Any:
    folder = Path(foreign_model(path, "an ImageReward"))
    missing = [name for name in (WEIGHTS_FILE, CONFIG_FILE) if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"weights not found at {path}, expected {WEIGHTS_FILE} and {CONFIG_FILE}; {missing[0]} is missing"
        )
    try:
        import ImageReward
    except ModuleNotFoundError as error:
        raise UserError(
            "reward image_reward needs the package ImageReward; install it with pip install image-reward"
        ) from error
    return ImageReward.load(
        str(folder / WEIGHTS_FILE), device=device, med_config=str(folder / CONFIG_FILE), download_root=str(folder)
    )
