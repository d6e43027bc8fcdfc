"""Directional Preference Alignment: the prompt states the weights of the rewards, and the best responses are learned.

    build_directed("round1.jsonl", questions={"path": "questions.jsonl"}, model="my-model", rewards=[...])

A direction v is a unit vector with one weight per reward. `build_directed` draws one per question, states it in the
prompt, samples answers and keeps the one with the largest v . r. `recipe: sft` on these rows is one round of rejection
sampling; the next round starts from its model. `build_stated` only writes the prompts, for a warm start or held-out
data.

Differences from the paper: rewards may have any scale; the direction is part of the question, not of the system turn;
v . r uses the rounded weights in the prompt; rows of earlier rounds are not mixed in.

Source: Wang et al., arXiv 2402.18571; prompt and rounding: RLHFlow/Directional-Preference-Alignment README.md.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.errors import UserError
from mmrl.rewards import RewardConfig, RewardSum, TrainerState
from mmrl.vlm.critic.critiques import write_texts
from mmrl.vlm.critic.questions import ask_instead, load_source, write_questions
from mmrl.vlm.data.messages import make_template
from mmrl.vlm.data.task import TaskError, VlmTask, question_text, score_texts
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig
from mmrl.vlm.model.model_config import FrozenModelConfig

LOGGER = logging.getLogger("mmrl")
TEMPLATE = "Your response should maximize weighted rating = {{ rating }}\n\n{{ question }}"
"""Question with a direction; the first sentence is taken from the public model."""
SPREAD = 45.0
"""Maximum angle in degrees between a direction and the axis of the first reward."""
Row = tuple[VlmTask, VlmTask, dict[str, Any]]


def draw_direction(rng: np.random.Generator, size: int, spread: float = SPREAD) -> list[float]:
    """Unit vector of `size` weights at an angle to the first axis that is uniform up to `spread` degrees."""
    # a normal vector has a uniform direction, so all other rewards are treated alike
    angle, rest = math.radians(rng.uniform(0, spread)), rng.normal(size=size - 1)
    return [math.cos(angle), *(math.sin(angle) * rest / np.linalg.norm(rest)).tolist()]


def stated(direction: Sequence[float]) -> list[int]:
    """Weights of a unit vector in hundredths, as prompts state them."""
    return [round(100 * weight) for weight in direction]


def rating(names: Sequence[str], weights: Sequence[int]) -> str:
    """Weights of rewards in words, such as helpfulness*97 + verbosity*-26."""
    return " + ".join(f"{name}*{weight}" for name, weight in zip(names, weights, strict=True))


def build_stated(
    path: str | Path,
    *,
    questions: Mapping[str, Any],
    rewards: Sequence[str],
    angles: Sequence[float] | None = None,
    template: str = TEMPLATE,
    spread: float = SPREAD,
    seed: int = 0,
) -> Path:
    """Write questions with directions in their prompts.

    Args:
        path: JSONL file to write; columns prompt, images, direction and those of the questions.
        questions: options of a data set, as in `data` of a configuration.
        rewards: names of the rewards, at least two.
        angles: of two rewards, degrees from the first one's axis towards the second one's; each question is asked once
            with each. None draws one direction for each question.
        template: text with {{ question }} and {{ rating }}, or a .jinja file.
        spread: largest angle of a drawn direction to the axis of the first reward, in degrees.
        seed: of what is drawn.

    Raises:
        UserError: the questions cannot be read, or rewards and angles do not fit.
    """
    render = _renderer(template)
    _check(rewards, spread)
    if angles is not None and len(rewards) != 2:
        raise UserError(f"angles need exactly two rewards, but there are {len(rewards)}; remove angles")
    rng, rows = np.random.default_rng([seed, 23]), list[Row]()
    for task in load_source(questions, "questions").tasks:
        given = [[math.cos(math.radians(angle)), math.sin(math.radians(angle))] for angle in angles or ()]
        for direction in given or [draw_direction(rng, len(rewards), spread)]:
            words = rating(rewards, stated(direction))
            kept = {key: value for key, value in task.columns.items() if key not in ("prompt", "images", "videos")}
            rows.append((task, _asked(task, words, render), kept | {"direction": words}))
    return write_questions(path, rows)


def build_directed(
    path: str | Path,
    *,
    questions: Mapping[str, Any],
    model: str,
    rewards: Sequence[Mapping[str, Any]],
    answers: int = 16,
    temperature: float = 1.0,
    max_new_tokens: int = 256,
    template: str = TEMPLATE,
    spread: float = SPREAD,
    seed: int = 0,
) -> Path:
    """Write the best response to each question along a drawn direction, for `recipe: sft`.

    An answer that a reward fails on is left out, and so is a question without another one.

    Args:
        path: JSONL file to write; columns prompt, images, completion, direction, score (v . r) and, by name, rewards.
        questions: options of a data set, as in `data` of a configuration.
        model: folder or hub id of the model that answers.
        rewards: options of at least two rewards, as in `rewards` of a configuration, without weights.
        answers: sampled of each question; 80 in the paper.
        temperature: of these.
        max_new_tokens: the longest answer.
        template: text with {{ question }} and {{ rating }}, or a .jinja file.
        spread: largest angle of a direction to the axis of the first reward, in degrees.
        seed: of everything drawn.

    Raises:
        UserError: data, model or rewards cannot be used, or no answer has all rewards.
    """
    render, terms = _renderer(template), [_term(options) for options in rewards]
    names = [term.name for term in terms]
    _check(names, spread)
    tasks, rng = load_source(questions, "questions").tasks, np.random.default_rng([seed, 24])
    # answers are weighed by the rounded numbers that the prompt states
    weights = [stated(draw_direction(rng, len(terms), spread)) for _ in tasks]
    words = [rating(names, own) for own in weights]
    asked = [_asked(task, own, render) for task, own in zip(tasks, words, strict=True)]
    policy = load_policy(FrozenModelConfig(path=model))
    config = SamplerConfig(max_new_tokens=max_new_tokens, temperature=temperature)
    written = write_texts(policy, asked, answers, config, seed, "directions")
    rows, missing = list[Row](), 0
    begin = policy.turns.parts.begin
    scored = _score(terms, tasks, written, lambda text: policy.turns.encode_answer(begin, text))
    for task, question, own, said, texts, values in zip(tasks, asked, weights, words, written, scored, strict=True):
        score = values @ (np.array(own) / 100)
        missing += int(np.isnan(score).sum())
        if not np.isnan(score).all():
            # an answer without one of the rewards has no score and cannot be the best
            best = int(np.nanargmax(score))
            columns = {"completion": texts[best], "direction": said, "score": float(score[best])}
            rows.append((task, question, columns | {"rewards": dict(zip(names, values[best].tolist(), strict=True))}))
    if missing:
        LOGGER.warning("%d of %d answers lack a reward and were skipped", missing, answers * len(tasks))
    if not rows:
        raise UserError(f"none of the {answers * len(tasks)} answers has all rewards: {', '.join(names)}")
    return write_questions(path, rows)


def _renderer(template: str) -> Callable[..., str]:
    return make_template(template, ("question", "rating"), "template", "the text of the prompt")


def _asked(task: VlmTask, words: str, render: Callable[..., str]) -> VlmTask:
    try:
        return ask_instead(task, render(question=question_text(task), rating=words), words)
    except TaskError as error:
        raise UserError(str(error)) from None


def _term(options: Mapping[str, Any]) -> RewardConfig:
    try:
        return RewardConfig(**options)
    except TypeError as error:
        raise UserError(f"rewards: {error}; use the options of `rewards` in a configuration") from None


def _check(names: Sequence[str], spread: float) -> None:
    if len(names) < 2:
        raise UserError(f"a direction needs at least two rewards; given: {', '.join(names) or 'none'}")
    if not 0 <= spread <= 180:
        raise UserError(f"spread is {spread}; it must be between 0 and 180 degrees")


def _score(
    terms: Sequence[RewardConfig],
    tasks: Sequence[VlmTask],
    written: Sequence[Sequence[str]],
    tokens: Callable[[str], list[int]],
) -> list[np.ndarray]:
    """Rewards (answers, terms) of each question's answers; NaN where one failed."""
    flat = [(task, text) for task, own in zip(tasks, written, strict=True) for text in own]
    texts = [text for _, text in flat]
    scorer = RewardSum(terms)
    try:
        lengths = [tokens(text) for text in texts]
        found = score_texts(scorer, TrainerState(), [task for task, _ in flat], texts, lengths)
    finally:
        scorer.close()
    for name, message in found.examples.items():
        LOGGER.warning("reward %s failed: %s", name, message)
    values = np.array([found.terms[term.name] for term in terms]).T
    return np.split(values, np.cumsum([len(own) for own in written])[:-1])
