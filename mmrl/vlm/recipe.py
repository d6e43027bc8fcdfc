"""Group-based RL of a vision-language model with any objective of the catalogue.

Stages: sample G responses a question with the prompt prefilled once, score them with verifiable rewards, estimate
advantages inside each group, update with the objective's surrogate. PAPO and APO override the stages that they change.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mmrl.core.objective import Objective, PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.core.state import AdaptiveKL
from mmrl.rewards import RewardResult, RewardSum, TrainerState
from mmrl.training.loop.breakdown import parts_of_tasks
from mmrl.training.loop.evaluation import Evaluation, Measure, evaluate_tasks
from mmrl.training.loop.objectives import make_objective
from mmrl.training.loop.recipe import NoUsableTasksError, PrefixScope, Recipe
from mmrl.training.loop.sampler import Sampler
from mmrl.training.loop.scoring import RewardErrors, with_rewards
from mmrl.training.record.samples import SampleRecord
from mmrl.training.record.stopwatch import stopwatch
from mmrl.vlm.config import VlmConfig
from mmrl.vlm.data import LoadedTasks, load_splits, load_tasks
from mmrl.vlm.evaluation import AnswerMeasure, FurtherMeasures
from mmrl.vlm.kept_prefill import KeepPrefill
from mmrl.vlm.models import load_policy
from mmrl.vlm.payload import Prompt, VlmPayload, token_lists
from mmrl.vlm.pictures import task_images
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.sampler import PolicySampler
from mmrl.vlm.sampling import Samples
from mmrl.vlm.scoring import check_columns, score_texts, splits_by_key
from mmrl.vlm.task import TaskError, VlmTask

LOGGER = logging.getLogger("mmrl")

ConfigT = TypeVar("ConfigT", bound="VlmConfig")


class VlmRecipe(Recipe[VlmPolicy, VlmTask]):
    """Samples, scores and evaluates with a vision-language model; the loss is the objective's.

    Args:
        config: options of the run.

    Raises:
        UserError: model, data or rewards cannot be used.
    """

    config: VlmConfig
    cramped = 0
    """Prompts so far that leave fewer positions than sampler.max_new_tokens."""

    def __init__(self, config: VlmConfig) -> None:
        self.config = config
        self.objective = make_objective(config.objective, config.sampler.max_new_tokens)
        loaded = self.prepare_tasks(load_tasks(config.data), training=True)
        self.train_tasks = loaded.tasks
        self.eval_tasks = load_splits(config, self.prepare_tasks)
        self.skipped: Counter[str] = Counter(loaded.skipped)
        self.rewards = RewardSum(config.rewards)
        with ExitStack() as undone:
            undone.callback(self.rewards.close)
            check_columns(self.rewards, {"data": self.train_tasks} | splits_by_key(self.eval_tasks))
            self.policy: VlmPolicy = load_policy(config.model, value_head=self.objective.needs_values)
            self.policy.check_response_length(config.sampler.max_new_tokens)
            undone.pop_all()
        self.sampler: Sampler[VlmPolicy, Prompt, Samples] = PolicySampler(config.sampler, self._keep_prefill())
        self.version = 0
        self._errors = RewardErrors()
        self._controller = _kl_controller(config, self.objective)

    def prepare_tasks(self, loaded: LoadedTasks, *, training: bool) -> LoadedTasks:
        """Complete the questions of a data set as this recipe asks them, before the model is loaded.

        Args:
            loaded: questions of `data` or of a held-out split.
            training: whether they are of `data`.
        """
        return loaded

    def rollout(self, policy: VlmPolicy, tasks: Sequence[VlmTask], generator: torch.Generator) -> Rollouts:
        """Sample G responses to each question; questions that cannot be encoded are counted and left out."""
        with stopwatch("encode"):
            usable, prompts = self.encode(policy, tasks)
        size = self.config.trainer.samples_per_task
        self.sampler.load(policy, self.version)
        samples = self.sampler.sample(prompts, size, generator)
        payload = VlmPayload(prompts, usable, samples.response_ids, samples.texts, samples.finish)
        return Rollouts(
            group=torch.arange(len(usable), device=samples.mask.device).repeat_interleave(size),
            mask=samples.mask,
            logp_old=samples.logp,
            reward=torch.full((len(samples.texts),), float("nan"), device=samples.mask.device),
            payload=payload,
            extras={"nucleus_mass": samples.nucleus_mass} if self._truncates else {},
        )

    def score(self, rollouts: Rollouts) -> Rollouts:
        """Weighted sum of the reward functions; a row with a failed term keeps NaN and is left out of the loss."""
        payload = VlmPayload.of(rollouts)
        groups = rollouts.group.tolist()
        tasks, prompts = [payload.tasks[group] for group in groups], [payload.prompts[group].text for group in groups]
        result = self.score_texts(tasks, prompts, payload.texts, token_lists(payload.response_ids, rollouts.mask))
        self._errors.count(result)
        return with_rewards(rollouts, result)

    def score_texts(
        self, tasks: Sequence[VlmTask], prompts: Sequence[str], texts: Sequence[str], tokens: Sequence[list[int]]
    ) -> RewardResult:
        """Score responses with all rewards; see `mmrl.vlm.scoring.score_texts`."""
        trainer = self.config.trainer
        epoch = self.version * trainer.tasks_per_step / max(len(self.train_tasks), 1)
        state = TrainerState(self.version, trainer.steps, epoch)
        return score_texts(self.rewards, state, tasks, prompts, texts, tokens)

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator) -> Rollouts:
        """Advantages of the objective's estimator; truncated responses leave the update where that is wanted."""
        if self.config.mask_truncated_completions:
            whole = [finish != "length" for finish in VlmPayload.of(rollouts).finish]
            kept = torch.tensor(whole, dtype=rollouts.mask.dtype, device=rollouts.mask.device)
            rollouts = rollouts.replace(mask=rollouts.mask * kept[:, None])
        return super().advantages(rollouts, accelerator)

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Teacher-forced scores at the sampling temperature."""
        return self.score_view(policy, rollouts, outputs, "original")

    def score_view(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str], view: str) -> PolicyOutputs:
        """`scores` with another form of the prompts.

        Args:
            policy: the policy, wrapped or not, or its reference.
            rollouts: rows whose payload is a `VlmPayload`.
            outputs: of "logp", "entropy" and "values".
            view: "original" or a key of the payload's views.
        """
        temperature = self.config.sampler.temperature
        return policy(rollouts, view=view, temperature=temperature, outputs=outputs)  # type: ignore[no-any-return]

    def prefix_scope(self, policy: nn.Module) -> AbstractContextManager[PrefixScope]:
        """Hold the prompt of a group while the micro-batches of its responses run."""
        scorer: Any = getattr(policy, "module", policy)
        return scorer.prefixes.open()  # type: ignore[no-any-return]

    def evaluate(self, policy: VlmPolicy, split: str, accelerator: Accelerator) -> Evaluation:
        """Greedy and sampled accuracy on held-out questions, and that of best of n and of revisions where asked for."""
        measures = self.answer_measures(policy, split)
        return evaluate_tasks(measures, self.eval_tasks[split], self.config.evaluation.records, accelerator)

    def answer_measures(self, policy: VlmPolicy, split: str) -> list[Measure[VlmTask]]:
        """All that is measured of the answers to the questions of a held-out split; the first one is the headline."""
        answers = self.answer_measure(policy, split)
        return [answers, *self._further_measures(answers)]

    @functools.cached_property
    def _further_measures(self) -> FurtherMeasures:
        return self.config.evaluation.further_measures()

    def answer_measure(self, policy: VlmPolicy, split: str) -> AnswerMeasure:
        """What is measured on a held-out split."""
        config = self.config
        return AnswerMeasure(
            policy=policy,
            encode=self.encode,
            score=self.score_texts,
            errors=self._errors,
            accuracy_reward=self.accuracy_term,
            evaluation=config.evaluation,
            sampler=config.sampler,
            seed=config.seed,
            split=split,
            parts=parts_of_tasks([task.columns for task in self.eval_tasks[split]], config.evaluation.by),
        )

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
        """Share of finished responses, questions skipped so far and reward errors of the step."""
        payload = VlmPayload.of(rollouts)
        finished = sum(finish != "length" for finish in payload.finish) / max(len(payload.finish), 1)
        return {
            "response/finished_fraction": finished,
            "data/skipped": float(sum(self.skipped.values())),
            "policy/kl_coef": self.objective.kl_coef,
            **self._nucleus_mass(rollouts),
            **({"response/beyond_positions": float(self.cramped)} if self.cramped else {}),
        } | self._errors.take()

    def encode(
        self, policy: VlmPolicy, tasks: Sequence[VlmTask], *, allow_none: bool = False
    ) -> tuple[list[VlmTask], list[Prompt]]:
        """Tokenise questions with their images and videos.

        Args:
            policy: the policy that will read them.
            tasks: questions.
            allow_none: return two empty lists where none of them can be used.

        Returns:
            Those that could be encoded, and their prompts.

        Raises:
            NoUsableTasksError: none of them could be, and that is not allowed.
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
        wanted, left = self.config.sampler.max_new_tokens, policy.positions - len(prompt.input_ids)
        if wanted <= left:
            return
        if not self.cramped:
            LOGGER.warning(
                "a prompt of %d tokens leaves %d of the model's %d positions, fewer than sampler.max_new_tokens=%d; "
                "such prompts are counted in response/beyond_positions; shorten one of the two",
                len(prompt.input_ids),
                left,
                policy.positions,
                wanted,
            )
        self.cramped += 1

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count the version of the weights and move the KL coefficient towards its target."""
        self.version = step
        divergence = metrics.get("policy/kl_ref", float("nan"))
        if self._controller is not None and math.isfinite(divergence):
            trainer = self.config.trainer
            self._set_kl_coef(self._controller.update(divergence, trainer.tasks_per_step * trainer.samples_per_task))

    @classmethod
    def export(cls, config: VlmConfig, checkpoint: Path, output: Path) -> str:
        """Write an ordinary model folder with tokenizer and processor, adapters added into the weights."""
        policy = load_policy(replace(config.model, path=str(checkpoint / "model"), build=None))
        policy.save_merged(output)
        return "transformers.AutoModelForImageTextToText.from_pretrained"

    def state_dict(self) -> dict[str, Any]:
        """Counts of skipped questions and failed rewards, and the adaptive coefficient."""
        controller = None if self._controller is None else self._controller.state_dict()
        return {
            "skipped": dict(self.skipped),
            "errors": self._errors.state_dict(),
            "adaptive_kl": controller,
            "version": self.version,
            "cramped": self.cramped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.skipped = Counter(state["skipped"])
        self._errors.load_state_dict(state["errors"])
        self.version = int(state["version"])
        self.cramped = int(state.get("cramped", 0))
        if self._controller is not None and state["adaptive_kl"] is not None:
            self._controller.load_state_dict(state["adaptive_kl"])
            self._set_kl_coef(self._controller.coefficient)

    @property
    def accuracy_term(self) -> str:
        """Reward term whose value 1 counts as a right answer."""
        return self.config.accuracy_reward or self.config.rewards[-1].name

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
        return KeepPrefill.VALUES if self.needs_old_pass else KeepPrefill.NOTHING

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

    def close(self) -> None:
        """End the reward workers."""
        self.rewards.close()


def _kl_controller(config: VlmConfig, objective: Objective) -> AdaptiveKL | None:
    chosen = config.adaptive_kl
    return None if chosen.target is None else AdaptiveKL(objective.kl_coef, chosen.target, chosen.horizon)
