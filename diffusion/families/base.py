"""A model family: how to embed prompts, call the network, choose its times and decode latents.

A family is one class in one file of this folder, or in your own file given by `model.family`. The class translates to
the conventions used everywhere else in the package: latents as stored, (B, C, H, W), or (B, C, T, H, W) for videos;
sigma from 1 (noise) to 0 (image); velocity = noise - image; guidance scale 1 = no guidance.

Shapes: B rows (images or videos), C latent channels, T latent frames, H x W latent pixels, F x h x w frames and pixels,
L text tokens of width D, P width of a pooled text embedding, S steps.
"""

from __future__ import annotations

import copy
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import torch

from mmrl.errors import UserError
from mmrl.fields import bounded

if TYPE_CHECKING:
    from torch import Tensor

PATCH = 2
"""Size of an image token in latent pixels."""


def scheduler_grid(scheduler: Any, steps: int, *, tokens: int, even: bool = False) -> Tensor:
    """Times of a flow-matching Euler scheduler, spaced by the scheduler or as S equal steps from 1 to 1 / S.

    Both are then shifted by a fixed number or, with `use_dynamic_shifting`, by `dynamic_shift`. Times spaced by the
    scheduler end at its already shifted `sigma_min`, so they are shifted twice.

    Args:
        scheduler: not modified.
        steps: S, at least 1.
        tokens: number of tokens the network gets per sample.
        even: whether to use equal steps.

    Returns:
        (S + 1,) float32 on the CPU, descending, the last 0.

    Source: diffusers FlowMatchEulerDiscreteScheduler.set_timesteps.
    """
    options: dict[str, Any] = {}
    if scheduler.config.use_dynamic_shifting:
        options["mu"] = dynamic_shift(scheduler, tokens)
    if even and not scheduler.config.get("use_flow_sigmas"):
        options["sigmas"] = even_sigmas(steps)
    return grid_of(scheduler, steps, **options)


def grid_of(scheduler: Any, steps: int, **options: Any) -> Tensor:
    """The scheduler's times (S + 1,) after `set_timesteps` with `options`; the scheduler is not changed."""
    own = copy.deepcopy(scheduler)
    own.set_timesteps(steps, **options)
    grid: Tensor = own.sigmas.to("cpu", torch.float32).clone()
    if not grid.isfinite().all():
        raise UserError(f"{type(own).__name__} has no times for steps={steps} with its settings; use more steps")
    if not own.timesteps.is_floating_point():
        called = own.timesteps.cpu()
        # The scheduler truncates before rounding to float32, so 333.999 may become 334 here. Such times are moved to
        # the neighbouring float32 number, after which truncating them gives the scheduler's own number again.
        for up in (0.0, 1.0):
            wrong = (grid[:-1] * 1000).floor() - called
            near = torch.nextafter(grid[:-1], torch.tensor(up))
            grid[:-1] = torch.where(wrong < 0 if up else wrong > 0, near, grid[:-1])
    return grid


def cuts_times(scheduler: Any) -> bool:
    """Whether the scheduler calls the network at whole numbers, as diffusers' multistep solvers do."""
    own = copy.deepcopy(scheduler)
    own.set_timesteps(2, **({"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}))
    return not own.timesteps.is_floating_point()


def even_sigmas(steps: int) -> list[float]:
    """S equal steps from 1 to 1 / S."""
    sigmas: list[float] = torch.linspace(1.0, 1.0 / steps, steps, dtype=torch.float64).tolist()
    return sigmas


def dynamic_shift(scheduler: Any, tokens: int) -> float:
    """Return mu, the logarithm of the shift for a size, by linear interpolation between two sizes in the config.

    Source: diffusers pipelines/flux/pipeline_flux.py, calculate_shift.
    """
    config = scheduler.config
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    return float(config.base_shift + slope * (tokens - config.base_image_seq_len))


def pack_latents(latents: Tensor) -> Tensor:
    """Cut latents (B, C, H, W) into 2 x 2 patches, row by row; each is a token (B, H/2 * W/2, 4 C), channels first."""
    rows, channels, height, width = latents.shape
    if height % PATCH or width % PATCH:
        raise UserError(f"latents of {height} x {width} cannot be cut into patches of {PATCH} x {PATCH}")
    patches = latents.reshape(rows, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack_latents(tokens: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `pack_latents`: tokens (B, H/2 * W/2, 4 C) to latents (B, C, H, W)."""
    rows, count, channels = tokens.shape
    down, across = height // PATCH, width // PATCH
    if height % PATCH or width % PATCH or count != down * across or channels % PATCH**2:
        raise ValueError(f"tokens of shape {tuple(tokens.shape)} do not match {height} x {width} latent pixels.")
    patches = tokens.reshape(rows, down, across, channels // PATCH**2, PATCH, PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(rows, -1, height, width)


Text: TypeAlias = "dict[str, Tensor]"
"""Embeddings of prompts by name: "tokens", "pooled" if the model uses it, and other entries the family needs."""
VelocityModel: TypeAlias = "Callable[[Tensor, Tensor, Text], Tensor]"
"""(latents (B, C, H, W), sigma (B,), text of B rows) -> velocity (B, C, H, W)."""
Combine: TypeAlias = "Callable[[Tensor, Tensor, float, Tensor], Tensor]"
"""(positive, negative, scale, sigma (B,)) -> guided velocity."""
MASK = "_mask"
"""Suffix of the mask of a padded entry."""
REFERENCE = "reference"
"""Name of the entry with the latents (C, H, W) of an image to be edited."""


class LatentSides(NamedTuple):
    """Sizes supported by a network, in latent pixels."""

    patch: int
    default: int
    """Height, and also width if `width` is None."""
    most: int | None = None
    width: int | None = None


class TextPart(NamedTuple):
    """Attribute names of a text encoder and its tokenizer in a pipeline."""

    encoder: str
    tokenizer: str
    is_clip: bool = False
    """Whether it pools at the end token and is limited to `tokenizer_max_length` instead of `max_sequence_length`."""
    optional: bool = False


class Cut(NamedTuple):
    """The part of a prompt that a tokenizer truncates."""

    tokenizer: str
    """Name of the tokenizer in the pipeline."""
    tokens: int
    """Number of tokens of the whole prompt, including start and end."""
    limit: int
    """Number of tokens that are read."""
    text: str
    """The truncated text."""


class KohyaNames(NamedTuple):
    """Layer names of a network in adapter files in kohya-ss's format, as read by ComfyUI and diffusers."""

    prefix: str = "lora_unet_"
    renamed: tuple[tuple[str, str], ...] = ()
    """Regular expressions and replacements, applied in order to the names used by diffusers."""
    fused: tuple[tuple[str, ...], ...] = ()
    """Name endings of layers that are fused there; `renamed` applies to the first of them."""
    dotted: bool = False
    """Whether the parts of a name are joined by dots instead of underscores."""
    by_diffusers: bool = True
    """Whether diffusers can read such files too."""


@dataclass
class FamilyOptions:
    """Options of every family."""

    max_sequence_length: int | None = bounded(None, at_least=1)
    """Maximum number of tokens of the long text encoder. Default: the pipeline's own."""


def linear_guidance(positive: Tensor, negative: Tensor, scale: float, sigma: Tensor | None = None) -> Tensor:
    """Classifier-free guidance, negative + scale (positive - negative)."""
    return negative + scale * (positive - negative)


class Family(ABC):
    """One model family, instantiated for one pipeline.

    Args:
        pipeline: an instance of the class named by `pipeline_class`.
        options: an instance of `options_class`; None for the defaults.
    """

    pipeline_class: ClassVar[str]
    """Class name in the pipeline's model_index.json."""
    summary: ClassVar[str]
    """Released models."""
    citation: ClassVar[str]
    """Paper or repository of the models."""
    schedulers: ClassVar[tuple[str, ...]] = ("FlowMatchEulerDiscreteScheduler",)
    """Scheduler classes supported by `sigma_grid`; only their times are used, not their steps."""
    predictions: ClassVar[tuple[str, ...]] = ("flow_prediction",)
    """Supported values of the scheduler's `prediction_type`, if it has one."""
    networks: ClassVar[tuple[str, ...]] = ("transformer",)
    """Names of the velocity networks in the pipeline; all except the first may be absent."""
    lora_targets: Sequence[str]
    """Linear layers that get an adapter, by the end of their name; each must exist."""
    text_parts: ClassVar[tuple[TextPart, ...]]
    text_length: ClassVar[int]
    """Default of `max_sequence_length`."""
    text_width: ClassVar[str]
    """Entry of the network's configuration with the width of its text tokens."""
    ragged: ClassVar[tuple[str, ...]] = ()
    """Text entries whose length L depends on the prompt; they are padded with zeros and get a mask (B, L) bool."""
    negative_differs: ClassVar[bool] = False
    """Whether negative prompts are embedded differently from positive ones."""
    settings: ClassVar[tuple[str, ...]] = ()
    """Arguments of the pipeline's class that are not components, such as the time to switch between two networks."""
    unused: ClassVar[Mapping[str, Any]] = {}
    """Arguments of the pipeline's class that replace parts which nothing reads, so that these are not loaded."""
    video: ClassVar[bool] = False
    """Whether a sample is a video, latents (C, T, H, W)."""
    takes_image: ClassVar[bool] = False
    """Whether a prompt can have an image to be edited."""
    edits: ClassVar[bool] = False
    """Whether the models are meant for prompts with an image."""
    kohya: ClassVar[KohyaNames | None] = None
    """Names in adapter files in kohya-ss's format; None if no program reads these files."""
    options_class: ClassVar[type[FamilyOptions]] = FamilyOptions

    def __init__(self, pipeline: Any, options: Any = None) -> None:
        self.pipeline = pipeline
        self.options: Any = self.options_class() if options is None else options
        if self.options.max_sequence_length is not None and all(part.is_clip for part in self.text_parts):
            raise UserError(
                f"model.max_sequence_length is {self.options.max_sequence_length}, but {self.pipeline_class} only has "
                f"CLIP encoders, which read {self.text_length} tokens; leave it out"
            )
        self._cuts: tuple[Any, bool] | None = None

    # text

    @property
    def max_sequence_length(self) -> int:
        """Maximum number of tokens of the long text encoder."""
        return self.options.max_sequence_length or self.text_length

    @property
    def text_device(self) -> torch.device:
        """Device of the text encoders, which may move earlier than the networks."""
        encoders = (getattr(self.pipeline, part.encoder) for part in self.text_parts)
        # an optional encoder may be missing
        return next(encoder.device for encoder in encoders if encoder is not None)

    @abstractmethod
    def encode(self, prompt: str, *, negative: bool = False) -> Text:
        """Embed one prompt with the pipeline's own `encode_prompt`; entries have no batch axis."""

    def encode_edit(self, prompt: str, image: Tensor, *, negative: bool = False) -> Text:
        """Embed one prompt with the image (3, h, w) in -1..1 to be edited.

        As in the pipelines, the latents of the image are the mode of the autoencoder's Gaussian.
        """
        return self.encode(prompt, negative=negative) | {
            # the network's normalisation, as for latents that are denoised
            REFERENCE: self.normalise(self.encode_pixels(image[None])[0])[0]
        }

    def token_ids(self, part: TextPart, prompt: str, *, negative: bool = False) -> list[int]:
        """All tokens of a prompt that count towards its encoder's limit, without truncation."""
        return self.tokenized(part, self.read_text(part, prompt))

    def tokenized(self, part: TextPart, text: str) -> list[int]:
        """All tokens of a text, without truncation."""
        tokenizer = getattr(self.pipeline, part.tokenizer)
        ids: list[int] = tokenizer(text, truncation=False, verbose=False).input_ids
        return ids

    def read_text(self, part: TextPart, prompt: str) -> str:
        """The prompt with a space inserted into each spelled-out control token, for tokenizers other than CLIP's.

        They cannot simply be turned off: T5's vocabulary has them as ordinary pieces, and chat templates need them.
        """
        tokenizer = getattr(self.pipeline, part.tokenizer)
        if part.is_clip or tokenizer is None:
            return prompt
        # Normalised first, because a text may only spell a control token after normalisation. ByT5's tokenizer is
        # written in Python and has no backend.
        normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        text = prompt if normalizer is None else normalizer.normalize_str(prompt)
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        # `(?!)` never matches, for tokenizers without control tokens
        control = re.compile("|".join(map(re.escape, [*tokenizer.all_special_tokens, *added])) or "(?!)")
        # only rewritten if needed: normalising could change other prompts
        return control.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text) if control.search(text) else prompt

    def lengths(self, prompt: str, *, negative: bool = False) -> dict[str, int]:
        """Length L of each ragged entry, from the tokenizer only."""
        part = self.text_parts[0]
        ids = self.token_ids(part, prompt, negative=negative) if self.ragged else []
        # truncated as the pipeline does
        return dict.fromkeys(self.ragged, min(len(ids), self.max_sequence_length))

    def collate(self, rows: Sequence[Text], lengths: Mapping[str, int] | None = None) -> Text:
        """Stack prompts; ragged entries are padded to `lengths` or to the longest prompt, whichever is longer."""
        found: Text = {}
        for name in rows[0]:
            values = [row[name] for row in rows]
            if name in self.ragged:
                # the run's common length if it is known: in low precision the padding changes the rounding
                size = max(int((lengths or {}).get(name, 0)), *(len(value) for value in values))
                # padded at the end, where the mask below switches positions off
                found[name] = torch.stack([padded(value, size) for value in values])
                real = torch.tensor([len(value) for value in values], device=found[name].device)
                found[name + MASK] = torch.arange(size, device=real.device) < real[:, None]
            else:
                # a view for a single prompt: it is expanded to all rows without a copy
                found[name] = values[0][None] if len(values) == 1 else torch.stack(values)
        return found

    def text_vector(self, text: Text) -> Tensor:
        """One text vector (B, P) per row, for critics and distances between prompts."""
        if "pooled" in text:
            return text["pooled"]
        tokens = text["tokens"]
        mask = text.get("tokens" + MASK)
        if mask is None:
            return tokens.mean(1)
        weight = mask.to(tokens)[..., None]  # the mean over real tokens: padding must not change the vector
        return (tokens * weight).sum(1) / weight.sum(1).clamp(min=1)

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the entries for a prompt of maximum length, from the network's configuration only."""
        config = getattr(self.pipeline, self.networks[0]).config
        # read from configurations, so memory can be estimated before weights are loaded
        shapes: dict[str, tuple[int, ...]] = {"tokens": (self.max_sequence_length, int(config[self.text_width]))}
        if pooled := config.get("pooled_projection_dim"):
            shapes["pooled"] = (int(pooled),)
        return shapes

    # the network

    @property
    def embedded_guidance(self) -> bool:
        """Whether the guidance scale is an input of the network."""
        return False

    @property
    def few_steps(self) -> str:
        """Why the pipeline counts as a few-step model without guidance; empty if it does not."""
        return ""

    @abstractmethod
    def velocity(self, network: Any, latents: Tensor, sigma: Tensor, text: Text) -> Tensor:
        """Velocity at latents and times (B,), in the shape of the latents and the network's dtype."""

    def model(self, network: Any = None) -> VelocityModel:
        """Wrap a network, by default the pipeline's first, as a velocity model."""
        return partial(self.velocity, getattr(self.pipeline, self.networks[0]) if network is None else network)

    def network_of(self, sigma: Tensor) -> Tensor | None:
        """Index in `networks` (B,) of each row's network; None = the first for all."""
        return None

    def combine(self, positive: Tensor, negative: Tensor, scale: float, sigma: Tensor) -> Tensor:
        """Guided velocity from the velocities of the prompt and the negative prompt; linear by default."""
        return linear_guidance(positive, negative, scale)

    # sizes and times

    @property
    def factor(self) -> int:
        """Size of a latent pixel in pixels."""
        return int(self.pipeline.vae_scale_factor)

    @property
    def channels(self) -> int:
        """Number of latent channels."""
        return int(self.pipeline.vae.config.latent_channels)

    @property
    def frame_factor(self) -> int:
        """Frames per latent frame, except for the first latent frame, which is a single frame."""
        return 1

    default_frames: ClassVar[int] = 1
    """Default number of frames of a video."""

    @abstractmethod
    def sides(self) -> LatentSides:
        """Latent sizes supported by the network."""

    def latent_shape(self, height: int | None = None, width: int | None = None, frames: int | None = None) -> Any:
        """Shape of one sample's latents, (C, H, W) or (C, T, H, W), from the size in pixels; None for the default."""
        limits = self.sides()
        multiple = self.factor * limits.patch
        sides = []
        for name, pixels, default in (
            ("height", height, limits.default),
            ("width", width, limits.width or limits.default),
        ):
            side = default * self.factor if pixels is None else pixels
            # the VAE's factor times the network's patch
            if side < 1 or side % multiple:
                near = _near(side, multiple, multiple)
                raise UserError(f"{name}={side} must be a positive multiple of {multiple} pixels; {near}")
            if limits.most is not None and side > limits.most * self.factor:
                most = limits.most * self.factor
                raise UserError(f"{name}={side} exceeds the maximum that the transformer has positions for: {most}")
            sides.append(side // self.factor)
        if not self.video:
            if frames is not None:
                raise UserError(
                    f"frames={frames}, but {self.pipeline_class} generates images, not videos; leave model.frames out"
                )
            return self.channels, *sides
        count = self.default_frames if frames is None else frames
        # the first latent frame is one frame, every other one `frame_factor` frames
        if count < 1 or (count - 1) % self.frame_factor:
            near = _near(count, self.frame_factor, 1)
            raise UserError(f"frames={count} must be 1 more than a multiple of {self.frame_factor}; {near}")
        return self.channels, (count - 1) // self.frame_factor + 1, *sides

    def frames(self, shape: Sequence[int]) -> int:
        """Frames of a video with latents of `shape`."""
        return 1 + (shape[1] - 1) * self.frame_factor

    def tokens(self, shape: Sequence[int]) -> int:
        """Number of tokens that the network gets for one sample with latents of `shape`."""
        count = 1
        for side in shape[1:]:
            count *= side
        # frames are not patched, only height and width
        return count // self.sides().patch ** 2

    @abstractmethod
    def sigma_grid(self, steps: int, shape: Sequence[int]) -> Tensor:
        """Times (S + 1,) float32 on the CPU at which the pipeline calls the network for latents of `shape`.

        They are decreasing. The network is not called at the last time, which is 0 unless the family's paths end
        earlier.
        """

    @property
    def max_time(self) -> float:
        """The largest time that the network knows; larger ones are not drawn to train it."""
        return 1.0

    def prediction_scale(self, sigma: Tensor) -> Tensor:
        """Ratio (B,) of the error of what the network predicts to the error of the velocity, at times (B,)."""
        return torch.ones_like(sigma)

    def time(self, sigma: Tensor) -> Tensor:
        """Times (B,) as passed to the network, 1000 at pure noise; some schedulers truncate fractions."""
        scheduler = self.pipeline.scheduler
        if self._cuts is None or self._cuts[0] is not scheduler:
            self._cuts = scheduler, cuts_times(scheduler)  # cached per scheduler, which users may replace
        # truncation must equal the pipeline's: the network would see another time than at sampling
        return (sigma * 1000).floor() if self._cuts[1] else sigma * 1000

    def drawing_scheduler(self) -> Any:
        """The scheduler with which the pipeline itself takes the steps of evaluations: Euler steps at these times."""
        return self.pipeline.scheduler

    def first_latents(self, noise: Tensor, sigma: Tensor) -> Tensor:
        """The initial state (B, C, H, W) from standard normal noise, at the first time of the grid ()."""
        return noise

    def finished(self, latents: Tensor, sigma: Tensor) -> Tensor:
        """x_0 from the last state, at the last time of the grid ()."""
        return latents

    # the pipeline's own call

    def call(self, shape: Sequence[int], scale: float, negative: str = "") -> dict[str, Any]:
        """Arguments of the pipeline's call, besides prompt, steps and noise, that reproduce the suite's sampling.

        Args:
            shape: shape of one sample's latents.
            scale: guidance scale.
            negative: negative prompt.
        """
        height, width = (side * self.factor for side in shape[-2:])
        return {"height": height, "width": width, **self.guidance_call(scale, negative), **self.further_call()}

    def guidance_call(self, scale: float, negative: str) -> dict[str, Any]:
        """Arguments of the pipeline's call for guidance."""
        # without guidance pipelines ignore the negative prompt or warn about it
        return {"guidance_scale": scale, **({"negative_prompt": negative} if negative and scale != 1 else {})}

    def further_call(self) -> dict[str, Any]:
        """Arguments of the pipeline's call that only depend on the options."""
        return {"max_sequence_length": self.max_sequence_length}

    def edit_call(self, shape: Sequence[int]) -> dict[str, Any]:
        """Further arguments of the pipeline's call for an image to be edited, which already has the size of the run."""
        return {}

    def call_lines(self, scale: float) -> list[str]:
        """Lines of Python for settings that are not arguments of the pipeline's call."""
        return []

    def call_lacks(self, scale: float, negative: str, steps: int) -> str:
        """Why the pipeline's call cannot reproduce the suite's sampling; empty if it can."""
        return f"the pipeline has no guidance scale below 1, but evaluations used {scale:g}" if scale < 1 else ""

    # pixels

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels (B, h, w, 3) or (B, F, h, w, 3) float32, in 0..1 before clamping."""
        autoencoder = self.pipeline.vae
        # policies may run in bfloat16 and decode in float32
        encoded = self.denormalise(latents.to(autoencoder.device, autoencoder.dtype))
        return channels_last(autoencoder.decode(encoded, return_dict=False)[0])

    def encode_pixels(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the autoencoder's Gaussian float32, from images (B, 3, h, w) in -1..1."""
        gaussian = self.pipeline.vae.encode(pixels).latent_dist
        return gaussian.mean.float(), gaussian.std.float()

    def normalise(self, encoded: Tensor) -> Tensor:
        """Convert the autoencoder's latents to the network's."""
        scale, shift = self._normalisation(encoded)
        return (encoded - shift) * scale

    def denormalise(self, latents: Tensor) -> Tensor:
        """The inverse of `normalise`."""
        scale, shift = self._normalisation(latents)
        return latents / scale + shift

    def _normalisation(self, like: Tensor) -> tuple[Any, Any]:
        """Scale and shift, numbers or tensors shaped for latents."""
        config = self.pipeline.vae.config
        # older autoencoders have no shift, newer ones may have None
        return float(config.scaling_factor), float(config.get("shift_factor") or 0.0)


class ChannelwiseFamily(Family):
    """A family whose autoencoder has a mean and standard deviation per latent channel."""

    def normalise(self, encoded: Tensor) -> Tensor:
        """Standardise each channel."""
        mean, deviation = channel_statistics(self.pipeline.vae.config, encoded)
        return (encoded - mean) / deviation

    def denormalise(self, latents: Tensor) -> Tensor:
        """Undo `normalise`."""
        mean, deviation = channel_statistics(self.pipeline.vae.config, latents)
        return latents * deviation + mean


def _near(value: int, multiple: int, smallest: int) -> str:
    """End of a message: the nearest valid values."""
    # multiples are counted from the smallest valid value, 1 for frames
    below = smallest + (value - smallest) // multiple * multiple
    return f"the smallest is {smallest}" if below < smallest else f"the nearest are {below} and {below + multiple}"


def padded(values: Tensor, size: int) -> Tensor:
    """Values (L, ...) padded with zeros at the end, (size, ...)."""
    return torch.cat([values, values.new_zeros(size - len(values), *values.shape[1:])])


def channel_statistics(source: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """`latents_mean` and `latents_std` of an autoencoder or its configuration, shaped for latents (B, C, ...)."""
    # one value per channel, for images and videos
    column = (1, -1, *[1] * (like.ndim - 2))
    mean, deviation = (torch.as_tensor(getattr(source, name)) for name in ("latents_mean", "latents_std"))
    return mean.to(like).reshape(column), deviation.to(like).reshape(column)


def channels_last(samples: Tensor) -> Tensor:
    """Decoded samples (B, 3, ..., h, w) in -1..1 as (B, ..., h, w, 3) in 0..1, float32."""
    return (samples.float() / 2 + 0.5).movedim(1, -1)


def blocks_of(network: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Blocks of a network by name: the outermost entries of its module lists that contain linear layers."""
    lists = [name for name, module in network.named_modules() if isinstance(module, torch.nn.ModuleList)]
    # lists inside a block's own submodules are part of that block
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    entries = itertools.chain.from_iterable(
        ((f"{name}.{key}", entry) for key, entry in network.get_submodule(name).named_children()) for name in outer
    )
    # lists without linear layers hold norms or embedders
    return {
        name: entry for name, entry in entries if any(isinstance(part, torch.nn.Linear) for part in entry.modules())
    }
