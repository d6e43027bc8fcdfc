"""Held-out accuracy of best of n with the model as its own critic, and of n answers without a critic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmrl.training.loop.evaluation import Measure, Row, Trial, with_interval
from mmrl.training.loop.seeds import make_generator, stream_seed
from mmrl.training.record.outcomes import Outcome
from mmrl.training.record.samples import SampleRecord
from mmrl.vlm.critic.self_critic import Choice, SelfCriticConfig, best_of_n
from mmrl.vlm.evaluation import AnswerMeasure
from mmrl.vlm.payload import token_lists
from mmrl.vlm.pictures import task_images
from mmrl.vlm.sampler import sample
from mmrl.vlm.task import VlmTask


@dataclass
class SelfCriticMeasure(Measure[VlmTask]):
    """Accuracy of the answer that the model itself chooses among n.

    The metrics are accuracy/self_critic, accuracy/majority, accuracy/pass_at_1 (the mean of the n) and
    accuracy/pass_at_n (any of them is right) with bootstrap intervals over questions, and those of `judgement_metrics`.
    All four are of the same answers, whose draws follow from (seed, split) alone.
    """

    answers: AnswerMeasure
    """Model, scores and draws."""
    config: SelfCriticConfig

    @property
    def batch_size(self) -> int:
        """Questions that are answered together."""
        return self.answers.batch_size

    def run(self, batch: Sequence[Trial[VlmTask]], start: int) -> list[Row]:
        """Draw n answers to each question and have the model choose; questions that cannot be encoded are left out."""
        own, count = self.answers, self.config.n
        tasks, prompts = own.encode(own.policy, [trial.task for trial in batch], allow_none=True)
        if not prompts:
            return []
        generator = make_generator(own.seed, "self_critic", own.split, start)
        drawn = sample(own.policy, prompts, count, own.sampling(), generator)
        tokens = token_lists(drawn.response_ids, drawn.mask)
        repeated = [(task, prompt.text) for task, prompt in zip(tasks, prompts, strict=True) for _ in range(count)]
        scored = own.score([task for task, _ in repeated], [text for _, text in repeated], drawn.texts, tokens)
        own.errors.warn(scored)
        right = own.right(scored.terms)
        groups = [slice(n * count, (n + 1) * count) for n in range(len(tasks))]
        choices = best_of_n(own.policy, tasks, [drawn.texts[part] for part in groups], self.config, own.sampling())
        index_of = {trial.task.id: trial.index for trial in batch}
        return [
            {
                "index": index_of[task.id],
                "repeat": 0,
                "task": task,
                "prompt": prompt.text,
                "response": drawn.texts[part][chosen.chosen],
                "choice": chosen,
                "scores": _scores(right[part], chosen),
            }
            for task, prompt, part, chosen in zip(tasks, prompts, groups, choices, strict=True)
        ]

    def metrics(self, rows: Sequence[Row], tasks: Sequence[VlmTask]) -> dict[str, float]:
        """Accuracies with intervals, and statistics of the judgements."""
        metrics: dict[str, float] = {}
        for name in rows[0]["scores"] if rows else ():
            rng = np.random.default_rng(stream_seed(self.answers.seed, "bootstrap", self.answers.split))
            metrics |= with_interval(name, [row["scores"][name] for row in rows], rng)
        return metrics | judgement_metrics([row["choice"] for row in rows])

    def outcome(self, row: Row) -> Outcome:
        """Whether the chosen answer is right, and the others of the same draw."""
        known = {name: [value for value in values if value == value] for name, values in row["scores"].items()}
        return Outcome(row["task"].id, {name: float(np.mean(values)) for name, values in known.items() if values})

    def record(self, row: Row) -> SampleRecord:
        """The chosen answer."""
        task: VlmTask = row["task"]
        return SampleRecord(
            id=task.id,
            prompt=row["prompt"],
            response=row["response"],
            answer=str(task.columns.get("answer", "")),
            images=task_images(task, self.answers.policy.layout.patch_size),
            correct=row["scores"]["accuracy/self_critic"] == [1.0],
        )


def judgement_metrics(choices: Sequence[Choice]) -> dict[str, float]:
    """Statistics of the judgements behind some choices."""
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
    known = [value for value in right if value == value]
    return {
        "accuracy/self_critic": [right[chosen.chosen]],
        "accuracy/majority": [right[chosen.majority]],
        "accuracy/pass_at_1": list(right),
        "accuracy/pass_at_n": [max(known)] if known else [float("nan")],
    }
