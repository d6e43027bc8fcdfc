"""FLUX.2-klein."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from diffusion.families.base import (
    PATCH,
    REFERENCE,
    Family,
    FamilyOptions,
    KohyaNames,
    LatentSides,
    Text,
    TextPart,
    even_sigmas,
    grid_of,
)

if TYPE_CHECKING:
    from torch import Tensor

REFERENCE_TIME = 10
"""First coordinate of the tokens of an image to be edited."""
LARGE = 4300
"""Image tokens above which the shift does not depend on the number of steps."""


@dataclass
class KleinOptions(FamilyOptions):
    """Options of FLUX.2-klein."""

    text_layers: list[int] = field(default_factory=lambda: [9, 18, 27])
    """Layers of the text encoder whose hidden states are concatenated."""


class KleinFamily(Family):
    """FLUX.2-klein: tokens of three layers of Qwen3 without a mask, a shift that depends on size and step count.

    Latents are patches of 2 x 2 of the autoencoder's, (B, 4 C, H / 2, W / 2): they are normalised as such. Without a
    mask the padding is part of the prompt, so its length stays the released one.
    """

    pipeline_class = "Flux2KleinPipeline"
    summary = "FLUX.2-klein 4B and 9B, distilled and base, with or without an image to be edited"
    citation = "black-forest-labs/flux2"
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *("attn.to_qkv_mlp_proj", "attn.to_out"),
    )
    text_parts = (TextPart("text_encoder", "tokenizer"),)
    text_length = 512
    text_width = "joint_attention_dim"
    settings = ("is_distilled",)
    kohya = KohyaNames(
        renamed=(
            (r"^single_transformer_blocks\.(\d+)\.attn\.to_qkv_mlp_proj", r"single_blocks.\1.linear1"),
            (r"^single_transformer_blocks\.(\d+)\.attn\.to_out", r"single_blocks.\1.linear2"),
            (r"^transformer_blocks\.(\d+)\.attn\.to_q", r"double_blocks.\1.img_attn.qkv"),
            (r"^transformer_blocks\.(\d+)\.attn\.to_out\.0", r"double_blocks.\1.img_attn.proj"),
            (r"^transformer_blocks\.(\d+)\.attn\.add_q_proj", r"double_blocks.\1.txt_attn.qkv"),
            (r"^transformer_blocks\.(\d+)\.attn\.to_add_out", r"double_blocks.\1.txt_attn.proj"),
            (r"^transformer_blocks\.(\d+)\.ff\.linear_in", r"double_blocks.\1.img_mlp.0"),
            (r"^transformer_blocks\.(\d+)\.ff\.linear_out", r"double_blocks.\1.img_mlp.2"),
            (r"^transformer_blocks\.(\d+)\.ff_context\.linear_in", r"double_blocks.\1.txt_mlp.0"),
            (r"^transformer_blocks\.(\d+)\.ff_context\.linear_out", r"double_blocks.\1.txt_mlp.2"),
        ),
        fused=(("attn.to_q", "attn.to_k", "attn.to_v"), ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")),
    )
    takes_image = True
    options_class = KleinOptions

    @property
    def few_steps(self) -> str:
        """Whether the pipeline says so."""
        return "its model_index.json sets is_distilled" if self.pipeline.config.is_distilled else ""

    def guidance_call(self, scale: float, negative: str) -> dict[str, Any]:
        """The negative prompt is always the empty one."""
        return {"guidance_scale": scale}

    def further_call(self) -> dict[str, Any]:
        """The layers, if they differ from the pipeline's default."""
        layers = tuple(self.options.text_layers)
        return super().further_call() | ({} if layers == (9, 18, 27) else {"text_encoder_out_layers": layers})

    def call_lacks(self, scale: float, negative: str, steps: int) -> str:
        """The pipeline has no negative prompt, and a distilled one no guidance."""
        if self.few_steps and scale != 1:
            return f"the pipeline of a distilled model has no guidance, but evaluations used {scale:g}"
        lacks = "the pipeline takes no negative prompt, but evaluations used one" if negative and scale != 1 else ""
        return super().call_lacks(scale, negative, steps) or lacks

    @property
    def factor(self) -> int:
        """Pixels on a side of a patch."""
        return PATCH * int(self.pipeline.vae_scale_factor)

    @property
    def channels(self) -> int:
        """Channels of a patch."""
        return PATCH**2 * int(self.pipeline.vae.config.latent_channels)

    def encode(self, prompt: str, *, negative: bool = False) -> Text:
        """Tokens (L, D), including padding."""
        layers = tuple(self.options.text_layers)
        tokens, _ = self.pipeline.encode_prompt(
            self.read_text(self.text_parts[0], prompt),
            device=self.text_device,
            max_sequence_length=self.max_sequence_length,
            text_encoder_out_layers=layers,
        )
        return {"tokens": tokens[0]}

    def token_ids(self, part: TextPart, prompt: str, *, negative: bool = False) -> list[int]:
        """Tokens of the prompt in its chat template."""
        message = [{"role": "user", "content": self.read_text(part, prompt)}]
        # as in the pipeline, whose template closes an empty think block
        options: dict[str, Any] = {"add_generation_prompt": True, "enable_thinking": False}
        return self.tokenized(part, self.pipeline.tokenizer.apply_chat_template(message, tokenize=False, **options))

    def velocity(self, network: Any, latents: Tensor, sigma: Tensor, text: Text) -> Tensor:
        """Velocity (B, 4 C, H, W)."""
        rows, _, height, width = latents.shape
        tokens = latents.flatten(2).transpose(1, 2)
        # four coordinates: image, row, column, token
        places = _positions((1, height, width, 1), rows, latents.device)
        if REFERENCE in text:
            image = text[REFERENCE]
            tokens = torch.cat([tokens, image.flatten(2).transpose(1, 2)], 1)
            # the reference has the same rows and columns; its first coordinate distinguishes the two images
            own = _positions((1, *image.shape[-2:], 1), rows, latents.device)
            places = torch.cat([places, own + own.new_tensor([REFERENCE_TIME, 0, 0, 0])], 1)
        velocity = network(
            hidden_states=tokens,
            timestep=sigma,
            # the klein networks have no guidance embedding
            guidance=None,
            encoder_hidden_states=text["tokens"],
            txt_ids=_positions((1, 1, 1, text["tokens"].shape[1]), rows, latents.device),
            img_ids=places,
            return_dict=False,
        )[0]
        return velocity[:, : height * width].transpose(1, 2).reshape(latents.shape)  # without the reference's tokens

    def sides(self) -> LatentSides:
        """Positions are rotary; the default is the pipeline's."""
        return LatentSides(1, self.pipeline.default_sample_size // PATCH)

    def sigma_grid(self, steps: int, shape: Sequence[int]) -> Tensor:
        """Equal steps with an empirical shift."""
        mu = empirical_shift(steps, self.tokens(shape))
        return grid_of(self.pipeline.scheduler, steps, sigmas=even_sigmas(steps), mu=mu)

    def normalise(self, encoded: Tensor) -> Tensor:
        """Patches of the autoencoder's latents (B, C, H, W), by the statistics of its batch norm."""
        rows, channels, height, width = encoded.shape
        patches = encoded.reshape(rows, channels, height // PATCH, PATCH, width // PATCH, PATCH)
        mean, deviation = self._statistics(encoded)
        return (patches.permute(0, 1, 3, 5, 2, 4).reshape(rows, -1, height // PATCH, width // PATCH) - mean) / deviation

    def denormalise(self, latents: Tensor) -> Tensor:
        """The autoencoder's latents (B, C, 2 H, 2 W) of patches (B, 4 C, H, W)."""
        mean, deviation = self._statistics(latents)
        rows, channels, height, width = latents.shape
        patches = (latents * deviation + mean).reshape(rows, channels // PATCH**2, PATCH, PATCH, height, width)
        return patches.permute(0, 1, 4, 2, 5, 3).reshape(rows, -1, PATCH * height, PATCH * width)

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        norm = self.pipeline.vae.bn
        # the deviation of a batch norm in evaluation mode
        deviation = (norm.running_var + self.pipeline.vae.config.batch_norm_eps).sqrt()
        return norm.running_mean.to(like).reshape(1, -1, 1, 1), deviation.to(like).reshape(1, -1, 1, 1)


def empirical_shift(steps: int, tokens: int) -> float:
    """Return mu, the logarithm of the shift: lines in the number of tokens for 10 and for 200 steps, and between them.

    Source: diffusers pipelines/flux2/pipeline_flux2_klein.py, compute_empirical_mu.
    """
    many = 0.00016927 * tokens + 0.45666666
    if tokens > LARGE:
        return many
    few = 8.73809524e-05 * tokens + 1.89833333
    return (many - few) / 190.0 * steps + many - 200.0 * (many - few) / 190.0


def _positions(sides: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
    """Coordinates (B, L, 4) of the tokens: reference image, row, column, text position."""
    return torch.cartesian_prod(*(torch.arange(side, device=device) for side in sides)).expand(rows, -1, -1)
