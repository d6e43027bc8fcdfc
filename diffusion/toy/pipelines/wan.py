"""A tiny Wan pipeline: the released architectures, and an autoencoder of clips that needs no training.

The first frame is encoded alone and the others in groups, as in Wan's own autoencoder. A group of t frames of p x p
pixels becomes one latent pixel: its coordinates along the K directions in which such blocks vary most.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from diffusion.toy.pipelines.patches import NOISELESS, principal_directions
from diffusion.toy.pipelines.tiny import t5_tokenizer, write_pipeline
from mmrl.errors import UserError
from mmrl.hub.compat import ensure_torchvision

ensure_torchvision()

from diffusers import ModelMixin  # noqa: E402
from diffusers.configuration_utils import ConfigMixin, register_to_config  # noqa: E402
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution  # noqa: E402


class BlockAutoencoder(ModelMixin, ConfigMixin):
    """Linear autoencoder of clips with the interface of diffusers' AutoencoderKLWan."""

    @register_to_config
    def __init__(
        self,
        scale_factor_spatial: int = 2,
        scale_factor_temporal: int = 4,
        z_dim: int = 16,
        latents_mean: Sequence[float] = (),
        latents_std: Sequence[float] = (),
    ) -> None:
        super().__init__()
        self._pixels = scale_factor_spatial
        self._frames = scale_factor_temporal
        size = 3 * scale_factor_temporal * scale_factor_spatial**2
        if not 1 <= z_dim <= size:
            raise UserError(f"z_dim={z_dim} must be between 1 and {size}")
        self.basis = nn.Parameter(torch.eye(z_dim, size), requires_grad=False)
        self.mean = nn.Parameter(torch.zeros(size), requires_grad=False)

    @classmethod
    def fit(cls, clips: NDArray[np.uint8], pixels: int = 2, frames: int = 4, channels: int = 16) -> BlockAutoencoder:
        """Find the directions in which blocks of clips uint8 (N, F, h, w, 3) vary most."""
        statistics: dict[str, Any] = {"latents_mean": [0.0] * channels, "latents_std": [1.0] * channels}
        sizes = {"scale_factor_spatial": pixels, "scale_factor_temporal": frames, "z_dim": channels}
        model = cls(**sizes, **statistics)
        scaled = torch.from_numpy(clips).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
        blocks = model._blocks(scaled).movedim(1, -1).flatten(0, -2).double()
        mean, directions, deviation = principal_directions(blocks, channels)
        model.mean.data.copy_(mean)
        model.basis.data.copy_(directions)
        model.register_to_config(latents_std=[deviation] * channels)
        return model.eval()

    def encode(self, x: Tensor, return_dict: bool = True) -> Any:
        """A Gaussian (B, K, T, h / p, w / p) of no width, from clips (B, 3, F, h, w) in -1..1."""
        blocks = self._blocks(x).movedim(1, -1) - self.mean
        latents = (blocks @ self.basis.T).movedim(-1, 1)
        gaussian = DiagonalGaussianDistribution(torch.cat([latents, torch.full_like(latents, NOISELESS)], 1))
        return SimpleNamespace(latent_dist=gaussian) if return_dict else (gaussian,)

    def decode(self, z: Tensor, return_dict: bool = True) -> Any:
        """Clips (B, 3, t (T - 1) + 1, p H, p W) of latents (B, K, T, H, W)."""
        blocks = z.movedim(1, -1) @ self.basis + self.mean
        cells = blocks.unflatten(-1, (3, self._frames, self._pixels, self._pixels))  # B T H W 3 t p p
        clips = cells.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3)
        clips = clips[:, :, self._frames - 1 :]  # the first block is copies of the first frame
        return DecoderOutput(sample=clips) if return_dict else (clips,)

    def _blocks(self, x: Tensor) -> Tensor:
        """Blocks (B, 3 t p^2, T, h / p, w / p) of clips; the first frame is repeated to a whole block."""
        pixels, frames = self._pixels, self._frames
        whole = torch.cat([x[:, :, :1].expand(-1, -1, frames - 1, -1, -1), x], 2)
        cells = (
            whole.unflatten(4, (-1, pixels)).unflatten(3, (-1, pixels)).unflatten(2, (-1, frames))
        )  # B 3 T t H p W p
        return cells.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4)


def build_tiny_wan(
    path: Path | str,
    autoencoder: BlockAutoencoder,
    *,
    corpus: Sequence[str],
    layers: int = 3,
    heads: int = 4,
    head_width: int = 24,
    text_width: int = 64,
    shift: float = 1.5,
    seed: int = 0,
) -> Path:
    """Build a Wan 2.1 pipeline whose transformer and text encoder are small and random, and save it.

    Args:
        path: folder to write; created with its parents.
        autoencoder: of the clips.
        corpus: captions that the tokenizer learns its words from.
        layers: blocks of the transformer.
        heads: attention heads of the transformer.
        head_width: width of one of them.
        text_width: width of a text token, a multiple of 4.
        shift: timestep shift of the scheduler.
        seed: seed of the random weights; the global generator is left alone.

    Returns:
        The folder, which `WanPipeline.from_pretrained` loads.
    """
    return write_pipeline(
        Path(path), lambda: _assemble(autoencoder, corpus, layers, heads, head_width, text_width, shift), seed
    )


def _assemble(
    autoencoder: Any, corpus: Sequence[str], layers: int, heads: int, head_width: int, text_width: int, shift: float
) -> Any:
    from diffusers import UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    tokenizer = t5_tokenizer(corpus, 400)
    config = UMT5Config(
        vocab_size=len(tokenizer),
        d_model=text_width,
        d_kv=text_width // 4,
        d_ff=2 * text_width,
        num_layers=1,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    channels = autoencoder.config.z_dim
    transformer: Any = WanTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=head_width,
        in_channels=channels,
        out_channels=channels,
        text_dim=text_width,
        freq_dim=64,
        ffn_dim=4 * heads * head_width,
        num_layers=layers,
        rope_max_seq_len=64,
    )
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=UMT5EncoderModel(config).eval(),
        vae=autoencoder,
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift),
        transformer=transformer.eval(),
    )
