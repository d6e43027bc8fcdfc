"""SANA."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from diffusion.families.base import MASK, Family, FamilyOptions, LatentSides, Text, TextPart, grid_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class SanaOptions(FamilyOptions):
    """Options of SANA."""

    instruction: list[str] | None = None
    """Lines before a positive prompt that ask the text encoder to enrich it. Default: the pipeline's own."""


class SanaFamily(Family):
    """SANA: masked tokens of Gemma, an instruction before positive prompts only, linear attention.

    Its scheduler, DPM-Solver++ on flow times, equals Euler at first order on the same times, whose fractions it
    truncates.
    """

    pipeline_class = "SanaPipeline"
    summary = "SANA 0.6B and 1.6B"
    citation = "SANA, arXiv 2410.10629"
    schedulers = ("DPMSolverMultistepScheduler", "FlowMatchEulerDiscreteScheduler")
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    text_parts = (TextPart("text_encoder", "tokenizer"),)
    text_length = 300
    text_width = "caption_channels"
    negative_differs = True
    options_class = SanaOptions

    def encode(self, prompt: str, *, negative: bool = False) -> Text:
        """Tokens (L, D), the first and the last of all, and their mask (L,) bool."""
        tokens, mask, _, _ = self.pipeline.encode_prompt(
            self.read_text(self.text_parts[0], prompt),
            device=self.text_device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
            complex_human_instruction=None if negative else self._instruction(),
        )
        return {"tokens": tokens[0], "tokens" + MASK: mask[0].bool()}

    def _instruction(self) -> list[str]:
        if self.options.instruction is not None:
            return self.options.instruction
        # `encode_prompt` has a different default from the pipeline's call
        found: list[str] = inspect.signature(self.pipeline.__call__).parameters["complex_human_instruction"].default
        return found

    def token_ids(self, part: TextPart, prompt: str, *, negative: bool = False) -> list[int]:
        """Tokens of the prompt and two of the instruction."""
        if negative or not self._instruction():
            return super().token_ids(part, prompt)
        start = "\n".join(self._instruction())
        return self.tokenized(part, start + self.read_text(part, prompt))[
            len(self.pipeline.tokenizer.encode(start)) - 2 :
        ]

    def velocity(self, network: Any, latents: Tensor, sigma: Tensor, text: Text) -> Tensor:
        """Velocity (B, C, H, W)."""
        velocity: Tensor = network(
            latents,
            encoder_hidden_states=text["tokens"],
            encoder_attention_mask=text["tokens" + MASK],
            timestep=self.time(sigma) * network.config.timestep_scale,
            return_dict=False,
        )[0]
        return velocity[:, : latents.shape[1]]  # some models predict a variance too

    def sides(self) -> LatentSides:
        """The transformer has no positions; its default is its training size."""
        config = self.pipeline.transformer.config
        return LatentSides(config.patch_size, config.sample_size)

    def sigma_grid(self, steps: int, shape: Sequence[int]) -> Tensor:
        """The scheduler's own times."""
        return grid_of(self.pipeline.scheduler, steps)

    def drawing_scheduler(self) -> Any:
        """DPM-Solver++ at first order."""
        scheduler = self.pipeline.scheduler
        if type(scheduler).__name__ != "DPMSolverMultistepScheduler":
            return scheduler
        return type(scheduler).from_config(scheduler.config, solver_order=1, algorithm_type="dpmsolver++")

    def further_call(self) -> dict[str, Any]:
        """The size is not moved to one of a list, and the instruction is the run's."""
        own = self.options.instruction
        instruction = {} if own is None else {"complex_human_instruction": [*own]}
        return {**super().further_call(), "use_resolution_binning": False, **instruction}

    def encode_pixels(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """The autoencoder has no distribution."""
        encoded: Tensor = self.pipeline.vae.encode(pixels).latent.float()
        return encoded, torch.zeros_like(encoded)
