"""Diffusers pipelines: loading with all checks, decoding latents to images, and encoding images to latents.

Shapes: B rows (images or videos), C latent channels, H x W latent pixels, F x h x w frames and pixels; the latents of a
video are (B, C, T, H, W).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusion.families.base import Family
from diffusion.families.table import find_family
from mmrl.core.payload import to_host
from mmrl.errors import UserError
from mmrl.files import expanded, read_json_object, written_by_run
from mmrl.hub.building import check_finite, first_line, may_be_hub_id
from mmrl.hub.compat import ensure_torchvision, quiet_transformers
from mmrl.workers.given import take_model

INDEX_FILE = "model_index.json"
LIBRARIES = ("diffusers", "transformers")
"""Libraries whose classes may appear in a pipeline's index."""
OWN_CLASSES = "diffusion."
"""Prefix of the modules of this package whose classes may appear there too."""


class DecodedImages(NamedTuple):
    """Images of B latents."""

    pixels: NDArray[np.uint8]
    """RGB (B, h, w, 3), or (B, K, h, w, 3) of videos; black if `finite` is False."""
    finite: NDArray[np.bool_]
    """(B,) bool, whether latents and decoded pixels are finite. A black row that is not finite is not an image."""


def load_pipeline(
    path_or_id: Path | str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    family: str | None = None,
) -> Any:
    """Load a pipeline with all parts frozen, in evaluation mode and without progress bars.

    Args:
        path_or_id: pipeline folder, or a hub id such as stabilityai/stable-diffusion-3.5-medium.
        dtype: precision of all parts.
        device: device of all parts.
        family: `module:Class` of a custom family; None for a built-in one.

    Returns:
        The pipeline, an instance of the class given in its model_index.json.

    Raises:
        UserError: the folder or hub id does not exist, the pipeline has no family, the family does not support its
            scheduler, or a part is missing or damaged.
    """
    ensure_torchvision()
    where, folder = _resolve(path_or_id)
    index, kind = _read_index(where, folder, family)
    absent = _absent_parts(index, kind, where, folder)
    # before loading: a wrong scheduler should not cost the download of the weights
    if index["scheduler"][1] not in kind.schedulers:
        raise UserError(
            f"{where} has the scheduler {index['scheduler'][1]}; {kind.pipeline_class} needs "
            f"{' or '.join(kind.schedulers)}"
        )
    pipeline = _lent(where, dtype, kind.networks[0])
    if pipeline is None:
        pipeline = _from_pretrained(where, index, dtype, {**dict.fromkeys(absent), **kind.unused})
    upcast(pipeline.vae)
    # only after loading, since its default depends on the scheduler's class
    predicted = pipeline.scheduler.config.get("prediction_type", kind.predictions[0])
    if predicted not in kind.predictions:
        raise UserError(
            f"the scheduler in {where} has prediction_type={predicted}, not {' or '.join(kind.predictions)}"
        )
    for name, reason in SCHEDULER_OPTIONS.items():
        if pipeline.scheduler.config.get(name):
            raise UserError(f"the scheduler in {where} has {name}=true, {reason}; set it to false")
    for name, part in pipeline.components.items():
        if isinstance(part, torch.nn.Module):
            _check_complete(name, part, where)
            # dropout in a text encoder would make cached embeddings random
            part.requires_grad_(False).eval()
    return pipeline.to(device)


def outlined_pipeline(path_or_id: Path | str, family: str | None = None) -> Any:
    """Build a pipeline from its configuration only; its weights are uninitialised and on the default device.

    Raises:
        UserError: the folder or hub id does not exist, the pipeline has no family, or a configuration is damaged.
    """
    import diffusers

    ensure_torchvision()
    where, folder = _resolve(path_or_id)
    index, kind = _read_index(where, folder, family)
    parts: dict[str, Any] = dict.fromkeys(_absent_parts(index, kind, where, folder))
    try:
        with quiet_transformers(), quiet_diffusers():
            for name, part in index.items():
                if not name.startswith("_") and isinstance(part, list) and part[0]:
                    parts[name] = _outlined(where, name, *part)
            given = {name: index[name] for name in kind.settings if name in index}
            return getattr(diffusers, index["_class_name"])(**parts, **given)
    except Exception as error:  # as in loading
        raise UserError(f"the configuration of the pipeline in {where} cannot be read: {first_line(error)}") from error


def _outlined(where: str, name: str, library: str, kind: str) -> Any:
    """A part of a pipeline; its weights, if any, have no values."""
    own: Any = getattr(importlib.import_module(library), kind)
    # tokenizers and schedulers have no weights and are needed whole
    if not issubclass(own, torch.nn.Module):
        return own.from_pretrained(where, subfolder=name)
    # diffusers models have `load_config`, those of transformers a `config_class`
    if hasattr(own, "load_config"):
        return own.from_config(own.load_config(where, subfolder=name))
    return own(own.config_class.from_pretrained(where, subfolder=name))


def decode_latents(family: Family, latents: Tensor, batch: int = 8, frames: int = 0) -> DecodedImages:
    """Decode latents to images or videos in small batches.

    Args:
        family: the family whose autoencoder decodes.
        latents: (B, C, H, W) or (B, C, T, H, W), in the network's normalisation.
        batch: images decoded at once (videos one at a time); only affects memory.
        frames: frames of a video to keep, evenly spaced from the first to the last; 0 = all.

    Returns:
        The images and which of them are finite.

    Raises:
        ValueError: wrong number of dimensions or channels.

    Gradient: none.
    """
    expected = f"(B, {family.channels}, {'T, ' if family.video else ''}H, W)"
    if latents.ndim != 4 + family.video or latents.shape[1] != family.channels:
        raise ValueError(f"latents have the shape {tuple(latents.shape)}; must be {expected}.")
    parts = []
    with torch.no_grad(), own_precision(family.pipeline.vae.device):
        for part in latents.split(1 if family.video else batch):
            images = family.decode(part)
            # both are checked, since either can be finite while the other is not
            whole = images.isfinite().flatten(1).all(1) & part.to(images.device).isfinite().flatten(1).all(1)
            # replaced before the cast: uint8 of NaN is undefined
            shown = images.clamp(0, 1).where(whole.reshape(-1, *[1] * (images.ndim - 1)), images.new_zeros(()))
            if family.video and 0 < frames < shown.shape[1]:
                # evenly spaced, first and last included
                shown = shown[:, torch.linspace(0, shown.shape[1] - 1, frames).round().long()]
            # moved to the CPU part by part; whole videos do not fit on the accelerator
            parts.append(to_host([(shown * 255).round().to(torch.uint8), whole]))
    pixels, finite = (torch.cat(own).numpy() for own in zip(*parts, strict=True))
    return DecodedImages(pixels, finite)


def encode_images(
    family: Family, images: NDArray[np.uint8], generator: torch.Generator | None = None, batch: int = 8
) -> Tensor:
    """Encode images or videos to latents in small batches.

    Args:
        family: the family whose autoencoder encodes.
        images: RGB uint8 (B, h, w, 3), or (B, F, h, w, 3) for videos, in a size supported by the autoencoder.
        generator: for sampling from the autoencoder's Gaussian, independent of `batch`; None takes its mode.
        batch: images encoded at once (videos one at a time).

    Returns:
        Latents (B, C, H, W) or (B, C, T, H, W) float32 on the autoencoder's device, in the network's normalisation.

    Raises:
        UserError: images for a video family, or videos for an image family.
        ValueError: wrong shape or dtype.

    Gradient: none.
    """
    autoencoder = family.pipeline.vae
    _check_given(family, images)
    means, deviations = [], []
    with torch.no_grad(), own_precision(autoencoder.device):
        for part in torch.from_numpy(np.ascontiguousarray(images)).split(1 if family.video else batch):
            scaled = part.to(autoencoder.device).movedim(-1, 1).to(autoencoder.dtype) / 127.5 - 1
            mean, deviation = family.encode_pixels(scaled)
            means.append(mean)
            deviations.append(deviation)
        encoded = torch.cat(means)
        if generator is not None:
            # drawn for all images at once, after the loop, so that `batch` does not change the noise
            noise = torch.randn(encoded.shape, generator=generator, device=generator.device).to(encoded.device)
            encoded = encoded + torch.cat(deviations) * noise
        # sampled in the autoencoder's scale, normalised afterwards
        return family.normalise(encoded)


def upcast(autoencoder: Any) -> None:
    """Hold an autoencoder in float32 if its activations overflow in float16, according to its configuration."""
    if autoencoder.dtype == torch.float16 and autoencoder.config.get("force_upcast"):
        autoencoder.float()


def own_precision(device: torch.device) -> torch.autocast:
    """Run frozen parts in the precision of their weights; in that of the trainer they may overflow."""
    return torch.autocast(device.type, enabled=False)


def _check_given(family: Family, images: NDArray[np.uint8]) -> None:
    """Reject images that the family's autoencoder does not support."""
    if images.ndim in (4, 5) and (images.ndim == 5) != family.video:
        drawn, given = ("videos", "images (B, h, w, 3)") if family.video else ("images", "videos (B, F, h, w, 3)")
        raise UserError(
            f"{family.pipeline_class} generates {drawn}, but got {given}; a .npz file must contain videos as (N, F, "
            "h, w, 3)"
        )
    factor, group = family.factor, family.frame_factor
    fits = images.ndim == 4 + family.video and images.shape[-1] == 3
    fits = fits and not (images.shape[-3] % factor or images.shape[-2] % factor)
    fits = fits and not (family.video and (images.shape[1] - 1) % group)
    if not fits or images.dtype != np.uint8:
        expected = f"uint8 (B, {'F, ' if family.video else ''}h, w, 3), h and w multiples of {factor}"
        frames = f", F 1 more than a multiple of {group}" if family.video else ""
        raise ValueError(f"images are {images.dtype} {images.shape}; must be {expected}{frames}.")


def _resolve(path_or_id: Path | str) -> tuple[str, Path | None]:
    """Path or id for diffusers, and the folder if it is one."""
    folder = expanded(path_or_id)
    if (folder / INDEX_FILE).is_file():
        return str(folder), folder
    if folder.is_dir():
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:6]) or "nothing"
        raise UserError(f"{folder} is not a pipeline folder: it has no {INDEX_FILE}; it contains {found}")
    if not isinstance(path_or_id, str) or not may_be_hub_id(path_or_id):
        raise UserError(
            f"pipeline folder {path_or_id} not found; pass a folder with {INDEX_FILE} or a Hub id (owner/name)"
        )
    if advice := written_by_run(path_or_id):
        raise UserError(f"pipeline folder {path_or_id} not found{advice}")
    return str(path_or_id), None


def _read_index(where: str, folder: Path | None, family: str | None) -> tuple[dict[str, Any], type[Family]]:
    """The index, with the parts that the family does not use replaced, and the family."""
    if folder is None:
        from diffusers import DiffusionPipeline

        try:
            index = dict(DiffusionPipeline.load_config(where))
        except Exception as error:  # hub and network errors
            raise UserError(
                f"folder {where!r} not found, and it cannot be downloaded from the Hub: {first_line(error)}"
            ) from error
    else:
        index = read_json_object(folder / INDEX_FILE)
    place = f"{where}/{INDEX_FILE}"
    if not isinstance(index.get("_class_name"), str):
        raise UserError(f"{place}: _class_name is {index.get('_class_name')!r:.80}; expected a name")
    kind = find_family(index["_class_name"], family, where)
    for name, part in index.items():
        if not name.startswith("_") and isinstance(part, list):
            if name not in kind.unused:
                _check_part(name, part, place)
            if folder is not None and (code := [*(folder / name).glob("*.py")]):
                raise UserError(f"{code[0]} is code in a model folder, which is never run; remove it")
    return {**index, **kind.unused}, kind


def _check_part(name: str, part: list[Any], place: str) -> None:
    """Reject classes that could be code in the folder itself, before diffusers looks for them."""
    if len(part) != 2 or not all(entry is None or isinstance(entry, str) for entry in part):
        raise UserError(f"{place}: {name} is {part!r:.80}; expected the names of a library and a class")
    library, kind = part
    if library not in (None, *LIBRARIES) and not library.startswith(OWN_CLASSES):
        raise UserError(
            f"{place}: {name} is a class of {library!r:.80}; only {', '.join(LIBRARIES)} and this package are "
            "allowed, because code in a model folder is never run"
        )
    # AutoModel and its kind follow `auto_map` to code; AutoencoderKL is an ordinary class
    if kind is not None and re.match("Auto(?!encoder)", kind):
        raise UserError(
            f"{place}: {name} is {kind!r:.80}, which may refer to code in the folder, which is never run; use a "
            "plain class name"
        )


def _absent_parts(index: dict[str, Any], family: type[Family], where: str, folder: Path | None) -> list[str]:
    """Parts missing from the index; diffusers needs each of them passed as None."""
    import diffusers

    # without `self`
    arguments = list(inspect.signature(getattr(diffusers, family.pipeline_class).__init__).parameters)[1:]
    names = [name for name in arguments if name not in family.settings]
    # [null, null] in an index means that the part was left out when saving
    absent = [name for name in names if not (isinstance(index.get(name), list) and index[name][0])]
    for name in (family.networks[0], "vae", "scheduler"):
        if name in absent:
            raise UserError(f"{where} has no {name}, according to its {INDEX_FILE}")
    if folder is not None:
        for name in names:
            if name not in absent and not (folder / name).is_dir():
                raise UserError(f"{where} lacks the folder {name}, which is listed in its {INDEX_FILE}")
    return absent


def _lent(where: str, dtype: torch.dtype, network: str) -> Any:
    """The pipeline of the user's program that was saved in a folder; None if there is none."""
    own = take_model(where)
    if own is None or getattr(own, network).dtype == dtype:
        return own  # with all parts in their precision, such as a decoder in float32
    return own.to(dtype)


def _from_pretrained(where: str, index: dict[str, Any], dtype: torch.dtype, given: dict[str, Any]) -> Any:
    import diffusers

    try:
        for part in index.values():
            if isinstance(part, list) and str(part[0]).startswith(OWN_CLASSES):
                importlib.import_module(part[0])  # diffusers only finds classes of other packages if already imported
        with quiet_transformers(), quiet_diffusers():
            pipeline = getattr(diffusers, index["_class_name"]).from_pretrained(where, torch_dtype=dtype, **given)
            pipeline.set_progress_bar_config(disable=True)
            return pipeline
    except Exception as error:  # damaged files, missing packages and memory each raise their own kinds
        raise UserError(f"the pipeline in {where} cannot be loaded: {first_line(error)}") from error


@contextlib.contextmanager
def quiet_diffusers() -> Iterator[None]:
    """Turn off progress bars and warnings while loading and saving; this module does the checks itself."""
    from diffusers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            # the oldest supported release only knows the old name of the argument
            warnings.filterwarnings("ignore", message=".*torch_dtype.*", category=FutureWarning)
            yield
    finally:
        logging.set_verbosity(verbosity)
        # restored rather than enabled: users may have turned the bars off themselves
        if shown:
            logging.enable_progress_bar()


def _check_complete(name: str, part: torch.nn.Module, where: str) -> None:
    # diffusers leaves missing weights on the meta device and only logs a warning
    lacking = [key for key, weight in part.state_dict().items() if weight.is_meta]
    if lacking:
        raise UserError(f"{len(lacking)} tensors are missing from the files of {name} in {where}, such as {lacking[0]}")
    check_finite(dict(part.named_parameters()), f"{name} in {where}")


SCHEDULER_OPTIONS = {
    "invert_sigmas": "so its times run from image to noise",
    "stochastic_sampling": "so its steps are neither Euler steps nor steps with a known log-probability",
}
"""Unsupported scheduler options, and what they change."""
