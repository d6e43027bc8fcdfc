"""Arms of `python -m benchmarks vlm` made of the suite's own code: updates, sampling, whole steps, PAPO's passes.

The layout decides how often a prompt is computed: "rows" once for each completion, image included, as in libraries
whose batches are rows; "tower once" the same with the image through the vision tower once; "shared" once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import measure
from benchmarks.measure import Recorder, repeat
from benchmarks.vlm.workload import Shape, shape_of, suppressed_tokens
from mmrl.core.loss import Denominators
from mmrl.core.objectives.objective import LossOutput
from mmrl.core.rollouts import Rollouts
from mmrl.rewards import RewardConfig
from mmrl.runs.run_log import Stopwatch
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import make_accelerator
from mmrl.training.recipe import Step, make_reference, shared_prefix
from mmrl.training.settings import TrainerConfig
from mmrl.training.trainer import Trainer
from mmrl.training.update import count_denominators, update_constants
from mmrl.vlm.data.dataset import DataConfig
from mmrl.vlm.data.prompt import Prompt, VlmPayload
from mmrl.vlm.engine.vlm_sampler import SamplerConfig, sample
from mmrl.vlm.methods.papo import PapoConfig, PapoRecipe, blacken_patches
from mmrl.vlm.model.model_config import ModelConfig
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe

OFF_POLICY = 0.3
"""Standard deviation of old minus new log-prob, in nats: about half of the ratios are clipped."""
LOGP = frozenset({"logp"})


def update_arm(options: dict[str, Any]) -> dict[str, Any]:
    """Forward and backward pass of the loss of one group.

    Args:
        options: model, data, shape, layout, micro_batch.
    """
    with make_recipe(options, old_logp="sampler") as recipe:
        rollouts = make_rollouts(recipe, shape_of(options["shape"]))
        rollouts = rows_apart(rollouts) if options["layout"] == "rows" else rollouts

        def once(watch: measure.Stopwatch) -> None:
            _forward_backward(recipe, rollouts, options["micro_batch"], watch)
            recipe.policy.zero_grad(set_to_none=True)

        return repeat(once, options["repetitions"], options["device"])


def sample_arm(options: dict[str, Any]) -> dict[str, Any]:
    """Draw the completions of one prompt with the suite's sampler.

    Args:
        options: model, data, shape.
    """
    shape = shape_of(options["shape"])
    with make_recipe(options) as recipe:
        _, prompts = recipe.encode(recipe.policy, recipe.train_tasks[:1])
        generator = torch.Generator().manual_seed(0)
        drawn: list[Tensor] = []

        def once(watch: measure.Stopwatch) -> None:
            with _Clock(recipe.policy.device, lambda: watch).running():
                found = sample(recipe.policy, prompts, shape.group, recipe.config.sampler, generator)
            drawn.append(found.mask)

        found = repeat(once, options["repetitions"], options["device"])
    return found | {"counts": {"completion_tokens": float(torch.cat(drawn).sum(1).mean())}}


def generate_arm(options: dict[str, Any]) -> dict[str, Any]:
    """Draw the completions of one prompt with `generate`, called as TRL's GRPOTrainer calls it.

    Args:
        options: model, data, shape.
    """
    from transformers import GenerationConfig

    shape = shape_of(options["shape"])
    with make_recipe(options | {"shared_prefix": False}) as recipe:
        policy = recipe.policy
        network = policy.network
        inputs = _repeated_inputs(recipe, shape.group)
        settings = GenerationConfig(
            max_new_tokens=shape.completion,
            do_sample=True,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            pad_token_id=policy.pad_id,
            eos_token_id=list(policy.eos_ids),
            suppress_tokens=suppressed_tokens(options["model"], policy.processor.tokenizer),
            disable_compile=True,
        )
        widths: list[int] = []

        def once(watch: measure.Stopwatch) -> None:
            with torch.no_grad():
                widths.append(network.generate(**inputs, generation_config=settings).shape[1])

        found = repeat(once, options["repetitions"], options["device"])
    return found | {"counts": {"completion_tokens": widths[0] - shape.prompt}}


def step_arm(options: dict[str, Any]) -> dict[str, Any]:
    """Whole GRPO steps of the suite's training loop: sampling, rewards, one update with AdamW.

    Args:
        options: model, data, shape, and what `make_recipe` takes.
    """
    recorder = Recorder(options["device"])
    with make_recipe(options) as recipe, tempfile.TemporaryDirectory() as folder:
        accelerator = make_accelerator(recipe.config.trainer.mixed_precision)
        recipe.policy.to(accelerator.device)
        trainer = Trainer(recipe, recipe.config, Path(folder), accelerator, None)
        trainer.log.watch = _Clock(accelerator.device, lambda: recorder.watch)
        recorder.start()
        for _ in range(options["repetitions"] + 1):
            trainer.train_step()
            recorder.lap()
    counts = {"completion_tokens": trainer.log.totals["tokens"] / trainer.log.totals["samples"]}
    return recorder.result() | {"counts": counts}


def papo_arm(options: dict[str, Any]) -> dict[str, Any]:
    """Training passes of one PAPO step: reference, masked image, forward and backward.

    With layout "rows" this emulates the public recipe in the suite's own code: rows with an image each, and a pass
    for the old log-probs, which that recipe makes in every step.

    Args:
        options: model, data, shape, layout.
    """
    flat = options["layout"] == "rows"
    with make_recipe(options, papo=True, old_logp="sampler" if flat else "recompute") as recipe:
        drawn = _with_masked_view(recipe, make_rollouts(recipe, shape_of(options["shape"])))
        reference = make_reference(recipe.config.reference, recipe.policy, needed=True)
        policy = recipe.policy

        def once(watch: measure.Stopwatch) -> None:
            # prompts are new in every step: the reference remembers the features of those that it has seen
            rollouts = rows_apart(drawn) if flat else _with_new_prompts(drawn)
            with _Clock(policy.device, lambda: watch).running():
                if flat:
                    with watch.stage("old_logp"):
                        recipe.scores_in_chunks(policy, rollouts, LOGP)
                ready = update_constants(recipe, policy, reference, rollouts, Step())
            _forward_backward(recipe, ready, 0, watch)
            policy.zero_grad(set_to_none=True)

        return repeat(once, options["repetitions"], options["device"])


@contextmanager
def make_recipe(options: dict[str, Any], *, papo: bool = False, old_logp: str = "recompute") -> Iterator[VlmRecipe]:
    """Build the recipe of an arm through the public configuration.

    Args:
        options: model, data, shape, device; dtype, mixed_precision, layout, shared_prefix, gradient_checkpointing,
            keep_prefill, skip_zero_advantage_groups, tasks_per_step and reward where they differ from the suite's
            defaults.
        papo: PAPO instead of GRPO without KL.
        old_logp: value of trainer.old_logp.
    """
    shape = shape_of(options["shape"])
    shared = options.get("shared_prefix", options.get("layout", "shared") == "shared")
    dtype = options.get("dtype", "bfloat16" if options["device"] == "cuda" else "float32")
    common: dict[str, Any] = {
        "model": ModelConfig(
            path=options["model"],
            dtype=dtype,
            shared_prefix=shared,
            gradient_checkpointing=options.get("gradient_checkpointing", False),
        ),
        "data": DataConfig(path=options["data"]),
        "rewards": [RewardConfig(name="checksum", function=options.get("reward", REWARD), isolate=False)],
        "sampler": SamplerConfig(
            max_new_tokens=shape.completion,
            keep_prefill=options.get("keep_prefill", True),
        ),
        "trainer": TrainerConfig(
            steps=options["repetitions"] + 1,
            tasks_per_step=options.get("tasks_per_step", 1),
            samples_per_task=shape.group,
            skip_zero_advantage_groups=options.get("skip_zero_advantage_groups", True),
            learning_rate=1e-4 if dtype == "bfloat16" else 1e-6,
            mixed_precision=options.get("mixed_precision", "none"),
            old_logp=old_logp,
        ),
    }
    recipe = _open_recipe(common, papo, apart=options.get("layout") == "rows")
    with contextlib.closing(recipe):
        policy = recipe.policy
        extra = torch.tensor(suppressed_tokens(options["model"], policy.processor.tokenizer))
        policy.banned_ids = torch.unique(torch.cat([policy.banned_ids, extra]))
        policy.to(options["device"])
        yield recipe


def make_rollouts(recipe: VlmRecipe, shape: Shape, lengths: Sequence[int] = (), tasks: int = 1) -> Rollouts:
    """Groups of random completions with rewards, advantages and old log-probs of a different policy.

    Args:
        recipe: encodes the prompts and scores the completions once.
        shape: sizes of a group.
        lengths: tokens of each row; empty = T for all.
        tasks: groups.
    """
    generator = torch.Generator().manual_seed(0)
    policy = recipe.policy
    found, prompts = recipe.encode(recipe.policy, recipe.train_tasks[:tasks])
    rows = tasks * shape.group
    allowed = torch.ones(policy.network.config.get_text_config().vocab_size, dtype=torch.bool)
    allowed[policy.banned_ids.cpu()] = False
    words = torch.nonzero(allowed).flatten()
    ids = words[torch.randint(len(words), (rows, shape.completion), generator=generator)]
    sizes = torch.tensor(list(lengths) or [shape.completion] * rows)
    mask = (torch.arange(shape.completion) < sizes[:, None]).float()
    rollouts = Rollouts(
        group=torch.arange(tasks).repeat_interleave(shape.group),
        mask=mask,
        logp_old=torch.zeros_like(mask),
        reward=torch.rand(rows, generator=generator),
        payload=VlmPayload(prompts, found, ids, [""] * rows, ["length"] * rows),
    ).to(policy.device)
    drift = OFF_POLICY * torch.randn(mask.shape, generator=generator).to(policy.device)
    with torch.no_grad():
        logp = recipe.scores(policy, rollouts, LOGP).logp
    return recipe.objective.compute_advantages(rollouts.replace(logp_old=(logp + drift) * rollouts.mask))


def rows_apart(rollouts: Rollouts) -> Rollouts:
    """Give every row its own group and prompt, so that nothing can be shared."""
    payload = VlmPayload.of(rollouts)
    groups = rollouts.group.tolist()

    def own(items: Sequence[Any]) -> list[Any]:
        return [items[group] for group in groups]

    views = {name: own(view) for name, view in payload.views.items()}
    apart = dataclasses.replace(payload, prompts=own(payload.prompts), tasks=own(payload.tasks), views=views)
    group = torch.arange(len(groups), device=rollouts.group.device)
    return _with_new_prompts(rollouts.replace(group=group, payload=apart))


class _RowRecipe(VlmRecipe):
    """GRPO whose update computes prompt and image of every row, those of groups without a gradient included."""

    own_loss = "grpo_rows"

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators, step: Step) -> LossOutput:
        return super().loss(policy, rows_apart(minibatch), denominators, step)


class _Clock(Stopwatch):
    """Hands the stages of the training loop to the stopwatch of the arm."""

    def __init__(self, device: torch.device, current: Callable[[], measure.Stopwatch]) -> None:
        super().__init__(device)
        self._current = current

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for stage in (*PART_OF.get(name, ()), name):
                stack.enter_context(self._current().stage(stage))
            stack.enter_context(super().stage(name))
            yield


def _open_recipe(common: dict[str, Any], papo: bool, apart: bool) -> VlmRecipe:
    if papo:
        return PapoRecipe(PapoConfig(**common))
    config = VlmConfig(objective=ObjectiveConfig(preset="grpo", kl={"kind": "none"}), **common)
    return _RowRecipe(config) if apart else VlmRecipe(config)


def _forward_backward(recipe: VlmRecipe, rollouts: Rollouts, micro_batch: int, watch: measure.Stopwatch) -> None:
    denominators = count_denominators(recipe, rollouts)
    chunks = list(rollouts.micro_batches(micro_batch or rollouts.num_rows))
    with shared_prefix(recipe.policy, chunks) as shared:
        for chunk in chunks:
            with watch.stage("forward"):
                output = recipe.loss(recipe.policy, chunk, denominators, Step())
            with watch.stage("backward"):
                output.loss.backward()
        with watch.stage("backward"):
            shared.backward()


def _with_new_prompts(rollouts: Rollouts) -> Rollouts:
    """The same rows with prompts that no cache has seen."""
    payload = VlmPayload.of(rollouts)

    def renewed(prompts: Sequence[Prompt | None]) -> list[Any]:
        return [None if prompt is None else dataclasses.replace(prompt) for prompt in prompts]

    views = {name: renewed(view) for name, view in payload.views.items()}
    return rollouts.replace(payload=dataclasses.replace(payload, prompts=renewed(payload.prompts), views=views))


def _with_masked_view(recipe: VlmRecipe, rollouts: Rollouts) -> Rollouts:
    payload = VlmPayload.of(rollouts)
    rng = np.random.default_rng(0)
    views: list[Prompt | None] = [
        recipe.policy.encode(task, [blacken_patches(image, 14, 0.6, rng) for image in task.load_images()])
        for task in payload.tasks
    ]
    return rollouts.replace(
        payload=dataclasses.replace(payload, views={"masked": views}),
        extras={"papo_weight": torch.ones_like(rollouts.reward)},
    )


def _repeated_inputs(recipe: VlmRecipe, group: int) -> dict[str, Any]:
    """Inputs of `generate` with the prompt and its pixels once for each completion."""
    policy = recipe.policy
    task = recipe.train_tasks[0]
    text = policy.processor.apply_chat_template(task.messages, tokenize=False, add_generation_prompt=True)
    images = [image for _ in range(group) for image in task.load_images()]
    inputs = policy.processor(text=[text] * group, images=images, padding=True, return_tensors="pt")
    return {name: value.to(policy.device) for name, value in inputs.items()}


REWARD = "benchmarks.vlm.workload:checksum_reward"
PART_OF = {"prefill": ("generate",), "decode": ("generate",)}
"""Stages that also count in another one, which other libraries have."""
