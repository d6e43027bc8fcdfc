"""Rows whose completion is a model's answer: a teacher's, or the initial model's answers that a reward accepts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.errors import UserError
from mmrl.rewards import RewardConfig, RewardSum, TrainerState
from mmrl.training.processes import make_generator
from mmrl.vlm.critic.questions import load_source, write_questions
from mmrl.vlm.data.task import VlmTask, score_texts
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig, sample
from mmrl.vlm.model.model_config import FrozenModelConfig

LOGGER = logging.getLogger("mmrl")
BATCH = 64
"""Number of answers per batch."""


def build_answered(
    path: str | Path,
    *,
    questions: Mapping[str, Any],
    model: str,
    count: int = 256,
    samples: int = 1,
    max_new_tokens: int = 40,
    accepts: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """Write questions of a dataset with a model's answers as their completions.

    An answer that is cut at `max_new_tokens` is left out.

    Args:
        path: JSONL file to write; columns prompt, images, completion and those of the questions.
        questions: options of a data set, as in `data` of a configuration.
        model: folder or name of the model that answers.
        count: answers that are written, to count / samples questions.
        samples: answers to a question; 1 takes the likeliest one, more are sampled at temperature 1.
        max_new_tokens: the longest answer.
        accepts: options of a reward, as in `rewards` of a configuration; answers that it gives less than 1 are left
            out. None keeps all.
        seed: of the questions and the samples.

    Raises:
        UserError: there are too few questions, or no answer is left.
    """
    tasks = load_source(questions, "questions").tasks
    if not 1 <= samples <= count or count // samples > len(tasks):
        raise UserError(f"count is {count} and samples is {samples}, but there are {len(tasks)} questions")
    order = np.random.default_rng([seed, 25]).permutation(len(tasks))[: count // samples]
    written = _answers([tasks[index] for index in order.tolist()], model, samples, max_new_tokens, seed)
    kept = written if accepts is None else _accepted(written, RewardConfig(**accepts))
    if not kept:
        raise UserError(f"none of {count} answers of {model} is both finished and accepted: accepts={accepts}")
    return write_questions(path, [(task, task, _columns(task) | {"completion": text}) for task, text, _ in kept])


def _columns(task: VlmTask) -> dict[str, Any]:
    return {name: value for name, value in task.columns.items() if name not in ("prompt", "images", "videos")}


def _answers(
    tasks: list[VlmTask], model: str, samples: int, longest: int, seed: int
) -> list[tuple[VlmTask, str, list[int]]]:
    """Finished answers with their tokens, question by question."""
    policy, config = load_policy(FrozenModelConfig(path=model)), SamplerConfig(max_new_tokens=longest)
    size, found = max(1, BATCH // samples), []
    for start in range(0, len(tasks), size):
        part = tasks[start : start + size]
        draws = make_generator(seed, "answers", start) if samples > 1 else None
        written = sample(policy, [policy.encode(task) for task in part], samples, config, draws)
        lengths = written.mask.sum(1).long().tolist()
        found += [
            (part[row // samples], text, written.response_ids[row, : lengths[row]].tolist())
            for row, text in enumerate(written.texts)
            if written.finish[row] != "length"
        ]
    return found


def _accepted(written: list[tuple[VlmTask, str, list[int]]], reward: RewardConfig) -> list[Any]:
    """Answers that earn 1; one that the reward fails on is left out."""
    tasks, texts, tokens = (list(column) for column in zip(*written, strict=True)) if written else ([], [], [])
    scorer = RewardSum([reward])
    try:
        found = score_texts(scorer, TrainerState(), tasks, texts, tokens)
    finally:
        scorer.close()
    for name, message in found.examples.items():
        LOGGER.warning("reward %s failed, and the affected answers are skipped: %s", name, message)
    return [row for row, score in zip(written, found.terms[reward.name], strict=True) if score == 1.0]
