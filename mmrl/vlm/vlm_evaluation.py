"""Evaluation of responses to held-out questions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL.Image import Image
from torch import Tensor

from mmrl.rewards import RewardResult
from mmrl.runs.records import Outcome, SampleRecord, short_digest
from mmrl.runs.run_log import LONGER, metric_label
from mmrl.runs.statistics import pass_at, with_interval
from mmrl.training.evaluation import Measure, Row, Trial, mean_scores, part_metric, unscored
from mmrl.training.processes import Streams, stream_seed
from mmrl.training.scoring import describe_failure, failure_of
from mmrl.vlm.data.prompt import Prompt, token_lists
from mmrl.vlm.data.task import VlmTask, task_images
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig, Samples
from mmrl.vlm.vlm_config import VlmEvaluationConfig

LOGGER = logging.getLogger("mmrl")
FOR_MEMORY = ("batch_rows", "keep_prefill")
"""Sampling options that affect responses only through rounding."""


@dataclass
class AnswerMeasure(Measure[VlmTask]):
    """Greedy and sampled accuracy.

    Draws depend only on (seed, split), so evaluations of different steps and arms are paired. Metrics:
    accuracy/greedy with a Wilson interval and accuracy/sampled with a bootstrap interval over questions, both also for
    each value of the data columns in `evaluation.by`; accuracy/pass_at_<k> for k = 2, 4, ..., 64 up to
    `evaluation.samples`; the means of the other reward terms as terms/<term>/<protocol>; the mean response lengths of
    all, correct and wrong answers; and the counts skipped and unscored.
    """

    policy: VlmPolicy
    split: str
    evaluation: VlmEvaluationConfig
    seed: int
    sampling: SamplerConfig
    """How responses are sampled, in addition to greedy decoding."""
    parts: Sequence[Mapping[str, str]]
    """For each question of the split, its values in the breakdown columns."""
    encode: Callable[..., tuple[list[VlmTask], list[Prompt]]]
    """`VlmDomain.encode`."""
    draw: Callable[..., Samples]
    """Samples responses, with the arguments of `mmrl.vlm.engine.vlm_sampler.sample`."""
    score: Callable[[Sequence[VlmTask], Sequence[str], Sequence[list[int]]], RewardResult]
    """Scores responses with all rewards, from questions, texts and tokens."""
    accuracy_term: str
    """The reward that decides whether a response is correct."""
    scored_by: Any
    """Description of all rewards, for the ledger."""
    broken_down: Sequence[str]
    """Additional rewards that are also broken down."""
    draw_answer: Callable[[VlmTask, str, bool], Image] | None
    """Draws a response, given whether it is correct, for the report."""
    cut_splits: set[str]
    """Splits of the run for which `LONGER` was logged."""

    @property
    def batch_size(self) -> int:
        """Number of questions answered together."""
        return self.evaluation.batch_tasks

    def run(self, batch: Sequence[Trial[VlmTask]], start: int) -> list[Row]:
        """Answer questions in both modes, skipping those that cannot be encoded."""
        rows, prompts = self.open_rows(self.policy, batch)
        for mode, count in self._modes() if rows else ():
            draws = None if mode == "greedy" else self.draws(rows, count, "evaluate")
            drawn = self.draw(self.policy, prompts, count, self.sampling, draws)
            self._score(rows, drawn, mode, count)
        return rows

    def draws(self, rows: Sequence[Row], count: int, purpose: str) -> Tensor:
        """Uniform draws (B * count, sampling.draws) for the responses to B questions, by seed, split and question."""
        # no step in the seed: each evaluation draws the same numbers for a question, so differences are paired
        streams = Streams(stream_seed(self.seed, purpose, self.split), [row["index"] for row in rows])
        return streams.uniform(len(rows), count, self.sampling.draws)

    def open_rows(self, policy: VlmPolicy, batch: Sequence[Trial[VlmTask]]) -> tuple[list[Row], list[Prompt]]:
        """A row and a prompt for each question that can be encoded."""
        tasks, prompts = self.encode(policy, [trial.task for trial in batch], allow_none=True)
        # by id, because encoding drops questions and so shifts their places
        index_of = {trial.task.id: trial.index for trial in batch}
        rows: list[Row] = [
            {"index": index_of[task.id], "repeat": 0, "task": task, "prompt": prompt.text, "scores": {}}
            for task, prompt in zip(tasks, prompts, strict=True)
        ]
        return rows, prompts

    def metrics(self, rows: Sequence[Row], tasks: Sequence[VlmTask]) -> dict[str, float]:
        """Accuracies with intervals, response lengths and counts; raises RunError if no question was usable."""
        if tasks and not rows:
            self.encode(self.policy, tasks)  # raises with the cause
        metrics = {"skipped": float(len(tasks) - len(rows))}
        for name in rows[0]["scores"] if rows else ():
            metrics |= self._mean(name, rows, name)
        for mode, _ in self._modes() if rows else ():
            lengths = [length for row in rows for length in row[f"{mode}/length"]]
            metrics[f"response/length_{mode}"] = float(np.mean(lengths))
            metrics |= self._lengths_by_outcome(rows, mode)
        self._warn_of_cuts(rows)
        metrics["unscored"] = float(sum(unscored([row["scores"][name]]) for row in rows for name in self._accuracies()))
        terms = [_term_metric(term, mode) for term in self.broken_down for mode, _ in self._modes()]
        for column, value, part in self._parts_of(rows):
            metrics[part_metric("n", column, value)] = float(len(part))
            for name in (*self._accuracies(), *terms):
                metrics |= self._mean(part_metric(name, column, value), part, name)
        return metrics

    def outcome(self, row: Row) -> Outcome:
        """The mean scores of a question's responses."""
        return Outcome(row["task"].id, mean_scores(row["scores"]), dict(self.parts[row["index"]]))

    def about(self) -> Row:
        """How responses are sampled, and which reward decides whether they are correct."""
        sampling = {name: value for name, value in vars(self.sampling).items() if name not in FOR_MEMORY}
        return {
            "horizon": self.sampling.max_new_tokens,
            "decodings": dict(self._modes()),
            "bootstrap": stream_seed(self.seed, "bootstrap", self.split),
            "sampling": sampling,
            "right": self.accuracy_term,
            "rewards": self.scored_by,
        }

    def entries(self, row: Row) -> list[Row]:
        """The responses to a question; `success` is None if a response could not be scored."""
        return [
            {
                "decoding": mode,
                "answer": number,
                "state": row["task"].id,
                "success": None if (right := row["scores"][f"accuracy/{mode}"][number]) != right else right == 1.0,
                "return": row[f"{mode}/rewards"][number],
                "length": row[f"{mode}/length"][number],
                "ending": row[f"{mode}/endings"][number],
                "output": row[f"{mode}/outputs"][number],
                "prompt": row["prompt"],
                "text": row[f"{mode}/texts"][number],
                "scores": {
                    name: values[number]
                    for name, values in row["scores"].items()
                    if name.endswith(f"/{mode}") or (not number and mode == "sampled" and "/pass_at_" in name)
                },
                "parts": dict(self.parts[row["index"]]),
            }
            for mode, count in self._modes()
            for number in range(count)
        ]

    def failure(self, rows: Sequence[Row]) -> str:
        """Reason why no response could be scored; empty if one could."""
        return describe_failure(rows, self.split)

    def record(self, row: Row) -> SampleRecord:
        """The first response to a question."""
        task: VlmTask = row["task"]
        draw = self.draw_answer
        return self.sample_record(
            row,
            response=row["response"],
            outputs=[] if draw is None else [draw(task, row["response"], row["correct"])],
            reward=row["reward"],
            terms=row["terms"],
            finish=row["finish"],
            correct=row["correct"],
        )

    def sample_record(self, row: Row, **answer: Any) -> SampleRecord:
        """A row's question and a response to it, as a sample for the report."""
        task: VlmTask = row["task"]
        images = task_images(task, self.policy.layout.patch_size)
        right = str(task.columns.get("answer", ""))
        return SampleRecord(id=task.id, prompt=row["prompt"], answer=right, images=images, **answer)

    def _modes(self) -> list[tuple[str, int]]:
        modes = [("greedy", int(self.evaluation.greedy)), ("sampled", self.evaluation.samples)]
        return [(mode, count) for mode, count in modes if count]

    def _warn_of_cuts(self, rows: Sequence[Row]) -> None:
        """Warn once per split if every answer of a mode was cut off."""
        for mode, _ in self._modes():
            if rows and all(row[f"{mode}/cut"] for row in rows) and self.split not in self.cut_splits:
                self.cut_splits.add(self.split)
                length = self.sampling.max_new_tokens
                LOGGER.warning("%s: all %s responses hit the limit of %d tokens; %s", self.split, mode, length, LONGER)

    def _accuracies(self) -> list[str]:
        return [f"accuracy/{mode}" for mode, _ in self._modes()]

    def _parts_of(self, rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
        """Column, value and rows of each part."""
        values: dict[str, set[str]] = {}
        for parts in self.parts:
            for column, value in parts.items():
                values.setdefault(column, set()).add(value)
        for column, found in values.items():
            for value in sorted(found):
                yield column, value, [row for row in rows if self.parts[row["index"]].get(column) == value]

    def _mean(self, metric: str, rows: Sequence[Row], name: str) -> dict[str, float]:
        """Mean of the scores of some rows with its interval: Wilson's for proportions with one answer per question."""
        # several answers to one question are correlated, which Wilson's interval ignores; the bootstrap over questions
        # does not. NaN (unscored) is the value that differs from itself
        scores = [row["scores"][name] for row in rows]
        # value == value is False for NaN: unscored answers do not count
        values = {value for task in scores for value in task if value == value}
        once = all(sum(value == value for value in task) <= 1 for task in scores) and values <= {0.0, 1.0}
        seed = stream_seed(self.seed, "bootstrap", self.split)
        return with_interval(metric, scores, None if once else np.random.default_rng(seed))

    def _lengths_by_outcome(self, rows: Sequence[Row], mode: str) -> dict[str, float]:
        """Mean lengths of correct and of wrong answers, if there are any."""
        scored = [
            pair for row in rows for pair in zip(row[f"{mode}/length"], row["scores"][f"accuracy/{mode}"], strict=True)
        ]
        found = {
            outcome: [length for length, score in scored if score == value]
            for outcome, value in (("right", 1.0), ("wrong", 0.0))
        }
        return {f"response/length_{mode}_{outcome}": float(np.mean(part)) for outcome, part in found.items() if part}

    def _score(self, rows: list[Row], drawn: Samples, mode: str, count: int) -> None:
        """Add the scores and lengths of `count` answers to each row, and the first answer of the first mode."""
        # rows of `drawn` are question by question
        repeated = [row for row in rows for _ in range(count)]
        lengths = drawn.mask.sum(1).int().tolist()
        tokens = token_lists(drawn.response_ids, drawn.mask)
        result = self.score([row["task"] for row in repeated], drawn.texts, tokens)
        failure = failure_of(result)
        for index, row in enumerate(rows):
            first, stop = index * count, (index + 1) * count
            row["scores"].update(self._scores(result.terms, mode, slice(first, stop)))
            row[f"{mode}/length"] = lengths[first:stop]
            row[f"{mode}/cut"] = all(finish == "length" for finish in drawn.finish[first:stop])
            row[f"{mode}/rewards"], row[f"{mode}/endings"] = list(result.total[first:stop]), drawn.finish[first:stop]
            row[f"{mode}/texts"] = list(drawn.texts[first:stop])
            row[f"{mode}/outputs"] = [short_digest(text.encode()) for text in drawn.texts[first:stop]]
            # a failure stays only if every mode failed: one scored answer is enough for the split
            row["failure"] = failure and row.get("failure", failure)
            if "response" not in row:
                row |= self._first_answer(drawn, result.total[first], result.terms, first)

    def right(self, terms: Mapping[str, Sequence[float]]) -> list[float]:
        """1 for each correct response, 0 for each incorrect one, NaN if it could not be scored."""
        return [value if value != value else float(value == 1.0) for value in terms[self.accuracy_term]]

    def _scores(self, terms: Mapping[str, Sequence[float]], mode: str, own: slice) -> dict[str, list[float]]:
        """Scores of the answers to one question by metric; the accuracy comes first."""
        right = self.right(terms)[own]
        others = {
            _term_metric(name, mode): list(values[own]) for name, values in terms.items() if name != self.accuracy_term
        }
        chances = pass_at(right) if mode == "sampled" else {}
        passes = {f"accuracy/pass_at_{k}": [chance] for k, chance in chances.items()}
        return {f"accuracy/{mode}": right, **passes, **others}

    def _first_answer(self, drawn: Samples, reward: float, terms: Any, index: int) -> Row:
        return {
            "response": drawn.texts[index],
            "finish": drawn.finish[index],
            "reward": reward,
            "terms": {name: values[index] for name, values in terms.items()},
            "correct": terms[self.accuracy_term][index] == 1.0,
        }


def _term_metric(term: str, mode: str) -> str:
    return f"terms/{metric_label(term)}/{mode}"
