import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.core.rollouts import Rollouts
from mmrl.vlm.data.prompt import Prompt, VlmPayload
from mmrl.vlm.data.task import VideoClip, VlmTask
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig, Samples, sample
from mmrl.vlm.inference.inference_sampler import EngineSamplerConfig, VllmConfig
from mmrl.vlm.toy.tiny import build_tiny_vlm

CORPUS = [
    f"What is the sum of {a} and {b}? Look at the image. <think>{a} and {b}</think><answer>{a + b}</answer>"
    for a in range(10)
    for b in range(10)
]


def noise_image(height: int, width: int, seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make_task(name: str, text: str, sizes: Sequence[tuple[int, int]] = ()) -> VlmTask:
    """Task with one noise image for each (height, width)."""
    content = [{"type": "image"} for _ in sizes] + [{"type": "text", "text": text}]
    images = [noise_image(*size, seed=sum(map(ord, name)) + index) for index, size in enumerate(sizes)]
    return VlmTask(name, [{"role": "user", "content": content}], images)


def ragged_tasks() -> list[VlmTask]:
    """No, one and two images; prompts of four different lengths."""
    return [
        make_task("none", "What is the sum of 3 and 4?"),
        make_task("one", "Sum?", [(64, 64)]),
        make_task("two", "What is the sum of 9 and 9 in the image and the sum?", [(64, 96), (128, 64)]),
        make_task("wide", "1", [(64, 128)]),
    ]


def make_rollouts(
    tasks: Sequence[VlmTask], prompts: Sequence[Prompt], samples: Samples, **views: list[Prompt | None]
) -> Rollouts:
    rows = len(samples.texts)
    payload = VlmPayload(list(prompts), list(tasks), samples.response_ids, samples.texts, samples.finish, dict(views))
    return Rollouts(
        group=torch.arange(rows) // (rows // len(prompts)),
        mask=samples.mask,
        logp_old=samples.logp,
        reward=torch.zeros(rows),
        payload=payload,
    )


def draw(policy: VlmPolicy, tasks: Sequence[VlmTask], group: int = 3, seed: int = 0, **options) -> Rollouts:
    """Rollouts of the tasks with tokens sampled by the policy."""
    prompts = [policy.encode(task) for task in tasks]
    config = SamplerConfig(**{"max_new_tokens": 10} | options)
    samples = sample(policy, prompts, group, config, torch.Generator().manual_seed(seed))
    return make_rollouts(tasks, prompts, samples)


def video_task(name: str, text: str, path: Path, count: int = 1, images: int = 0, **options) -> VlmTask:
    """Question on one clip shown `count` times, with noise images before and after."""
    usual = {"nframes": 4, "min_pixels": 28 * 28, "max_pixels": 64 * 96} | options
    content = [{"type": "image"} for _ in range(images)] + [{"type": "video"} for _ in range(count)]
    content += [{"type": "text", "text": text}] + [{"type": "image"} for _ in range(images)]
    pictures = [noise_image(64, 64 + 32 * n, n) for n in range(2 * images)]
    clips = [VideoClip(str(path), usual)] * count
    return VlmTask(name, [{"role": "user", "content": content}], pictures, clips)


VLLM = os.environ.get("MMRL_VLLM_PYTHON", "")
needs_vllm = pytest.mark.skipif(not VLLM, reason="MMRL_VLLM_PYTHON names no interpreter that has vLLM")


def build_for_vllm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny Qwen2.5-VL that vLLM's CPU build can run, whose attention heads have at least 32 entries."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    sizes = {"hidden": 64, "heads": 2, "kv_heads": 1, "vision_hidden": 64, "vision_heads": 2, "vision_depth": 2}
    return build_tiny_vlm(folder, corpus=CORPUS, max_positions=512, initializer_range=0.1, **sizes)


def through_vllm(max_new_tokens: int, **options) -> EngineSamplerConfig:
    """Sampling through vLLM, whose log-probabilities must be the policy's within 1e-5."""
    settings = VllmConfig(python=VLLM, tolerance=1e-5, options={"max_num_seqs": 32, "enforce_eager": True})
    return EngineSamplerConfig(engine="vllm", max_new_tokens=max_new_tokens, vllm=settings, **options)
