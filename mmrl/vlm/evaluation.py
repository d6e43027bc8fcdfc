"""Held-out accuracy of a vision-language model: one greedy answer and n sampled ones a question, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from accelerate import Accelerator

from mmrl.training.loop.distributed import merge_lists, shard
from mmrl.training.loop.recipe import Evaluation
from mmrl.training.loop.seeds import make_generator, stream_seed
from mmrl.training.record.samples import SampleRecord
from mmrl.training.record.statistics import cluster_bootstrap_interval, wilson_interval
from mmrl.vlm.sampler import SamplerConfig, sample
from mmrl.vlm.task import VlmTask

if TYPE_CHECKING:
    from mmrl.vlm.recipe import VlmRecipe

__all__ = ["evaluate_split"]


def evaluate_split(recipe: Any, tasks: Sequence[VlmTask], split: str, accelerator: Accelerator) -> Evaluation:
    """Answer every question greedily and by sampling, and count the right ones.

    The draws follow from (seed, split) alone, so evaluations of different steps and arms are paired.

    Args:
        recipe: a recipe with `policy`, `rewards`, `encode` and a configuration with `evaluation` and `sampler`.
        tasks: held-out questions.
        split: name of the split.
        accelerator: processes to share the work with.

    Returns:
        accuracy/greedy with its Wilson interval, accuracy/sampled with a bootstrap interval over questions,
        response length, the counts n, skipped and unscored, and records of the first questions.

    Raises:
        RunError: no question of the split could be used.
    """
    settings = recipe.config.evaluation
    mine = shard(list(enumerate(tasks)), accelerator)
    rows: list[dict[str, Any]] = []
    for start in range(0, len(mine), settings.batch_tasks):
        batch = mine[start : start + settings.batch_tasks]
        rows += _answer_batch(recipe, batch, split, start)
    rows = sorted(merge_lists(rows, accelerator), key=lambda row: row["index"])
    if tasks and not rows:
        recipe.encode(tasks)  # raises with the cause
    metrics = _metrics(rows, len(tasks), stream_seed(recipe.config.seed, "bootstrap", split))
    records = [_record(row) for row in rows[: settings.records]]
    return Evaluation(metrics, records)


def _answer_batch(
    recipe: VlmRecipe, batch: Sequence[tuple[int, VlmTask]], split: str, start: int
) -> list[dict[str, Any]]:
    settings, config = recipe.config.evaluation, recipe.config
    usable, prompts = recipe.encode([task for _, task in batch], allow_none=True)
    if not prompts:
        return []
    index_of = {task.id: index for index, task in batch}
    rows: list[dict[str, Any]] = [
        {"index": index_of[task.id], "task": task, "prompt": prompt.text}
        for task, prompt in zip(usable, prompts, strict=True)
    ]
    modes = [("greedy", 1)] if settings.greedy else []
    modes += [("sampled", settings.samples)] if settings.samples else []
    for mode, count in modes:
        options = SamplerConfig(
            max_new_tokens=config.sampler.max_new_tokens,
            temperature=settings.temperature,
            stop=config.sampler.stop,
            batch_rows=config.sampler.batch_rows,
            lean=config.sampler.lean,
        )
        generator = make_generator(config.seed, "evaluate", split, start)
        drawn = sample(recipe.policy, prompts, count, options, generator, greedy=mode == "greedy")
        _score_responses(recipe, rows, drawn, mode, count)
    return rows


def _score_responses(recipe: VlmRecipe, rows: list[dict[str, Any]], drawn: Any, mode: str, count: int) -> None:
    from mmrl.vlm.recipe import columns_of

    repeated = [row for row in rows for _ in range(count)]
    lengths = drawn.mask.sum(1).int().tolist()
    columns = columns_of([row["task"] for row in repeated], lengths)
    result = recipe.rewards.score([row["prompt"] for row in repeated], drawn.texts, columns)
    term = recipe.config.accuracy_reward or recipe.config.rewards[-1].name
    for place, row in enumerate(rows):
        answers = range(place * count, (place + 1) * count)
        row[mode] = [result.terms[term][index] for index in answers]
        row[f"{mode}/length"] = [lengths[index] for index in answers]
        if "response" not in row:
            first = place * count
            row |= {
                "response": drawn.texts[first],
                "finish": drawn.finish[first],
                "reward": result.total[first],
                "terms": {name: values[first] for name, values in result.terms.items()},
                "correct": result.terms[term][first] == 1.0,
            }


def _metrics(rows: list[dict[str, Any]], total: int, seed: int) -> dict[str, float]:
    metrics: dict[str, float] = {"n": float(len(rows)), "skipped": float(total - len(rows))}
    unscored = 0
    for mode in ("greedy", "sampled"):
        if not rows or mode not in rows[0]:
            continue
        values = [[float(value == 1.0) for value in row[mode] if value == value] for row in rows]
        unscored += sum(len(row[mode]) for row in rows) - sum(len(answers) for answers in values)
        values = [answers for answers in values if answers]
        flat = [value for answers in values for value in answers]
        mean = float(np.mean(flat)) if flat else float("nan")
        if max((len(answers) for answers in values), default=0) == 1:
            low, high = wilson_interval(int(sum(flat)), len(flat))
        else:
            low, high = cluster_bootstrap_interval(values, np.random.default_rng(seed))
        metrics |= {f"accuracy/{mode}": mean, f"accuracy/{mode}/low": low, f"accuracy/{mode}/high": high}
        lengths = [length for row in rows for length in row[f"{mode}/length"]]
        metrics[f"response/length_{mode}"] = float(np.mean(lengths))
    return metrics | {"unscored": float(unscored)}


def _record(row: dict[str, Any]) -> SampleRecord:
    task: VlmTask = row["task"]
    return SampleRecord(
        id=task.id,
        prompt=row["prompt"],
        response=row["response"],
        answer=str(task.columns.get("answer", "")),
        images=task.load_images(),
        reward=row["reward"],
        terms=row["terms"],
        finish=row["finish"],
        correct=row["correct"],
    )
