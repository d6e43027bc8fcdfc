"""LLaVA-Critic-R1's self-critic: the model that wrote n responses to a question judges them, and the best is kept.

    choices = best_of_n(policy, tasks, responses, SelfCriticConfig(), SamplerConfig(max_new_tokens=512))

Responses with the same final answer are one candidate, shown as the first of them; two different ones are compared in
both orders, with the likeliest judgement. The released code has no script of the paper's best of 128, so the two
protocols are this project's own.

Source: Wang et al., LLaVA-Critic-R1, arXiv 2509.00676, section 5 (best of n with the same model as critic).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from PIL import Image

from mmrl.fields import bounded, choice, rare
from mmrl.hub.video_sampling import Frames
from mmrl.rewards.answers import normalise, read_answer
from mmrl.runs.records import Outcome, SampleRecord
from mmrl.runs.statistics import with_interval
from mmrl.training.evaluation import Measure, Row, Trial, mean_scores
from mmrl.training.processes import stream_seed
from mmrl.vlm.critic.questions import CRITIC_TEMPLATE, critic_renderer, critic_task, without_marks
from mmrl.vlm.data.prompt import Prompt, PromptTooLong, token_lists
from mmrl.vlm.data.task import VlmTask, load_videos, question_text
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig, sample
from mmrl.vlm.vlm_evaluation import AnswerMeasure


@dataclass(frozen=True)
class PairVerdict:
    """A judge's preference between answers a and b, asked in both orders."""

    shown_first: int | None
    """1 or 2, with a shown as number 1; None if the judgement could not be read."""
    shown_second: int | None
    """1 or 2, with a shown as number 2."""

    @property
    def wins(self) -> float:
        """Fraction of the two orders in which a is preferred; an unreadable judgement counts as half."""
        first = 0.5 if self.shown_first is None else float(self.shown_first == 1)
        second = 0.5 if self.shown_second is None else float(self.shown_second == 2)
        return (first + second) / 2

    @property
    def agrees(self) -> bool:
        """Whether both orders prefer the same answer."""
        return None not in (self.shown_first, self.shown_second) and self.shown_first != self.shown_second


@dataclass(frozen=True)
class Match:
    """Two different answers to one question, to compare."""

    question: int
    a: int
    b: int


Compare = Callable[[Sequence[Match]], Sequence[PairVerdict]]
"""A judge: the verdict of each match."""


def choose(votes: Sequence[Sequence[int]], protocol: str, compare: Compare) -> list[int]:
    """Choose one answer to each question.

    round_robin compares every two different answers. Their scores are those of all responses compared with one
    another, equal ones drawn: answer i with v_i votes has sum_j v_j wins(i, j) + (v_i - 1) / 2. knockout compares
    neighbours, and the winners again, until one is left. Draws go to the answer with more votes, then to the earlier.
    """
    return PROTOCOLS[protocol](votes, compare)


def majority(votes: Sequence[int]) -> int:
    """Index of the answer with the most votes; the first one in a tie."""
    return max(range(len(votes)), key=lambda index: (votes[index], -index))


def _round_robin(votes: Sequence[Sequence[int]], compare: Compare) -> list[int]:
    matches = [Match(n, a, b) for n, own in enumerate(votes) for b in range(len(own)) for a in range(b)]
    # an answer draws against equal ones, of which there are v - 1
    scores = [[(count - 1) / 2 for count in own] for own in votes]
    for match, verdict in zip(matches, compare(matches) if matches else [], strict=True):
        own = votes[match.question]
        scores[match.question][match.a] += own[match.b] * verdict.wins
        scores[match.question][match.b] += own[match.a] * (1 - verdict.wins)
    return [
        max(range(len(own)), key=lambda index: (score[index], own[index], -index))
        for own, score in zip(votes, scores, strict=True)
    ]


def _knockout(votes: Sequence[Sequence[int]], compare: Compare) -> list[int]:
    # one round for all questions at a time, so that judgements are batched
    left = [list(range(len(own))) for own in votes]
    while matches := [Match(n, *own[k : k + 2]) for n, own in enumerate(left) for k in range(0, len(own) - 1, 2)]:
        beaten = {
            (match.question, _loser(match, verdict, votes[match.question]))
            for match, verdict in zip(matches, compare(matches), strict=True)
        }
        left = [[index for index in own if (n, index) not in beaten] for n, own in enumerate(left)]
    return [own[0] for own in left]


def _loser(match: Match, verdict: PairVerdict, votes: Sequence[int]) -> int:
    # a draw goes to the more frequent answer, then to the earlier one
    if verdict.wins == 0.5:
        return match.a if votes[match.b] > votes[match.a] else match.b
    return match.b if verdict.wins > 0.5 else match.a


PROTOCOLS: dict[str, Callable[[Sequence[Sequence[int]], Compare], list[int]]] = {
    "round_robin": _round_robin,
    "knockout": _knockout,
}


OPTION = "evaluation.self_critic.template"


@dataclass
class SelfCriticConfig:
    """A model's judgements of its own answers."""

    n: int = bounded(8, at_least=2)
    """Number of responses to each question, sampled at `evaluation.temperature`."""
    template: str = CRITIC_TEMPLATE
    """The critic's question, with {{ question }}, {{ first }} and {{ second }}, or a .jinja file; as in training."""
    shown: str = choice("response", ("response", "answer"))
    """What the critic sees of a candidate: the whole response, or its final answer."""
    protocol: str = rare(choice("round_robin", lambda: tuple(PROTOCOLS)))
    """round_robin: compare every pair of different answers; knockout: winners of pairs meet in the next round."""
    max_new_tokens: int | None = rare(bounded(None, at_least=1))
    """Maximum judgement length in tokens. Default: `sampler.max_new_tokens`."""
    splits: list[str] = field(default_factory=list)
    """Held-out splits to measure this on. Default: all."""

    def validate(self) -> None:
        """Reject an incomplete template; raises UserError."""
        critic_renderer(self.template, OPTION)


@dataclass
class Choice:
    """The critic's choice among the n responses to a question."""

    chosen: int
    """Index of the response that the critic keeps."""
    majority: int
    """Index of the first response with the most frequent answer."""
    answers: list[str]
    """The different final answers, in the order of their first response."""
    verdicts: list[PairVerdict] = field(default_factory=list)
    """Judgements of the pairs that were compared."""


@torch.no_grad()
def best_of_n(
    policy: VlmPolicy,
    tasks: Sequence[VlmTask],
    responses: Sequence[Sequence[str]],
    config: SelfCriticConfig,
    sampler: SamplerConfig,
) -> list[Choice]:
    """Choose one of the responses to each question by the model's own judgements of pairs.

    Args:
        policy: the critic, usually the model that gave the responses.
        tasks: N questions.
        responses: at least one to each question.
        config: template and protocol.
        sampler: longest judgement and batches.

    Returns:
        A choice for each question; a pair whose question does not fit in the model's context is a draw.

    Raises:
        TaskError: an image can no longer be read.
        UserError: the template leaves something out.
    """
    candidates = [_candidates(task, own) for task, own in zip(tasks, responses, strict=True)]
    shown = [
        [without_marks(one.answer if config.shown == "answer" and one.answer else texts[one.first]) for one in own]
        for own, texts in zip(candidates, responses, strict=True)
    ]
    critic = _Critic(policy, tasks, shown, config, sampler)
    votes = [[candidate.votes for candidate in own] for own in candidates]
    chosen = choose(votes, config.protocol, critic.compare)
    return [
        Choice(own[index].first, own[majority(count)].first, [c.answer for c in own], verdicts)
        for own, index, count, verdicts in zip(candidates, chosen, votes, critic.verdicts, strict=True)
    ]


@dataclass
class _Candidate:
    answer: str
    first: int
    votes: int


def _candidates(task: VlmTask, responses: Sequence[str]) -> list[_Candidate]:
    """Different final answers: marked ones, else whole responses; those without one only if no response has one."""
    asked = question_text(task)
    answers = [read_answer(text, asked) for text in responses]
    # marks are optional only if nobody used them
    if not any(answers):
        answers = [read_answer(text, asked, require_block=False) or text for text in responses]
    found: dict[str, _Candidate] = {}
    for index, answer in enumerate(answers):
        key = "" if answer is None else normalise(answer)
        found.setdefault(key, _Candidate(answer or "", index, 0)).votes += 1
    # a response without an answer is no candidate next to others
    if len(found) > 1:
        found.pop("", None)
    return list(found.values())


class _Critic:
    """Asks a model which of two responses is better, in both orders, for many questions together."""

    def __init__(
        self,
        policy: VlmPolicy,
        tasks: Sequence[VlmTask],
        shown: Sequence[Sequence[str]],
        config: SelfCriticConfig,
        sampler: SamplerConfig,
    ) -> None:
        self.policy = policy
        self.tasks = tasks
        self.shown = shown
        self.render = critic_renderer(config.template, OPTION)
        longest = config.max_new_tokens or sampler.max_new_tokens
        # the likeliest judgement, however answers are sampled
        self.sampler = replace(sampler, max_new_tokens=longest, temperature=1.0, top_p=1.0, top_k=0)
        self.verdicts: list[list[PairVerdict]] = [[] for _ in tasks]
        self._media: dict[int, tuple[list[Image.Image], list[Frames] | None]] = {}

    def compare(self, matches: Sequence[Match]) -> list[PairVerdict]:
        """Verdicts of the matches, which are also kept by question."""
        # both orders: models prefer one of the two places
        prompts = [self._prompt(match, swapped) for match in matches for swapped in (False, True)]
        asked = [prompt for prompt in prompts if prompt is not None]
        texts = sample(self.policy, asked, 1, self.sampler, None).texts if asked else []
        read = iter([_number(text, prompt.text) for text, prompt in zip(texts, asked, strict=True)])
        numbers = [None if prompt is None else next(read) for prompt in prompts]
        found = [PairVerdict(*numbers[2 * index : 2 * index + 2]) for index in range(len(matches))]
        for match, verdict in zip(matches, found, strict=True):
            self.verdicts[match.question].append(verdict)
        return found

    def _prompt(self, match: Match, swapped: bool) -> Prompt | None:
        """The critic's question; None if it does not fit in the model's context."""
        task, shown = self.tasks[match.question], self.shown[match.question]
        first, second = (match.b, match.a) if swapped else (match.a, match.b)
        asked = critic_task(task, shown[first], shown[second], self.render, f"{first} or {second}")
        if match.question not in self._media:  # read once for all questions about them
            videos = load_videos(task, self.policy.layout.patch_size) if task.videos else None
            self._media[match.question] = (task.load_images(), videos)
        try:
            return self.policy.encode(asked, *self._media[match.question])
        except PromptTooLong:
            return None


def _number(text: str, prompt: str) -> int | None:
    answer = read_answer(text, prompt)
    return {"1": 1, "2": 2}.get("" if answer is None else normalise(answer))


@dataclass
class SelfCriticMeasure(Measure[VlmTask]):
    """Accuracy of the answer that the model chooses among its own n answers.

    The metrics are accuracy/self_critic, accuracy/majority, accuracy/pass_at_1 (the mean of the n) and
    accuracy/pass_at_n (any of them is right) with bootstrap intervals over questions, and those of `judgement_metrics`.
    All four are of the same answers, whose draws follow from (seed, split) alone.
    """

    answers: AnswerMeasure
    """Model, scores and draws."""
    config: SelfCriticConfig

    @property
    def batch_size(self) -> int:
        """Number of questions answered together."""
        return self.answers.batch_size

    def run(self, batch: Sequence[Trial[VlmTask]], start: int) -> list[Row]:
        """Sample n answers to each question and let the model choose; questions that cannot be encoded are skipped."""
        own, count = self.answers, self.config.n
        rows, prompts = own.open_rows(own.policy, batch)
        if not rows:
            return []
        drawn = sample(own.policy, prompts, count, own.sampling, own.draws(rows, count, "self_critic"))
        tokens = token_lists(drawn.response_ids, drawn.mask)
        scored = own.score([row["task"] for row in rows for _ in range(count)], drawn.texts, tokens)
        right = own.right(scored.terms)
        groups = [slice(n * count, (n + 1) * count) for n in range(len(rows))]
        texts = [drawn.texts[part] for part in groups]
        choices = best_of_n(own.policy, [row["task"] for row in rows], texts, self.config, own.sampling)
        for row, part, said, chosen in zip(rows, groups, texts, choices, strict=True):
            scores = _scores(right[part], chosen)
            row |= {"response": said[chosen.chosen], "choice": chosen, "scores": scores}
        return rows

    def metrics(self, rows: Sequence[Row], tasks: Sequence[VlmTask]) -> dict[str, float]:
        """Accuracies with intervals, and statistics of the judgements."""
        metrics: dict[str, float] = {}
        for name in rows[0]["scores"] if rows else ():
            # the same resamples for every metric of these answers
            rng = np.random.default_rng(stream_seed(self.answers.seed, "bootstrap", self.answers.split))
            metrics |= with_interval(name, [row["scores"][name] for row in rows], rng)
        return metrics | judgement_metrics([row["choice"] for row in rows])

    def outcome(self, row: Row) -> Outcome:
        """Whether the chosen answer and the other answers to the question are correct."""
        return Outcome(row["task"].id, mean_scores(row["scores"]))

    def record(self, row: Row) -> SampleRecord:
        """The chosen answer."""
        right = row["scores"]["accuracy/self_critic"] == [1.0]
        return self.answers.sample_record(row, response=row["response"], correct=right)


def judgement_metrics(choices: Sequence[Choice]) -> dict[str, float]:
    """Statistics of the judgements that led to some choices."""
    if not choices:
        return {}
    verdicts = [verdict for chosen in choices for verdict in chosen.verdicts]
    metrics = {
        "self_critic/different": float(np.mean([len(chosen.answers) for chosen in choices])),
        "self_critic/compared": len(verdicts) / len(choices),
    }
    if not verdicts:
        return metrics
    numbers = [number for verdict in verdicts for number in (verdict.shown_first, verdict.shown_second)]
    readable = [number for number in numbers if number is not None]
    metrics["self_critic/order_agreement"] = float(np.mean([verdict.agrees for verdict in verdicts]))
    metrics["self_critic/unreadable"] = 1 - len(readable) / len(numbers)
    if readable:
        metrics["self_critic/first_share"] = float(np.mean([number == 1 for number in readable]))
    return metrics


def _scores(right: Sequence[float], chosen: Choice) -> dict[str, list[float]]:
    # any of them is right: NaN must not hide it
    known = [value for value in right if value == value]
    return {
        "accuracy/self_critic": [right[chosen.chosen]],
        "accuracy/majority": [right[chosen.majority]],
        "accuracy/pass_at_1": list(right),
        "accuracy/pass_at_n": [max(known)] if known else [float("nan")],
    }
