"""Critique-RL: a critic learns to judge and to help in two stages (arXiv 2510.24320).

A reasoner answers the questions of the data, and the policy criticises its answers. In the first
`critique.discrimination_steps` steps a critique earns 1 for the right verdict about the answer and -1 for the wrong one
or none. After that the reasoner revises each answer after its critique, and the critique earns

    r = gain(answer right, revised right) + verdict_weight    where its verdict is right, else -1.

A verdict is the paper's line "Correctness of the final answer: Correct" (or Wrong), or, without such a line, whether
the critique lists an error (Critic-V's rule). Templates and reasoner are those of `evaluation.revision`, whose measure
is the evaluation; without a reasoner the policy answers and revises itself. The objective is RLOO with the code's KL of
0.01 in the reward.

Differences from WooooDyy/Critique-RL: answers are sampled in each step and not beforehand; a critique with both
verdicts has none, where the code takes the right one; one run has both stages, with the start as the reference of both.

Source: WooooDyy/Critique-RL RL/Critique-RL/reward/reward_func.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch

from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice
from mmrl.rewards import RewardResult
from mmrl.rewards.answers import final_part
from mmrl.training.evaluation import Measure
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.training.scoring import with_rewards
from mmrl.vlm.critic.critiques import critique_renderer, critique_task, is_satisfied
from mmrl.vlm.critic.measures import CriticEvaluationConfig
from mmrl.vlm.critic.questions import without_marks
from mmrl.vlm.critic.revision import CRITIQUE_KEY, RevisionConfig, RevisionMeasure, revise
from mmrl.vlm.data.prompt import VlmPayload, token_lists
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.vlm_policy import VlmPolicy, load_policy
from mmrl.vlm.engine.vlm_sampler import sample
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe

RIGHT_LINE, WRONG_LINE = (f"Correctness of the final answer: {word}" for word in ("Correct", "Wrong"))
GAINS: dict[str, Mapping[tuple[bool, bool], float]] = {
    "refine": {(False, False): 0.0, (False, True): 1.0, (True, False): 0.0, (True, True): 1.0},
    "correct": {(False, False): 0.0, (False, True): 1.0, (True, False): 0.0, (True, True): 0.2},
    "delta": {(False, False): 0.0, (False, True): 1.0, (True, False): -1.0, (True, True): 0.0},
}
"""Gain of a revision, by whether the answer was correct before it and is correct after it."""


def read_verdict(critique: str) -> bool | None:
    """Whether a critique calls the answer correct; None if it says neither or both."""
    right, wrong = RIGHT_LINE in critique, WRONG_LINE in critique
    if right or wrong:
        return None if right and wrong else right
    # an empty critique says nothing, but `is_satisfied` would read it as approval
    return is_satisfied(critique) if (final_part(critique) or "").strip() else None


def critique_reward(
    verdict: bool | None, before: float, after: float | None = None, gain: str = "refine", weight: float = 0.2
) -> float:
    """Reward of a critique.

    Args:
        verdict: whether it calls the answer right.
        before: 1 where the answer is right, 0 where it is wrong, NaN where that is unknown.
        after: the same of the revised answer; None in the first stage.
        gain: key of `GAINS`.
        weight: added for the right verdict in the second stage.
    """
    # unscored, not wrong: the critique is then not trained
    if math.isnan(before) or (after is not None and math.isnan(after)):
        return math.nan
    # no gain without the right verdict, or a revision could be rewarded whose critique was wrong
    if verdict is None or verdict != (before == 1.0):
        return -1.0
    return 1.0 if after is None else GAINS[gain][before == 1.0, after == 1.0] + weight


@dataclass
class CritiqueSettings:
    """Rewards of critiques."""

    discrimination_steps: int = bounded(500, at_least=0)
    """Number of steps of the first stage, in which only the verdict is rewarded."""
    gain: str = choice("refine", lambda: tuple(GAINS))
    """Reward of a revision. refine: 1 if it is correct; correct: 0.2 if it stays correct, 1 if it becomes correct;
    delta: 1 if it becomes correct, -1 if it becomes incorrect."""
    verdict_weight: float = bounded(0.2, at_least=0)
    """Reward of the correct verdict in the second stage."""
    temperature: float = bounded(1.0, above=0)
    """Temperature of the reasoner's answers; revisions are decoded greedily."""


def revising_evaluation() -> CriticEvaluationConfig:
    """Options of evaluations that measure revisions."""
    return CriticEvaluationConfig(revision=RevisionConfig(), samples=0)


@dataclass
class CritiqueRlConfig(VlmConfig):
    """A Critique-RL run; `rewards` decide whether an answer is correct."""

    critique: CritiqueSettings = field(default_factory=CritiqueSettings)
    """Rewards of critiques."""
    evaluation: CriticEvaluationConfig = field(default_factory=revising_evaluation)
    """Evaluation; training uses the reasoner and templates of `revision` too."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="rloo", kl={"coef": 0.01}))
    """Objective that is optimised."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        own = self.evaluation
        if own.revision is None:
            raise ValueError("evaluation.revision is empty, but training uses its reasoner and templates; set it")
        if not own.greedy or own.samples or own.temperature != 1 or own.by or own.self_critic or own.revision.splits:
            raise ValueError(
                "evaluation measures greedy answers, before and after revision, on all of eval_data; remove greedy, "
                "samples, temperature, by, self_critic and revision.splits"
            )


@dataclass
class CriticisedTask(VlmTask):
    """A critic's question about an answer."""

    question: VlmTask = field(default_factory=lambda: VlmTask("", []))
    """The question that was answered."""
    prompt: str = ""
    """Its text as the reasoner read it."""
    answer: str = ""
    """The reasoner's answer."""


class CritiqueRlRecipe(VlmRecipe):
    """RLOO, or another objective, on critiques of a reasoner's answers."""

    config: CritiqueRlConfig

    def __init__(self, config: CritiqueRlConfig) -> None:
        super().__init__(config)
        assert config.evaluation.revision is not None
        self.revision = config.evaluation.revision
        self.render = critique_renderer(self.revision.critique_template, CRITIQUE_KEY)
        self._frozen = None if self.revision.reasoner is None else load_policy(self.revision.reasoner)

    @property
    def reasoner(self) -> VlmPolicy:
        """The model that answers and revises."""
        # without a separate reasoner, answers come from the policy that is being trained
        return self.policy if self._frozen is None else self._frozen.to(self.policy.device)

    def rollout(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> Rollouts:
        """Let the reasoner answer the questions, and sample critiques of each answer."""
        sampler = self.config.sampler.config
        # encoded for the reasoner, which may have another processor than the critic
        usable, prompts = self.encode(self.reasoner, tasks)
        streams = streams.among(tasks, usable)
        # separate draws: the critiques of the same tasks take the stream without a purpose
        draws = streams.uniform(len(usable), 1, sampler.max_new_tokens, purpose="answers")
        answering = replace(sampler, temperature=self.config.critique.temperature)
        answers = sample(self.reasoner, prompts, 1, answering, draws).texts
        asked = []
        for task, prompt, answer in zip(usable, prompts, answers, strict=True):
            about = critique_task(task, without_marks(answer), self.render)
            own = {item.name: getattr(about, item.name) for item in fields(VlmTask)}
            asked.append(CriticisedTask(**own, question=task, prompt=prompt.text, answer=answer))
        return super().rollout(policy, asked, streams, step)

    def score(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """Rewards of verdicts, and of revisions in the second stage."""
        payload, settings = VlmPayload.of(rollouts), self.config.critique
        tasks: list[CriticisedTask] = payload.tasks  # type: ignore[assignment]
        group = rollouts.host.group.tolist()
        before, result = self._right(tasks, [task.answer for task in tasks], step)
        rows = [tasks[number] for number in group]
        terms = {"unrevised": [before[number] for number in group]}
        after: list[float] | None = None
        if step.number >= settings.discrimination_steps:
            after, result = self._right(rows, self._revised(rows, payload.texts), step)
            terms["revised"] = after
        later: Sequence[float | None] = after or [None] * len(rows)
        judged = list(zip(map(read_verdict, payload.texts), terms["unrevised"], later, strict=True))
        total = [critique_reward(*row, settings.gain, settings.verdict_weight) for row in judged]
        # the first stage's reward, so that both stages log the same 0 or 1
        terms["verdict"] = [max(critique_reward(verdict, was), 0.0) for verdict, was, _ in judged]
        tokens, prompts = token_lists(payload.response_ids, rollouts.mask), [payload.prompts[n].text for n in group]
        extras = rollouts.extras | self._block_inputs(rollouts, rows, prompts, tokens)
        return with_rewards(rollouts.replace(extras=extras), replace(result, total=total, terms=terms))

    def measures(self, policy: VlmPolicy, split: str, step: Step) -> list[Measure[VlmTask]]:
        """Answers before and after revision."""
        return [RevisionMeasure(self.answers(policy, split, step), self.revision, self.reasoner)]

    def correct(self, rollouts: Rollouts) -> torch.Tensor:
        """(B,) bool, rows with the correct verdict."""
        return rollouts.reward_terms["verdict"] == 1.0

    def describe(self) -> str:
        """The objective's formula and the rewards of both stages."""
        own = self.config.critique
        return (
            f"{super().describe()}\nR_i = 1 for the right verdict, else -1, for {own.discrimination_steps} steps, then "
            f"{own.gain} gain of the revision + {own.verdict_weight:g} for the right verdict, else -1"
        )

    def _revised(self, tasks: Sequence[CriticisedTask], critiques: Sequence[str]) -> list[str]:
        """The reasoner's answers after the critiques."""
        questions, first = [task.question for task in tasks], [task.answer for task in tasks]
        once, sampler = replace(self.revision, rounds=1), self.config.sampler.config
        # also where the critique calls the answer right: rewards compare it before and after
        found = revise(self.reasoner, questions, first, lambda *_: list(critiques), once, sampler, always=True)
        return [revision.answers[-1] for revision in found]

    def _right(
        self, tasks: Sequence[CriticisedTask], answers: Sequence[str], step: Step
    ) -> tuple[list[float], RewardResult]:
        """1 for each right answer, 0 for a wrong one, NaN where it could not be scored; and all scores."""
        tokenizer = self.reasoner.processor.tokenizer
        tokens = [tokenizer.encode(text, add_special_tokens=False) for text in answers]
        result = self.score_texts([task.question for task in tasks], answers, tokens, step)
        self.errors.count(result)
        scores = result.terms[self.accuracy_term]
        return [value if math.isnan(value) else float(value == 1.0) for value in scores], result
