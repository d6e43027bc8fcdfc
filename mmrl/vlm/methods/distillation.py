"""Distillation: the policy learns a teacher's probabilities for its sampled responses, or for given ones.

Two ways, which can be added up, also to the rewards of the objective:

    reward: the advantage of each token gets + reward * (logp_teacher - logp_old), the reverse KL on the policy's own
        samples (on-policy distillation, Thinking Machines 2025; discount 0)
    divergence: the loss gets + divergence * mean JSD_beta(policy, teacher), over the whole vocabulary (GKD, Agarwal et
        al., arXiv 2306.13649); a share 1 - on_policy of the questions is learned from a given answer instead

The teacher is a frozen model, or the policy itself under a prompt that holds the answer (self-distillation: SDFT, arXiv
2601.19897; OPSD, arXiv 2601.18734). With `teacher.path` the model at the start, and a prompt, it is the start that
knows the answer.

Differences: GKD draws one kind of row for a whole batch, here it is drawn for each question, and a question has one
given answer however many samples others have. The temperature of sampling divides the logits of both sides, and the
loss is not multiplied by it. Given answers have no share in the policy loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mmrl.core.blocks.foreign import SOURCE, TEACHER
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import Unless, bounded, only_with, rare
from mmrl.training.distillation import DistilWeights, TeacherTerm, importance_weighted
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams
from mmrl.training.recipe import NoUsableTasksError, Step, opening
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.methods.sft import given_answers
from mmrl.vlm.methods.teacher import Teacher, TeacherConfig, TeacherPrompts
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe


@dataclass
class DistilSettings(DistilWeights):
    """Weights of the teacher's terms, the divergence, and the responses that it applies to."""

    on_policy: float = rare(bounded(1.0, at_least=0, at_most=1))
    """Probability that a question is answered by the policy; the other questions use an answer from the data."""
    target_key: str = rare(only_with("completion", on_policy=Unless(1)))
    """Column with the given answers, for `on_policy` below 1."""

    def validate(self) -> None:
        """Check that something is learned; raises ValueError."""
        super().validate()
        if self.on_policy == 0 and not self.divergence:
            raise ValueError(
                "distil.on_policy is 0, so nothing is sampled; set distil.divergence to learn from the data"
            )


@dataclass
class DistilConfig(VlmConfig):
    """A distillation run."""

    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """The model that responses are compared with."""
    distil: DistilSettings = field(default_factory=DistilSettings)
    """Weights of the teacher's terms, and the kind of divergence."""
    objective: ObjectiveConfig = field(default_factory=importance_weighted)
    """Policy loss of the advantages. Default: the importance-weighted loss without clipping and without a KL to the
    initial policy."""

    @property
    def compared_samples(self) -> int | None:
        """See `VlmConfig`: the rewards' advantages count only with `distil.task`."""
        # without their own advantages, groups need no second sample
        return super().compared_samples if self.distil.task else None


class DistilRecipe(VlmRecipe):
    """Distillation of a language or vision-language model from a teacher."""

    config: DistilConfig

    def __init__(self, config: DistilConfig) -> None:
        super().__init__(config)
        with opening(self.opened):
            self.teacher = Teacher(config.teacher, self.policy, config.sampler.temperature)
        if config.teacher.prompt:
            self.view = TeacherPrompts(config.teacher.prompt)
        name = "the teacher under its own prompt" if config.teacher.prompt else "the teacher"
        states = frozenset({"states"})
        self.distillation = TeacherTerm(config.distil, self.teacher.scores, self._divergence, states, name)
        self.terms = [*self.terms, self.distillation]

    def rollout(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> Rollouts:
        """Sample responses to some of the questions; the others have the answer from the data as their only row."""
        # drawn for each question, so that it does not depend on the others in the batch
        sampled = streams.uniform(len(tasks), 1, purpose="on_policy") < self.config.distil.on_policy
        own, given = ([place for place, wanted in enumerate(sampled == side) if wanted] for side in (True, False))
        parts: list[Rollouts] = []
        failure: NoUsableTasksError | None = None
        for places, answer in ((own, self._sampled), (given, self._given)):
            try:
                if places:
                    parts.append(answer(policy, [tasks[place] for place in places], streams.select(places), step))
            except NoUsableTasksError as error:
                failure = error
        # one kind that can be used is enough: with more processes, a process has few questions of each
        if failure is not None and not parts:
            raise failure
        joined = Rollouts.concat(parts)
        assert joined.places is not None
        # back in the order of the questions: streams and metrics follow it
        order = sorted(range(joined.num_groups), key=joined.places.__getitem__)
        return joined.select_groups(torch.tensor(order))

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Weight the objective's advantages, and add the teacher's reward of each sampled token."""
        return self.distillation.teach(super().advantages(rollouts, accelerator, step))

    def _divergence(self, policy: nn.Module, minibatch: Rollouts, scores: PolicyOutputs) -> Tensor:
        assert scores.states is not None
        return self.teacher.divergence(scores.states, minibatch, self.config.distil.beta)

    def _sampled(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> Rollouts:
        """Sampled responses."""
        rows = super().rollout(policy, tasks, streams, step)
        return rows.replace(extras={**rows.extras, SOURCE: torch.zeros_like(rows.group)})

    def _given(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> Rollouts:
        """One row for each question, its answer in the data."""
        usable, prompts = self.encode(policy, tasks)
        texts = [str(task.columns[self.config.distil.target_key]) for task in usable]
        ids = [policy.encode_answer(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        rows = given_answers(policy, usable, prompts, texts, ids)
        payload, own = VlmPayload.of(rows), streams.among(tasks, usable)
        if self.view is not None:
            payload = self.view(payload, policy, own)
        extras = {SOURCE: torch.full_like(rows.group, TEACHER)}
        if self.config.sampler.top_p < 1.0 or self.config.sampler.top_k > 0:
            # given answers were not truncated, so the whole probability counts
            extras["nucleus_mass"] = torch.ones_like(rows.mask)
        return own.noted(
            # no reward: only the divergence is learned from them
            rows.replace(payload=payload, extras=extras, reward=torch.full_like(rows.reward, float("nan")))
        )

    def check_data(self) -> None:
        """Reject questions that lack a column of the prompt, or the answer to learn; raises UserError."""
        self.config.teacher.check_columns(self.train_tasks)
        key = self.config.distil.target_key
        if self.config.distil.on_policy == 1.0:
            return
        without = next((task for task in self.train_tasks if not isinstance(task.columns.get(key), str)), None)
        if without is not None:
            raise UserError(
                f"data: question {without.id} has no text in column '{key}' (distil.target_key), which "
                f"distil.on_policy={self.config.distil.on_policy:g} learns from; columns: {', '.join(without.columns)}"
            )
