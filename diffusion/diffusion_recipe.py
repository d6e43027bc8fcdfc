"""Shared parts of the diffusion recipes: prompts, images, rewards, held-out evaluation and cost metrics.

A method supplies the process whose decisions are trained, `Trajectories` (denoising, a log-density for each step) or
`FlowMatching` (noisy versions of the finished images), and what its paper changes: advantages, scores or the loss.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from diffusion.data.prompts import DiffusionTask, PromptConfig, load_prompts
from diffusion.diffusion_config import DiffusionConfig, GivenEvaluationConfig, GivenImagesConfig, TrajectoryParts
from diffusion.diffusion_evaluation import ImageMeasure, shown_output, training_cost
from diffusion.families.base import REFERENCE
from diffusion.models.adapters import save_formatted
from diffusion.models.conditioning import TextEncoders
from diffusion.models.diffusion_policy import DiffusionPolicy, load_policy
from diffusion.models.ema import EMAWeights, EvalAverage, KeepsEvalAverage
from diffusion.models.pipeline_card import describe_pipeline
from diffusion.models.pipelines import decode_latents
from diffusion.rewards.image_rewards import load_rewards
from diffusion.sampling.few_steps import warn_of_few_steps
from diffusion.sampling.latent_sampler import check_sampler
from diffusion.sampling.schedule import RANDOM_SOLVERS
from diffusion.sampling.steps import gaussian_kl
from diffusion.sampling.trajectories import DiffusionPayload, StepScores, Trajectories
from mmrl.core.loss import Metric
from mmrl.core.objectives.decoupled import decoupled_advantages
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.core.state import Stateful, Tally
from mmrl.errors import UserError
from mmrl.hub.tables import LoadedRows
from mmrl.rewards import RewardResult, RewardSum
from mmrl.rewards.sum import reward_columns, tell_renamed
from mmrl.runs.dry_run import model_follows
from mmrl.runs.export import Exported
from mmrl.runs.run_log import stopwatch
from mmrl.training.evaluation import Elsewhere, Evaluation, evaluate_tasks, held_out_tasks
from mmrl.training.objectives import make_objective
from mmrl.training.processes import Streams, global_advantages, process_device
from mmrl.training.recipe import LossTerm, Passes, Recipe, Reference, Step, opening, single_update, start_kind
from mmrl.training.scoring import RewardErrors, with_rewards

LOGGER = logging.getLogger("mmrl")
NOT_FINITE = "the latents or the decoded image are not finite"


class Process(Protocol):
    """Draws images and evaluates models on their decisions.

    Denoising as `Trajectories` has it (a decision is a step), or noising again as `FlowMatching` has it (a decision is
    a noisy version of the image).
    """

    def draw(
        self, policy: DiffusionPolicy, tasks: Sequence[DiffusionTask], group_size: int, streams: Streams
    ) -> Rollouts:
        """Draw the latents of G images for each task, without images and rewards."""
        ...

    def scores(self, model: Any, rollouts: Rollouts, reference: Reference | None = None) -> PolicyOutputs:
        """Log-density (B, T) of each decision under a model, and its divergence from a reference."""
        ...


class DiffusionDomain:
    """Model, prompts, rewards, evaluation and reports of recipes on a diffusion or flow model."""

    config: Any
    supervised: ClassVar[bool]
    policy: DiffusionPolicy
    train_tasks: Sequence[Any]
    eval_tasks: Mapping[str, Sequence[DiffusionTask]]
    start: Reference
    parts: dict[str, Stateful]
    added: dict[str, Any]
    opened: ExitStack

    def open(self, config: Any, scoring: DiffusionConfig | GivenEvaluationConfig) -> None:
        """Load prompts, rewards and pipeline; `scoring` has the settings of sampling and scoring."""
        self.skipped = Tally()
        self.errors = RewardErrors()
        self.scoring = scoring
        self.train_tasks = self.load_train_tasks()
        self.eval_tasks = held_out_tasks(config, lambda data, key: self._load(data, key).tasks)
        self.rewards = load_rewards(scoring.rewards, scoring.heldout_rewards)
        with opening(self.opened) as opened:
            opened.callback(self.rewards.close)
            self._check_columns()
            model_follows(self)
            self.policy = load_policy(config.model, config.seed)
            opened.callback(self.policy.embeddings.close)
            self.policy.embeddings.encoders.to(process_device())  # the networks follow later
            key = "sampler" if config is scoring else "evaluation.sampler"
            check_sampler(self.policy, scoring.sampler, key)
            warn_of_few_steps(self.policy, scoring.sampler, key, matched=not isinstance(config, TrajectoryParts))
            self.check_prompts(self.policy.embeddings.encoders)
            # of all splits: padding changes rounding, so training and evaluation have to share it
            self.policy.embeddings.pad_to(self._prompts(), (scoring.sampler.negative_prompt, ""))
        if config.model.free_text_encoders:
            self._free_text_encoders()
        # copied before the first update
        self.start = Reference(start_kind(self.policy), self.policy)
        self.eval_ema = EvalAverage(self.policy, config.eval_ema)
        self.parts |= {
            "skipped": self.skipped,
            "errors": self.errors,
            "cost": self.policy.cost,
            "eval_ema": self.eval_ema,
        }
        self.added |= {"errors": self.errors.step, "cost": self.policy.cost}

    def load_train_tasks(self) -> Sequence[Any]:
        """The training prompts."""
        loaded = self._load(self.config.data, "data")
        self.skipped.update(loaded.skipped)
        return loaded.tasks

    def score_images(self, tasks: Sequence[DiffusionTask], images: np.ndarray, finite: Sequence[bool]) -> RewardResult:
        """Score images uint8 (B, height, width, 3) as the function `score_images` does, and log the first failure."""
        result = score_images(self.rewards, tasks, images, finite)
        self.errors.warn(result)
        return result

    def measures(self, policy: DiffusionPolicy, split: str, step: Step) -> list[ImageMeasure]:
        """Images at fixed prompts and seeds: rewards, held-out rewards, diversity, distance to the base model."""
        config = self.config
        self.start.to(policy.device)  # copied before the policy moved there
        measure = ImageMeasure(
            policy=policy,
            base=self.start,
            score=self.score_images,
            heldout=[reward.name for reward in self.scoring.heldout_rewards],
            evaluation=config.evaluation,
            sampler=self.scoring.sampler,
            seed=config.seed,
            split=split,
            rewards=[*self.scoring.rewards, *self.scoring.heldout_rewards],
        )
        return [measure]

    def evaluating(self, policy: DiffusionPolicy) -> AbstractContextManager[None]:
        """Evaluate the average of the policy."""
        return self.eval_ema.applied(policy)

    def evaluate(
        self,
        policy: DiffusionPolicy,
        split: str,
        accelerator: Accelerator,
        step: Step,
        elsewhere: Elsewhere | None = None,
    ) -> Evaluation:
        """Measure the policy and report the training cost so far."""
        with self.evaluating(policy), training_cost(policy, accelerator) as cost:
            measures, tasks = self.measures(policy, split, step), self.eval_tasks[split]
            found = evaluate_tasks(measures, tasks, self.config.evaluation.records, accelerator, elsewhere)
        return dataclasses.replace(found, metrics=found.metrics | cost)

    def describe_row(self, rollouts: Rollouts, row: int) -> dict[str, Any]:
        """The prompt and its image."""
        payload = DiffusionPayload.of(rollouts)
        task = payload.tasks[int(rollouts.group[row])]
        found = {
            "id": task.id,
            "prompt": task.prompt,
            "response": "",
            "outputs": [shown_output(payload.images[row], task)],
            "finish": "image" if payload.finite[row] else "overflow",
        }
        if self.supervised:
            return found | {"reward": None, "advantage": None}
        advantage = rollouts.advantage
        return found | {"advantage": None if advantage is None else float(advantage[row].mean())}

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float | Metric]:
        """Skipped prompts and cost of the run so far, and reward errors of the step."""
        return {
            "data/skipped": float(sum(self.skipped.values())),
            **{f"cost/{name}": float(value) for name, value in self.policy.cost.items()},
            **self.errors.take(),
        }

    @classmethod
    def export(cls, config: Any, checkpoint: Path, output: Path) -> Exported:
        """Write an ordinary pipeline folder; with an evaluation average, the folder of the averaged weights."""
        # the average if there is one, since that is what the reported numbers belong to
        weights = EvalAverage.folder_of(checkpoint)
        policy = load_policy(dataclasses.replace(config.model, path=str(weights), build=None))
        policy.save_pipeline(output)
        # diffusers does not know that Stable Diffusion 3 may lack its T5 encoder
        absent = ", ".join(f"{name}=None" for name in policy.absent_parts())
        return describe_pipeline(config, policy, absent)

    @classmethod
    def export_adapter(cls, config: Any, checkpoint: Path, output: Path, form: str) -> Exported:
        """Write the adapters of `export` in one of `diffusion.models.adapters.FORMATS`."""
        weights = EvalAverage.folder_of(checkpoint)
        policy = load_policy(dataclasses.replace(config.model, path=str(weights), build=None))
        save_formatted(policy, output, form)
        absent = ", ".join(f"{name}=None" for name in policy.absent_parts())
        return describe_pipeline(config, policy, absent, form)

    def _free_text_encoders(self) -> None:
        embeddings = self.policy.embeddings
        embeddings.negative(self.scoring.sampler.negative_prompt)
        # the empty prompt too: evaluations may use guidance although training does not
        embeddings.negative("")
        for task in self._tasks():
            image = getattr(task, "image", None)
            for prompt in self.prompts_of(task):
                embeddings.rows([prompt], images=[image])
        LOGGER.info("text encoders freed: %.0f MB", embeddings.free_encoders() / 1e6)

    def _prompts(self) -> dict[str, None]:
        """All prompts of the run."""
        return dict.fromkeys(prompt for task in self._tasks() for prompt in self.prompts_of(task))

    def _tasks(self) -> list[Any]:
        """Training and evaluation tasks."""
        return [*self.train_tasks, *(task for tasks in self.eval_tasks.values() for task in tasks)]

    def prompts_of(self, task: Any) -> list[str]:
        """Prompts that a training or evaluation task needs."""
        return [task.prompt]

    def _load(self, data: PromptConfig, key: str, *, measured: bool = False) -> LoadedRows[DiffusionTask]:
        """Prompts of a file; only the model's tokenizers can measure them."""
        try:
            return load_prompts(data, self.cut_of) if measured else load_prompts(data)
        except UserError as error:
            raise UserError(f"{key}: {error}") from error

    def _check_columns(self) -> None:
        """Check that all prompts have the columns that their rewards read."""
        # recipes of given images score only what evaluations draw
        trained = {"data": self.train_tasks} if isinstance(self.scoring, DiffusionConfig) else {}
        splits = {f"eval_data.{name}": tasks for name, tasks in self.eval_tasks.items()}
        for key, tasks in (trained | splits).items():
            try:
                edits = any(isinstance(task, DiffusionTask) and task.image is not None for task in tasks)
                self.rewards.check_columns([*columns_of(tasks), *([REFERENCE] if edits else [])])
                tell_renamed(key, _passed(tasks))
            except UserError as error:
                raise UserError(f"{key}: {error}") from error

    def check_prompts(self, encoders: TextEncoders) -> None:
        """Reject images that the family does not support, and exclude prompts that its tokenizers would truncate."""
        self._encoders = encoders
        self._check_references()
        self._leave_out_long_prompts()

    def _check_references(self) -> None:
        """Reject images to be edited that the family does not support, or that only some rows have."""
        trained = {"data": [task for task in self.train_tasks if isinstance(task, DiffusionTask)]}
        splits = {f"eval_data.{name}": tasks for name, tasks in self.eval_tasks.items()}
        family = self._encoders.family
        for key, tasks in (trained | splits).items():
            edits = [task for task in tasks if task.image is not None]
            if not edits:
                continue
            if not family.takes_image:
                raise UserError(
                    f"{key}: {edits[0].id} has an image, but {family.pipeline_class} does not take images; remove "
                    f"the column, or set {key}.image_key to an empty string if only rewards read it"
                )
            without = next((task.id for task in tasks if task.image is None), None)
            if without is not None:
                raise UserError(
                    f"{key}: {without} has no image, but {edits[0].id} has one; either all rows or none must have an "
                    "image"
                )
            if hidden := next((task.id for task in edits if REFERENCE in task.columns), None):
                raise UserError(
                    f"{key}: {hidden} has a column {REFERENCE!r}, a name reserved for the image that rewards get; "
                    "rename the column"
                )

    def _leave_out_long_prompts(self) -> None:
        """Exclude prompts and captions of which a tokenizer would drop a part; files of prompts are read again."""
        config = self.config
        limit = config.evaluation.max_tasks or None
        # files are only read again if something would be cut: measuring prompts takes a tokenizer call each
        if any(isinstance(task, DiffusionTask) and self.cut_of(task.prompt) for task in self.train_tasks):
            # counted again while rereading
            self.skipped.clear()
            loaded = self._load(config.data, "data", measured=True)
            self.train_tasks = loaded.tasks
            self.skipped.update(loaded.skipped)
        if isinstance(config, GivenImagesConfig):
            fitting = [task for task in self.train_tasks if not any(map(self.cut_of, self.prompts_of(task)))]
            if not fitting:
                raise UserError(
                    "all captions are too long for the model's tokenizers; shorten them, or increase "
                    "model.max_sequence_length"
                )
            if count := len(self.train_tasks) - len(fitting):
                LOGGER.warning("skipped %d rows (too_long): their captions are too long for the tokenizers", count)
                self.skipped["too_long"] += count
            self.train_tasks = fitting
        for name, data in config.eval_data.items():
            if any(self.cut_of(task.prompt) for task in self.eval_tasks[name]):
                tasks = self._load(data, f"eval_data.{name}", measured=True).tasks[:limit]
                self.eval_tasks = {**self.eval_tasks, name: tasks}

    def cut_of(self, prompt: str) -> str | None:
        """Describe the part of a prompt that no text encoder reads; None if an encoder reads all of it."""
        cuts = self._encoders.lost(prompt)
        return None if not cuts else f"{cuts[0].tokenizer} would drop {cuts[0].text!r} of the prompt"


class DiffusionRecipe(KeepsEvalAverage, DiffusionDomain, Recipe[DiffusionPolicy, Any]):
    """Reinforcement learning of a diffusion or flow model; a method sets `process`."""

    config: DiffusionConfig
    process: Process
    """The process whose decisions are trained."""
    start: Reference
    samples_as_it_scores: ClassVar[bool] = True

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__(config)
        self.objective = make_objective(config.objective)
        self.compared = config.compared
        noisy = isinstance(config, TrajectoryParts) or (config.sampler.solver in RANDOM_SOLVERS)
        self.variety = "more noise (sampler.noise_level)" if noisy else ""
        self.open(config, config)

    @property
    def sampling_average(self) -> EMAWeights | None:
        """The average that images are drawn with; None if they are drawn with the policy's current weights."""
        return None

    def rollout_state(self, tasks: Sequence[Any]) -> Any:
        """The average that images are drawn with."""
        return None if self.sampling_average is None else self.sampling_average.state_dict()

    def load_rollout_state(self, state: Any) -> None:
        """Restore `rollout_state`."""
        if self.sampling_average is not None:
            self.sampling_average.load_state_dict(state)

    def draw(self, policy: DiffusionPolicy, tasks: Sequence[Any], streams: Streams, step: Step) -> Rollouts:
        """Draw the latents of G images for each prompt."""
        return self.process.draw(policy, tasks, self.config.trainer.samples_per_task, streams)

    def rollout(self, policy: DiffusionPolicy, tasks: Sequence[Any], streams: Streams, step: Step) -> Rollouts:
        """Draw G images for each prompt; images with non-finite latents are counted and get no score."""
        average = self.sampling_average
        with nullcontext() if average is None else average.applied(policy):
            rollouts = self.draw(policy, tasks, streams, step)
        payload = DiffusionPayload.of(rollouts)
        sampler = self.config.sampler
        with stopwatch("decode"):
            decoded = decode_latents(
                policy.family, payload.latents, batch=sampler.batch_rows, frames=sampler.kept_frames
            )
        payload = dataclasses.replace(payload, images=decoded.pixels, finite=decoded.finite.tolist())
        return rollouts.replace(payload=payload.without_nonfinite())

    def score(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """Weighted sum of the rewards; NaN, without a gradient, for a row with a failed term or no image."""
        payload = DiffusionPayload.of(rollouts)
        tasks = [payload.tasks[group] for group in rollouts.host.group.tolist()]
        result = self.score_images(tasks, payload.images, payload.finite)
        self.errors.count(result)
        return with_rewards(rollouts, result)

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Log-density of each decision, and with "kl_ref" its divergence from the reference."""
        return self.process.scores(policy, rollouts, self.loss_reference if "kl_ref" in outputs else None)

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Advantages of the summed reward, or with `combine: gdpo` the normalised sum of per-reward advantages."""
        if self.config.combine == "sum":
            return self.estimate(rollouts, accelerator, step)
        weights = {reward.name: reward.weight for reward in self.config.rewards}
        estimate = functools.partial(decoupled_advantages, self.objective, weights=weights, state=self.objective_state)
        return global_advantages(estimate, rollouts, accelerator)

    @property
    def loss_reference(self) -> Reference | None:
        """The reference of the loss's divergence term; None if the objective has no such term."""
        if not self.objective.needs_reference:
            return None
        assert self.reference is not None
        return self.reference


def score_images(
    rewards: RewardSum,
    tasks: Sequence[DiffusionTask],
    images: np.ndarray | Sequence[np.ndarray],
    finite: Sequence[bool],
) -> RewardResult:
    """Score B images uint8 (height, width, 3) with all rewards, optimised and held out.

    Rows that are not `finite` have no image and fail every term.
    """
    rows = [row for row, good in enumerate(finite) if good]
    kept = [tasks[row] for row in rows]
    # the columns of all tasks: a reward's column does not go missing because no row with an image has it
    columns = {other: [task.columns.get(name) for task in kept] for name, other in _passed(tasks).items()}
    if rewards.reads(REFERENCE) and any(task.image for task in kept):
        columns[REFERENCE] = _references(kept, *images[0].shape[-3:-1])
    # rewards see only rows with an image
    found = rewards.score([task.prompt for task in kept], [images[row] for row in rows], columns)
    return _with_missing(found, rows, len(finite))


def _references(tasks: Sequence[DiffusionTask], height: int, width: int) -> list[Any]:
    """Pixels uint8 (height, width, 3) of the image that each row edits, read once for all rows of an image."""
    sources = {task.image.digest: task.image for task in tasks if task.image is not None}
    found = {digest: image.pixels(height, width) for digest, image in sources.items()}
    return [None if task.image is None else found[task.image.digest] for task in tasks]


def _with_missing(found: RewardResult, rows: Sequence[int], total: int) -> RewardResult:
    """Results of some rows as results of all: NaN, and counted, if there was no image."""
    index = {row: number for number, row in enumerate(rows)}

    def fill(values: Sequence[float]) -> list[float]:
        return [values[index[row]] if row in index else float("nan") for row in range(total)]

    missing = total - len(rows)
    errors = found.errors | ({"latents/overflow": missing} if missing else {})
    examples = found.examples | ({"latents/overflow": NOT_FINITE} if missing else {})
    terms = {name: fill(values) for name, values in found.terms.items()}
    return RewardResult(fill(found.total), terms, errors, examples, found.traces)


def columns_of(tasks: Sequence[DiffusionTask]) -> dict[str, list[Any]]:
    """Columns of the rows' tasks as lists for the rewards; None for a task that lacks a column."""
    return {other: [task.columns.get(name) for task in tasks] for name, other in _passed(tasks).items()}


def _passed(tasks: Sequence[DiffusionTask]) -> dict[str, str]:
    return reward_columns(sorted({name for task in tasks for name in task.columns}))


class TrajectoryRecipe(DiffusionRecipe):
    """Learning from stochastic denoising steps, which `process` draws."""

    process: Trajectories
    keeps_means: ClassVar[bool] = False
    """Whether the method compares the means of steps with those of the policy at the start of the update."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        # means cost as much memory as the states, so they are stored only if a loss reads them
        keep = self.keeps_means or "kl_old" in self.objective.needs
        precision = config.trainer.mixed_precision
        self.process = Trajectories(self.policy, config.sampler, config.step, precision, keep_mean=keep)
        self.old = OldMeans(self)
        self.terms = [self.old] if keep else []

    def draw(self, policy: DiffusionPolicy, tasks: Sequence[Any], streams: Streams, step: Step) -> Rollouts:
        """Draw images; the window of trained steps may move with the training step."""
        return self.process.draw(policy, tasks, self.config.trainer.samples_per_task, streams, step.number)

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Log-density of each step, and its divergence from the reference and the policy before the update."""
        found = self.process.evaluate(policy, rollouts)
        decisions = found.steps.decisions
        kl_old = None
        if "kl_old" in outputs:
            _, mean_old = self.old.of(found, rollouts)
            kl_old = decisions.scatter(gaussian_kl(found.mean, mean_old, found.std))
        kl_ref = self.process.kl(found, self.loss_reference if "kl_ref" in outputs else None)
        return PolicyOutputs(decisions.scatter(found.logp), kl_ref=kl_ref, kl_old=kl_old)


class OldMeans(LossTerm):
    """Means and log-densities of the policy at the start of the update, if rounding makes the sampler's differ.

    A single update has them anyway.
    """

    name = "old_means"
    gradient = "never"

    def __init__(self, recipe: TrajectoryRecipe) -> None:
        self.recipe = recipe

    @property
    def is_in_update(self) -> bool:
        """Whether the policy in the loss is still the one at the start of the update."""
        return single_update(self.recipe.config.trainer) and not self.recipe.keeps_sampled_logp

    def of(self, found: StepScores, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        """Old log-densities (M,) and means (M, C, H, W) of scored steps."""
        if self.is_in_update:
            # detached from the same pass: the ratio is exactly 1 and still has a gradient
            return found.logp.detach(), found.mean.detach()
        means = DiffusionPayload.of(rollouts).mean_old
        assert means is not None
        decisions = found.steps.decisions
        return decisions.gather(rollouts.logp_old), decisions.gather(means)

    def provides(self, step: Step) -> frozenset[str]:
        """The log-densities, which have to come from the same pass as the means."""
        return frozenset() if self.is_in_update else frozenset({"logp_old"})

    def prepare(self, passes: Passes, rollouts: Rollouts, step: Step) -> Rollouts:
        """Evaluate the sampled steps again, in the micro-batches of the update so that both round alike."""
        if self.recipe.keeps_sampled_logp or self.is_in_update:
            return rollouts
        payload = DiffusionPayload.of(rollouts)
        assert payload.mean_old is not None
        logps, means = [], []
        # the same splits as in the update: another batch shape would round differently in low precision
        for chunk in rollouts.micro_batches(self.recipe.config.trainer.micro_batch or rollouts.num_rows):
            with torch.no_grad():
                found = self.recipe.process.evaluate(passes.policy, chunk)
            decisions = found.steps.decisions
            sampled = DiffusionPayload.of(chunk).mean_old
            assert sampled is not None
            # untrained steps keep the sampler's means; nothing reads them, but the table stays rectangular
            mean = sampled.flatten(0, 1).index_copy(0, decisions.index, found.mean)
            means.append(mean.view(*decisions.shape, *mean.shape[1:]))
            logps.append(decisions.scatter(found.logp))
        # both from one pass: GRPO-Guard's ratio is exactly 1 only if they agree
        return rollouts.replace(
            logp_old=torch.cat(logps), payload=dataclasses.replace(payload, mean_old=torch.cat(means))
        )
