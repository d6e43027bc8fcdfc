"""Stable Diffusion 1.5, 2 and XL as flow models.

They are trained on x_t = sqrt(a) x_0 + sqrt(1 - a) noise, with a = alphas_cumprod at step t of 1000. In rescaled
coordinates this is the path of a flow model: with k = sqrt(a) + sqrt(1 - a),

    x = x_t / k,    sigma = sqrt(1 - a) / k,    velocity = noise - x_0,

so x = (1 - sigma) x_0 + sigma noise, and deterministic DDIM is Euler's method. The inverse is k = 1 / sqrt((1 -
sigma)^2 + sigma^2) and a = ((1 - sigma) k)^2. DDPO's stochastic step is `diffusion.sampling.steps.DdimStep`. Paths
neither start at pure noise (sigma 1) nor end at 0: the first state is unit noise at the first time, and the last state
is used as the image.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from diffusion.families.base import Family, KohyaNames, LatentSides, Text, TextPart, channel_statistics
from mmrl.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

LOGGER = logging.getLogger("mmrl")
NEAR = 0.05
"""Times within this distance of a training step, in steps, count as that step; the difference is rounding."""
SPACINGS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas")
"""Options of schedulers that space the times differently."""


class StableDiffusionFamily(Family):
    """Stable Diffusion 1.5 and 2: a UNet on tokens of CLIP, times of leading DDIM steps, linear guidance."""

    pipeline_class = "StableDiffusionPipeline"
    summary = "Stable Diffusion 1.5, 2 and 2.1"
    citation = "Latent diffusion, arXiv 2112.10752"
    schedulers = (
        "DDIMScheduler",
        "DDPMScheduler",
        "PNDMScheduler",
        "EulerDiscreteScheduler",
        "EulerAncestralDiscreteScheduler",
        "DPMSolverMultistepScheduler",
    )
    predictions = ("epsilon", "v_prediction")
    networks = ("unet",)
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    text_parts: ClassVar[tuple[TextPart, ...]] = (TextPart("text_encoder", "tokenizer", is_clip=True),)
    text_length = 77
    text_width = "cross_attention_dim"
    kohya: ClassVar[KohyaNames | None] = KohyaNames()
    settings: ClassVar[tuple[str, ...]] = ("requires_safety_checker",)
    unused: ClassVar[Mapping[str, Any]] = {
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }

    def __init__(self, pipeline: Any, options: Any = None) -> None:
        super().__init__(pipeline, options)
        network = getattr(pipeline, "unet", None)
        if network is not None and network.config.get("time_cond_proj_dim"):
            raise UserError(
                "the UNet takes the guidance scale as an input (time_cond_proj_dim), as latent consistency models "
                "do, which is not supported; use the model that it was distilled from"
            )

    def encode(self, prompt: str, *, negative: bool = False) -> Text:
        """Tokens (L, D)."""
        tokens, _ = self.pipeline.encode_prompt(prompt, self.text_device, 1, False)
        return {"tokens": tokens[0]}

    def velocity(self, network: Any, latents: Tensor, sigma: Tensor, text: Text) -> Tensor:
        """Velocity (B, C, H, W) in the latents' dtype."""
        # sigma 1 is no step of training; the noisiest one is the nearest that the UNet knows
        sigma = sigma.float().clamp(max=self.max_time)
        s = sigma.reshape(-1, 1, 1, 1)
        # the UNet's own latents have unit variance: x = k x_t with sqrt(a) = (1 - s) k
        k = 1 / (s.square() + (1 - s).square()).sqrt()
        # float32: the conversions divide by sqrt(a), which is small at noisy times
        noisy = k * latents.float()
        found = network(
            noisy.to(latents.dtype), self._steps(sigma), text["tokens"], return_dict=False, **self._added(latents, text)
        )[0].float()
        signal, spread = (1 - s) * k, s * k  # sqrt(a) and sqrt(1 - a)
        # both predictions are turned into noise and image, whose difference is the velocity
        if self.pipeline.scheduler.config.prediction_type == "v_prediction":
            noise, clean = signal * found + spread * noisy, signal * noisy - spread * found
        else:
            noise, clean = found, (noisy - spread * found) / signal
        return (noise - clean).to(latents.dtype)

    def prediction_scale(self, sigma: Tensor) -> Tensor:
        """1 - sigma for the noise, and 1 / k for the UNet's own velocity sqrt(a) noise - sqrt(1 - a) x_0."""
        return _root(sigma) if self.pipeline.scheduler.config.prediction_type == "v_prediction" else 1 - sigma

    def _added(self, latents: Tensor, text: Text) -> dict[str, Any]:
        return {}

    @cached_property
    def _scheduler(self) -> Any:
        from diffusers import DDIMScheduler

        config = self.pipeline.scheduler.config
        if ignored := [name for name in SPACINGS if config.get(name)]:
            LOGGER.warning(
                "%s has %s, which evaluations and training do not use; their times are the scheduler's without it",
                type(self.pipeline.scheduler).__name__,
                ", ".join(ignored),
            )
        # defaults of the pipeline's scheduler count too, which diffusers would replace by those of DDIM
        config = {name: value for name, value in config.items() if name != "_use_default_values"}
        # clipping predictions to -1..1 is for pixels, not for latents
        return DDIMScheduler.from_config(config, clip_sample=False, thresholding=False)

    @cached_property
    def _sigmas(self) -> Tensor:
        """Times (1000,) of each step of training, rising."""
        return _sigma_of(self._scheduler.alphas_cumprod.double())

    @property
    def max_time(self) -> float:
        """Time of the last step of training."""
        return float(self._sigmas[-1])

    def _steps(self, sigma: Tensor) -> Tensor:
        """Training step (B,) of each time, interpolated in the logarithm of the noise-to-signal ratio."""
        table, times = (value.double().cpu().numpy() for value in (self._sigmas, sigma))
        # in the log of the ratio, where the steps of training are almost evenly spaced
        found = np.interp(np.log(times / (1 - times)), np.log(table / (1 - table)), np.arange(len(table)))
        whole = np.round(found)
        # steps of the grid are whole numbers: rounding must not move them to a neighbour
        steps = np.where(np.abs(found - whole) < NEAR, whole, found)
        return torch.from_numpy(steps).to(sigma.device, torch.float32)

    @property
    def few_steps(self) -> str:
        """Turbo models use trailing steps; so do models with zero terminal SNR, which are excluded."""
        config = self.pipeline.scheduler.config
        trails = config.get("timestep_spacing") == "trailing" and not config.get("rescale_betas_zero_snr")
        return "its scheduler uses trailing steps, like SD-Turbo and SDXL-Turbo" if trails else ""

    def drawing_scheduler(self) -> Any:
        """DDIM on the times of the pipeline's scheduler, without clipping."""
        return copy.deepcopy(self._scheduler)

    def call_lacks(self, scale: float, negative: str, steps: int) -> str:
        """DDIM takes equal steps, evaluations those to the next time, which may be uneven or longer."""
        scheduler = self._scheduler
        scheduler.set_timesteps(steps)
        length = scheduler.config.num_train_timesteps // steps
        uneven = bool((scheduler.timesteps.diff() != -length).any())
        spacing = scheduler.config.timestep_spacing
        lacks = f"with {spacing} times, {steps} steps of DDIM in diffusers are {length} training steps long"
        lacks += ", but evaluations step from each time to the next"
        return super().call_lacks(scale, negative, steps) or (lacks if uneven else "")

    def further_call(self) -> dict[str, Any]:
        """CLIP reads a fixed number of tokens."""
        return {}

    def first_latents(self, noise: Tensor, sigma: Tensor) -> Tensor:
        """Unit noise is the first state in the UNet's own coordinates."""
        return noise * _root(sigma).to(noise)

    def finished(self, latents: Tensor, sigma: Tensor) -> Tensor:
        """Use the last state, in the UNet's own coordinates, as the image."""
        return latents / _root(sigma).to(latents)

    def sides(self) -> LatentSides:
        """The UNet halves its input several times; the default is its training size."""
        config = self.pipeline.unet.config
        return LatentSides(2 ** (len(config.block_out_channels) - 1), config.sample_size)

    def sigma_grid(self, steps: int, shape: Sequence[int]) -> Tensor:
        """Times of DDIM's steps and its last one, which is above 0."""
        scheduler = self._scheduler
        scheduler.set_timesteps(steps)
        alphas = torch.stack([*scheduler.alphas_cumprod[scheduler.timesteps], scheduler.final_alpha_cumprod])
        return _sigma_of(alphas.double()).float()


class StableDiffusionXlFamily(StableDiffusionFamily):
    """Stable Diffusion XL: tokens of two CLIP encoders, a pooled one, and the size as an input."""

    pipeline_class = "StableDiffusionXLPipeline"
    summary = "Stable Diffusion XL"
    citation = "SDXL, arXiv 2307.01952"
    settings = ("force_zeros_for_empty_prompt", "add_watermarker")
    unused: ClassVar[Mapping[str, Any]] = {}
    text_parts = (
        TextPart("text_encoder", "tokenizer", is_clip=True),
        TextPart("text_encoder_2", "tokenizer_2", is_clip=True),
    )
    negative_differs = True

    def encode(self, prompt: str, *, negative: bool = False) -> Text:
        """Tokens (L, D) and pooled (P,); zeros for an empty negative prompt, if the pipeline uses them."""
        tokens, _, pooled, _ = self.pipeline.encode_prompt(
            prompt, device=self.text_device, do_classifier_free_guidance=False
        )
        found = {"tokens": tokens[0], "pooled": pooled[0]}
        # as the pipeline does if its configuration says so
        if negative and not prompt and self.pipeline.config.force_zeros_for_empty_prompt:
            return {name: torch.zeros_like(value) for name, value in found.items()}
        return found

    def _normalisation(self, like: Tensor) -> tuple[Any, Any]:
        """Autoencoders of models derived from SDXL may also have a mean and standard deviation per channel."""
        scale, shift = super()._normalisation(like)
        config = self.pipeline.vae.config
        if config.get("latents_mean") is None or config.get("latents_std") is None:
            return scale, shift
        mean, deviation = channel_statistics(config, like)
        return scale / deviation, mean

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        """The network's input has the pooled text and six embedded sizes."""
        config = self.pipeline.unet.config
        sizes = 6 * config.addition_time_embed_dim
        return super().text_shapes() | {"pooled": (config.projection_class_embeddings_input_dim - sizes,)}

    def _added(self, latents: Tensor, text: Text) -> dict[str, Any]:
        """The image's size, no cut, and the size again."""
        height, width = (self.factor * side for side in latents.shape[-2:])
        # as if the image was neither scaled nor cropped
        size = torch.tensor([height, width, 0, 0, height, width], device=latents.device, dtype=latents.dtype)
        return {"added_cond_kwargs": {"text_embeds": text["pooled"], "time_ids": size.expand(len(latents), -1)}}


def _sigma_of(alphas: Tensor) -> Tensor:
    return (1 - alphas).sqrt() / (alphas.sqrt() + (1 - alphas).sqrt())


def _root(sigma: Tensor) -> Tensor:
    """1 / k."""
    return (sigma.square() + (1 - sigma).square()).sqrt()
