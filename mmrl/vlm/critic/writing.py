"""Several critiques of each answer, sampled from a model."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.errors import UserError
from mmrl.training.loop.seeds import make_generator
from mmrl.vlm.model_config import ModelConfig
from mmrl.vlm.models import load_policy
from mmrl.vlm.payload import Prompt
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.sampler import sample
from mmrl.vlm.sampling import SamplerConfig
from mmrl.vlm.task import TaskError, VlmTask

BATCH = 64
"""Answers criticised together."""


def write_critiques(
    model: str, tasks: Sequence[VlmTask], count: int, temperature: float, max_new_tokens: int, seed: int
) -> list[list[str]]:
    """Sample critiques."""
    policy = load_policy(ModelConfig(path=model))
    config = SamplerConfig(max_new_tokens=max_new_tokens, temperature=temperature)
    found: list[list[str]] = []
    for start in range(0, len(tasks), BATCH):
        prompts = [_encode(policy, task) for task in tasks[start : start + BATCH]]
        texts = sample(policy, prompts, count, config, make_generator(seed, "critiques", start)).texts
        found += [texts[place * count : (place + 1) * count] for place in range(len(prompts))]
    return found


def _encode(policy: VlmPolicy, task: VlmTask) -> Prompt:
    try:
        return policy.encode(task)
    except TaskError as error:
        raise UserError(str(error)) from None
