"""The Python that draws with an exported pipeline as evaluations do, and other facts for its card."""

from __future__ import annotations

import inspect
from typing import Any

from diffusion.models.policy import DiffusionPolicy
from mmrl.runs.export import Exported


def describe_pipeline(config: Any, policy: DiffusionPolicy, absent: str) -> Exported:
    """Facts about the pipeline folder of a policy; `absent` has the options that loading it needs."""
    family, model, options = policy.family, config.model, f", {absent}" if absent else ""
    sampler = getattr(config, "sampler", None) or config.evaluation.sampler
    guidance = sampler.guidance if sampler.eval_guidance is None else sampler.eval_guidance
    height, width = (side * family.factor for side in policy.latent_shape[-2:])
    known = inspect.signature(type(policy.pipeline).__call__).parameters
    asked = {
        "num_inference_steps": sampler.eval_steps,
        "guidance_scale": guidance,
        "height": height,
        "width": width,
        "negative_prompt": sampler.negative_prompt or None,
        "num_frames": model.frames if family.video else None,
        "max_sequence_length": model.max_sequence_length,
    }
    words = ", ".join(f"{name}={value!r}" for name, value in asked.items() if value is not None and name in known)
    own = type(policy.pipeline.vae).__module__  # the tiny pipelines have an autoencoder of this suite
    lines = [
        *([f"import {own}  # its autoencoder"] if own.startswith("diffusion.") else []),
        "from diffusers import DiffusionPipeline",
        "",
        f"pipeline = DiffusionPipeline.from_pretrained(folder{options})",
    ]
    drawn = "frames[0]" if family.video else "images[0]"
    use = [f'drawn = pipeline("a red circle", {words}).{drawn}']
    use += [
        'from diffusers.utils import export_to_video\nexport_to_video(drawn, "drawn.mp4")'
        if family.video
        else 'drawn.save("drawn.png")'
    ]
    kind = "video" if family.video else "image"
    sampled = f"Evaluations draw with {sampler.eval_steps} Euler steps and guidance {guidance:g}, from fixed seeds."
    return Exported(
        call="diffusers.DiffusionPipeline.from_pretrained" + (f"({absent})" if absent else ""),
        load="\n".join(lines),
        use="\n".join(use),
        library="diffusers",
        task=f"text-to-{kind}",
        facts={"decoding": sampled, f"size of the {kind}": f"{width} x {height} pixels"},
    )
