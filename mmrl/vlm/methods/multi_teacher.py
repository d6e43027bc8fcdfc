"""AMPO: answers from several teachers for questions that the policy always gets wrong (arXiv 2510.02227).

A row of the data has a column of teachers' answers, {model, text} each. Where no sample of a question is right,
`count` of its samples, drawn at random, are exchanged for the answers that the policy comprehends best: those after
whose reasoning it gives the right answer's tokens the highest mean probability. Their reward is at least 1, advantages
are those of the new group, and the objective `multi_teacher` gives their tokens the weight p / (p + 0.1) instead of a
clipped ratio.

The reasoning is the text up to `ANSWER_MARK`; an answer without the mark is comprehended least. Differences: as in
train_ampo.sh the statistics of a group are those of all its rows (the code has an estimator of the policy's own samples
too, which its script does not use); teachers' answers that are longer than the policy's may be are left out, where the
code cuts them off; the code's limit on length and its repetition penalty are rewards here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmrl.core.blocks.foreign import TEACHER
from mmrl.core.loss import masked_mean
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import bounded
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams
from mmrl.training.recipe import RolloutStage, Step
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.data.task import TaskError, VlmTask, check_no_media
from mmrl.vlm.data.turn_template import encode_text
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.methods.replacing import Exchange, Replacing
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe

RESPONSES = "teacher_responses"
"""Column with the teachers' answers, a list of {model, text}."""
ANSWER_MARK = "<answer>"
"""Text that separates a teacher's reasoning from its answer, in the format of the paper's prompts."""
LEAST_REWARD = 1.0
"""Minimum reward of a teacher's answer."""


@dataclass
class TeachersSettings:
    """Teachers' answers for questions that all samples get wrong."""

    count: int = bounded(2, at_least=1)
    """Maximum number of samples per group to replace."""


@dataclass
class MultiTeacherConfig(VlmConfig):
    """An AMPO run."""

    teachers: TeachersSettings = field(default_factory=TeachersSettings)
    """Teachers' answers for questions that all samples get wrong."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="multi_teacher"))
    """Objective that is optimised."""


class Teachers(Replacing):
    """Replaces samples by teachers' answers, for questions that all samples get wrong."""

    settings: TeachersSettings

    def check_data(self, tasks: Sequence[VlmTask]) -> None:
        """Reject questions without any teacher's answer, or with one in the wrong format; raises UserError."""
        given = [self._texts(task) for task in tasks]
        if not any(given):
            key, columns = RESPONSES, ", ".join(tasks[0].columns)
            raise UserError(
                f"data: no question has teachers' answers in a column '{key}', a list of "
                f"{{model, text}}; columns: {columns}"
            )

    def replacements(
        self, policy: VlmPolicy, rollouts: Rollouts, failed: Sequence[int], streams: Streams, step: Step
    ) -> Exchange | None:
        """The answers that the policy understands best, replacing randomly drawn samples."""
        payload, settings = VlmPayload.of(rollouts), self.settings
        chosen: list[tuple[int, str]] = []
        leaving: list[int] = []
        host = rollouts.host.group
        for place, group in enumerate(failed):
            texts = self._usable(policy, payload, group)
            # only scored samples are exchanged: an unscored one teaches nothing anyway
            own = torch.nonzero((host == group) & rollouts.scored.cpu()).flatten()
            # at most as many as fit into the group
            number = min(settings.count, len(texts), len(own))
            if not number:
                continue
            # the policy's view, so that answers close to its own reasoning come first
            known = self.comprehension(policy, rollouts, group, texts)
            best = known.argsort(descending=True, stable=True)[:number].tolist()
            chosen += [(group, texts[index]) for index in best]
            # from the stream of the question, so that other questions do not change the choice
            order = torch.randperm(len(own), generator=streams.of(place, "teachers"))[:number]
            leaving += own[order].tolist()
        if not chosen:
            return None
        groups, texts = [group for group, _ in chosen], [text for _, text in chosen]
        ids = [policy.encode_answer(payload.prompts[group], text) for group, text in chosen]
        # scored by the same rewards as the samples
        rows = self.with_scores(self.rows_of(rollouts, groups, ids, texts, TEACHER), step)
        rows = rows.replace(reward=rows.reward.clamp(min=LEAST_REWARD))  # one that failed stays NaN
        return torch.tensor(leaving), self.with_logp(policy, rows)

    def metrics(self, rollouts: Rollouts, step: Step) -> dict[str, float]:
        """Adds the number of teachers' answers that were too long."""
        return {"replaced/too_long": float(self.replaced["too_long"])} | super().metrics(rollouts, step)

    def comprehension(self, policy: VlmPolicy, rollouts: Rollouts, group: int, texts: Sequence[str]) -> Tensor:
        """(n,) on the host: mean probability of the correct answer's tokens after the reasoning of each text.

        -1 where a text has no `ANSWER_MARK`, or the question no answer.
        """
        payload, mark = VlmPayload.of(rollouts), ANSWER_MARK
        prompt, answer = payload.prompts[group], payload.tasks[group].columns.get("answer")
        tokenizer = policy.processor.tokenizer
        found = torch.full((len(texts),), -1.0)
        marked = [number for number, text in enumerate(texts) if mark in text]
        if answer is None or not marked:
            return found
        right = encode_text(str(answer), tokenizer)
        before = []
        for number in marked:
            reasoning, _, rest = texts[number].rpartition(mark)
            # the space between mark and answer, so that tokens begin where they would
            space = rest[: len(rest) - len(rest.lstrip())]
            before.append(policy.encode_answer(prompt, reasoning + mark + space, ends=False))
        ids = [[*start, *right] for start in before]
        rows = self.rows_of(rollouts, [group] * len(ids), ids, [""] * len(ids), TEACHER)
        starts = torch.tensor([[len(start)] for start in before], device=rows.mask.device)
        # only the answer's own tokens, not the reasoning before them
        answered = rows.mask * (torch.arange(rows.num_decisions, device=rows.mask.device) >= starts)
        rows = rows.replace(mask=answered)
        logp = self.recipe.scores_in_chunks(policy, rows, frozenset({"logp"})).logp
        found[marked] = masked_mean(logp.exp(), rows.mask).float().cpu()
        return found

    def formula(self) -> str:
        """The exchange."""
        return (
            f"if no sample is right: up to {self.settings.count} samples make room for the teachers' answers after "
            "whose reasoning the right answer is likeliest"
        )

    def _texts(self, task: VlmTask) -> list[str]:
        """Teachers' answers of a question; raises UserError."""
        key = RESPONSES
        found: list[str] = []
        for entry in task.columns.get(key) or []:
            text: Any = entry.get("text") if isinstance(entry, dict) else entry
            if not isinstance(text, str):
                raise UserError(
                    f"data: question {task.id} has {entry!r} in column '{key}'; a teacher's answer "
                    'must be {"model": ..., "text": ...}'
                )
            try:
                check_no_media(task, key, text, "media_in_answer")
            except TaskError as error:
                raise UserError(f"data: {error}") from error
            found.append(text)
        return found

    def _usable(self, policy: VlmPolicy, payload: VlmPayload, group: int) -> list[str]:
        """Teachers' answers of a group that are no longer than the policy's may be; the others are counted."""
        prompt, found = payload.prompts[group], []
        for text in self._texts(payload.tasks[group]):
            if len(policy.encode_answer(prompt, text)) <= self.recipe.config.sampler.max_new_tokens:
                found.append(text)
            else:
                self.replaced["too_long"] += 1
        return found


class MultiTeacherRecipe(VlmRecipe):
    """The objective `multi_teacher`, or another, with teachers' answers if every sample fails."""

    config: MultiTeacherConfig

    def make_stages(self) -> list[RolloutStage]:
        """Teachers' answers."""
        return [Teachers(self, self.config.teachers)]
