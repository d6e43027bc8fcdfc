"""Stable Diffusion 3 and FLUX: load their pipelines, call their transformers, turn images into latents and back.

A new family is one row of `FAMILIES`. Its transformer becomes a `VelocityModel` on ordinary latents.

Shapes: B rows (images), C latent channels, H x W latent pixels, h x w image pixels, L text tokens of width D, P width
of the pooled embedding. sigma runs from 1 (noise) to 0 (image); velocity = noise - image, as both families have it.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmrl.errors import UserError
from mmrl.files import expanded, read_json_object
from mmrl.hub.building import check_finite, first_line, may_be_hub_id
from mmrl.hub.compat import ensure_torchvision, quiet_transformers

VelocityModel = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(latents (B, C, H, W), sigma (B,), tokens (B, L, D), pooled (B, P)) -> velocity (B, C, H, W)."""
FLUX_PATCH = 2
"""Latent pixels on a side of one image token of FLUX."""
INDEX_FILE = "model_index.json"
ADDING = "a further family is a row of FAMILIES in diffusion/models/pipelines.py, see docs/adding.md"
LIBRARIES = ("diffusers", "transformers")
"""Libraries whose classes a pipeline may name."""
OWN_CLASSES = "diffusion."
"""Start of the modules of this package whose classes a pipeline may name."""


class DecodedImages(NamedTuple):
    """Images of B latents."""

    pixels: NDArray[np.uint8]
    """RGB (B, h, w, 3); black where `finite` is False."""
    finite: NDArray[np.bool_]
    """(B,) whether latents and decoded pixels are numbers. A black row that is not finite is no image of a policy."""


class LatentSides(NamedTuple):
    """Sizes that a transformer can represent, in latent pixels."""

    patch: int
    default: int
    most: int | None


class TextPart(NamedTuple):
    """Attribute names of a text encoder and its tokenizer in a pipeline."""

    encoder: str
    tokenizer: str
    is_t5: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Family:
    """One model family."""

    velocity: Callable[[Any, float], VelocityModel]
    """Make the velocity model from the transformer and `ModelConfig.guidance_embedding`."""
    sides: Callable[[Any], LatentSides]
    """Read the sides of the latent from the pipeline."""
    text: tuple[TextPart, ...]
    text_length: int
    """Default length of the T5 encoder in tokens."""
    encode: Callable[[Any, str, str, int], tuple[Tensor, Tensor]]
    """(pipeline, prompt, prompt for T5, length) -> tokens (1, L, D) and pooled (1, P), by the pipeline's own
    `encode_prompt`."""
    even_steps: bool = False
    """Whether the pipeline gives its scheduler S equal steps from 1 to 1 / S; others let it space the times itself."""


def family_of(pipeline: Any) -> Family:
    """The family of a pipeline; raises UserError for others."""
    for base in type(pipeline).__mro__:
        if base.__name__ in FAMILIES:
            return FAMILIES[base.__name__]
    raise UserError(f"{type(pipeline).__name__} is not supported; there are: {', '.join(FAMILIES)}; {ADDING}")


def load_pipeline(
    path_or_id: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Any:
    """Load a pipeline with all its parts frozen, in evaluation mode and without progress bars.

    Args:
        path_or_id: pipeline folder, or a hub id such as stabilityai/stable-diffusion-3.5-medium.
        dtype: precision of all parts.
        device: where they go.

    Returns:
        StableDiffusion3Pipeline or FluxPipeline.

    Raises:
        UserError: no such folder or hub id, another kind of pipeline, a scheduler that is not the Euler flow-matching
            one, or a part that is missing or damaged.
    """
    ensure_torchvision()
    where, folder = _resolve(path_or_id)
    index = _read_index(where, folder)
    family = str(index.get("_class_name"))
    if family not in FAMILIES:
        raise UserError(f"{where} is a {family}; supported are: {', '.join(FAMILIES)}; {ADDING}")
    absent = _absent_parts(index, family, where, folder)
    if index["scheduler"][1] != SCHEDULER:
        raise UserError(f"{where} has the scheduler {index['scheduler'][1]}; flow models here need {SCHEDULER}")
    pipeline = _from_pretrained(where, index, dtype, absent)
    for name, reason in SCHEDULER_OPTIONS.items():
        if pipeline.scheduler.config.get(name):
            raise UserError(f"the scheduler in {where} has {name}=true, {reason}; set it to false")
    for name, part in pipeline.components.items():
        if isinstance(part, torch.nn.Module):
            _check_complete(name, part, where)
            part.requires_grad_(False).eval()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device)


def decode_latents(pipeline: Any, latents: Tensor, batch: int = 8) -> DecodedImages:
    """Decode latents to images, some at a time.

    Args:
        pipeline: the pipeline whose autoencoder decodes.
        latents: (B, C, H, W), as the transformer works on them; those of FLUX unpacked.
        batch: images decoded together; it limits memory and changes nothing else.

    Returns:
        The images and which of them are numbers.

    Raises:
        ValueError: latents of another number of dimensions or channels.

    Gradient: none.
    """
    autoencoder = pipeline.vae
    scale, shift = _normalisation(autoencoder)
    channels = int(autoencoder.config.latent_channels)
    if latents.ndim != 4 or latents.shape[1] != channels:
        raise ValueError(f"latents have the shape {tuple(latents.shape)}; must be (B, {channels}, H, W).")
    pixels, finite = [], []
    with torch.no_grad():
        for part in latents.split(batch):
            encoded = part.to(autoencoder.device, autoencoder.dtype) / scale + shift
            images = autoencoder.decode(encoded, return_dict=False)[0].float()
            whole = images.isfinite().flatten(1).all(1) & part.to(images.device).isfinite().flatten(1).all(1)
            shown = (images / 2 + 0.5).clamp(0, 1).where(whole[:, None, None, None], images.new_zeros(()))
            pixels.append((shown * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu())
            finite.append(whole.cpu())
    return DecodedImages(torch.cat(pixels).numpy(), torch.cat(finite).numpy())


def encode_images(
    pipeline: Any, images: NDArray[np.uint8], generator: torch.Generator | None = None, batch: int = 8
) -> Tensor:
    """Encode images to latents, some at a time.

    Args:
        pipeline: the pipeline whose autoencoder encodes.
        images: RGB uint8 (B, h, w, 3); h and w multiples of the autoencoder's factor.
        generator: source of a sample of the autoencoder's Gaussian; None takes its mode. The draws do not depend on
            `batch`.
        batch: images encoded together.

    Returns:
        Latents (B, C, H, W) float32 on the autoencoder's device, as the transformer works on them.

    Raises:
        ValueError: images of another shape or dtype.

    Gradient: none.
    """
    autoencoder, factor = pipeline.vae, int(pipeline.vae_scale_factor)
    fits = images.ndim == 4 and images.shape[3] == 3 and not (images.shape[1] % factor or images.shape[2] % factor)
    if not fits or images.dtype != np.uint8:
        raise ValueError(
            f"images are {images.dtype} {images.shape}; must be uint8 (B, h, w, 3), h and w multiples of {factor}."
        )
    scale, shift = _normalisation(autoencoder)
    means, deviations = [], []
    with torch.no_grad():
        for part in torch.from_numpy(np.ascontiguousarray(images)).split(batch):
            scaled = part.to(autoencoder.device).permute(0, 3, 1, 2).to(autoencoder.dtype) / 127.5 - 1
            gaussian = autoencoder.encode(scaled).latent_dist
            means.append(gaussian.mean.float())
            deviations.append(gaussian.std.float())
    encoded = torch.cat(means)
    if generator is not None:
        noise = torch.randn(encoded.shape, generator=generator, device=generator.device).to(encoded.device)
        encoded = encoded + torch.cat(deviations) * noise
    return (encoded - shift) * scale


def latent_shape(pipeline: Any, height: int | None = None, width: int | None = None) -> tuple[int, int, int]:
    """Shape C, H, W of one image's latents, from its size in pixels; None = the size the pipeline was trained for."""
    factor, limits = int(pipeline.vae_scale_factor), family_of(pipeline).sides(pipeline)
    multiple = factor * limits.patch
    sides = []
    for name, pixels in (("height", height), ("width", width)):
        side = limits.default * factor if pixels is None else pixels
        if side < 1 or side % multiple:
            raise UserError(f"{name}={side} must be a positive multiple of {multiple} pixels")
        if limits.most is not None and side > limits.most * factor:
            raise UserError(f"{name}={side} is more than the transformer has positions for: {limits.most * factor}")
        sides.append(side // factor)
    return int(pipeline.vae.config.latent_channels), sides[0], sides[1]


def image_tokens(pipeline: Any, shape: tuple[int, int, int]) -> int:
    """Tokens that the transformer sees of one image with latents of `shape` C, H, W: H * W / patch ** 2."""
    return shape[1] * shape[2] // family_of(pipeline).sides(pipeline).patch ** 2


class Sd3Transformer:
    """A diffusers SD3Transformer2DModel as `VelocityModel`.

    Args:
        transformer: the module, plain or wrapped.
        train_timesteps: what sigma = 1 is called in the transformer's own time.
    """

    def __init__(self, transformer: Any, train_timesteps: int = 1000) -> None:
        self.transformer = transformer
        self.train_timesteps = train_timesteps

    def __call__(self, latents: Tensor, sigma: Tensor, tokens: Tensor, pooled: Tensor) -> Tensor:
        """Velocity (B, C, H, W) in the transformer's dtype."""
        velocity: Tensor = self.transformer(
            hidden_states=latents,
            timestep=sigma * self.train_timesteps,
            encoder_hidden_states=tokens,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        return velocity


class FluxTransformer:
    """A diffusers FluxTransformer2DModel as `VelocityModel`.

    A guidance-distilled transformer takes the guidance scale as an input and costs one row an image whatever its value.
    `GuidedVelocity` around it is guidance of the other kind, with a negative prompt.

    Args:
        transformer: the module, plain or with adapters.
        guidance_embedding: guidance scale, an input of guidance-distilled transformers; others ignore it.

    Source: black-forest-labs/flux src/flux/sampling.py (`prepare`, `denoise`, `unpack`).
    """

    def __init__(self, transformer: Any, guidance_embedding: float = 3.5) -> None:
        self.transformer = transformer
        self.guidance_embedding = guidance_embedding

    def __call__(self, latents: Tensor, sigma: Tensor, tokens: Tensor, pooled: Tensor) -> Tensor:
        """Velocity (B, C, H, W) in the transformer's dtype."""
        height, width = latents.shape[-2:]
        guidance = None
        if self.transformer.config.guidance_embeds:
            guidance = torch.full((len(latents),), self.guidance_embedding, dtype=torch.float32, device=latents.device)
        velocity = self.transformer(
            hidden_states=pack_latents(latents),
            timestep=sigma,  # the transformer multiplies by 1000 itself
            guidance=guidance,
            encoder_hidden_states=tokens,
            pooled_projections=pooled,
            txt_ids=torch.zeros(tokens.shape[1], 3, device=latents.device),
            img_ids=_image_ids(height // FLUX_PATCH, width // FLUX_PATCH, latents.device),
            return_dict=False,
        )[0]
        return unpack_latents(velocity, height, width)


def pack_latents(latents: Tensor) -> Tensor:
    """Cut latents (B, C, H, W) into patches of 2 x 2, row by row, each a token (B, H/2 * W/2, 4 C), channels first."""
    rows, channels, height, width = latents.shape
    if height % FLUX_PATCH or width % FLUX_PATCH:
        raise UserError(f"latents of {height} x {width} cannot be cut into patches of {FLUX_PATCH} x {FLUX_PATCH}")
    patches = latents.reshape(rows, channels, height // FLUX_PATCH, FLUX_PATCH, width // FLUX_PATCH, FLUX_PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack_latents(tokens: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `pack_latents`: tokens (B, H/2 * W/2, 4 C) to latents (B, C, H, W)."""
    rows, count, channels = tokens.shape
    down, across = height // FLUX_PATCH, width // FLUX_PATCH
    if height % FLUX_PATCH or width % FLUX_PATCH or count != down * across or channels % FLUX_PATCH**2:
        raise ValueError(f"tokens of shape {tuple(tokens.shape)} are not those of {height} x {width} latent pixels.")
    patches = tokens.reshape(rows, down, across, channels // FLUX_PATCH**2, FLUX_PATCH, FLUX_PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(rows, -1, height, width)


def _image_ids(down: int, across: int, device: torch.device) -> Tensor:
    """Position of each image token (down * across, 3): 0, row, column; text tokens are all at 0, 0, 0."""
    row, column = torch.meshgrid(torch.arange(down, device=device), torch.arange(across, device=device), indexing="ij")
    return torch.stack([torch.zeros_like(row), row, column], dim=-1).flatten(0, 1).float()


def _normalisation(autoencoder: Any) -> tuple[float, float]:
    """Scale and shift of latents: latent = (encoded - shift) * scale."""
    return float(autoencoder.config.scaling_factor), float(autoencoder.config.shift_factor or 0.0)


def _resolve(path_or_id: Path | str) -> tuple[str, Path | None]:
    """Path or id for diffusers, and the folder if it is one."""
    folder = expanded(path_or_id)
    if (folder / INDEX_FILE).is_file():
        return str(folder), folder
    if folder.is_dir():
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:6]) or "nothing"
        raise UserError(f"{folder} is not a pipeline folder: it has no {INDEX_FILE}; it holds {found}")
    if not isinstance(path_or_id, str) or not may_be_hub_id(path_or_id):
        raise UserError(
            f"there is no pipeline folder {path_or_id}; give a folder with {INDEX_FILE} or a hub id (owner/name)"
        )
    return str(path_or_id), None


def _read_index(where: str, folder: Path | None) -> dict[str, Any]:
    if folder is None:
        from diffusers import DiffusionPipeline

        try:
            index = dict(DiffusionPipeline.load_config(where))
        except Exception as error:  # hub and network errors
            raise UserError(
                f"there is no local folder {where!r}, and it cannot be fetched from the hub: {first_line(error)}"
            ) from error
    else:
        index = read_json_object(folder / INDEX_FILE)
    place = f"{where}/{INDEX_FILE}"
    for name, part in index.items():
        if not name.startswith("_") and isinstance(part, list):
            _check_part(name, part, place)
            if folder is not None and (code := [*(folder / name).glob("*.py")]):
                raise UserError(f"{code[0]} is code in a model folder, which is never run; remove it")
    if not isinstance(index.get("_class_name"), str):
        raise UserError(f"{place}: _class_name is {index.get('_class_name')!r:.80}; expected a name")
    return index


def _check_part(name: str, part: list[Any], place: str) -> None:
    """Refuse classes that could be code of the folder itself, before diffusers looks for them."""
    if len(part) != 2 or not all(entry is None or isinstance(entry, str) for entry in part):
        raise UserError(f"{place}: {name} is {part!r:.80}; expected the names of a library and a class")
    library, kind = part
    if library not in (None, *LIBRARIES) and not library.startswith(OWN_CLASSES):
        raise UserError(
            f"{place}: {name} is a class of {library!r:.80}; allowed are {', '.join(LIBRARIES)} and this package, as "
            "code in a model folder is never run"
        )
    if kind is not None and re.match("Auto(?!encoder)", kind):
        raise UserError(
            f"{place}: {name} is {kind!r:.80}, which may stand for code in the folder, and that is never run; "
            "name the class itself"
        )


def _absent_parts(index: dict[str, Any], family: str, where: str, folder: Path | None) -> list[str]:
    """Parts that the index leaves out; diffusers needs each of them named."""
    import diffusers

    names = list(inspect.signature(getattr(diffusers, family).__init__).parameters)[1:]
    absent = [name for name in names if not (isinstance(index.get(name), list) and index[name][0])]
    for name in REQUIRED_PARTS:
        if name in absent:
            raise UserError(f"{where} has no {name}, according to its {INDEX_FILE}")
    if folder is not None:
        for name in names:
            if name not in absent and not (folder / name).is_dir():
                raise UserError(f"{where} lacks the folder {name}, which its {INDEX_FILE} names")
    return absent


def _from_pretrained(where: str, index: dict[str, Any], dtype: torch.dtype, absent: list[str]) -> Any:
    import diffusers

    missing: dict[str, Any] = dict.fromkeys(absent)
    try:
        for part in index.values():
            if isinstance(part, list) and str(part[0]).startswith(OWN_CLASSES):
                importlib.import_module(part[0])  # diffusers finds classes of other packages only once imported
        with quiet_transformers(), quiet_diffusers():
            return getattr(diffusers, index["_class_name"]).from_pretrained(where, torch_dtype=dtype, **missing)
    except Exception as error:  # damaged files, missing packages and memory each raise their own kinds
        raise UserError(f"the pipeline in {where} cannot be loaded: {first_line(error)}") from error


@contextlib.contextmanager
def quiet_diffusers() -> Iterator[None]:
    """Switch off the progress bars and warnings of loading and saving; this module makes those checks."""
    from diffusers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            # the oldest release that is supported knows only the older name
            warnings.filterwarnings("ignore", message=".*torch_dtype.*", category=FutureWarning)
            yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def _check_complete(name: str, part: torch.nn.Module, where: str) -> None:
    # diffusers leaves weights that its files lack on the meta device and only logs it
    lacking = [key for key, weight in part.state_dict().items() if weight.is_meta]
    if lacking:
        raise UserError(f"the files of {name} in {where} lack {len(lacking)} tensors, such as {lacking[0]}")
    check_finite(dict(part.named_parameters()), f"{name} in {where}")


REQUIRED_PARTS = ("transformer", "vae", "scheduler")
SCHEDULER = "FlowMatchEulerDiscreteScheduler"
SCHEDULER_OPTIONS = {
    "invert_sigmas": "so its times run from image to noise",
    "stochastic_sampling": "so its steps are neither the Euler step nor one whose log-probability is known here",
}
"""Options that change the scheduler's steps, and how."""


def _sd3_sides(pipeline: Any) -> LatentSides:
    config = pipeline.transformer.config
    return LatentSides(config.patch_size, config.sample_size, config.pos_embed_max_size * config.patch_size)


def _flux_sides(pipeline: Any) -> LatentSides:
    # FLUX's positions are rotary, so its transformer has no size of its own
    return LatentSides(FLUX_PATCH, pipeline.vae.config.sample_size // pipeline.vae_scale_factor, None)


def _encode_sd3(pipeline: Any, prompt: str, t5: str, length: int) -> tuple[Tensor, Tensor]:
    tokens, _, pooled, _ = pipeline.encode_prompt(
        prompt, None, t5, do_classifier_free_guidance=False, max_sequence_length=length
    )
    return tokens, pooled


def _encode_flux(pipeline: Any, prompt: str, t5: str, length: int) -> tuple[Tensor, Tensor]:
    tokens, pooled, _ = pipeline.encode_prompt(prompt, t5, max_sequence_length=length)
    return tokens, pooled


FAMILIES = {
    "StableDiffusion3Pipeline": Family(
        velocity=lambda transformer, guidance_embedding: Sd3Transformer(transformer),
        sides=_sd3_sides,
        text=(
            TextPart("text_encoder", "tokenizer"),
            TextPart("text_encoder_2", "tokenizer_2"),
            TextPart("text_encoder_3", "tokenizer_3", is_t5=True, optional=True),
        ),
        text_length=256,
        encode=_encode_sd3,
    ),
    "FluxPipeline": Family(
        velocity=FluxTransformer,
        sides=_flux_sides,
        text=(TextPart("text_encoder", "tokenizer"), TextPart("text_encoder_2", "tokenizer_2", is_t5=True)),
        text_length=512,
        encode=_encode_flux,
        even_steps=True,
    ),
}
"""Families by the class name of their pipeline."""
