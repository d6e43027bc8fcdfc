"""Critic-V's inference: a reasoner answers, a critic criticises the answer, and the reasoner answers again.

    first = greedy_answers(reasoner, tasks, sampler)
    revisions = revise(reasoner, tasks, first, PolicyCritic(critic, config, sampler), config, sampler)

The critique, without its thinking, becomes the next user turn behind the answer, so that the reasoner sees image,
question, answer and critique. A critique that finds nothing wrong ends the rounds of its question, as in the public
code, where this holds for the first round only. Answers and critiques are the likeliest ones.

Source: Zhang et al., Critic-V, arXiv 2411.18203; kyrieLei/Critic-V inference/reason_critic.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mmrl.fields import bounded, rare
from mmrl.rewards.answers import final_part
from mmrl.runs.records import Outcome, SampleRecord
from mmrl.runs.statistics import with_interval
from mmrl.training.evaluation import Measure, Row, Trial
from mmrl.vlm.critic.critiques import CRITIQUE_TEMPLATE, critique_renderer, critique_task, is_satisfied
from mmrl.vlm.critic.questions import without_marks
from mmrl.vlm.data.messages import make_template, split_marks
from mmrl.vlm.data.prompt import Prompt, PromptTooLong
from mmrl.vlm.data.task import VlmTask, question_text
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig, sample
from mmrl.vlm.model.model_config import FrozenModelConfig
from mmrl.vlm.vlm_evaluation import AnswerMeasure

REVISION_TEMPLATE = "Reflection on the former answer: {{ critique }}\n{{ question }}"
"""User turn that asks for a revision, as in the public code."""
CRITIQUE_KEY = "evaluation.revision.critique_template"

Criticise = Callable[[Sequence[VlmTask], Sequence[str]], list[str]]
"""Function (questions, answers) -> critiques."""


def revision_renderer(template: str) -> Callable[..., str]:
    """Template of the turn that asks for a revision as a function (critique, question) -> text; raises UserError."""
    return make_template(
        template, ("critique",), "evaluation.revision.revision_template", "the critique", ("question",)
    )


@dataclass
class RevisionConfig:
    """Critiques and revisions of answers."""

    reasoner: FrozenModelConfig | None = None
    """Model that answers and revises. Default: the trained model. The critic is always the trained model."""
    critique_template: str = CRITIQUE_TEMPLATE
    """The critic's question, with {{ question }} and {{ answer }}, or a .jinja file; as in training."""
    revision_template: str = REVISION_TEMPLATE
    """The user turn after the answer, with {{ critique }} and optionally {{ question }}, or a .jinja file."""
    rounds: int = rare(bounded(1, at_least=1))
    """Maximum number of revisions per answer."""
    controls: bool = rare(True)
    """Also measure revisions with an empty critique, and with the critique of another question."""
    max_new_tokens: int | None = rare(bounded(None, at_least=1))
    """Maximum critique length in tokens. Default: `sampler.max_new_tokens`."""
    splits: list[str] = field(default_factory=list)
    """Held-out splits to measure this on. Default: all."""

    def validate(self) -> None:
        """Reject an incomplete template; raises UserError."""
        critique_renderer(self.critique_template, CRITIQUE_KEY)
        revision_renderer(self.revision_template)


@dataclass
class Revision:
    """Answers to one question and their critiques."""

    answers: list[str]
    """The first answer and its revisions."""
    critiques: list[str]
    """The critique of each criticised answer."""

    @property
    def criticised(self) -> bool:
        """Whether the first critique found fault."""
        return bool(self.critiques) and not is_satisfied(self.critiques[0])


class PolicyCritic:
    """A model's greedy critiques.

    Args:
        policy: the critic.
        config: template and length of critiques.
        sampler: batches, and the length where the configuration has none.
    """

    def __init__(self, policy: VlmPolicy, config: RevisionConfig, sampler: SamplerConfig) -> None:
        self.policy = policy
        self.render = critique_renderer(config.critique_template, CRITIQUE_KEY)
        self.sampler = replace(sampler, max_new_tokens=config.max_new_tokens or sampler.max_new_tokens)

    def __call__(self, tasks: Sequence[VlmTask], answers: Sequence[str]) -> list[str]:
        """The critique of each answer; empty if the critic's question does not fit in the model's context."""
        asked = [
            critique_task(task, without_marks(text), self.render) for task, text in zip(tasks, answers, strict=True)
        ]
        return _greedy(self.policy, asked, self.sampler, [""] * len(asked))


def greedy_answers(policy: VlmPolicy, tasks: Sequence[VlmTask], sampler: SamplerConfig) -> list[str]:
    """The greedy answer to each question; raises TaskError if one cannot be encoded."""
    prompts = [policy.encode(task) for task in tasks]
    return sample(policy, prompts, 1, sampler, None).texts if prompts else []


def revise(
    reasoner: VlmPolicy,
    tasks: Sequence[VlmTask],
    answers: Sequence[str],
    criticise: Criticise,
    config: RevisionConfig,
    sampler: SamplerConfig,
    *,
    always: bool = False,
) -> list[Revision]:
    """Criticise and revise answers to N questions, at most `config.rounds` times.

    Args:
        reasoner: model that revises.
        tasks: the questions.
        answers: the first answer to each.
        criticise: function (questions, answers) -> critiques.
        config: templates and rounds.
        sampler: longest answer and batches.
        always: revise also where the critique finds nothing wrong.
    """
    render = revision_renderer(config.revision_template)
    found = [Revision([text], []) for text in answers]
    chats = list(tasks)
    unsettled = list(range(len(found)))
    for _ in range(config.rounds):
        if not unsettled:
            break
        critiques = criticise([tasks[n] for n in unsettled], [found[n].answers[-1] for n in unsettled])
        for n, critique in zip(unsettled, critiques, strict=True):
            found[n].critiques.append(critique)
        # a satisfied critique ends the rounds of its question
        unsettled = [n for n in unsettled if always or not is_satisfied(found[n].critiques[-1])]
        for n in unsettled:
            chats[n] = next_turn(chats[n], tasks[n], found[n], render)
        # kept if the longer chat does not fit any more
        last = [found[n].answers[-1] for n in unsettled]
        for n, text in zip(unsettled, _greedy(reasoner, [chats[n] for n in unsettled], sampler, last), strict=True):
            found[n].answers.append(text)
    return found


def next_turn(chat: VlmTask, task: VlmTask, so_far: Revision, render: Callable[..., str]) -> VlmTask:
    """The chat with the last answer and a user turn that asks for a revision after its critique."""
    question = "".join(item["text"] for item in split_marks(question_text(task)) if item["type"] == "text")
    critique = (final_part(so_far.critiques[-1]) or "").strip()
    asked = render(critique=without_marks(critique), question=question)
    turns = [
        {"role": "assistant", "content": [{"type": "text", "text": without_marks(so_far.answers[-1])}]},
        {"role": "user", "content": [{"type": "text", "text": asked}]},
    ]
    return replace(chat, id=f"{task.id}/revision {len(so_far.answers)}", messages=[*chat.messages, *turns])


def _greedy(policy: VlmPolicy, tasks: Sequence[VlmTask], sampler: SamplerConfig, otherwise: Sequence[str]) -> list[str]:
    """The greedy responses; `otherwise` for questions that do not fit in the model's context."""
    prompts: list[Prompt | None] = []
    for task in tasks:
        try:
            prompts.append(policy.encode(task))
        except PromptTooLong:
            prompts.append(None)
    fitting = [prompt for prompt in prompts if prompt is not None]
    texts = iter(sample(policy, fitting, 1, sampler, None).texts if fitting else [])
    return [text if prompt is None else next(texts) for prompt, text in zip(prompts, otherwise, strict=True)]


BEFORE, AFTER = "accuracy/unrevised", "accuracy/revised"
EMPTY, SHUFFLED = "accuracy/revised_empty", "accuracy/revised_shuffled"


@dataclass
class RevisionMeasure(Measure[VlmTask]):
    """Accuracy of greedy answers before and after revision.

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
        """Number of questions answered together."""
        return self.answers.batch_size

    def run(self, batch: Sequence[Trial[VlmTask]], start: int) -> list[Row]:
        """Answer, criticise and revise; questions that cannot be encoded are skipped."""
        own = self.answers
        rows, prompts = own.open_rows(self.reasoner, batch)
        if not rows:
            return []
        tasks = [row["task"] for row in rows]
        first = sample(self.reasoner, prompts, 1, own.sampling, None).texts
        critic = PolicyCritic(own.policy, self.config, own.sampling)
        revisions = self._revise(tasks, first, critic)
        answers = {BEFORE: first, AFTER: [revision.answers[-1] for revision in revisions]}
        if self.config.controls:
            # how much asking again alone changes
            empty = self._revise(tasks, first, lambda tasks, answers: [""] * len(tasks), always=True)
            answers[EMPTY] = [revision.answers[-1] for revision in empty]
            # how much the critique of another question changes
            if len(tasks) > 1:
                shuffled = self._revise(tasks, first, _shuffled(critic))
                answers[SHUFFLED] = [revision.answers[-1] for revision in shuffled]
        right = {name: self._right(tasks, said) for name, said in answers.items()}
        for number, row in enumerate(rows):
            row |= {"revision": revisions[number], "right": {name: values[number] for name, values in right.items()}}
        return rows

    def metrics(self, rows: Sequence[Row], tasks: Sequence[VlmTask]) -> dict[str, float]:
        """Accuracies with intervals, and fractions of answers that critiques and revisions change."""
        metrics: dict[str, float] = {}
        for name in dict.fromkeys(name for row in rows for name in row["right"]):
            # one answer a question, so Wilson's interval
            metrics |= with_interval(name, [[row["right"][name]] for row in rows if name in row["right"]], None)
        changes = [(row["right"][BEFORE], row["right"][AFTER], row["revision"]) for row in rows]
        return metrics | change_shares(changes)

    def outcome(self, row: Row) -> Outcome:
        """Whether each of the answers is correct."""
        return Outcome(row["task"].id, {name: value for name, value in row["right"].items() if value == value})

    def record(self, row: Row) -> SampleRecord:
        """All answers with their critiques."""
        revision: Revision = row["revision"]
        lines = [f"answer: {revision.answers[0]}"]
        for number, critique in enumerate(revision.critiques):
            lines.append(f"critique: {critique}")
            lines += [f"revised: {text}" for text in revision.answers[number + 1 : number + 2]]
        return self.answers.sample_record(row, response="\n".join(lines), correct=row["right"][AFTER] == 1.0)

    def _revise(
        self, tasks: Sequence[VlmTask], first: Sequence[str], critic: Criticise, always: bool = False
    ) -> list[Revision]:
        return revise(self.reasoner, tasks, first, critic, self.config, self.answers.sampling, always=always)

    def _right(self, tasks: Sequence[VlmTask], texts: Sequence[str]) -> list[float]:
        own = self.answers
        tokenizer = self.reasoner.processor.tokenizer
        tokens = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return own.right(own.score(tasks, texts, tokens).terms)


def change_shares(changes: Sequence[tuple[float, float, Revision]]) -> dict[str, float]:
    """Fractions of incorrect answers found and fixed, and of correct answers criticised and broken.

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
