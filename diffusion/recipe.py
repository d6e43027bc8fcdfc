"""What every diffusion recipe shares: prompts, images, rewards, held-out evaluation, and the count of what it cost.

A recipe of this room says how latents are drawn and what is learnt from them; `diffusion/trajectories.py` does it for
the methods with a log-probability of each denoising step, `diffusion/flow_matching.py` for those that learn from x_0.
"""

from __future__ import annotations

import dataclasses
import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from diffusion.conditioning import TextRows
from diffusion.data import DiffusionTask, LoadedPrompts, PromptConfig, columns_of, load_prompts
from diffusion.ema import EMAWeights, eval_ema_decay
from diffusion.evaluation import DiffusionEvaluationConfig, ImageMeasure, training_cost
from diffusion.payload import DiffusionPayload
from diffusion.pipelines import decode_latents
from diffusion.policy import DiffusionPolicy, LoraSettings, ModelConfig, load_policy
from diffusion.rewards import load_image_rewards
from diffusion.sampler import SamplerConfig
from mmrl.core.objective import Objective
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import bounded, choice
from mmrl.rewards import RewardConfig, RewardResult, RewardSum
from mmrl.training.loop.distributed import global_advantages
from mmrl.training.loop.evaluation import Evaluation, evaluate_tasks
from mmrl.training.loop.objectives import ObjectiveConfig, check_objective, make_objective
from mmrl.training.loop.recipe import Recipe
from mmrl.training.loop.reference import Reference
from mmrl.training.loop.scoring import error_metrics, note_errors, with_rewards
from mmrl.training.loop.settings import RunConfig, TrainerConfig
from mmrl.training.record.samples import SampleRecord
from mmrl.training.record.stopwatch import stopwatch

__all__ = ["DiffusionConfig", "DiffusionRecipe", "EvalEmaConfig", "full_model", "image_trainer"]

LOGGER = logging.getLogger("mmrl")
COMBINATIONS = ("sum", "gdpo")
SCORES = ("kl_ref",)
"""What an image policy scores beside log-probabilities: the divergence of two Gaussians, or a velocity distance."""


def full_model() -> ModelConfig:
    """Every weight of the transformer is trained."""
    return ModelConfig(lora=LoraSettings(enabled=False))


def image_trainer() -> TrainerConfig:
    """Optimiser and batch sizes of the published recipes: AdamW at 3e-4 for LoRA, two updates an epoch."""
    return TrainerConfig(
        learning_rate=3e-4,
        samples_per_task=24,
        minibatches_per_step=2,
        weight_decay=1e-4,
        old_logp="sampler",
    )


@dataclass
class EvalEmaConfig:
    """A moving average of the weights for evaluation and use; sampling and KL terms do not see it."""

    decay: float = bounded(0.0, at_least=0, below=1)
    """Share of the old average that is kept at most, min((1 + s) / (10 + s), decay); 0 = no average."""


@dataclass
class DiffusionConfig(RunConfig):
    """A reinforcement-learning run of a diffusion or flow model."""

    compares_samples: ClassVar[bool] = True
    """Whether advantages come from the other images of a prompt."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Pipeline, adapter, precision."""
    data: PromptConfig = field(default_factory=PromptConfig)
    """Training prompts."""
    eval_data: dict[str, PromptConfig] = field(default_factory=dict)
    """Held-out prompts by name; the first split is the headline."""
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    """How images are drawn."""
    rewards: list[RewardConfig] = field(default_factory=list)
    """Reward terms that are optimised, and their weights."""
    heldout_rewards: list[RewardConfig] = field(default_factory=list)
    """Reward terms that are never optimised and always reported beside the others; at least one."""
    combine: str = choice("sum", COMBINATIONS)
    """sum: weighted sum of the rewards, then one advantage; gdpo: an advantage of each reward, then the sum."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """What is optimised."""
    eval_ema: EvalEmaConfig = field(default_factory=EvalEmaConfig)
    """Moving average that evaluations use."""
    trainer: TrainerConfig = field(default_factory=image_trainer)
    """Batch sizes, optimiser and guards."""
    evaluation: DiffusionEvaluationConfig = field(default_factory=DiffusionEvaluationConfig)
    """Evaluation at fixed prompts and seeds."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        _check_rewards(self)
        objective = make_objective(self.objective)
        samples = self.trainer.samples_per_task if self.compares_samples else None
        check_objective(objective, SCORES, samples, [reward.name for reward in self.rewards])


def _source(reward: RewardConfig) -> str:
    return reward.function or reward.name


def _check_rewards(config: DiffusionConfig) -> None:
    heldout = [reward.name for reward in config.heldout_rewards]
    if not any(reward.weight for reward in config.rewards):
        raise ValueError("rewards is empty or all of its weights are 0; name at least one, see `mmrl list rewards`")
    if not heldout:
        raise ValueError(
            "heldout_rewards is empty; name at least one reward that is not optimised, so that reward hacking shows"
        )
    both = sorted(
        {_source(reward) for reward in config.rewards} & {_source(reward) for reward in config.heldout_rewards}
    )
    if both:
        raise ValueError(
            f"{', '.join(both)} is in rewards and in heldout_rewards; a held-out reward must not be optimised"
        )


class DiffusionRecipe(Recipe[DiffusionPolicy, Any]):
    """Prompts, images, rewards and evaluation of a diffusion or flow model.

    Args:
        config: options of the run.

    Raises:
        UserError: model, prompts or rewards cannot be used.
    """

    config: DiffusionConfig
    policy: DiffusionPolicy
    start: Reference
    loss_name: ClassVar[str | None] = None
    """Name of a loss of the recipe's own, which takes only advantages and coefficients from the objective."""

    def __init__(self, config: DiffusionConfig) -> None:
        self.config = config
        self.objective: Objective = make_objective(config.objective)
        if self.loss_name is not None:
            self.objective = dataclasses.replace(self.objective, name=self.loss_name)
        self.policy = load_policy(config.model, config.seed)
        self.skipped: Counter[str] = Counter()
        self.train_tasks: Sequence[Any] = self.load_train_tasks()
        limit = config.evaluation.max_tasks or None
        self.eval_tasks: Mapping[str, Sequence[DiffusionTask]] = {
            name: self._load(data, f"eval_data.{name}").tasks[:limit] for name, data in config.eval_data.items()
        }
        self.rewards = _reward_sum(config)
        if config.model.free_text_encoders:
            self._free_text_encoders()
        self.start = Reference("adapter" if self.policy.has_adapter else "frozen", self.policy)
        self.reference: Reference | None = None
        self.eval_ema = EMAWeights(self.policy) if config.eval_ema.decay else None
        self.errors: Counter[str] = Counter()

    def load_train_tasks(self) -> Sequence[Any]:
        """The training prompts."""
        loaded = self._load(self.config.data, "data")
        self.skipped.update(loaded.skipped)
        return loaded.tasks

    @abstractmethod
    def draw(self, tasks: Sequence[DiffusionTask], generator: torch.Generator) -> Rollouts:
        """Draw the latents of G images for each task, without images and rewards."""

    def rollout(self, policy: nn.Module, tasks: Sequence[Any], generator: torch.Generator) -> Rollouts:
        """Draw G images for each prompt; images whose latents overflowed are counted and cannot be scored."""
        rollouts = self.draw(tasks, generator)
        payload = DiffusionPayload.of(rollouts)
        with stopwatch("decode"):
            payload.images, payload.finite = self.decode(payload.latents)
        return rollouts.replace(payload=payload.without_nonfinite())

    def decode(self, latents: Tensor) -> tuple[np.ndarray, list[bool]]:
        """Images uint8 (B, height, width, 3) of latents (B, C, H, W), and which of them are finite."""
        images, finite = decode_latents(self.policy.pipeline, latents, batch=self.config.sampler.batch_rows)
        return images, finite.tolist()

    def score(self, rollouts: Rollouts) -> Rollouts:
        """Weighted sum of the rewards; a row with a failed term or without an image keeps NaN and teaches nothing."""
        payload = DiffusionPayload.of(rollouts)
        tasks = [payload.tasks[group] for group in rollouts.group.tolist()]
        result = self.score_images(tasks, payload.images, payload.finite)
        return with_rewards(rollouts, result)

    def score_images(self, tasks: Sequence[DiffusionTask], images: np.ndarray, finite: Sequence[bool]) -> RewardResult:
        """Score images with all rewards, optimised and held out, and count what failed.

        Args:
            tasks: the task of each row.
            images: uint8 (B, height, width, 3).
            finite: whether the row has an image; the others are failures of every term.

        Returns:
            Sums over the optimised rewards, and every term.
        """
        rows = [row for row, good in enumerate(finite) if good]
        kept = [tasks[row] for row in rows]
        # the columns of all tasks: a reward's column does not go missing because no row with an image has it
        columns = {name: [task.columns.get(name) for task in kept] for name in columns_of(tasks)}
        found = self.rewards.score([task.prompt for task in kept], [images[row] for row in rows], columns)
        result = _spread(found, rows, len(finite))
        note_errors(self.errors, result)
        return result

    def reference_pass(self, reference: Reference, rollouts: Rollouts) -> Rollouts:
        """Keep the reference for the loss, which compares with it exactly, state by state; nothing is scored here."""
        self.reference = reference
        return rollouts

    @property
    def loss_outputs(self) -> frozenset[str]:
        """The log-density, and the exact divergence from the reference where the objective has a KL term."""
        return super().loss_outputs | ({"kl_ref"} if self.objective.needs_reference else set())

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator) -> Rollouts:
        """Advantages of the summed reward, or with `combine: gdpo` the weighted sum of each reward's own.

        Source: reward-decoupled normalisation (GDPO), X-GenGroup/Flow-Factory.
        """
        if self.config.combine == "sum":
            return self.estimate(rollouts, accelerator)
        total = torch.zeros_like(rollouts.mask)
        for reward in self.config.rewards:
            # where a term does not apply it is NaN: no reward of 0, which would move the others' mean and deviation
            values = torch.where(rollouts.scored, rollouts.reward_terms[reward.name], torch.nan)
            part = self.estimate(rollouts.replace(reward=values), accelerator).advantage
            assert part is not None
            total = total + reward.weight * part
        return rollouts.replace(advantage=total)

    def estimate(self, rollouts: Rollouts, accelerator: Accelerator) -> Rollouts:
        """Advantages of one reward with the objective's estimator, over all processes."""
        return global_advantages(self.objective.compute_advantages, rollouts, accelerator)

    def evaluate(self, policy: DiffusionPolicy, split: str, accelerator: Accelerator) -> Evaluation:
        """Images at fixed prompts and seeds: rewards, held-out rewards, diversity, distance to the base model."""
        config = self.config
        self.start.to(policy.device)  # copied before the policy moved there
        measure = ImageMeasure(
            policy=policy,
            base=self.start,
            score=self.score_images,
            heldout=[reward.name for reward in config.heldout_rewards],
            evaluation=config.evaluation,
            sampler=config.sampler,
            seed=config.seed,
            split=split,
        )
        average = nullcontext() if self.eval_ema is None else self.eval_ema.applied()
        with average, training_cost(policy, accelerator) as cost:
            found = evaluate_tasks([measure], self.eval_tasks[split], config.evaluation.records, accelerator)
        return Evaluation(found.metrics | cost, found.records)

    def records(self, rollouts: Rollouts, limit: int) -> list[SampleRecord]:
        """Whole groups as images with rewards and advantages."""
        from PIL import Image

        payload = DiffusionPayload.of(rollouts)
        advantage = rollouts.advantage
        found = []
        for row in range(min(limit, rollouts.num_rows)):
            task = payload.tasks[int(rollouts.group[row])]
            found.append(
                SampleRecord(
                    id=task.id,
                    prompt=task.prompt,
                    response="",
                    outputs=[Image.fromarray(payload.images[row])],
                    reward=float(rollouts.reward[row]),
                    terms={name: float(values[row]) for name, values in rollouts.reward_terms.items()},
                    advantage=None if advantage is None else float(advantage[row].mean()),
                    finish="image" if payload.finite[row] else "overflow",
                )
            )
        return found

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float]:
        """Skipped prompts, reward errors so far, and what the run has cost."""
        return {
            "data/skipped": float(sum(self.skipped.values())),
            **{f"cost/{name}": float(value) for name, value in self.policy.cost.items()},
            **error_metrics(self.errors),
        }

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move the evaluation average."""
        if self.eval_ema is not None:
            self.eval_ema.update(eval_ema_decay(step, self.config.eval_ema.decay))

    def state_dict(self) -> dict[str, Any]:
        """Counts and the evaluation average."""
        return {
            "skipped": dict(self.skipped),
            "errors": dict(self.errors),
            "cost": dict(self.policy.cost),
            "eval_ema": None if self.eval_ema is None else self.eval_ema.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.skipped = Counter(state["skipped"])
        self.errors = Counter(state["errors"])
        self.policy.cost.update(state["cost"])
        if self.eval_ema is not None and state["eval_ema"] is not None:
            self.eval_ema.load_state_dict(state["eval_ema"])

    def save_parts(self, folder: Path) -> None:
        """Write the evaluation average beside the policy, as `eval_ema`."""
        if self.eval_ema is not None:
            with self.eval_ema.applied():
                self.policy.save_pretrained(folder / "eval_ema")

    def close(self) -> None:
        """End the reward workers."""
        self.rewards.close()

    def text_of(self, tasks: Sequence[DiffusionTask], rows: Tensor) -> TextRows:
        """Text of rows, given the group (B,) of each."""
        embedded = self.policy.embeddings.rows([task.prompt for task in tasks], allow_empty=True)
        return embedded.select(rows.cpu())

    def seeds_for(self, groups: int, generator: torch.Generator) -> Tensor:
        """Seeds (B, 2) int64 of the initial noise and of the later noise of each row."""
        size = self.config.trainer.samples_per_task
        seeds = torch.randint(2**62, (groups * size, 2), generator=generator)
        if self.config.sampler.same_noise:
            seeds[:, 0] = seeds[::size, 0].repeat_interleave(size)
        return seeds

    def _free_text_encoders(self) -> None:
        tasks = [*self.train_tasks, *(task for tasks in self.eval_tasks.values() for task in tasks)]
        embeddings = self.policy.embeddings
        embeddings.negative(self.config.sampler.negative_prompt)
        embeddings.negative("")
        for prompt in dict.fromkeys(prompt for task in tasks for prompt in self.prompts_of(task)):
            embeddings.rows([prompt])
        LOGGER.info("text encoders freed: %.0f MB", embeddings.free_encoders() / 1e6)

    def prompts_of(self, task: Any) -> list[str]:
        """Texts that a training or evaluation task can ask for."""
        return [task.prompt]

    def _load(self, data: PromptConfig, key: str) -> LoadedPrompts:
        try:
            return load_prompts(data, self._cut_of)
        except UserError as error:
            raise UserError(f"{key}: {error}") from error

    def _cut_of(self, prompt: str) -> str | None:
        cuts = self.policy.embeddings.encoders.cuts(prompt)
        return None if not cuts else f"{cuts[0].tokenizer} would drop {cuts[0].text!r} of the prompt"


def _reward_sum(config: DiffusionConfig) -> RewardSum:
    """All terms as one sum in which the held-out rewards have no weight."""
    terms = [*config.rewards, *(_unweighted(reward) for reward in config.heldout_rewards)]
    functions: dict[str, Any] = {}
    for term in terms:
        name = term.function or term.name
        if ":" not in name:
            load_image_rewards([name], {name: term.options})  # wrong options and missing weights show before the run
            functions |= load_image_rewards([name])
    return RewardSum(terms, functions=functions)


def _unweighted(reward: RewardConfig) -> RewardConfig:
    return dataclasses.replace(reward, weight=0.0)


def _spread(found: RewardResult, rows: Sequence[int], total: int) -> RewardResult:
    """Results of some rows as results of all, NaN and counted where there was no image."""
    place = {row: number for number, row in enumerate(rows)}

    def fill(values: Sequence[float]) -> list[float]:
        return [values[place[row]] if row in place else float("nan") for row in range(total)]

    missing = total - len(rows)
    errors = found.errors | ({"latents/overflow": missing} if missing else {})
    examples = found.examples | ({"latents/overflow": "the latents are not finite"} if missing else {})
    terms = {name: fill(values) for name, values in found.terms.items()}
    return RewardResult(fill(found.total), terms, errors, examples)
