"""The Python that draws with an exported pipeline as evaluations do, and other facts for its card."""

from __future__ import annotations

from typing import Any

from diffusion.data.prompts import has_images
from diffusion.models.policy import DiffusionPolicy
from mmrl.runs.export import Exported

PROMPT = "a red circle"
IMAGES = ("from diffusers.utils import load_image", "from PIL import ImageOps")


def describe_pipeline(config: Any, policy: DiffusionPolicy, absent: str) -> Exported:
    """Facts about the pipeline folder of a policy; `absent` has the options that loading it needs."""
    family, sampler = policy.family, getattr(config, "sampler", None) or config.evaluation.sampler
    guidance = sampler.guidance if sampler.eval_guidance is None else sampler.eval_guidance
    height, width = (side * family.factor for side in policy.latent_shape[-2:])
    edits = family.takes_image and has_images(config, family.edits)
    kind = "video" if family.video else "image"
    facts = {
        "decoding": f"Evaluations draw with {sampler.eval_steps} Euler steps and guidance {guidance:g}, from fixed "
        "seeds; the noise of a seed is that of a generator of torch on the CPU, in float32.",
        "scheduler": _scheduler(policy)[0],
        f"size of the {kind}": f"{width} x {height} pixels",
    }
    lacks = family.call_lacks(guidance, sampler.negative_prompt)
    return Exported(
        call="diffusers.DiffusionPipeline.from_pretrained" + (f"({absent})" if absent else ""),
        load="\n".join(_load(config, policy, absent, guidance, IMAGES if edits else ())),
        use="\n".join(_use(policy, sampler, guidance, edits)),
        library="diffusers",
        task=f"{'image' if edits else 'text'}-to-{kind}",
        facts=facts,
        limits=[f"The printed call draws other images than evaluations: {lacks}."] if lacks else [],
    )


def _load(config: Any, policy: DiffusionPolicy, absent: str, guidance: float, images: tuple[str, ...]) -> list[str]:
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
        f"pipeline = DiffusionPipeline.from_pretrained(folder{options})",
        *_scheduler(policy)[1:],
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
    opened = [f'image = ImageOps.fit(load_image("picture.png"), {size})  # the image to be edited'] if edits else []
    return [*opened, drawn, 'drawn.save("drawn.png")']


def _scheduler(policy: DiffusionPolicy) -> tuple[str, ...]:
    """The scheduler of the folder, and where it differs from the start model's, Python that has that one again."""
    own, drawing = policy.pipeline.scheduler, policy.family.drawing_scheduler()
    kind, before = type(drawing).__name__, type(own).__name__
    changed = {name: value for name, value in own.config.items() if drawing.config.get(name, value) != value}
    changed = {name: value for name, value in changed.items() if not name.startswith("_")}
    if kind != before:
        return (f"{kind}, whose steps are those of evaluations; the start model has {before}",)
    if not changed:
        return (f"{kind}, that of the start model; evaluations take the same steps",)
    values = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    return (
        f"{kind} at first order, as evaluations draw; the start model has {values}",
        "# for the steps of the start model, which evaluations do not take:",
        f"# pipeline.scheduler = pipeline.scheduler.from_config(pipeline.scheduler.config, {values})",
    )
