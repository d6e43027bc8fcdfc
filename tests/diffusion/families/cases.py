"""The tiny pipelines of all families, and how the call of each pipeline says what the suite says."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from diffusion.families.table import family_of
from diffusion.toy.pipelines.tiny import TinySd3Sizes, build_tiny_sd3
from tests.diffusion.families import tiny
from tests.diffusion.families.tiny import CORPUS, NEGATIVE
from tests.diffusion.tiny_flux import TinyFluxSizes, build_tiny_flux


def _guidance_scale(scale: float) -> dict[str, Any]:
    return {"guidance_scale": scale}


@dataclass(frozen=True)
class Case:
    """A tiny pipeline of a family and what it is compared with."""

    build: Callable[[Path], Path]
    scales: tuple[float, ...] = (1.0, 4.0)
    """Guidance scales, of which 1 is none."""
    height: int = 32
    width: int = 24
    frames: int | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    """Options of `ModelConfig`."""
    call: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the pipeline's call."""
    guidance: Callable[[float], dict[str, Any]] = _guidance_scale
    """Arguments of the pipeline's call for a scale."""
    negative: str | None = NEGATIVE
    """The negative prompt; None where the pipeline's call takes none and has its own, the empty one."""
    pack: Callable[[Any, Tensor], Tensor] = lambda pipeline, latents: latents
    """What the call takes as latents."""
    unpack: Callable[[Any, Tensor, Tensor], Tensor] = lambda pipeline, found, start: found
    """Latents from what the call gives, for the start of their shape."""
    guide: Callable[[Any, float], None] = lambda pipeline, scale: None
    """Sets the scale of a pipeline whose call does not take it."""
    edits: bool = False
    """Whether an image is edited."""
    variant: bool = False
    """Whether another case of the family is gone through in the default tests; this one in one of them and slowly."""
    alone: bool = False
    """Whether the pipeline's autoencoder decodes one video at a time."""
    bare: bool = False
    """Whether some blocks have no layer for an adapter."""
    silent: tuple[str, ...] = ()
    """Parts of names of adapters that get no gradient, since the network drops what they compute."""


def _sd3(path: Path) -> Path:
    return build_tiny_sd3(path, corpus=CORPUS, sizes=TinySd3Sizes(layers=2))


def _flux(*, guidance: bool) -> Callable[[Path], Path]:
    sizes = TinyFluxSizes(layers=1, single_layers=1, guidance=guidance)
    return lambda path: build_tiny_flux(path, corpus=CORPUS, sizes=sizes)


def _pack(pipeline: Any, latents: Tensor) -> Tensor:
    return pipeline._pack_latents(latents, *latents.shape)


def _unpack(pipeline: Any, found: Tensor, start: Tensor) -> Tensor:
    factor = pipeline.vae_scale_factor
    return pipeline._unpack_latents(found, start.shape[-2] * factor, start.shape[-1] * factor, factor)


T5 = {"max_sequence_length": 20}
KLEIN = {"max_sequence_length": 96}
KLEIN_CALL = KLEIN | {"text_encoder_out_layers": (1, 2, 3)}
INSTRUCTION = ["Given a prompt, enhance it:", "User Prompt: "]


def _klein(*, distilled: bool = False, **options: Any) -> Case:
    return Case(
        lambda path: tiny.klein(path, distilled=distilled),
        model=KLEIN | {"family_options": {"text_layers": [1, 2, 3]}},
        call=KLEIN_CALL,
        unpack=lambda pipeline, found, start: family_of(pipeline).normalise(found),
        height=64,
        width=96,
        **options if distilled else {"negative": None} | options,
    )


def _wan(kind: str, **options: Any) -> Case:
    factor = 16 if kind == "5b" else 8
    return Case(
        lambda path: tiny.wan(path, kind),
        variant=kind == "5b",
        scales=(1.0, 5.0),
        height=4 * factor,
        width=6 * factor,
        frames=5,
        model={"max_sequence_length": 32, "family_options": options},
        call={"max_sequence_length": 32},
        guidance=lambda scale: {
            "guidance_scale": scale,
            **({"guidance_scale_2": 3.0} if options and scale > 1 else {}),
        },
    )


def _ltx(*, timed: bool) -> Case:
    return Case(
        lambda path: tiny.ltx(path, timed=timed),
        variant=timed,
        scales=(1.0, 3.0),
        height=64,
        width=96,
        frames=9,
        model={"max_sequence_length": 32},
        call={"max_sequence_length": 32},
        pack=lambda pipeline, latents: pipeline._pack_latents(latents),
        unpack=lambda pipeline, found, start: pipeline._unpack_latents(found, *start.shape[2:]),
    )


CASES = {
    "sd3": Case(_sd3, model=T5, call=T5, silent=("transformer_blocks.1.attn.add_q_proj",)),
    "flux": Case(
        _flux(guidance=False),
        model=T5,
        call=T5,
        guidance=lambda scale: {"true_cfg_scale": scale},
        pack=_pack,
        unpack=_unpack,
    ),
    "flux_distilled": Case(
        _flux(guidance=True),
        variant=True,
        scales=(1.0,),
        model=T5 | {"guidance_embedding": 2.5},
        call=T5 | {"guidance_scale": 2.5},
        guidance=lambda scale: {"true_cfg_scale": scale},
        pack=_pack,
        unpack=_unpack,
    ),
    "qwen_image": Case(
        tiny.qwen_image,
        guidance=lambda scale: {"true_cfg_scale": scale},
        pack=_pack,
        unpack=lambda *args: _unpack(*args)[:, :, 0],
        height=64,
        width=96,
        silent=("transformer_blocks.1.attn.add_q_proj", "transformer_blocks.1.attn.to_add_out"),
    ),
    "klein": _klein(),
    "klein_distilled": _klein(distilled=True, variant=True, scales=(1.0,)),
    "klein_edit": _klein(edits=True, variant=True),
    "kontext": Case(
        tiny.kontext,
        edits=True,
        scales=(1.0,),
        model=T5 | {"guidance_embedding": 2.5},
        call=T5 | {"guidance_scale": 2.5, "_auto_resize": False, "max_area": 32 * 24},
        guidance=lambda scale: {},
        pack=_pack,
        unpack=_unpack,
    ),
    "z_image": Case(
        tiny.z_image,
        scales=(1.0, 5.0),
        model={"max_sequence_length": 128},
        call={"max_sequence_length": 128},
        guidance=lambda scale: {"guidance_scale": scale - 1},
        height=64,
        width=96,
    ),
    "sana": Case(
        tiny.sana,
        scales=(1.0, 4.5),
        model={"max_sequence_length": 64, "family_options": {"instruction": INSTRUCTION}},
        call={"max_sequence_length": 64, "complex_human_instruction": INSTRUCTION, "use_resolution_binning": False},
        height=64,
        width=96,
    ),
    "wan": _wan("21"),
    "wan_two_networks": _wan("a14b", guidance_2=3.0),
    "wan_times_of_tokens": _wan("5b"),
    "stable_diffusion": Case(tiny.stable_diffusion, scales=(1.0, 5.0), height=64, width=96, bare=True),
    "stable_diffusion_v": Case(
        lambda path: tiny.stable_diffusion(path, "v_prediction"),
        scales=(1.0, 5.0),
        height=64,
        width=96,
        bare=True,
        variant=True,
    ),
    "stable_diffusion_pndm": Case(
        lambda path: tiny.stable_diffusion(path, scheduler="PNDMScheduler", skip_prk_steps=True),
        scales=(5.0,),
        height=64,
        width=96,
        bare=True,
        variant=True,
    ),
    "stable_diffusion_clipped": Case(
        lambda path: tiny.stable_diffusion(path, clip_sample=True),
        scales=(5.0,),
        height=64,
        width=96,
        bare=True,
        variant=True,
    ),
    "stable_diffusion_xl_euler": Case(
        lambda path: tiny.stable_diffusion_xl(path, "EulerDiscreteScheduler"),
        scales=(5.0,),
        height=64,
        width=96,
        bare=True,
        variant=True,
    ),
    "stable_diffusion_xl": Case(tiny.stable_diffusion_xl, scales=(1.0, 5.0), height=64, width=96, bare=True),
    "stable_diffusion_xl_empty_negative": Case(
        tiny.stable_diffusion_xl, scales=(5.0,), height=64, width=96, bare=True, variant=True, negative=None
    ),
    "ltx": _ltx(timed=False),
    "ltx_timed_autoencoder": _ltx(timed=True),
    "hunyuan_video15": Case(
        tiny.hunyuan_video15,
        scales=(1.0, 6.0),
        height=32,
        width=32,
        frames=5,
        model={"max_sequence_length": 600},
        guidance=lambda scale: {},
        guide=tiny.with_guider,
        alone=True,
        bare=True,
        silent=("transformer_blocks.1.attn.add_q_proj", "transformer_blocks.1.attn.to_add_out"),
    ),
}
"""One row for each family and each kind of its models that its class tells apart."""
