"""Tiny random pipelines of the released classes for families that have no world of their own here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diffusion.models.pipelines import quiet_diffusers
from diffusion.toy.pipelines.tiny import clip_text_model, clip_tokenizer, t5_tokenizer
from mmrl.hub.compat import ensure_torchvision, quiet_transformers
from tests.diffusion.tiny_flux import TinyFluxSizes, build_tiny_flux

SHORT, LONG, NEGATIVE = "a red circle", "two blue squares on a large green table", "blurry"
CORPUS = (SHORT, LONG, NEGATIVE)
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
STATISTICS = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.5, 2.0, 0.7, 1.0]}


def written(assemble: Callable[[], Any], path: Path) -> Path:
    """Save a pipeline of random weights from a fixed seed."""
    ensure_torchvision()
    with torch.random.fork_rng(devices=[]), quiet_transformers(), quiet_diffusers():
        torch.manual_seed(0)
        pipeline = assemble()
        for part in pipeline.components.values():
            if isinstance(part, torch.nn.Module):
                spread(part)
        pipeline.save_pretrained(path)
    return path


def spread(module: Any) -> None:
    """Fill what starts at zero, so that every part of a network matters."""
    with torch.no_grad():
        for weight in module.parameters():
            if not weight.any():
                weight.normal_(0, 0.05)


def kontext(path: Path) -> Path:
    ensure_torchvision()
    from diffusers import FluxKontextPipeline, FluxPipeline

    build_tiny_flux(path / "flux", corpus=CORPUS, sizes=TinyFluxSizes(layers=1, single_layers=1))
    with quiet_transformers(), quiet_diffusers():
        parts = FluxPipeline.from_pretrained(path / "flux").components
    return written(lambda: FluxKontextPipeline(**parts), path)


def qwen_tokenizer() -> Any:
    """Bytes and three marks."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *marks]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer: Any = Qwen2Tokenizer(vocab=vocabulary, merges=[], model_max_length=2048, padding_side="right")
    tokenizer.add_special_tokens({"additional_special_tokens": marks[1:]})
    tokenizer.chat_template = CHAT
    return tokenizer


def qwen3(tokenizer: Any) -> Any:
    """A text model of three layers of width 32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), head_dim=8, **text_sizes(3))).eval()


def text_sizes(layers: int) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    }


def qwen_vl(tokenizer: Any, layers: int = 2) -> Any:
    """Qwen2.5-VL with a tower of one layer."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    text = {"vocab_size": len(tokenizer), "rope_scaling": rope, "rope_parameters": rope} | text_sizes(layers)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}
    vision |= {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision | {"fullatt_block_indexes": [0]})
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def autoencoder(**options: Any) -> Any:
    """AutoencoderKL of factor 8 and 4 channels."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        **options,
    )


def qwen_image(path: Path) -> Path:
    ensure_torchvision()
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    def assemble() -> Any:
        tokenizer = qwen_tokenizer()
        return QwenImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True,
                base_shift=0.5,
                max_shift=0.9,
                base_image_seq_len=256,
                max_image_seq_len=8192,
                shift=1.0,
                shift_terminal=0.02,
            ),
            vae=AutoencoderKLQwenImage(base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **STATISTICS),
            text_encoder=qwen_vl(tokenizer),
            tokenizer=tokenizer,
            transformer=QwenImageTransformer2DModel(
                in_channels=16,
                out_channels=4,
                num_layers=2,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=32,
                axes_dims_rope=(4, 6, 6),
            ),
        )

    return written(assemble, path)


def klein(path: Path, *, distilled: bool) -> Path:
    ensure_torchvision()
    from diffusers import (
        AutoencoderKLFlux2,
        FlowMatchEulerDiscreteScheduler,
        Flux2KleinPipeline,
        Flux2Transformer2DModel,
    )

    def assemble() -> Any:
        tokenizer = qwen_tokenizer()
        vae: Any = AutoencoderKLFlux2(
            block_out_channels=(8, 8, 8, 8), layers_per_block=1, latent_channels=4, norm_num_groups=4, sample_size=64
        )
        vae.bn.running_mean.normal_()
        vae.bn.running_var.uniform_(0.5, 1.5)
        return Flux2KleinPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
            vae=vae,
            text_encoder=qwen3(tokenizer),
            tokenizer=tokenizer,
            transformer=Flux2Transformer2DModel(
                in_channels=16,
                num_layers=1,
                num_single_layers=2,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=96,
                timestep_guidance_channels=32,
                axes_dims_rope=(4, 4, 4, 4),
                guidance_embeds=False,
            ),
            is_distilled=distilled,
        )

    return written(assemble, path)


def z_image(path: Path) -> Path:
    ensure_torchvision()
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

    def assemble() -> Any:
        tokenizer = qwen_tokenizer()
        return ZImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=autoencoder(
                scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False
            ),
            text_encoder=qwen3(tokenizer).model,
            tokenizer=tokenizer,
            transformer=ZImageTransformer2DModel(
                in_channels=4,
                dim=32,
                n_layers=2,
                n_refiner_layers=1,
                n_heads=2,
                n_kv_heads=2,
                cap_feat_dim=32,
                axes_dims=[4, 6, 6],
                axes_lens=[1024, 64, 64],
            ),
        )

    return written(assemble, path)


def sana(path: Path) -> Path:
    ensure_torchvision()
    from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel
    from transformers import Gemma2Config, Gemma2Model

    def assemble() -> Any:
        tokenizer = qwen_tokenizer()  # any that pads on the right; the released one is GemmaTokenizerFast
        tokenizer.pad_token = "<|endoftext|>"
        levels = (8, 8, 8, 8)
        return SanaPipeline(
            scheduler=DPMSolverMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
            ),
            vae=AutoencoderDC(
                latent_channels=4,
                attention_head_dim=4,
                encoder_block_types="ResBlock",
                decoder_block_types="ResBlock",
                encoder_block_out_channels=levels,
                decoder_block_out_channels=levels,
                encoder_layers_per_block=(1, 1, 1, 1),
                decoder_layers_per_block=(1, 1, 1, 1),
                encoder_qkv_multiscales=((),) * 4,
                decoder_qkv_multiscales=((),) * 4,
                scaling_factor=0.41407,
                encoder_out_shortcut=False,
                decoder_in_shortcut=False,
            ),
            text_encoder=Gemma2Model(
                Gemma2Config(vocab_size=len(tokenizer), head_dim=8, sliding_window=1024, **text_sizes(2))
            ).eval(),
            tokenizer=tokenizer,
            transformer=SanaTransformer2DModel(
                in_channels=4,
                out_channels=4,
                num_attention_heads=2,
                attention_head_dim=16,
                num_layers=2,
                num_cross_attention_heads=2,
                cross_attention_head_dim=16,
                cross_attention_dim=32,
                caption_channels=32,
                sample_size=8,
            ),
        )

    return written(assemble, path)


def t5(*, umt5: bool) -> tuple[Any, Any]:
    """Tokenizer of words and an encoder of width 32."""
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    tokenizer = t5_tokenizer(CORPUS, 400)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    marks = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = (UMT5Config if umt5 else T5Config)(
        vocab_size=len(tokenizer), feed_forward_proj="gated-gelu", **sizes, **marks
    )
    return tokenizer, (UMT5EncoderModel if umt5 else T5EncoderModel)(config).eval()


def wan(path: Path, kind: str) -> Path:
    """Wan 2.1; "a14b", two networks; "5b", times of each token and an autoencoder of patches."""
    ensure_torchvision()
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

    def transformer() -> Any:
        return WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=32,
            freq_dim=16,
            ffn_dim=32,
            num_layers=2,
            rope_max_seq_len=64,
        )

    def assemble() -> Any:
        tokenizer, encoder = t5(umt5=True)
        patches: dict[str, Any] = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12}
        sizes: dict[str, Any] = patches | {"scale_factor_spatial": 16} if kind == "5b" else {}
        return WanPipeline(
            tokenizer=tokenizer,
            text_encoder=encoder,
            vae=AutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **STATISTICS, **sizes),
            scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
            transformer=transformer(),
            transformer_2=transformer() if kind == "a14b" else None,
            boundary_ratio=0.875 if kind == "a14b" else None,
            expand_timesteps=kind == "5b",
        )

    return written(assemble, path)


DDIM = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
}


def unet(width: int, **options: Any) -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=width,
        **options,
    )


def stable_diffusion(path: Path, prediction: str = "epsilon", scheduler: str = "DDIMScheduler", **more: Any) -> Path:
    ensure_torchvision()
    import diffusers
    from diffusers import StableDiffusionPipeline

    def assemble() -> Any:
        tokenizer = clip_tokenizer(CORPUS, 700, 32)
        return StableDiffusionPipeline(
            vae=autoencoder(scaling_factor=0.18215),
            text_encoder=clip_text_model(tokenizer, 32, 2, 4, 32),
            tokenizer=tokenizer,
            unet=unet(32),
            scheduler=getattr(diffusers, scheduler).from_config(DDIM | {"prediction_type": prediction} | more),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )

    return written(assemble, path)


def stable_diffusion_xl(path: Path, scheduler: str = "DDIMScheduler") -> Path:
    ensure_torchvision()
    import diffusers
    from diffusers import StableDiffusionXLPipeline

    def assemble() -> Any:
        tokenizer = clip_tokenizer(CORPUS, 700, 32)
        sizes = {"addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 32 + 6 * 8}
        return StableDiffusionXLPipeline(
            vae=autoencoder(scaling_factor=0.13025),
            text_encoder=clip_text_model(tokenizer, 32, 3, 4, 32),
            text_encoder_2=clip_text_model(tokenizer, 32, 3, 4, 32, projection=32),
            tokenizer=tokenizer,
            tokenizer_2=tokenizer,
            unet=unet(64, addition_embed_type="text_time", **sizes),
            scheduler=getattr(diffusers, scheduler).from_config(DDIM | {"timestep_spacing": "leading"}),
        )

    return written(assemble, path)


def ltx(path: Path, *, timed: bool) -> Path:
    ensure_torchvision()
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )

    def assemble() -> Any:
        tokenizer, encoder = t5(umt5=False)
        levels, scaled = (8, 8, 8, 8), (True, True, True, False)
        vae: Any = AutoencoderKLLTXVideo(
            latent_channels=8,
            block_out_channels=levels,
            decoder_block_out_channels=levels,
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
            spatio_temporal_scaling=scaled,
            decoder_spatio_temporal_scaling=scaled,
            timestep_conditioning=timed,
            decoder_inject_noise=(False,) * 5,
        )
        vae.latents_mean.normal_()
        vae.latents_std.uniform_(0.5, 1.5)
        return LTXPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True,
                base_shift=0.95,
                max_shift=2.05,
                base_image_seq_len=1024,
                max_image_seq_len=4096,
                shift_terminal=0.1,
                shift=1.0,
            ),
            vae=vae,
            text_encoder=encoder,
            tokenizer=tokenizer,
            transformer=LTXVideoTransformer3DModel(
                in_channels=8,
                out_channels=8,
                num_attention_heads=2,
                attention_head_dim=16,
                cross_attention_dim=32,
                num_layers=2,
                caption_channels=32,
            ),
        )

    return written(assemble, path)


def hunyuan_video15(path: Path) -> Path:
    ensure_torchvision()
    from diffusers import (
        AutoencoderKLHunyuanVideo15,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideo15Pipeline,
        HunyuanVideo15Transformer3DModel,
    )
    from diffusers.guiders import ClassifierFreeGuidance
    from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

    def assemble() -> Any:
        tokenizer, glyphs = qwen_tokenizer(), ByT5Tokenizer()
        sizes = {"d_model": 24, "d_kv": 6, "d_ff": 48, "num_layers": 1, "num_heads": 4}
        config = T5Config(vocab_size=len(glyphs), feed_forward_proj="gated-gelu", **sizes)
        return HunyuanVideo15Pipeline(
            text_encoder=qwen_vl(tokenizer, 3).model.language_model,
            tokenizer=tokenizer,
            transformer=HunyuanVideo15Transformer3DModel(
                in_channels=9,
                out_channels=4,
                num_attention_heads=2,
                attention_head_dim=16,
                num_layers=2,
                num_refiner_layers=1,
                mlp_ratio=2.0,
                text_embed_dim=32,
                text_embed_2_dim=24,
                image_embed_dim=16,
                rope_axes_dim=(4, 6, 6),
                target_size=64,
                task_type="t2v",
            ),
            vae=AutoencoderKLHunyuanVideo15(latent_channels=4, block_out_channels=(32,) * 5, layers_per_block=1),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
            text_encoder_2=T5EncoderModel(config).eval(),
            tokenizer_2=glyphs,
            guider=ClassifierFreeGuidance(guidance_scale=6.0),
        )

    return written(assemble, path)


def with_guider(pipeline: Any, scale: float) -> None:
    """Set the scale of a pipeline's guider."""
    from diffusers.guiders import ClassifierFreeGuidance

    pipeline.guider = ClassifierFreeGuidance(guidance_scale=scale)
