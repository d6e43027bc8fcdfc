"""What all recipes for vision-language models share: model, questions, rewards, evaluation, reports."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL.Image import Image
from torch import Tensor

from mmrl.core.loss import Metric
from mmrl.core.rollouts import Rollouts
from mmrl.core.state import Stateful, Tally
from mmrl.errors import UserError
from mmrl.rewards import RewardResult, RewardSum, TrainerState
from mmrl.rewards.reward_config import about_rewards, readers_of
from mmrl.runs.dry_run import model_follows
from mmrl.runs.export import Exported
from mmrl.runs.records import Outcome, SampleRecord, short_digest
from mmrl.runs.run_log import LONGER, metric_label
from mmrl.runs.statistics import pass_at, with_interval
from mmrl.training.evaluation import (
    NOT_PARTS,
    Measure,
    Row,
    Trial,
    mean_scores,
    part_metric,
    parts_of_tasks,
    unscored,
)
from mmrl.training.processes import Streams, stream_seed
from mmrl.training.recipe import LossTerm, NoUsableTasksError, Step
from mmrl.training.scoring import RewardErrors, describe_failure, failure_of, scored_record
from mmrl.vlm.data.dataset import LoadedTasks, load_splits, load_tasks
from mmrl.vlm.data.prompt import Prompt, VlmPayload, token_lists
from mmrl.vlm.data.task import TaskError, VideoOptions, VlmTask, check_columns, score_texts, splits_by_key, task_images
from mmrl.vlm.engine.vlm_export import export_model
from mmrl.vlm.engine.vlm_policy import VlmPolicy, load_policy
from mmrl.vlm.engine.vlm_sampler import Samples, sample
from mmrl.vlm.router_loss import router_terms
from mmrl.vlm.vlm_config import AnswerScoring, ExtraMeasures, VlmConfig, VlmEvaluationConfig

LOGGER = logging.getLogger("mmrl")


class Skipped(Tally):
    """Number of skipped questions, by kind."""

    def note(self, error: TaskError) -> None:
        """Count a question, and log the first of each kind."""
        if not self[error.kind]:
            LOGGER.warning("question skipped (%s): %s", error.kind, error)
        self[error.kind] += 1


class Questions:
    """Hooks that change the questions of a data set and how the report shows answers; no changes by default."""

    broken_down: Sequence[str] = ()
    """Reward terms that evaluations also break down by column."""
    draw: Callable[[VlmTask, str, bool], Image] | None = None
    """Draws an answer, given whether it is right, for the report; None if answers are only text."""

    def prepare(self, loaded: LoadedTasks, *, training: bool) -> LoadedTasks:
        """Complete the questions of a data set before the model is loaded; `training` is True for `data`."""
        return loaded


class MediaQuestions(Questions):
    """Questions for methods that change images or videos: rejects data without media, with the reason `why`."""

    def __init__(self, why: str) -> None:
        self.why = why

    def prepare(self, loaded: LoadedTasks, *, training: bool) -> LoadedTasks:
        """See `Questions`; raises UserError."""
        if training and not any(task.images or task.videos for task in loaded.tasks):
            raise UserError(f"data: no question has an image or a video, {self.why}")
        return loaded


class VlmDomain:
    """Model, questions, rewards, evaluation and reports of recipes on a vision-language model."""

    config: Any
    policy: VlmPolicy
    train_tasks: Sequence[VlmTask]
    eval_tasks: Mapping[str, Sequence[VlmTask]]
    parts: dict[str, Stateful]
    added: dict[str, Any]
    terms: Sequence[LossTerm]
    supervised: ClassVar[bool]
    longest: int = 0
    """Maximum response length in tokens; 0 if none is sampled."""
    policy_class: ClassVar[type[VlmPolicy]] = VlmPolicy
    """Class of the policy."""
    draw_answers: ClassVar[Callable[..., Samples]] = staticmethod(sample)
    """Samples answers to held-out questions, with the arguments of `mmrl.vlm.engine.vlm_sampler.sample`."""

    def open(
        self,
        config: Any,
        questions: Questions,
        scoring: VlmConfig | AnswerScoring,
        *,
        value_head: bool = False,
        trains_on_rewards: bool = True,
    ) -> None:
        """Load questions, rewards and model; `scoring` configures sampling and rewards.

        Raises:
            UserError: questions, rewards or model cannot be used.
        """
        self.questions = questions
        rewards, sampler = scoring.rewards, scoring.sampler
        self.evaluation_sampler = sampler.config
        self.accuracy_term = scoring.accuracy_reward or (rewards[-1].name if rewards else "")
        self.scored_by = about_rewards(rewards)
        loaded = self.prepare_tasks(load_tasks(config.data), training=True)
        self.train_tasks = loaded.tasks
        self.eval_tasks = load_splits(config, self.prepare_tasks)
        self.skipped, self.cramped, self.errors = Skipped(loaded.skipped), Tally(), RewardErrors()
        self.added |= {"skipped": self.skipped, "cramped": self.cramped, "errors": self.errors.step}
        self.all_cut: set[str] = set()
        self.parts |= {"skipped": self.skipped, "cramped": self.cramped, "errors": self.errors}
        self.rewards = RewardSum(rewards)
        # a refusal below must close the rewards and their workers; `pop_all` keeps them open if all went well
        with ExitStack() as undone:
            undone.callback(self.rewards.close)
            scored = {"data": self.train_tasks} if trains_on_rewards else {}
            # cheap checks of the data come before the model, which can take minutes to load
            check_columns(self.rewards, scored | splits_by_key(self.eval_tasks))
            # data and rewards are checked first, so that a mistake in them does not cost loading the model
            self.check_data()
            model_follows(self)
            self.policy = load_policy(config.model, value_head=value_head, policy_class=self.policy_class)
            self.terms = router_terms(self)
            self._check_media()
            self.policy.turns.check_readers(readers_of(rewards, getattr(sampler, "stop", ())))
            if trains_on_rewards or self.eval_tasks:
                self.longest = sampler.max_new_tokens
                self.policy.check_response_length(self.longest)
            undone.pop_all()

    def check_data(self) -> None:
        """Reject questions that the method cannot use, before the model is loaded; raises UserError."""

    def _check_media(self) -> None:
        """Reject images, videos and their options if the model reads text only; raises UserError."""
        for key, tasks in ({"data": self.train_tasks} | splits_by_key(self.eval_tasks)).items():
            if (shown := next((task.id for task in tasks if task.images or task.videos), None)) is not None:
                self.policy.check_reads_media(f"{key}: {shown} has an image or a video")
        if self.config.data.video != VideoOptions():
            self.policy.check_reads_media("data.video is set")

    def prepare_tasks(self, loaded: LoadedTasks, *, training: bool) -> LoadedTasks:
        """Complete the questions of a data set; see `Questions`."""
        return self.questions.prepare(loaded, training=training)

    def score_texts(
        self,
        tasks: Sequence[VlmTask],
        prompts: Sequence[str],
        texts: Sequence[str],
        tokens: Sequence[list[int]],
        step: Step,
    ) -> RewardResult:
        """Score responses with all rewards; see `mmrl.vlm.data.task.score_texts`."""
        epoch = step.number * self.config.trainer.tasks_per_step / max(len(self.train_tasks), 1)
        state = TrainerState(step.number, step.total, epoch)
        return score_texts(self.rewards, state, tasks, prompts, texts, tokens)

    def measures(self, policy: VlmPolicy, split: str, step: Step) -> list[Measure[VlmTask]]:
        """Greedy and sampled accuracy on held-out questions; best of n and revisions if configured."""
        answers = AnswerMeasure(self, policy, split, step)
        return [answers, *self._extra_measures(answers)]

    @functools.cached_property
    def _extra_measures(self) -> ExtraMeasures:
        return self.config.evaluation.extra_measures()

    def records(self, rollouts: Rollouts, limit: int) -> list[SampleRecord]:
        """Whole groups as text, images, frames of videos, rewards and advantages."""
        payload = VlmPayload.of(rollouts)
        given: dict[str, Any] = {"reward": None} if self.supervised else {}
        found: list[SampleRecord] = []
        images_of: dict[int, list[Any]] = {}
        for row in range(min(limit, rollouts.num_rows)):
            group = int(rollouts.group[row])
            task = payload.tasks[group]
            # decoded once per group: its rows show the same images
            if group not in images_of:
                images_of[group] = task_images(task, self.policy.layout.patch_size)
            found.append(
                scored_record(
                    rollouts,
                    row,
                    id=task.id,
                    prompt=payload.prompts[group].text,
                    response=payload.texts[row],
                    answer=str(task.columns.get("answer", "")),
                    images=images_of[group],
                    finish=payload.finish[row],
                    **given,
                )
            )
        return found

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float | Metric]:
        """Questions skipped so far, prompts with too little room, and reward errors of the step."""
        found: dict[str, float | Metric] = {"data/skipped": float(sum(self.skipped.values()))}
        if self.cramped["prompts"]:
            found["response/beyond_positions"] = float(self.cramped["prompts"])
        return found | self.errors.take()

    def encode(
        self, policy: VlmPolicy, tasks: Sequence[VlmTask], *, allow_none: bool = False
    ) -> tuple[list[VlmTask], list[Prompt]]:
        """Tokenise questions with their images and videos; count and skip those that cannot be encoded.

        Raises:
            NoUsableTasksError: no question could be encoded, and `allow_none` is false.
        """
        usable, prompts = [], []
        last: TaskError | None = None
        for task in tasks:
            try:
                prompts.append(policy.encode(task))
                usable.append(task)
                self._note_room(prompts[-1], policy)
            except TaskError as error:
                last = error
                self.skipped.note(error)
        if not prompts and not allow_none:
            raise NoUsableTasksError(f"none of {len(tasks)} questions could be used; the last one: {last}")
        return usable, prompts

    def _note_room(self, prompt: Prompt, policy: VlmPolicy) -> None:
        """Count prompts that leave fewer positions than a response may need, and warn about the first."""
        wanted, left = self.longest, policy.positions - len(prompt.input_ids)
        if wanted <= left:
            return
        if not self.cramped["prompts"]:
            LOGGER.warning(
                "a prompt of %d tokens leaves %d of the model's %d positions, fewer than sampler.max_new_tokens=%d; "
                "such prompts are counted in response/beyond_positions; shorten one of the two",
                *(len(prompt.input_ids), left, policy.positions, wanted),
            )
        self.cramped["prompts"] += 1

    @classmethod
    def export(cls, config: Any, checkpoint: Path, output: Path) -> Exported:
        """Write a standard model folder with tokenizer and processor, adapters merged into the weights."""
        return export_model(config, checkpoint, output, cls.policy_class)

    def close(self) -> None:
        """End the reward workers."""
        self.rewards.close()


FOR_MEMORY = ("batch_rows", "keep_prefill")
"""Sampling options that affect answers only by rounding."""


@dataclass
class AnswerMeasure(Measure[VlmTask]):
    """Greedy and sampled accuracy.

    Draws depend only on (seed, split), so evaluations of different steps and arms are paired. Metrics:
    accuracy/greedy with a Wilson interval and accuracy/sampled with a bootstrap interval over questions, both also for
    each value of the data columns in `evaluation.by`; accuracy/pass_at_<k> for k = 2, 4, ..., 64 up to
    `evaluation.samples`; the means of the other reward terms as terms/<term>/<protocol>; the mean response lengths of
    all, correct and wrong answers; and the counts skipped and unscored.
    """

    domain: VlmDomain
    policy: VlmPolicy
    split: str
    step: Step

    def __post_init__(self) -> None:
        config, columns = self.domain.config, [task.columns for task in self.domain.eval_tasks[self.split]]
        self.evaluation: VlmEvaluationConfig = config.evaluation
        self.seed: int = config.seed
        self.sampling = self.domain.evaluation_sampler.whole(self.evaluation.temperature)
        given = (getattr(config, key, "") for key in ("target_key", "chosen_key", "rejected_key"))
        self.parts = parts_of_tasks(columns, self.evaluation.by, {*NOT_PARTS, *given})
        """For each question of the split, its values in the breakdown columns."""

    @property
    def batch_size(self) -> int:
        """Number of questions answered together."""
        return self.evaluation.batch_tasks

    def run(self, batch: Sequence[Trial[VlmTask]], start: int) -> list[Row]:
        """Answer questions in both modes, skipping those that cannot be encoded."""
        rows, prompts = self.open_rows(self.policy, batch)
        for mode, count in self._modes() if rows else ():
            draws = None if mode == "greedy" else self.draws(rows, count, "evaluate")
            drawn = self.domain.draw_answers(self.policy, prompts, count, self.sampling, draws)
            self._score(rows, drawn, mode, count)
        return rows

    def draws(self, rows: Sequence[Row], count: int, purpose: str) -> Tensor:
        """Uniform draws (B * count, sampling.draws) for the answers to B questions, by seed, split and question."""
        # no step in the seed: each evaluation draws the same numbers for a question, so differences are paired
        streams = Streams(stream_seed(self.seed, purpose, self.split), [row["index"] for row in rows])
        return streams.uniform(len(rows), count, self.sampling.draws)

    def open_rows(self, policy: VlmPolicy, batch: Sequence[Trial[VlmTask]]) -> tuple[list[Row], list[Prompt]]:
        """A row and a prompt for each question that can be encoded."""
        tasks, prompts = self.domain.encode(policy, [trial.task for trial in batch], allow_none=True)
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
            self.domain.encode(self.policy, tasks)  # raises with the cause
        metrics = {"skipped": float(len(tasks) - len(rows))}
        for name in rows[0]["scores"] if rows else ():
            metrics |= self._mean(name, rows, name)
        for mode, _ in self._modes() if rows else ():
            lengths = [length for row in rows for length in row[f"{mode}/length"]]
            metrics[f"response/length_{mode}"] = float(np.mean(lengths))
            metrics |= self._lengths_by_outcome(rows, mode)
        self._warn_of_cuts(rows)
        metrics["unscored"] = float(sum(unscored([row["scores"][name]]) for row in rows for name in self._accuracies()))
        terms = [_term_metric(term, mode) for term in self.domain.questions.broken_down for mode, _ in self._modes()]
        for column, value, part in self._parts_of(rows):
            metrics[part_metric("n", column, value)] = float(len(part))
            for name in (*self._accuracies(), *terms):
                metrics |= self._mean(part_metric(name, column, value), part, name)
        return metrics

    def outcome(self, row: Row) -> Outcome:
        """The mean scores of a question's answers."""
        return Outcome(row["task"].id, mean_scores(row["scores"]), dict(self.parts[row["index"]]))

    def about(self) -> Row:
        """How answers are sampled, and which reward decides whether they are correct."""
        sampling = {name: value for name, value in vars(self.sampling).items() if name not in FOR_MEMORY}
        return {
            "horizon": self.sampling.max_new_tokens,
            "decodings": dict(self._modes()),
            "bootstrap": stream_seed(self.seed, "bootstrap", self.split),
            "sampling": sampling,
            "right": self.domain.accuracy_term,
            "rewards": self.domain.scored_by,
        }

    def entries(self, row: Row) -> list[Row]:
        """The answers to a question; `success` is None if an answer could not be scored."""
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
        """Reason why no answer could be scored; empty if one could."""
        return describe_failure(rows, self.split)

    def record(self, row: Row) -> SampleRecord:
        """The first answer to a question."""
        task: VlmTask = row["task"]
        draw = self.domain.questions.draw
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
        """A row's question and an answer to it, as a sample for the report."""
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
            if rows and all(row[f"{mode}/cut"] for row in rows) and self.split not in self.domain.all_cut:
                self.domain.all_cut.add(self.split)
                length = self.sampling.max_new_tokens
                LOGGER.warning("%s: every %s answer was cut at %d tokens; %s", self.split, mode, length, LONGER)

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

    def score(
        self, tasks: Sequence[VlmTask], prompts: Sequence[str], texts: Sequence[str], tokens: Sequence[list[int]]
    ) -> RewardResult:
        """Score answers with all rewards; the first failure of each kind is logged."""
        result = self.domain.score_texts(tasks, prompts, texts, tokens, self.step)
        self.domain.errors.warn(result)
        return result

    def _score(self, rows: list[Row], drawn: Samples, mode: str, count: int) -> None:
        """Add the scores and lengths of `count` answers to each row, and the first answer of the first mode."""
        # rows of `drawn` are question by question
        repeated = [row for row in rows for _ in range(count)]
        lengths = drawn.mask.sum(1).int().tolist()
        tokens = token_lists(drawn.response_ids, drawn.mask)
        result = self.score([row["task"] for row in repeated], [row["prompt"] for row in repeated], drawn.texts, tokens)
        failure = failure_of(result)
        for index, row in enumerate(rows):
            first, stop = index * count, (index + 1) * count
            row["scores"].update(self._scores(result.terms, mode, slice(first, stop)))
            row[f"{mode}/length"] = lengths[first:stop]
            row[f"{mode}/cut"] = all(finish == "length" for finish in drawn.finish[first:stop])
            row[f"{mode}/rewards"], row[f"{mode}/endings"] = list(result.total[first:stop]), drawn.finish[first:stop]
            row[f"{mode}/outputs"] = [short_digest(text.encode()) for text in drawn.texts[first:stop]]
            # a failure stays only if every mode failed: one scored answer is enough for the split
            row["failure"] = failure and row.get("failure", failure)
            if "response" not in row:
                row |= self._first_answer(drawn, result.total[first], result.terms, first)

    def right(self, terms: Mapping[str, Sequence[float]]) -> list[float]:
        """1 for each correct answer, 0 for each wrong one, NaN if it could not be scored."""
        return [value if value != value else float(value == 1.0) for value in terms[self.domain.accuracy_term]]

    def _scores(self, terms: Mapping[str, Sequence[float]], mode: str, own: slice) -> dict[str, list[float]]:
        """Scores of the answers to one question by metric; the accuracy comes first."""
        right = self.right(terms)[own]
        others = {
            _term_metric(name, mode): list(values[own])
            for name, values in terms.items()
            if name != self.domain.accuracy_term
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
            "correct": terms[self.domain.accuracy_term][index] == 1.0,
        }


def _term_metric(term: str, mode: str) -> str:
    return f"terms/{metric_label(term)}/{mode}"
