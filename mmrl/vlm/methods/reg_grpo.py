"""Reg-GRPO with difficulty-aware augmentation (DeepVideo-R1, arXiv 2506.07464), for images and videos.

The objective `reg_grpo` regresses the standardised advantages of a group on its standardised sequence log-ratios, with
a KL to the reference and without a clip (`mmrl.core.blocks.clip`). Several updates of the same rollouts
(`trainer.epochs`) are what it is made for.

How hard a question is: the mean reward of the last `window` samples less that of the question. A hard question is asked
with a hint: several traces are sampled with the answer in the question, and the beginning of the best one, longer the
harder the question is, goes into the question or at the start of the answer. An easy question is shown with
Gaussian noise on its images or on the frames of its videos. Training is on the question as it was asked: the prompt of
the group, with hint and noise, is computed once for its samples and for the reference too. Evaluations ask every
question as it is.

Where the paper is silent: it does not print the two scales and their limits, nor the deviation's epsilon; here they are
options. Its code was not available. A question's own mean is that of its last group, hint and noise included
(`measure: history`, which fades the help as the question succeeds, and needs questions that come back), or that of
samples drawn first (`measure: probe`). A hint is only given where the best trace earns more than the question does.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerate.utils import gather_object

from mmrl.core.loss import Metric
from mmrl.core.rollouts import Rollouts
from mmrl.core.state import DifficultyTracker
from mmrl.errors import UserError
from mmrl.runs.run_log import stopwatch
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams, merge_in_order
from mmrl.training.recipe import RolloutStage, Step
from mmrl.vlm.data.prompt import Prompt, VlmPayload, token_lists
from mmrl.vlm.data.task import TaskError, VlmTask
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import sample
from mmrl.vlm.methods.augmentation import (
    AugmentationSettings,
    AugmentedTask,
    augment_task,
    partial_trace,
    reasoning_of,
    rewrite_question,
)
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import MediaQuestions, VlmRecipe

LOGGER = logging.getLogger("mmrl")


@dataclass
class RegGrpoConfig(VlmConfig):
    """A Reg-GRPO run."""

    augmentation: AugmentationSettings = field(default_factory=AugmentationSettings)
    """Difficulty-aware augmentation; works with any objective."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="reg_grpo"))
    """Objective that is optimised."""


class Augmentation(RolloutStage):
    """Makes hard questions easier by hints and easy ones harder by noise."""

    name = "difficulty"

    def __init__(self, recipe: VlmRecipe, settings: AugmentationSettings) -> None:
        self.recipe, self.settings = recipe, settings
        self.tracker = DifficultyTracker(settings.window)
        self._noted_rewards: list[tuple[tuple[int, int], tuple[str, list[float]]]] = []
        """Rewards of questions, each with the number of its draw and its position in it."""
        self._drawn: Counter[str] = Counter()
        self.added = {"rewards": self._noted_rewards, "drawn": self._drawn}
        # the hardest questions of a step are chosen among all
        self.rolls_apart = not (settings.enabled and settings.max_hinted)

    def before(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> list[VlmTask]:
        """Questions of a step with their hints and noise."""
        settings = self.settings
        if not settings.enabled:
            return list(tasks)
        # hard questions get hints, easy ones noise
        difficulty = self._difficulties(policy, tasks, streams, step)
        starts = self._hints(policy, tasks, difficulty, streams, step)
        # one seed a question, so that its samples see the same noise
        seeds = streams.seeds(len(tasks), 1, purpose="noise").tolist()
        asked: list[VlmTask] = []
        for place, (task, hard) in enumerate(zip(tasks, difficulty, strict=True)):
            sigma = settings.noise_sigma(hard) if task.images or task.videos else 0.0
            if place in starts:
                asked.append(self._hinted(task, starts[place], settings.hint_fraction(hard)))
            elif sigma > 0:
                asked.append(augment_task(task, noise_sigma=sigma, noise_seed=seeds[place]))
            else:
                asked.append(task)
        return asked

    def scored(self, policy: VlmPolicy, rollouts: Rollouts, streams: Streams, step: Step) -> Rollouts:
        """Record the rewards of each question, for its difficulty."""
        if self.settings.measure == "history":
            tasks = VlmPayload.of(rollouts).tasks
            rewards: list[list[float]] = [[] for _ in tasks]
            for group, reward in zip(rollouts.group.tolist(), rollouts.reward.tolist(), strict=True):
                rewards[group].append(reward)
            for place, task, own in zip(streams.places, tasks, rewards, strict=True):
                self._noted_rewards.append(((streams.draw, place), (task.id, own)))
        return rollouts

    def on_step_end(self, step: Step) -> None:
        """Update the difficulties by the rewards of all processes."""
        for key, rewards in merge_in_order(self._noted_rewards):
            self.tracker.note(key, rewards)
        self._noted_rewards.clear()

    def metrics(self, rollouts: Rollouts, step: Step) -> dict[str, float | Metric]:
        """How many questions of the step were changed, and by how much."""
        tasks = VlmPayload.of(rollouts).tasks
        changed = [task for task in tasks if isinstance(task, AugmentedTask)]
        hints = [task.hint_fraction for task in changed if task.hint_fraction]
        noise = [task.noise_sigma for task in changed if task.noise_sigma]
        recent, drawn = self.tracker.recent, Counter(self._drawn)
        self._drawn.clear()
        found: dict[str, float | Metric] = {} if not recent else {"augment/window_mean": sum(recent) / len(recent)}
        return found | {
            "augment/hinted": Metric(float(len(hints)), len(tasks)),
            "augment/noised": Metric(float(len(noise)), len(tasks)),
            "augment/hint_fraction_mean": Metric(sum(hints), float(len(hints))),
            "augment/sigma_mean": Metric(sum(noise), float(len(noise))),
            "augment/traces": float(drawn["traces"]),
            "augment/probes": float(drawn["probes"]),
            "augment/traces_unused": float(drawn["unused"]),
        }

    def state_dict(self) -> dict[str, Any]:
        """The difficulties."""
        return self.tracker.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.tracker.load_state_dict(state)

    def formula(self) -> str:
        """The changes of questions."""
        settings, lines = self.settings, list[str]()
        if settings.enabled:
            lines += [f"difficulty D = mean reward of the last {settings.window} samples - that of the question:"]
        if settings.hint_scale:
            lines += [f"     first clip({settings.hint_scale:g} D, 0, {settings.hint_max:g}) of a trace as a hint"]
        if settings.noise_scale:
            lines += [f"     noise of deviation clip(-{settings.noise_scale:g} D, 0, {settings.noise_max:g}) on images"]
        return "\n".join(lines)

    def check_data(self, tasks: Sequence[VlmTask]) -> None:
        """Reject hints without answers, and warn if no question can occur again."""
        settings, trainer = self.settings, self.recipe.config.trainer
        if settings.hint_scale:
            without = next((task for task in tasks if not _answer_of(task)), None)
            if without is not None:
                raise UserError(
                    f"data: {without.id} has no answer, but sampling traces for hints needs one; set the column with "
                    "data.answer_key or set augmentation.hint_scale=0"
                )
        drawn = trainer.steps * trainer.tasks_per_step
        if settings.enabled and settings.measure == "history" and drawn <= len(tasks):
            LOGGER.warning(
                "augmentation.measure is history, but this run draws only %d questions from a dataset of %d, so no "
                "question occurs twice and none is changed; use measure: probe, more steps or fewer questions",
                drawn,
                len(tasks),
            )

    def _difficulties(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> list[float]:
        """Difficulty of each question."""
        settings = self.settings
        if settings.measure == "history":
            return [self.tracker.difficulty(task.id) for task in tasks]
        drawn = self._sampled(policy, list(tasks), settings.probe_samples, streams, "probe", step)
        found = [0.0] * len(tasks)
        for place, (_, rewards) in drawn.items():
            self._drawn["probes"] += len(rewards)
            self._noted_rewards.append(((streams.draw, streams.places[place]), (tasks[place].id, rewards)))
            # an unscored sample says nothing about how hard the question is
            scored = [reward for reward in rewards if math.isfinite(reward)]
            if scored:
                found[place] = self.tracker.difference(sum(scored) / len(scored))
        return found

    def _hints(
        self,
        policy: VlmPolicy,
        tasks: Sequence[VlmTask],
        difficulty: Sequence[float],
        streams: Streams,
        step: Step,
    ) -> Mapping[int, str]:
        """Beginnings of traces by the place of their question."""
        settings = self.settings
        hard = [place for place, value in enumerate(difficulty) if settings.hint_fraction(value) > 0]
        if settings.max_hinted:  # of all processes
            ranked = [(-difficulty[place], streams.places[place]) for place in hard]
            # ties in difficulty are broken by place, the same on every process
            chosen = {place for _, place in sorted(gather_object(ranked))[: settings.max_hinted]}
            hard = [place for place in hard if streams.places[place] in chosen]
        if not hard:
            return {}
        with_answer = [
            augment_task(task, messages=rewrite_question(task, settings.answer_template, answer=_answer_of(task)))
            for task in (tasks[place] for place in hard)
        ]
        found: dict[int, str] = {}
        window = self.tracker.difference(0.0)
        traces = self._sampled(policy, with_answer, settings.traces, streams.select(hard), "trace", step)
        # by number of the question among the hard ones
        for number, (texts, rewards) in traces.items():
            place = hard[number]
            self._drawn["traces"] += len(texts)
            hint = self._best_start(policy, texts, rewards, window - difficulty[place], difficulty[place])
            if hint:
                found[place] = hint
            else:
                self._drawn["unused"] += len(texts)
        return found

    def _best_start(
        self, policy: VlmPolicy, texts: Sequence[str], rewards: Sequence[float], usual: float, difficulty: float
    ) -> str:
        """Beginning of the best trace; empty if none earns more than the question usually does."""
        settings = self.settings
        best = max(range(len(texts)), key=lambda index: rewards[index] if math.isfinite(rewards[index]) else -math.inf)
        # a hint that is no better than the policy's own answers would only give the answer away
        if not rewards[best] > usual:
            return ""
        trace = reasoning_of(texts[best], settings.think_start, settings.think_end)
        return partial_trace(trace, settings.hint_fraction(difficulty), policy.processor.tokenizer)

    def _hinted(self, task: VlmTask, hint: str, fraction: float) -> AugmentedTask:
        settings = self.settings
        if settings.hint_place == "answer":
            return augment_task(task, given_start=settings.think_start + hint, hint_fraction=fraction)
        messages = rewrite_question(task, settings.hint_template, hint=hint)
        return augment_task(task, messages=messages, hint_fraction=fraction)

    def _sampled(
        self,
        policy: VlmPolicy,
        tasks: Sequence[VlmTask],
        count: int,
        streams: Streams,
        purpose: str,
        step: Step,
    ) -> dict[int, tuple[list[str], list[float]]]:
        """Responses to questions that are not trained on, and their rewards, by the place of their question.

        Questions that cannot be encoded are left out here; the rollout of the step counts them.
        """
        prompts: dict[int, Prompt] = {}
        with stopwatch("encode"):
            for place, task in enumerate(tasks):
                try:
                    prompts[place] = policy.encode(task)
                except TaskError:
                    continue
        if not prompts:
            return {}
        size = (count, self.recipe.config.sampler.max_new_tokens)
        draws = streams.select(list(prompts)).uniform(len(prompts), *size, purpose=purpose)
        drawn = sample(policy, list(prompts.values()), count, self.recipe.config.sampler, draws)
        repeated = [place for place in prompts for _ in range(count)]
        result = self.recipe.score_texts(
            [tasks[place] for place in repeated],
            drawn.texts,
            token_lists(drawn.response_ids, drawn.mask),
            step,
        )
        self.recipe.errors.warn(result)
        self.recipe.extra_samples += len(repeated)
        parts = {place: slice(number * count, (number + 1) * count) for number, place in enumerate(prompts)}
        return {place: (drawn.texts[part], list(result.total[part])) for place, part in parts.items()}


class RegGrpoRecipe(VlmRecipe):
    """Reg-GRPO, or another objective, on questions that are made easier or harder depending on their rewards."""

    config: RegGrpoConfig

    def __init__(self, config: RegGrpoConfig) -> None:
        noise = "so there is nothing to add noise to; set augmentation.noise_scale=0"
        super().__init__(config, MediaQuestions(noise) if config.augmentation.noise_scale else None)

    def make_stages(self) -> list[RolloutStage]:
        """Augmentation."""
        return [Augmentation(self, self.config.augmentation)]


def _answer_of(task: VlmTask) -> str:
    """The right answer as text, the first one if several are right; empty without one."""
    answer = task.columns.get("answer")
    if isinstance(answer, list | tuple):
        answer = next(iter(answer), None)
    return "" if answer is None else str(answer)
