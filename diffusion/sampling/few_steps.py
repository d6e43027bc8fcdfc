"""Few-step distilled models, and the settings and methods that do not suit them."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from diffusion.sampling.latent_sampler import LatentSamplerConfig

LOGGER = logging.getLogger("mmrl")
MOST = 10
"""Number of steps beyond what any such model needs."""
NAMED = re.compile(r"turbo|schnell|lightning|hyper-?sd|\blcm\b|distilled", re.IGNORECASE)
"""Names of such models; for some of them (SD3.5-large-turbo, Z-Image-Turbo) the name is the only sign."""


def sign_of_few_steps(policy: Any) -> str:
    """Why a model counts as a few-step distilled one, from its pipeline or its name; empty if it does not."""
    if sign := policy.family.few_steps:
        return str(sign)
    names = (policy.config.path, policy.base_path, policy.pipeline.config.get("_name_or_path"))
    found = next((name for path in names if path and NAMED.search(name := Path(str(path)).name)), None)
    return f"it is called {found}" if found else ""


def warn_of_few_steps(policy: Any, config: LatentSamplerConfig, key: str = "sampler", *, matched: bool = False) -> None:
    """Warn about guidance, many steps and methods that a few-step model was not made for.

    Args:
        policy: a `DiffusionPolicy`.
        config: sampling settings.
        key: path of these settings in the configuration.
        matched: whether the method trains velocities at noisy versions of images rather than the sampler's own steps.
    """
    sign = sign_of_few_steps(policy)
    if not sign:
        return
    said = f"this model is taken for one distilled to few steps without guidance, since {sign}"
    for name in ("guidance", "eval_guidance"):
        if (scale := getattr(config, name)) not in (None, 1.0):
            LOGGER.warning(
                "%s.%s is %s, but %s: twice the cost, and images that its own pipeline does not draw; set it to 1",
                *(key, name, scale, said),
            )
    for name in ("steps", "eval_steps"):
        drawn = name == "eval_steps" or key == "sampler"
        if drawn and (steps := getattr(config, name)) > MOST:
            LOGGER.warning("%s.%s is %d, but %s; set it to the steps that its card names", key, name, steps, said)
    if matched:
        LOGGER.warning(
            "%s, but this method teaches velocities of a path in many small steps, so it unlearns to draw in few; "
            "flow_grpo and other methods that train the sampler's own steps do not",
            said,
        )
