"""Supervised fine-tuning of a vision-language model: maximum likelihood of given completions.

A completion is a rollout that was given instead of sampled: with advantage 1 the policy-gradient loss without ratio has
exactly the gradient of the negative log-likelihood. `given_answers` builds such rollouts, for preference pairs too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import rare
from mmrl.rewards.reward_config import refuse_weights
from mmrl.training.processes import Streams
from mmrl.training.recipe import NoUsableTasksError, Step
from mmrl.training.settings import BaseRunConfig
from mmrl.training.supervised import SupervisedRecipe
from mmrl.vlm.data.dataset import LoadedTasks
from mmrl.vlm.data.messages import last_turn
from mmrl.vlm.data.prompt import Prompt, VlmPayload
from mmrl.vlm.data.task import TaskError, VlmTask, check_no_media
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.model.model_config import check_critic
from mmrl.vlm.vlm_config import AnswerScoring, VlmEvaluationConfig, VlmParts, check_scoring, scoring_evaluation
from mmrl.vlm.vlm_recipe import Questions, VlmDomain


@dataclass
class GivenAnswersConfig(VlmParts, BaseRunConfig):
    """A run on answers from the data; rewards and sampling are only used to evaluate held-out questions."""

    evaluation: VlmEvaluationConfig = field(default_factory=scoring_evaluation)
    """Evaluation, with rewards that score responses, and response lengths."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        check_scoring(self, self.scoring.rewards, self.scoring.accuracy_reward)
        refuse_weights({reward.name: reward.weight for reward in self.scoring.rewards}, "evaluation.rewards")
        check_critic(self.model, needed=False)

    @property
    def scoring(self) -> AnswerScoring:
        """Settings in `evaluation` for sampling and scoring responses."""
        assert isinstance(self.evaluation, AnswerScoring)
        return self.evaluation


def given_answers(
    policy: VlmPolicy,
    tasks: Sequence[VlmTask],
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    ids: Sequence[Sequence[int]],
) -> Rollouts:
    """Answers to N questions as B rows, a fixed number for each question, without log-probabilities and rewards."""
    longest = max(len(row) for row in ids)
    responses = torch.tensor([[*row, *[policy.pad_id] * (longest - len(row))] for row in ids])
    mask = torch.tensor([[1.0] * len(row) + [0.0] * (longest - len(row)) for row in ids])
    rollouts = Rollouts(
        group=torch.arange(len(tasks)).repeat_interleave(len(ids) // len(tasks)),
        mask=mask,
        logp_old=torch.zeros_like(mask),
        reward=torch.zeros(len(ids)),
        payload=VlmPayload(list(prompts), list(tasks), responses, list(texts), ["eos"] * len(ids)),
    )
    return rollouts.to(next(policy.parameters()).device)


@dataclass
class SftConfig(GivenAnswersConfig):
    """A supervised run on a column of completions."""

    target_key: str = rare("completion")
    """Column with the target text, or with TRL's assistant turn; the end token is added."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if self.eval_data and not self.scoring.rewards:
            raise ValueError("eval_data is set, but evaluation.rewards is empty; add a reward such as exact")


class SftRecipe(VlmDomain, SupervisedRecipe[VlmPolicy, VlmTask]):
    """Maximum likelihood of a column of completions."""

    config: SftConfig
    own_loss = "sft"

    def __init__(self, config: SftConfig, questions: Questions | None = None) -> None:
        super().__init__(config)
        self.open(config, questions or Questions(), config.scoring, trains_on_rewards=False)

    def prepare_tasks(self, loaded: LoadedTasks, *, training: bool) -> LoadedTasks:
        """Reject training questions without a completion, or with one that cannot be learned."""
        loaded = super().prepare_tasks(loaded, training=training)
        if training:
            tasks, loaded.tasks = loaded.tasks, []
            loaded.take(tasks, self._with_target)
            loaded.check_left(self.config.data.path)
        return loaded

    def _with_target(self, task: VlmTask) -> VlmTask:
        """The task with its completion as a text."""
        key = self.config.target_key
        cell = task.columns.get(key)
        if not isinstance(cell, str | list):
            raise UserError(
                f"{self.config.data.path}: question {task.id} has no text in column '{key}' (target_key); "
                f"columns: {', '.join(task.columns)}"
            )
        text = cell if isinstance(cell, str) else last_turn(task, key, cell)
        if not text.strip():
            raise TaskError("empty_answer", task.id, f"the answer in column '{key}' is empty")
        check_no_media(task, key, text, "media_in_answer")
        return replace(task, columns={**task.columns, key: text})

    def misfit(self, policy: VlmPolicy, prompt: Prompt, text: str, ids: Sequence[int]) -> str:
        """Why an answer, given as text and as tokens, cannot be learned whole; empty if it can."""
        room = policy.positions - len(prompt)
        return "" if len(ids) <= room else f"{len(ids)} tokens, but after its prompt there is only room for {room}"

    def fitting(
        self, policy: VlmPolicy, tasks: Sequence[VlmTask]
    ) -> tuple[list[VlmTask], list[Prompt], list[str], list[list[int]]]:
        """Questions, prompts, completions and their tokens; completions that are too long are skipped and counted."""
        found: list[tuple[VlmTask, Prompt, str, list[int]]] = []
        last: TaskError | None = None
        for task, prompt in zip(*self.encode(policy, tasks), strict=True):
            text = str(task.columns[self.config.target_key])
            ids = policy.encode_answer(prompt, text)
            if problem := self.misfit(policy, prompt, text, ids):
                last = TaskError("long_answer", task.id, f"the answer has {problem}; shorten it, or remove such rows")
                self.skipped.note(last)
                continue
            found.append((task, prompt, text, ids))
        if not found:
            raise NoUsableTasksError(f"none of {len(tasks)} answers could be used; the last one: {last}")
        usable, prompts, texts, rows = (list(part) for part in zip(*found, strict=True))
        return usable, prompts, texts, rows

    def batch(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> Rollouts:
        """Tokenise the given completions."""
        usable, prompts, texts, rows = self.fitting(policy, tasks)
        return streams.among(tasks, usable).noted(given_answers(policy, usable, prompts, texts, rows))

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Teacher-forced scores."""
        return policy(rollouts, outputs=outputs)
