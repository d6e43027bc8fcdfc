"""Held-out accuracy of answers before and after a critic's revision, with two uninformative controls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmrl.training.loop.evaluation import Measure, Row, Trial, with_interval
from mmrl.training.record.outcomes import Outcome
from mmrl.training.record.samples import SampleRecord
from mmrl.vlm.critic.revision import Criticise, PolicyCritic, Revision, RevisionConfig, revise
from mmrl.vlm.evaluation import AnswerMeasure
from mmrl.vlm.pictures import task_images
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.sampler import sample
from mmrl.vlm.task import VlmTask

BEFORE, AFTER = "accuracy/unrevised", "accuracy/revised"
EMPTY, SHUFFLED = "accuracy/revised_empty", "accuracy/revised_shuffled"


@dataclass
class RevisionMeasure(Measure[VlmTask]):
    """Accuracy of the likeliest answers before and after revision.

    The metrics are accuracy/unrevised and accuracy/revised, with controls accuracy/revised_empty (every answer is
    revised, the critique is empty) and accuracy/revised_shuffled (each answer gets the critique of another question of
    its batch, which also decides whether it is revised), with intervals, and those of `change_shares`.
    """

    answers: AnswerMeasure
    """Critic, scores and batches."""
    config: RevisionConfig
    reasoner: VlmPolicy
    """Model that answers and revises."""

    @property
    def batch_size(self) -> int:
        """Questions that are answered together."""
        return self.answers.batch_size

    def run(self, batch: Sequence[Trial[VlmTask]], start: int) -> list[Row]:
        """Answer, criticise and revise; questions that cannot be encoded are left out."""
        own = self.answers
        tasks, prompts = own.encode(self.reasoner, [trial.task for trial in batch], allow_none=True)
        if not tasks:
            return []
        first = sample(self.reasoner, prompts, 1, own.sampling(), None).texts
        critic = PolicyCritic(own.policy, self.config, own.sampling())
        revisions = self._revise(tasks, first, critic)
        answers = {BEFORE: first, AFTER: [revision.answers[-1] for revision in revisions]}
        if self.config.controls:
            empty = self._revise(tasks, first, lambda tasks, answers: [""] * len(tasks), always=True)
            answers[EMPTY] = [revision.answers[-1] for revision in empty]
            if len(tasks) > 1:
                shuffled = self._revise(tasks, first, _shuffled(critic))
                answers[SHUFFLED] = [revision.answers[-1] for revision in shuffled]
        texts = [prompt.text for prompt in prompts]
        right = {name: self._right(tasks, texts, said) for name, said in answers.items()}
        index_of = {trial.task.id: trial.index for trial in batch}
        return [
            {
                "index": index_of[task.id],
                "repeat": 0,
                "task": task,
                "prompt": texts[number],
                "revision": revisions[number],
                "right": {name: values[number] for name, values in right.items()},
            }
            for number, task in enumerate(tasks)
        ]

    def metrics(self, rows: Sequence[Row], tasks: Sequence[VlmTask]) -> dict[str, float]:
        """Accuracies with intervals, and shares of answers that critiques and revisions change."""
        metrics: dict[str, float] = {}
        for name in dict.fromkeys(name for row in rows for name in row["right"]):
            metrics |= with_interval(name, [[row["right"][name]] for row in rows if name in row["right"]], None)
        changes = [(row["right"][BEFORE], row["right"][AFTER], row["revision"]) for row in rows]
        return metrics | change_shares(changes)

    def outcome(self, row: Row) -> Outcome:
        """Whether each of the answers is right."""
        return Outcome(row["task"].id, {name: value for name, value in row["right"].items() if value == value})

    def record(self, row: Row) -> SampleRecord:
        """All answers with their critiques."""
        task: VlmTask = row["task"]
        revision: Revision = row["revision"]
        lines = [f"answer: {revision.answers[0]}"]
        for number, critique in enumerate(revision.critiques):
            lines.append(f"critique: {critique}")
            lines += [f"revised: {text}" for text in revision.answers[number + 1 : number + 2]]
        return SampleRecord(
            id=task.id,
            prompt=row["prompt"],
            response="\n".join(lines),
            answer=str(task.columns.get("answer", "")),
            images=task_images(task, self.answers.policy.layout.patch_size),
            correct=row["right"][AFTER] == 1.0,
        )

    def _revise(
        self, tasks: Sequence[VlmTask], first: Sequence[str], critic: Criticise, always: bool = False
    ) -> list[Revision]:
        return revise(self.reasoner, tasks, first, critic, self.config, self.answers.sampling(), always=always)

    def _right(self, tasks: Sequence[VlmTask], prompts: Sequence[str], texts: Sequence[str]) -> list[float]:
        own = self.answers
        tokenizer = self.reasoner.processor.tokenizer
        tokens = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        scored = own.score(tasks, prompts, texts, tokens)
        own.errors.warn(scored)
        return own.right(scored.terms)


def change_shares(changes: Sequence[tuple[float, float, Revision]]) -> dict[str, float]:
    """Shares of wrong answers found and fixed, of right answers criticised and broken.

    `changes` has for each question whether its answer was right before (1, 0, NaN) and after, and its revision.
    """
    wrong = [(after, revision) for before, after, revision in changes if before == 0.0]
    right = [(after, revision) for before, after, revision in changes if before == 1.0]
    shares: dict[str, float] = {}
    if wrong:
        shares["revision/found"] = float(np.mean([revision.criticised for _, revision in wrong]))
        shares["revision/fixed"] = float(np.mean([after == 1.0 for after, _ in wrong]))
    if right:
        shares["revision/false_alarms"] = float(np.mean([revision.criticised for _, revision in right]))
        shares["revision/broken"] = float(np.mean([after == 0.0 for after, _ in right]))
    return shares


def _shuffled(critic: Criticise) -> Criticise:
    """The critic with every critique given to the next question."""

    def criticise(tasks: Sequence[VlmTask], answers: Sequence[str]) -> list[str]:
        critiques = critic(tasks, answers)
        return [*critiques[-1:], *critiques[:-1]]

    return criticise
