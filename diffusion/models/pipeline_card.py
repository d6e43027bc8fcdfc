"""Python code that draws images with an exported pipeline as evaluations do, and other facts for its card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diffusion.data.prompts import has_images
from diffusion.models.adapters import loading_lines, read_by_diffusers
from diffusion.models.diffusion_policy import DiffusionPolicy
from mmrl.runs.export import Exported

PROMPT = "a red circle"
IMAGES = ("from diffusers.utils import load_image", "from PIL import Image, ImageOps")


def describe_pipeline(config: Any, policy: DiffusionPolicy, absent: str, form: str = "") -> Exported:
    """Facts about the pipeline folder of a policy, or its adapters in a format of `adapters.FORMATS`.

    `absent` has the options that loading the pipeline needs.
    """
    family, sampler = policy.family, getattr(config, "sampler", None) or config.evaluation.sampler
    guidance = sampler.guidance if sampler.eval_guidance is None else sampler.eval_guidance
    height, width = (side * family.factor for side in policy.latent_shape[-2:])
    edits = family.takes_image and has_images(config, family.edits)
    kind = "video" if family.video else "image"
    facts = {
        "decoding": (
            f"Evaluations draw with {sampler.eval_steps} Euler steps and guidance {guidance:g}, from fixed seeds; "
            "the noise of a seed is drawn by a float32 torch generator on the CPU."
        ),
        "scheduler": _scheduler(policy, adapter=bool(form))[0],
        f"size of the {kind}": f"{width} x {height} pixels",
    }
    lacks = family.call_lacks(guidance, sampler.negative_prompt, sampler.eval_steps)
    return Exported(
        call=CALLS.get(form) or "diffusers.DiffusionPipeline.from_pretrained" + (f"({absent})" if absent else ""),
        load="\n".join(_load(config, policy, absent, guidance, IMAGES if edits else (), form)),
        use="\n".join(_use(policy, sampler, guidance, edits)) if read_by_diffusers(policy, form) else "",
        library="peft" if form == "peft" else "diffusers",
        task=f"{'image' if edits else 'text'}-to-{kind}",
        facts=facts,
        limits=[f"The printed call does not draw the same images as evaluations: {lacks}."] if lacks else [],
    )


def _load(
    config: Any, policy: DiffusionPolicy, absent: str, guidance: float, images: tuple[str, ...], form: str
) -> list[str]:
    """Python that loads the folder."""
    precision = "" if config.model.dtype == "float32" else f"torch_dtype=torch.{config.model.dtype}"
    options = "".join(f", {option}" for option in (absent, precision) if option)
    own = type(policy.pipeline.vae).__module__  # the tiny pipelines have an autoencoder of this suite
    return [
        *([f"import {own}  # its autoencoder"] if own.startswith("diffusion.") else []),
        "import torch",
        "from diffusers import DiffusionPipeline",
        *images,
        "",
        *(
            loading_lines(policy, form, options)
            if form
            else [f"pipeline = DiffusionPipeline.from_pretrained(folder{options})"]
        ),
        *_scheduler(policy, adapter=bool(form))[1:],
        *policy.family.call_lines(guidance),
    ]


def _use(policy: DiffusionPolicy, sampler: Any, guidance: float, edits: bool) -> list[str]:
    """Python that draws as evaluations do."""
    family, shape = policy.family, policy.latent_shape
    asked = {"prompt": PROMPT, "num_inference_steps": sampler.eval_steps}
    asked |= family.call(shape, guidance, sampler.negative_prompt) | (family.edit_call(shape) if edits else {})
    words = [f"{name}={value!r}" for name, value in asked.items()]
    words += ["image=image"] * edits + ["generator=torch.Generator().manual_seed(0)"]
    drawn = f"drawn = pipeline({', '.join(words)}).{'frames' if family.video else 'images'}[0]"
    if family.video:
        return [drawn, "from diffusers.utils import export_to_video", 'export_to_video(drawn, "drawn.mp4")']
    size = asked["width"], asked["height"]
    fitted = f'ImageOps.fit(load_image("picture.png"), {size}, Image.Resampling.LANCZOS)  # the image to be edited'
    opened = [f"image = {fitted}"] if edits else []
    return [*opened, drawn, 'drawn.save("drawn.png")']


def _scheduler(policy: DiffusionPolicy, *, adapter: bool) -> tuple[str, ...]:
    """The scheduler that evaluations draw with, and Python that an adapter needs for it, or a pipeline for the other.

    The scheduler of an exported pipeline is that of evaluations, an adapter goes onto the pipeline of the start.
    """
    own, drawing = policy.pipeline.scheduler, policy.family.drawing_scheduler()
    kind, before = type(drawing).__name__, type(own).__name__
    there = {name: value for name, value in drawing.config.items() if not name.startswith("_")}
    changed = [name for name, value in there.items() if own.config.get(name, value) != value]
    if kind == before and not changed:
        return (f"{kind}, the start model's; evaluations take the same steps",)
    said = f"{kind}, with the steps used by evaluations; the start model has {before}"
    if adapter:
        made = f"{kind}.from_config(pipeline.scheduler.config, {_written(there, changed)})"
        return said, f"from diffusers import {kind}", f"pipeline.scheduler = {made}  # as evaluations draw"
    if kind != before:
        return (said,)
    values = _written(own.config, changed)
    return (
        f"{said} with {values}",
        "# for the steps of the start model, which evaluations do not use:",
        f"# pipeline.scheduler = {kind}.from_config(pipeline.scheduler.config, {values})",
    )


def _written(values: Mapping[str, Any], names: Sequence[str]) -> str:
    """Options as arguments, ranges of numbers as such."""
    whole = {name: isinstance(values[name], list) and values[name] == [*range(len(values[name]))] for name in names}
    shown = {
        name: f"[*range({len(values[name])})]" if whole[name] and values[name] else repr(values[name]) for name in names
    }
    return ", ".join(f"{name}={text}" for name, text in shown.items())


CALLS = {
    "diffusers": "pipeline.load_lora_weights",
    "kohya": "pipeline.load_lora_weights",
    "peft": "PeftModel.from_pretrained",
}
"""How adapters of each format are loaded; the card has the lines around it."""
