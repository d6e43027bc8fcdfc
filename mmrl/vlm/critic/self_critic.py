"""LLaVA-Critic-R1's self-critic: the weights that gave n responses to a question judge them, and the best is kept.

    choices = best_of_n(policy, tasks, responses, SelfCriticConfig(), SamplerConfig(max_new_tokens=512))

Responses with the same final answer are one candidate, shown as the first of them; two different ones are compared in
both orders, with the likeliest judgement. The released code has no script of the paper's best of 128, so the two
protocols are this project's own.

Source: Wang et al., LLaVA-Critic-R1, arXiv 2509.00676, section 5 (best of n with the same model as critic).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from PIL import Image

from mmrl.fields import bounded, choice, rare
from mmrl.hub.video_sampling import Frames
from mmrl.rewards.answers import normalise, read_answer
from mmrl.vlm.chat import PromptTooLong
from mmrl.vlm.critic.asking import question_text, without_marks
from mmrl.vlm.critic.questions import CRITIC_TEMPLATE, critic_renderer, critic_task
from mmrl.vlm.critic.tournament import PROTOCOLS, Match, Verdict, choose, majority
from mmrl.vlm.payload import Prompt
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.sampler import sample
from mmrl.vlm.sampling import SamplerConfig
from mmrl.vlm.task import VlmTask
from mmrl.vlm.video_input import load_videos

OPTION = "evaluation.self_critic.template"


@dataclass
class SelfCriticConfig:
    """Judgements of a model about its own answers."""

    n: int = bounded(8, at_least=2)
    """Responses to each question, at `evaluation.temperature`."""
    template: str = CRITIC_TEMPLATE
    """The critic's question, with {{ question }}, {{ first }} and {{ second }}, or a .jinja file; as in training."""
    shown: str = choice("response", ("response", "answer"))
    """Part of a candidate that the critic sees: the whole response, or its final answer."""
    protocol: str = rare(choice("round_robin", lambda: tuple(PROTOCOLS)))
    """round_robin: every two different answers are compared; knockout: the winners of pairs meet again."""
    max_new_tokens: int | None = rare(bounded(None, at_least=1))
    """Longest judgement in tokens; empty: `sampler.max_new_tokens`."""
    splits: list[str] = field(default_factory=list)
    """Held-out splits that it is measured on; empty: all."""

    def validate(self) -> None:
        """Refuse a template that leaves something out; raises UserError."""
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
    verdicts: list[Verdict] = field(default_factory=list)
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
        A choice for each question; a pair whose question does not fit into the model is a draw.

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
    """Different final answers: marked ones, else whole responses; those without one only where no response has one."""
    asked = question_text(task)
    answers = [read_answer(text, asked) for text in responses]
    if not any(answers):
        answers = [read_answer(text, asked, require_block=False) or text for text in responses]
    found: dict[str, _Candidate] = {}
    for index, answer in enumerate(answers):
        key = "" if answer is None else normalise(answer)
        found.setdefault(key, _Candidate(answer or "", index, 0)).votes += 1
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
        self.policy, self.tasks, self.shown = policy, tasks, shown
        self.render = critic_renderer(config.template, OPTION)
        longest = config.max_new_tokens or sampler.max_new_tokens
        self.sampler = replace(sampler, max_new_tokens=longest, temperature=1.0, top_p=1.0, top_k=0)
        self.verdicts: list[list[Verdict]] = [[] for _ in tasks]
        self._media: dict[int, tuple[list[Image.Image], list[Frames] | None]] = {}

    def compare(self, matches: Sequence[Match]) -> list[Verdict]:
        """Verdicts of the matches, which are also kept by question."""
        prompts = [self._prompt(match, swapped) for match in matches for swapped in (False, True)]
        asked = [prompt for prompt in prompts if prompt is not None]
        texts = sample(self.policy, asked, 1, self.sampler, None).texts if asked else []
        read = iter([_number(text, prompt.text) for text, prompt in zip(texts, asked, strict=True)])
        numbers = [None if prompt is None else next(read) for prompt in prompts]
        found = [Verdict(*numbers[2 * index : 2 * index + 2]) for index in range(len(matches))]
        for match, verdict in zip(matches, found, strict=True):
            self.verdicts[match.question].append(verdict)
        return found

    def _prompt(self, match: Match, swapped: bool) -> Prompt | None:
        """The critic's question; None where it does not fit into the model."""
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
