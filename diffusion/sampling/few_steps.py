"""Few-step distilled models, and the settings and methods that do not suit them."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from diffusion.sampling.latent_sampler import LatentSamplerConfig

LOGGER = logging.getLogger("mmrl")
MOST = 10
"""Maximum number of steps that any of these models needs."""
NAMED = re.compile(r"turbo|schnell|lightning|hyper-?sd|\blcm\b|distilled", re.IGNORECASE)
"""Names of few-step models; for some of them (SD3.5-large-turbo, Z-Image-Turbo) the name is the only sign."""


def sign_of_few_steps(policy: Any) -> str:
    """Why a model counts as a few-step distilled one, from its pipeline or its name; empty if it does not."""
    if sign := policy.family.few_steps:
        return str(sign)
    # the base pipeline too: the folder of an adapter need not mention it
    names = (policy.config.path, policy.base_path, policy.pipeline.config.get("_name_or_path"))
    found = next((name for path in names if path and NAMED.search(name := Path(str(path)).name)), None)
    return f"it is called {found}" if found else ""


def warn_of_few_steps(policy: Any, config: LatentSamplerConfig, key: str = "sampler", *, matched: bool = False) -> None:
    """Warn about guidance, step counts and methods that do not suit a few-step model.

    Args:
        policy: a `DiffusionPolicy`.
        config: sampling settings.
        key: path of these settings in the configuration.
        matched: whether the method trains velocities at noisy versions of images rather than the sampler's own steps.
    """
    sign = sign_of_few_steps(policy)
    if not sign:
        return
    said = f"this model appears to be distilled to few steps without guidance, since {sign}"
    for name in ("guidance", "eval_guidance"):
        if (scale := getattr(config, name)) not in (None, 1.0):
            LOGGER.warning(
                "%s.%s is %s, but %s: this doubles the cost and gives different images from the model's own "
                "pipeline; set it to 1",
                *(key, name, scale, said),
            )
    for name in ("steps", "eval_steps"):
        # a method with given images reads only the steps of evaluations
        drawn = name == "eval_steps" or key == "sampler"
        if drawn and (steps := getattr(config, name)) > MOST:
            LOGGER.warning("%s.%s is %d, but %s; set it to the number of steps on its card", key, name, steps, said)
    if matched:
        LOGGER.warning(
            "%s, but this method trains velocities for many small steps, so the model will lose its ability to draw "
            "in few steps; flow_grpo and other methods that train the sampler's own steps avoid this",
            said,
        )
