"""`python -m benchmarks diffusion`: shared text, batched guidance and stacked draws on a Stable Diffusion 3.

The usual way is diffusers' own pipeline, called for batches of images; it is always an arm, so nothing else has to be
installed to compare with. The model is random: 13.9 million weights in the transformer, text encoders whose work for a
prompt is that of one transformer row, as it is for Stable Diffusion 3.5 medium at 512 pixels with 256 T5 tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Arm, BenchOptions, check, comparison, progress, ratio, run_arms
from mmrl.errors import UserError

ARMS = "benchmarks.diffusion.arms"
CORPUS = ["a red circle and a blue square", "three green triangles", *map(str, range(10))]
LATENT_LIMIT = 2e-4
"""Maximum difference of sampled latents, whose standard deviation is about 1, after 10 guided steps in float32."""
VELOCITY_LIMIT = 2e-5
GRADIENT_LIMIT = 1e-5
"""Relative error of gradients."""
RECIPE_MINIMUM = 2.0
"""Minimum factor by which an epoch of AWM should be cheaper per image than an epoch of Flow-GRPO."""
CONTROL_LIMIT = 1e-2
"""Minimum relative change of the gradient when the negative half is detached."""

FULL_MODEL: dict[str, Any] = {
    "layers": 6,
    "heads": 4,
    "head_width": 64,
    "latent_size": 16,
    "latent_channels": 8,
    "text_width": 512,
    "clip_layers": 4,
    "clip_tokens": 77,
    "pooled_width": 256,
    "t5_layers": 2,
}
QUICK_MODEL: dict[str, Any] = {"layers": 2, "clip_tokens": 16}
MEDIUM_MODEL: dict[str, Any] = {
    "layers": 24,
    "dual_layers": 13,
    "heads": 24,
    "head_width": 64,
    "latent_size": 64,
    "latent_channels": 16,
    "vae_widths": (128, 256, 512, 512),
    "text_width": 4080,
    "pooled_width": 2048,
    "clip_tokens": 77,
    "t5_layers": 1,
}
STEP_FULL = {"images": 8, "micro_batch": 2, "steps": 0}
STEP_QUICK = {"images": 4, "micro_batch": 2, "steps": 3}
FULL = {"images": 24, "image_batch": 8, "steps": 10, "scale": 4.5, "text_tokens": 77, "prompts": 4}
QUICK = {"images": 4, "image_batch": 2, "steps": 3, "scale": 4.5, "text_tokens": 16, "prompts": 2}


def compare(options: BenchOptions) -> dict[str, dict[str, Any]]:
    """Run the comparisons of this room.

    Args:
        options: what to run and how often; `model` is a Stable Diffusion 3 pipeline folder instead of the random one.

    Returns:
        One comparison for each chosen name.

    Raises:
        UserError: an unknown name, or another library to compare with.
    """
    if options.against not in (None, "diffusers"):
        raise UserError(
            f"--against {options.against}: the diffusion benchmarks always compare with diffusers, and only with it"
        )
    chosen = options.chosen(NAMES)
    with tempfile.TemporaryDirectory(prefix="mmrl-bench-") as place:
        work = _Work(options, Path(place))
        return {name: COMPARISONS[name](work) for name in chosen}


class _Work:
    """The model and the sizes that all comparisons share."""

    def __init__(self, options: BenchOptions, place: Path) -> None:
        self.options = options
        self.place = place
        self.sizes = QUICK if options.quick else FULL
        self.model = str(options.model or _build(place, options.quick))
        self.quantity = "wall_s" if options.device == "cuda" else "cpu_s"

    def arm(self, name: str, function: str, **changes: Any) -> Arm:
        """An arm with its result in a separate file."""
        result = str(self.place / f"{function}-{name.replace(' ', '_')}.pt")
        return Arm(name, f"{ARMS}:{function}", self._common() | {"result": result} | changes)

    def ratio(
        self, runs: Mapping[str, dict[str, Any]], baseline: str, ours: str, minimum: float | None = None
    ) -> dict[str, Any]:
        """Time of the baseline divided by ours."""
        return ratio(runs, baseline, ours, self.quantity, minimum=minimum)

    def same(
        self, one: Arm, other: Arm, limit: float, *, relative: bool = False, above: bool = False
    ) -> dict[str, Any] | None:
        """Check the largest difference between the results of two arms; None if one of them failed.

        `relative` divides the norm of the difference by that of the first; with `above` they must differ by `limit`.
        """
        import torch

        files = [Path(arm.options["result"]) for arm in (one, other)]
        if not all(file.is_file() for file in files):
            return None
        first, second = (torch.load(file, weights_only=True) for file in files)
        difference = first - second
        value = difference.norm() / first.norm() if relative else difference.abs().max()
        return check(float(value), limit, above=above)

    def comparison(
        self,
        runs: Mapping[str, dict[str, Any]],
        ratios: Mapping[str, dict[str, Any]],
        notes: Sequence[str],
        checks: Mapping[str, dict[str, Any] | None] | None = None,
    ) -> dict[str, Any]:
        """The comparison with the checks that were possible."""
        made = {name: found for name, found in (checks or {}).items() if found is not None}
        return comparison(runs, ratios=ratios, checks=made, notes=notes)

    def _common(self) -> dict[str, Any]:
        return self.sizes | {"model": self.model}


def _build(place: Path, quick: bool) -> Path:
    from diffusion.toy.pipelines.tiny import TinySd3Sizes, build_tiny_sd3

    progress("building the model")
    return build_tiny_sd3(place / "model", corpus=CORPUS, sizes=TinySd3Sizes(**(QUICK_MODEL if quick else FULL_MODEL)))


def _rollout(work: _Work) -> dict[str, Any]:
    pipeline, by_row, shared, whole = arms = [
        work.arm("pipeline", "rollout_arm", way="pipeline"),
        work.arm("text of each image", "rollout_arm", way="text of each image"),
        work.arm("shared", "rollout_arm", way="shared"),
        work.arm("shared, group at once", "rollout_arm", way="shared", image_batch=work.sizes["images"]),
    ]
    runs = run_arms("rollout", arms, work.options)
    return work.comparison(
        runs,
        ratios={
            "pipeline": work.ratio(runs, pipeline.name, shared.name),
            "text of each image": work.ratio(runs, by_row.name, shared.name),
            "pipeline, group at once": work.ratio(runs, pipeline.name, whole.name),
        },
        checks={
            "latents of the pipeline": work.same(pipeline, shared, LATENT_LIMIT),
            "latents with the text of each image": work.same(by_row, shared, LATENT_LIMIT),
            "latents of the group at once": work.same(pipeline, whole, LATENT_LIMIT),
        },
        notes=[
            f"{work.sizes['images']} images of one prompt, batches of {work.sizes['image_batch']}, "
            f"{work.sizes['steps']} steps, guidance {work.sizes['scale']}; the cache is empty at the start of every "
            "repetition, so a prompt that recurs in a later epoch costs less than this",
            "the pipeline also batches guidance; the only thing left to share is the text, a small part of a guided "
            "rollout",
        ],
    )


def _encoding(work: _Work) -> dict[str, Any]:
    each, once = arms = [
        work.arm("each image", "encode_arm", way="each image"),
        work.arm("each prompt", "encode_arm", way="each prompt"),
    ]
    runs = run_arms("encoding", arms, work.options)
    return work.comparison(
        runs,
        ratios={"time": work.ratio(runs, each.name, once.name)},
        notes=["only the embedding; text_encoder_mb is the memory freed once all prompts are cached"],
    )


def _guidance(work: _Work) -> dict[str, Any]:
    settings = {"rows": work.sizes["image_batch"], "calls": 2, "alone": False, "train": False, "detach": "no"}
    two, one, both, after, before = arms = [
        work.arm("two calls", "guidance_arm", **settings, together=False),
        work.arm("one call", "guidance_arm", **settings, together=True),
        work.arm("train both", "guidance_arm", **settings | {"together": True, "train": True}),
        work.arm("train, detached after", "guidance_arm", **settings | _trained("after")),
        work.arm("train, no graph", "guidance_arm", **settings | _trained("before")),
    ]
    runs = run_arms("guidance", arms, work.options)
    return work.comparison(
        runs,
        ratios={
            "one call for two": work.ratio(runs, two.name, one.name),
            "no graph for the negative half": work.ratio(runs, after.name, before.name),
        },
        checks={
            "velocity": work.same(two, one, VELOCITY_LIMIT),
            "gradient": work.same(after, before, GRADIENT_LIMIT, relative=True),
            "gradient through both": work.same(both, after, CONTROL_LIMIT, relative=True, above=True),
        },
        notes=[
            "one call does the work of two: on a CPU that one half already saturates there is nothing to gain; on a "
            "GPU a small batch saves kernel launches",
            "`detached after` computes both halves with a graph and cuts the negative one off its result; the backward "
            "pass then still runs through that half, on zeros",
        ],
    )


def _trained(detach: str) -> dict[str, Any]:
    return {"together": True, "train": True, "detach": detach}


def _batching(work: _Work) -> dict[str, Any]:
    settings = {"rows": 8, "calls": 1, "together": True, "train": False, "detach": "no", "scale": 1.0}
    alone, together = arms = [
        work.arm("8 x 1", "guidance_arm", **settings, alone=True),
        work.arm("1 x 8", "guidance_arm", **settings, alone=False),
    ]
    runs = run_arms("batching", arms, work.options)
    return work.comparison(
        runs,
        ratios={"time": work.ratio(runs, alone.name, together.name)},
        checks={"velocity": work.same(alone, together, VELOCITY_LIMIT)},
        notes=["8 images of one prompt, each at its own times, no guidance; equal operations"],
    )


def _stacking(work: _Work) -> dict[str, Any]:
    settings = {"rows": 3, "draws": 6}
    each, stacked = arms = [
        work.arm("each draw", "stack_arm", **settings, way="each draw"),
        work.arm("stacked", "stack_arm", **settings, way="stacked"),
    ]
    runs = run_arms("stacking", arms, work.options)
    return work.comparison(
        runs,
        ratios={"time": work.ratio(runs, each.name, stacked.name)},
        checks={"gradient": work.same(each, stacked, GRADIENT_LIMIT, relative=True)},
        notes=["forward and backward pass of 3 images with 6 draws each; equal operations"],
    )


def _recipes(work: _Work) -> dict[str, Any]:
    names: Sequence[str] = ("flow-grpo", "flow-grpo-fast", "awm")
    arms = [work.arm(name, "recipe_arm", way=name, rows=4) for name in names]
    runs = run_arms("recipes", arms, work.options)
    return work.comparison(
        runs,
        ratios={
            "awm for flow-grpo": work.ratio(
                runs, "flow-grpo", "awm", **({} if work.options.quick else {"minimum": RECIPE_MINIMUM})
            ),
            "awm for flow-grpo-fast": work.ratio(runs, "flow-grpo-fast", "awm"),
        },
        notes=[
            "the transformer passes of an epoch for each of 4 images with the published defaults, not how well they "
            "learn. Flow-GRPO: 10 guided steps, 9 of them trained against a reference (the fast variant: 2). AWM: "
            "14 steps without guidance, and 6 draws through policy, reference and EMA",
        ],
    )


def _steps(work: _Work) -> dict[str, Any]:
    quick = work.options.quick
    settings = STEP_QUICK if quick else STEP_FULL
    model = work.options.model or (work.model if quick else _build_medium(work.place, work.options.device))
    common = {"model": str(model), "folder": str(work.place / "steps")}
    arms = [work.arm(name, "step_arm", way=name, **settings, **common) for name in ("flow_grpo", "awm")]
    runs = run_arms("steps", arms, work.options)
    return comparison(
        runs,
        ratios={"awm for flow_grpo": ratio(runs, "flow_grpo", "awm", work.quantity)},
        notes=[
            f"a whole step of the suite's loop on {settings['images']} images of two prompts, micro-batches of "
            f"{settings['micro_batch']}, LoRA of rank 32: rollout, reward, advantages, update; random weights, so "
            "only time and memory are meaningful",
            "without --quick and --model: the transformer of Stable Diffusion 3.5 medium (24 blocks of 24 x 64, 13 "
            "with dual attention) and an autoencoder of its widths for images of 512 pixels, and small text "
            "encoders; their tokens are 4080 wide instead of 4096, and prompts are embedded before the steps",
        ],
    )


def _build_medium(place: Path, device: str) -> Path:
    import torch

    from diffusion.toy.pipelines.tiny import TinySd3Sizes, build_tiny_sd3

    progress("building random weights with the size of Stable Diffusion 3.5 medium")
    with torch.device(device):
        return build_tiny_sd3(place / "medium", corpus=CORPUS, sizes=TinySd3Sizes(**MEDIUM_MODEL))


COMPARISONS: dict[str, Callable[[_Work], dict[str, Any]]] = {
    "rollout": _rollout,
    "encoding": _encoding,
    "guidance": _guidance,
    "batching": _batching,
    "stacking": _stacking,
    "recipes": _recipes,
    "steps": _steps,
}
"""Values of `--only`."""

NAMES = tuple(COMPARISONS)
