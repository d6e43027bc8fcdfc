"""Distillation: the policy learns a teacher's probabilities for its sampled answers, or for given ones.

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
from torch import nn

from mmrl.core.blocks.foreign import SOURCE, TEACHER
from mmrl.core.loss import Denominators, mean_metric, token_mean
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import SET, Unless, bounded, only_with, rare
from mmrl.runs.run_log import stopwatch
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams
from mmrl.training.recipe import LossTerm, Passes, Step, TermLoss
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.methods.sft import given_answers
from mmrl.vlm.methods.teacher import Teacher, TeacherConfig, TeacherPrompts
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe


@dataclass
class DistilSettings:
    """Weights of the teacher's parts, the divergence, and the answers that it applies to."""

    reward: float = bounded(1.0, at_least=0)
    """Weight of logp_teacher - logp_old in the advantage of each sampled token."""
    divergence: float = bounded(0.0, at_least=0)
    """Weight of the exact divergence from the teacher over the vocabulary."""
    beta: float = only_with(bounded(0.5, at_least=0, at_most=1), divergence=SET)
    """Kind of the divergence: 0 is KL(teacher || policy), 1 is KL(policy || teacher), between them the generalised
    Jensen-Shannon divergence of this mixture."""
    task: float = bounded(0.0, at_least=0)
    """Weight of the objective's own advantages, which the rewards give; 0 learns from the teacher alone."""
    on_policy: float = rare(bounded(1.0, at_least=0, at_most=1))
    """Probability that a question is answered by the policy; the others are learned from an answer of the data."""
    target_key: str = rare(only_with("completion", on_policy=Unless(1)))
    """Column with the given answers, for `on_policy` below 1."""

    def validate(self) -> None:
        """Check that something is learned; raises ValueError."""
        if not (self.reward or self.divergence):
            raise ValueError("distil.reward and distil.divergence are 0: the teacher teaches nothing; set one of them")
        if self.on_policy == 0 and not self.divergence:
            raise ValueError(
                "distil.on_policy is 0, so nothing is sampled; set distil.divergence, which learns from the data"
            )


@dataclass
class DistilConfig(VlmConfig):
    """A distillation run."""

    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """The model that answers are compared with."""
    distil: DistilSettings = field(default_factory=DistilSettings)
    """Weights of the teacher's parts, and the kind of divergence."""
    objective: ObjectiveConfig = field(
        default_factory=lambda: ObjectiveConfig(
            clip={"kind": "unclipped"}, kl={"kind": "none"}, aggregation={"kind": "token_mean"}
        )
    )
    """Policy loss of the advantages; the default is the importance-weighted loss without clip and KL to the start."""

    @property
    def compared_samples(self) -> int | None:
        """See `VlmConfig`: the rewards' advantages count only with `distil.task`."""
        return super().compared_samples if self.distil.task else None


class Distillation(LossTerm):
    """The exact divergence from the teacher; it also scores the samples for the advantages."""

    name = "distillation"

    def __init__(self, settings: DistilSettings, teacher: Teacher) -> None:
        self.settings, self.teacher = settings, teacher
        self.outputs = frozenset({"states"} if settings.divergence else ())
        self.gradient = "always" if settings.divergence else "never"

    def prepare(self, passes: Passes, rollouts: Rollouts, step: Step) -> Rollouts:
        """Add the teacher's log-probabilities of the rows."""
        with stopwatch("teacher_logp"):
            scores = passes.scores(rollouts, frozenset({"logp"}), self.teacher.scores)
        return rollouts.replace(extras={**rollouts.extras, "logp_teacher": scores.logp})

    def __call__(
        self, policy: nn.Module, minibatch: Rollouts, scores: PolicyOutputs, counts: Denominators, step: Step
    ) -> TermLoss:
        """The weighted mean of the divergence over all tokens of the optimiser step."""
        mask = minibatch.loss_mask
        own = mask * (minibatch.extras[SOURCE] == 0)[:, None]
        gap = scores.logp.detach() - minibatch.extras["logp_teacher"]
        metrics = {"distil/kl_sampled": mean_metric(gap, own)}
        if not self.settings.divergence:
            return TermLoss({}, metrics)
        assert scores.states is not None
        divergence = self.teacher.divergence(scores.states, minibatch, self.settings.beta)
        loss = self.settings.divergence * token_mean(divergence, mask, counts)
        return TermLoss({"loss/distillation": loss}, metrics | {"distil/divergence": mean_metric(divergence, mask)})

    def formula(self) -> str:
        """Formula of the teacher's parts of advantages and loss."""
        settings = self.settings
        lines = [f"distillation, with q = the teacher{' under its own prompt' if self.teacher.config.prompt else ''}:"]
        own = f"{settings.task:g} A_it + " if settings.task else ""
        if settings.reward:
            lines += [f"     A_it <- {own}{settings.reward:g} (log q_it - logp_old_it), 0 on given answers"]
        else:
            lines += [f"     A_it <- {settings.task:g} A_it, 0 on given answers"]
        if settings.divergence:
            lines += [f"          + {settings.divergence:g} * mean JSD(p, q; beta {settings.beta:g})"]
        return "\n".join(lines)


class DistilRecipe(VlmRecipe):
    """Distillation of a language or vision-language model from a teacher."""

    config: DistilConfig

    def __init__(self, config: DistilConfig) -> None:
        super().__init__(config)
        try:
            self.teacher = Teacher(config.teacher, self.policy, config.sampler.temperature)
        except UserError:
            self.close()
            raise
        if config.teacher.prompt:
            self.view = TeacherPrompts(config.teacher.prompt)
        self.terms = [*self.terms, Distillation(config.distil, self.teacher)]

    def rollout(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> Rollouts:
        """Sample answers to a share of the questions; the others have the answer of the data as their only row."""
        sampled = streams.uniform(len(tasks), 1, purpose="on_policy") < self.config.distil.on_policy
        own, given = ([place for place, wanted in enumerate(sampled == side) if wanted] for side in (True, False))
        parts = []
        if own:
            parts.append(super().rollout(policy, [tasks[place] for place in own], streams.select(own), step))
            parts[0] = parts[0].replace(extras={**parts[0].extras, SOURCE: torch.zeros_like(parts[0].group)})
        if given:
            parts.append(self._given(policy, [tasks[place] for place in given], streams.select(given)))
        joined = Rollouts.concat(parts)
        place = {id(task): number for number, task in enumerate(tasks)}
        order = sorted(range(joined.num_groups), key=lambda group: place[id(VlmPayload.of(joined).tasks[group])])
        return joined.select_groups(torch.tensor(order))

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Weigh the objective's advantages, and add the teacher's reward of each sampled token."""
        settings, rollouts = self.config.distil, super().advantages(rollouts, accelerator, step)
        assert rollouts.advantage is not None
        gain = rollouts.extras["logp_teacher"] - rollouts.logp_old
        advantage = settings.task * rollouts.advantage + settings.reward * gain
        own = rollouts.loss_mask * (rollouts.extras[SOURCE] == 0)[:, None]
        return rollouts.replace(advantage=torch.where(own > 0, advantage, 0.0))

    def _given(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams) -> Rollouts:
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
            extras["nucleus_mass"] = torch.ones_like(rows.mask)
        return own.noted(
            rows.replace(payload=payload, extras=extras, reward=torch.full_like(rows.reward, float("nan")))
        )

    def check_data(self) -> None:
        """Refuse questions without a column of the prompt, or without an answer that is learned; raises UserError."""
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
