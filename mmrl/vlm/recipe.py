"""Group-based RL of a vision-language model with any objective of the catalogue, and its domain.

Stages: sample G responses a question with the prompt prefilled once, score them with verifiable rewards, estimate
advantages inside each group, update with the objective's loss. `VlmDomain` is what supervised recipes share with it.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mmrl.core.objectives.objective import Objective, PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.core.state import AdaptiveKL
from mmrl.rewards import RewardResult, RewardSum, TrainerState
from mmrl.runs.samples import SampleRecord
from mmrl.runs.stopwatch import stopwatch
from mmrl.training.evaluation import Evaluation, Measure, evaluate_tasks, parts_of_tasks
from mmrl.training.objectives import make_objective
from mmrl.training.recipe import NoUsableTasksError, Recipe, Stateful, Step, Tally, scores_before_update
from mmrl.training.sampler import Sampler
from mmrl.training.scoring import RewardErrors, with_rewards
from mmrl.vlm.config import VlmConfig
from mmrl.vlm.data.dataset import LoadedTasks, load_splits, load_tasks
from mmrl.vlm.data.prompt import Prompt, VlmPayload, token_lists
from mmrl.vlm.data.task import TaskError, VlmTask, check_columns, score_texts, splits_by_key
from mmrl.vlm.engine.policy import VlmPolicy, load_policy
from mmrl.vlm.engine.prefix import KeepPrefill
from mmrl.vlm.engine.sampler import PolicySampler, SamplerConfig, Samples
from mmrl.vlm.evaluation import (
    AnswerMeasure,
    AnswerScoring,
    FurtherMeasures,
    task_images,
)

if TYPE_CHECKING:
    from PIL.Image import Image

LOGGER = logging.getLogger("mmrl")
View = Callable[[VlmPayload, VlmPolicy, torch.Generator], VlmPayload]
"""Adds another form of each prompt to a payload, such as one with masked images."""


class Questions:
    """How questions of the data are asked and their answers shown; the default asks them as they are."""

    broken_down: Sequence[str] = ()
    """Reward terms that evaluations also break down by column."""
    draw: Callable[[VlmTask, str, bool], Image] | None = None
    """Draws an answer, given whether it is right, for the report; None where answers are words alone."""

    def prepare(self, loaded: LoadedTasks, *, training: bool) -> LoadedTasks:
        """Complete the questions of a data set, before the model is loaded; `training` for those of `data`."""
        return loaded


class VlmDomain:
    """Model, questions, rewards, evaluation and reports of recipes on a vision-language model."""

    config: Any
    policy: VlmPolicy
    train_tasks: Sequence[VlmTask]
    eval_tasks: Mapping[str, Sequence[VlmTask]]
    parts: dict[str, Stateful]
    longest: int = 0
    """Longest response in tokens; 0 where none is sampled."""

    def open(
        self,
        config: Any,
        questions: Questions,
        scoring: VlmConfig | AnswerScoring,
        *,
        value_head: bool = False,
        trains_on_rewards: bool = True,
    ) -> None:
        """Load questions, rewards and model; `scoring` says how answers are sampled and scored.

        Raises:
            UserError: one of them cannot be used.
        """
        self.questions = questions
        rewards, sampler = scoring.rewards, scoring.sampler
        self.evaluation_sampler = sampler if isinstance(sampler, SamplerConfig) else sampler.config
        self.accuracy_term = scoring.accuracy_reward or (rewards[-1].name if rewards else "")
        loaded = self.prepare_tasks(load_tasks(config.data), training=True)
        self.train_tasks = loaded.tasks
        self.eval_tasks = load_splits(config, self.prepare_tasks)
        self.skipped, self.cramped, self.errors = Tally(loaded.skipped), Tally(), RewardErrors()
        self.parts |= {"skipped": self.skipped, "cramped": self.cramped, "errors": self.errors}
        self.rewards = RewardSum(rewards)
        with ExitStack() as undone:
            undone.callback(self.rewards.close)
            scored = {"data": self.train_tasks} if trains_on_rewards else {}
            check_columns(self.rewards, scored | splits_by_key(self.eval_tasks))
            self.policy = load_policy(config.model, value_head=value_head)
            if trains_on_rewards or self.eval_tasks:
                self.longest = sampler.max_new_tokens
                self.policy.check_response_length(self.longest)
            undone.pop_all()

    def prepare_tasks(self, loaded: LoadedTasks, *, training: bool) -> LoadedTasks:
        """Complete the questions of a data set; see `Questions`."""
        return self.questions.prepare(loaded, training=training)

    def score_texts(
        self,
        tasks: Sequence[VlmTask],
        prompts: Sequence[str],
        texts: Sequence[str],
        tokens: Sequence[list[int]],
        step: Step,
    ) -> RewardResult:
        """Score responses with all rewards; see `mmrl.vlm.data.task.score_texts`."""
        epoch = step.number * self.config.trainer.tasks_per_step / max(len(self.train_tasks), 1)
        state = TrainerState(step.number, step.total, epoch)
        return score_texts(self.rewards, state, tasks, prompts, texts, tokens)

    def evaluate(self, policy: VlmPolicy, split: str, accelerator: Accelerator, step: Step) -> Evaluation:
        """Greedy and sampled accuracy on held-out questions, and that of best of n and of revisions where asked for."""
        measures = self.answer_measures(policy, split, step)
        return evaluate_tasks(measures, self.eval_tasks[split], self.config.evaluation.records, accelerator)

    def answer_measures(self, policy: VlmPolicy, split: str, step: Step) -> list[Measure[VlmTask]]:
        """All that is measured of the answers to the questions of a held-out split; the first one is the headline."""
        config = self.config
        answers = AnswerMeasure(
            policy=policy,
            encode=self.encode,
            score=functools.partial(self.score_texts, step=step),
            errors=self.errors,
            accuracy_reward=self.accuracy_term,
            evaluation=config.evaluation,
            sampler=self.evaluation_sampler,
            seed=config.seed,
            split=split,
            parts=parts_of_tasks([task.columns for task in self.eval_tasks[split]], config.evaluation.by),
            broken_down=self.questions.broken_down,
            picture=self.questions.draw,
        )
        return [answers, *self._further_measures(answers)]

    @functools.cached_property
    def _further_measures(self) -> FurtherMeasures:
        return self.config.evaluation.further_measures()

    def records(self, rollouts: Rollouts, limit: int) -> list[SampleRecord]:
        """Whole groups as text, images, frames of videos, rewards and advantages."""
        payload = VlmPayload.of(rollouts)
        advantage = rollouts.advantage
        found: list[SampleRecord] = []
        pictures: dict[int, list[Any]] = {}
        for row in range(min(limit, rollouts.num_rows)):
            group = int(rollouts.group[row])
            task = payload.tasks[group]
            if group not in pictures:
                pictures[group] = task_images(task, self.policy.layout.patch_size)
            length = max(float(rollouts.mask[row].sum()), 1.0)
            found.append(
                SampleRecord(
                    id=task.id,
                    prompt=payload.prompts[group].text,
                    response=payload.texts[row],
                    answer=str(task.columns.get("answer", "")),
                    images=pictures[group],
                    reward=float(rollouts.reward[row]),
                    terms={name: float(values[row]) for name, values in rollouts.reward_terms.items()},
                    advantage=None if advantage is None else float(advantage[row].sum()) / length,
                    finish=payload.finish[row],
                )
            )
        return found

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float]:
        """Questions skipped so far, prompts with too little room, and reward errors of the step."""
        cramped = {"response/beyond_positions": float(self.cramped["prompts"])} if self.cramped["prompts"] else {}
        return {"data/skipped": float(sum(self.skipped.values()))} | cramped | self.errors.take()

    def encode(
        self, policy: VlmPolicy, tasks: Sequence[VlmTask], *, allow_none: bool = False
    ) -> tuple[list[VlmTask], list[Prompt]]:
        """Tokenise questions with their images and videos; those that cannot be encoded are counted and left out.

        Raises:
            NoUsableTasksError: none of them could be, and `allow_none` is false.
        """
        usable, prompts = [], []
        last: TaskError | None = None
        for task in tasks:
            try:
                prompts.append(policy.encode(task))
                usable.append(task)
                self._note_room(prompts[-1], policy)
            except TaskError as error:
                last = error
                self.note_skipped(error)
        if not prompts and not allow_none:
            raise NoUsableTasksError(f"none of {len(tasks)} questions could be used; the last one: {last}")
        return usable, prompts

    def note_skipped(self, error: TaskError) -> None:
        """Count a question that is left out, and log the first of each kind."""
        if not self.skipped[error.kind]:
            LOGGER.warning("question skipped (%s): %s", error.kind, error)
        self.skipped[error.kind] += 1

    def _note_room(self, prompt: Prompt, policy: VlmPolicy) -> None:
        """Count prompts that leave fewer positions than a response may take, and warn of the first."""
        wanted, left = self.longest, policy.positions - len(prompt.input_ids)
        if wanted <= left:
            return
        if not self.cramped["prompts"]:
            LOGGER.warning(
                "a prompt of %d tokens leaves %d of the model's %d positions, fewer than sampler.max_new_tokens=%d; "
                "such prompts are counted in response/beyond_positions; shorten one of the two",
                len(prompt.input_ids),
                left,
                policy.positions,
                wanted,
            )
        self.cramped["prompts"] += 1

    @classmethod
    def export(cls, config: Any, checkpoint: Path, output: Path) -> str:
        """Write an ordinary model folder with tokenizer and processor, adapters added into the weights."""
        policy = load_policy(replace(config.model, path=str(checkpoint / "model"), build=None))
        policy.save_merged(output)
        return "transformers.AutoModelForImageTextToText.from_pretrained"

    def close(self) -> None:
        """End the reward workers."""
        self.rewards.close()


class VlmRecipe(VlmDomain, Recipe[VlmPolicy, VlmTask]):
    """Samples, scores and evaluates with a vision-language model; the loss is the objective's.

    Args:
        config: options of the run.
        questions: how questions are asked; as they are by default.

    Raises:
        UserError: model, data or rewards cannot be used.
    """

    config: VlmConfig
    view: View | None = None
    """A second form of each prompt, which a method's loss term reads."""

    def __init__(self, config: VlmConfig, questions: Questions | None = None) -> None:
        super().__init__(config)
        self.objective = make_objective(config.objective, config.sampler.max_new_tokens)
        self.open(config, questions or Questions(), config, value_head=self.objective.needs_values)
        self.sampler: Sampler[VlmPolicy, Prompt, Samples] = PolicySampler(config.sampler, self._keep_prefill())
        self._controller = _kl_controller(config, self.objective)
        if self._controller is not None:
            self.parts["adaptive_kl"] = self._controller

    def rollout(self, policy: VlmPolicy, tasks: Sequence[VlmTask], generator: torch.Generator, step: Step) -> Rollouts:
        """Sample G responses to each question; questions that cannot be encoded are counted and left out."""
        with stopwatch("encode"):
            usable, prompts = self.encode(policy, tasks)
        size = self.config.trainer.samples_per_task
        self.sampler.load(policy, step.number)
        samples = self.sampler.sample(prompts, size, generator)
        payload = VlmPayload(prompts, usable, samples.response_ids, samples.texts, samples.finish)
        if self.view is not None:
            with stopwatch("encode"):
                payload = self.view(payload, policy, generator)
        return Rollouts(
            group=torch.arange(len(usable), device=samples.mask.device).repeat_interleave(size),
            mask=samples.mask,
            logp_old=samples.logp,
            reward=torch.full((len(samples.texts),), float("nan"), device=samples.mask.device),
            payload=payload,
            extras={"nucleus_mass": samples.nucleus_mass} if self._truncates else {},
        )

    def score(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """Weighted sum of the reward functions; a row with a failed term keeps NaN and is left out of the loss."""
        payload = VlmPayload.of(rollouts)
        groups = rollouts.group.tolist()
        tasks, prompts = [payload.tasks[group] for group in groups], [payload.prompts[group].text for group in groups]
        tokens = token_lists(payload.response_ids, rollouts.mask)
        result = self.score_texts(tasks, prompts, payload.texts, tokens, step)
        self.errors.count(result)
        return with_rewards(rollouts, result)

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Advantages of the objective's estimator; truncated responses leave the update where that is wanted."""
        if self.config.mask_truncated_completions:
            whole = [finish != "length" for finish in VlmPayload.of(rollouts).finish]
            kept = torch.tensor(whole, dtype=rollouts.mask.dtype, device=rollouts.mask.device)
            rollouts = rollouts.replace(mask=rollouts.mask * kept[:, None])
        return super().advantages(rollouts, accelerator, step)

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Teacher-forced scores at the sampling temperature."""
        return policy(rollouts, temperature=self.config.sampler.temperature, outputs=outputs)  # type: ignore[no-any-return]

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float]:
        """Adds the share of finished responses, the KL coefficient and the sampled share of the distribution."""
        payload = VlmPayload.of(rollouts)
        finished = sum(finish != "length" for finish in payload.finish) / max(len(payload.finish), 1)
        own = {"response/finished_fraction": finished, "policy/kl_coef": self.objective.kl_coef}
        return super().step_metrics(rollouts) | own | self._nucleus_mass(rollouts)

    def on_step_end(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Move the KL coefficient towards its target."""
        divergence = metrics.get("policy/kl_ref", float("nan"))
        if self._controller is not None and math.isfinite(divergence):
            trainer = self.config.trainer
            self._set_kl_coef(self._controller.update(divergence, trainer.tasks_per_step * trainer.samples_per_task))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`, with the adaptive coefficient."""
        super().load_state_dict(state)
        if self._controller is not None:
            self._set_kl_coef(self._controller.coefficient)

    def correct(self, rollouts: Rollouts) -> Tensor:
        """(B,) bool, rows with a right answer."""
        return rollouts.reward_terms[self.accuracy_term] == 1.0

    def _keep_prefill(self) -> KeepPrefill:
        """What sampling leaves of the prompts' prefill for the update.

        The graph needs a step of one update on all rows at once, whose memory it does not raise, in one process, and a
        training mode that computes what sampling does: no dropout, no checkpointing.
        """
        trainer, model = self.config.trainer, self.config.model
        if not (self.config.sampler.keep_prefill and self.policy.shares_prefix):
            return KeepPrefill.NOTHING
        once = trainer.single_update and trainer.micro_batch == 0 and not self.objective.filter.resamples
        same = not model.gradient_checkpointing and not (model.lora.enabled and model.lora.dropout)
        alone = not (torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1)
        if once and same and alone:
            return KeepPrefill.GRAPH
        return KeepPrefill.VALUES if scores_before_update(trainer, self.objective) else KeepPrefill.NOTHING

    @property
    def _truncates(self) -> bool:
        return self.config.sampler.top_p < 1.0 or self.config.sampler.top_k > 0

    def _nucleus_mass(self, rollouts: Rollouts) -> dict[str, float]:
        if not self._truncates or "nucleus_mass" not in rollouts.extras:
            return {}
        total = (rollouts.extras["nucleus_mass"] * rollouts.mask).sum() / rollouts.mask.sum().clamp(min=1)
        return {"response/nucleus_mass": float(total)}

    def _set_kl_coef(self, value: float) -> None:
        self.objective = self.objective.with_kl_coef(value)


def _kl_controller(config: VlmConfig, objective: Objective) -> AdaptiveKL | None:
    chosen = config.adaptive_kl
    return None if chosen.target is None else AdaptiveKL(objective.kl_coef, chosen.target, chosen.horizon)
