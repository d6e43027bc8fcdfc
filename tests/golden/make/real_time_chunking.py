"""Real-time chunking by its authors' code (jax) and by lerobot's: soft masks, chunks and guided velocities."""

import functools
import math
from types import SimpleNamespace
from typing import Any

import torch

from tests.golden.make.peers import Clone, Made, Wheel, numbers, tensors

COMMIT = "cc6c5f5d7126bd3a7e58f1a28a9699152f465eb9"
MODEL, LEROBOT = "src/model.py", "lerobot/policies/rtc/modeling_rtc.py"
ROWS, CHUNK, SIZE, STEPS, LIMIT = 2, 6, 2, 5, 5.0
CASES = [[0, 4], [1, 4], [2, 3], [3, 3], [1, 6]]
"""Delay, and control steps left of the running chunk."""


def make(path: str) -> Made:
    clone = Clone(path, "Physical-Intelligence/real-time-chunking-kinetix", COMMIT)
    inputs: dict[str, Any] = {
        "steps": STEPS,
        "limit": LIMIT,
        "cases": CASES,
        "previous": numbers(0, ROWS, CHUNK, SIZE),
        "observation": numbers(1, ROWS, CHUNK * SIZE),
        "mixing": numbers(2, CHUNK * SIZE, CHUNK * SIZE, low=-0.6, high=0.6),
        "sigmas": [1.0, 0.8, 0.5, 0.2],
        "latents": numbers(3, ROWS, CHUNK, SIZE, low=-2.0, high=2.0),
        "constant": numbers(4, ROWS, CHUNK, SIZE),
    }
    return "Real-Time Chunking, arXiv 2506.07339", inputs, [authors(clone, inputs), lerobot(inputs)], clone


def authors(clone: Clone, inputs: dict[str, Any]) -> dict[str, Any]:
    """Chunks of the velocity tanh(x M + observation + t) in the time of the paper."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    mixing = jnp.asarray(inputs["mixing"])

    class Policy:
        action_chunk_size, action_dim = CHUNK, SIZE

        def __call__(self, observation: Any, x: Any, t: Any) -> Any:
            return jnp.tanh(x.reshape(len(x), -1) @ mixing + observation + t).reshape(x.shape)

    names = {"jax": jax, "jnp": jnp, "functools": functools, "nnx": SimpleNamespace(Module=object)}
    mask = clone.function(MODEL, "get_prefix_weights", **names)
    policy = clone.function(MODEL, "FlowPolicy", get_prefix_weights=mask, **names)
    key = jax.random.key(0)
    previous, observation = jnp.asarray(inputs["previous"]), jnp.asarray(inputs["observation"])
    chunks = []
    for delay, left in CASES:
        given = (STEPS, previous, delay, left, "exp", LIMIT)
        chunks.append(policy.realtime_action(Policy(), key, observation, *given).tolist())
    return {
        "program": clone.name,
        "calls": [f"{MODEL}:get_prefix_weights", f"{MODEL}:FlowPolicy.realtime_action"],
        "relative": 1e-12,
        "noise": jax.random.normal(key, previous.shape).tolist(),
        "weights": [mask(delay, left, CHUNK, "exp").tolist() for delay, left in CASES],
        "chunks": chunks,
    }


def lerobot(inputs: dict[str, Any]) -> dict[str, Any]:
    """Guided velocities for a velocity that does not depend on x, where its missing Jacobian changes nothing."""
    wheel, b = Wheel("lerobot"), tensors(inputs)
    schedules = SimpleNamespace(ZEROS=0, ONES=1, LINEAR=2, EXP=3)
    base = wheel.function(LEROBOT, "RTCProcessor", RTCAttentionSchedule=schedules, math=math)
    own = base.__new__(base)
    own.rtc_config = SimpleNamespace(prefix_attention_schedule=3, max_guidance_weight=LIMIT)
    own.track = lambda **_: None
    found = []
    for delay, left in CASES:
        each = [
            own.denoise_step(b.latents, b.previous, delay, torch.tensor(time), lambda _: b.constant, left)
            for time in inputs["sigmas"]
        ]
        found.append(torch.stack(each).tolist())
    return {
        "program": wheel.name,
        "calls": [f"{LEROBOT}:RTCProcessor.denoise_step"],
        "relative": 1e-6,
        "because": "its weights and times are float32",
        "velocities": found,
    }
