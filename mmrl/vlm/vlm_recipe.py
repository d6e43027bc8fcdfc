"""Group-based RL of a vision-language model with any objective, and what all recipes for these models share.

`VlmDomain` has model, questions, rewards, evaluation and reports. Each step of `VlmRecipe` samples G responses per
question with the prompt prefilled once, scores them with verifiable rewards, estimates advantages within each group,
and updates the policy with the objective's loss.
"""

from __future__ import annotations

import bisect
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from PIL.Image import Image
from torch import Tensor, nn

from mmrl.core.blocks.baselines import GREEDY_REWARD
from mmrl.core.loss import Metric, mean_metric
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.payload import to_device
from mmrl.core.rollouts import ANSWER, TOKENS, Rollouts
from mmrl.core.state import AdaptiveKL, Stateful, Tally
from mmrl.errors import UserError
from mmrl.rewards import RewardResult, RewardSum
from mmrl.rewards.answers import Chat, number_answers
from mmrl.rewards.reward_config import about_rewards, readers_of
from mmrl.runs.dry_run import model_follows
from mmrl.runs.export import Exported
from mmrl.runs.run_log import stopwatch
from mmrl.training.evaluation import NOT_PARTS, Measure, parts_of_tasks
from mmrl.training.processes import Streams
from mmrl.training.recipe import (
    LossTerm,
    NoUsableTasksError,
    Recipe,
    Sampler,
    Step,
    opening,
    reward_state,
    scores_before_update,
    single_update,
)
from mmrl.training.scoring import RewardErrors, with_rewards
from mmrl.vlm.data.dataset import BUDGET, LoadedTasks, load_splits, load_tasks
from mmrl.vlm.data.prompt import Prompt, VlmPayload, token_lists
from mmrl.vlm.data.task import (
    Skipped,
    TaskError,
    VideoOptions,
    VlmTask,
    check_columns,
    score_texts,
    splits_by_key,
    task_images,
)
from mmrl.vlm.engine.prefix import KeepPrefill
from mmrl.vlm.engine.vlm_export import export_model
from mmrl.vlm.engine.vlm_policy import VlmPolicy, load_policy
from mmrl.vlm.engine.vlm_sampler import PolicySampler, Samples, sample
from mmrl.vlm.inference.inference_sampler import check_engine, open_engine
from mmrl.vlm.router_loss import router_terms
from mmrl.vlm.vlm_config import AnswerScoring, ExtraMeasures, VlmConfig
from mmrl.vlm.vlm_evaluation import AnswerMeasure

LOGGER = logging.getLogger("mmrl")
CODE_MARKS = ("```", "<tool_call>")
"""Texts with which code or a tool call begins."""
USUAL_BUDGET = 4096
"""Budget for questions that state none, as in ZJU-REAL/HBPO rllm/rewards/math_reward.py."""
View = Callable[[VlmPayload, VlmPolicy, Streams], VlmPayload]
"""Function that adds another form of each prompt to a payload, such as one with masked images."""


class Questions:
    """Hooks that change the questions of a dataset and how the report shows responses; no changes by default."""

    broken_down: Sequence[str] = ()
    """Reward terms that evaluations also break down by column."""
    draw: Callable[[VlmTask, str, bool], Image] | None = None
    """Draws a response, given whether it is correct, for the report; None if responses are only text."""

    def prepare(self, loaded: LoadedTasks, *, training: bool) -> LoadedTasks:
        """Complete the questions of a dataset before the model is loaded; `training` is True for `data`."""
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
    opened: ExitStack
    terms: Sequence[LossTerm]
    supervised: ClassVar[bool]
    longest: int = 0
    """Maximum response length in tokens; 0 if none is sampled."""
    policy_class: ClassVar[type[VlmPolicy]] = VlmPolicy
    """Class of the policy."""
    draw_answers: ClassVar[Callable[..., Samples]] = staticmethod(sample)
    """Samples responses to held-out questions, with the arguments of `mmrl.vlm.engine.vlm_sampler.sample`."""

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
        self.cut_splits: set[str] = set()
        self._shown: tuple[VlmTask, list[Any]] | None = None
        """The question that `describe_row` showed last, and its images."""
        self.parts |= {"skipped": self.skipped, "cramped": self.cramped, "errors": self.errors}
        self.rewards = RewardSum(rewards)
        with opening(self.opened) as opened:
            opened.callback(self.rewards.close)
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
        """Complete the questions of a dataset; see `Questions`."""
        return self.questions.prepare(loaded, training=training)

    def score_texts(
        self,
        tasks: Sequence[VlmTask],
        texts: Sequence[str],
        tokens: Sequence[list[int]],
        step: Step,
    ) -> RewardResult:
        """Score responses with all rewards; see `mmrl.vlm.data.task.score_texts`."""
        state = reward_state(self.config, self.train_tasks, step)
        return score_texts(self.rewards, state, tasks, texts, tokens)

    def measures(self, policy: VlmPolicy, split: str, step: Step) -> list[Measure[VlmTask]]:
        """Greedy and sampled accuracy on held-out questions; best of n and revisions if configured."""
        answers = self.answers(policy, split, step)
        return [answers, *self._extra_measures(answers)]

    def answers(self, policy: VlmPolicy, split: str, step: Step) -> AnswerMeasure:
        """Greedy and sampled accuracy on held-out questions."""
        config = self.config
        given = (getattr(config, key, "") for key in ("target_key", "chosen_key", "rejected_key"))
        columns = [task.columns for task in self.eval_tasks[split]]

        def score(tasks: Sequence[VlmTask], texts: Sequence[str], tokens: Sequence[list[int]]) -> RewardResult:
            result = self.score_texts(tasks, texts, tokens, step)
            self.errors.warn(result)
            return result

        return AnswerMeasure(
            policy=policy,
            split=split,
            evaluation=config.evaluation,
            seed=config.seed,
            sampling=self.evaluation_sampler.whole(config.evaluation.temperature),
            parts=parts_of_tasks(columns, config.evaluation.by, {*NOT_PARTS, *given}),
            encode=self.encode,
            draw=self.draw_answers,
            score=score,
            accuracy_term=self.accuracy_term,
            scored_by=self.scored_by,
            broken_down=self.questions.broken_down,
            draw_answer=self.questions.draw,
            cut_splits=self.cut_splits,
        )

    @functools.cached_property
    def _extra_measures(self) -> ExtraMeasures:
        return self.config.evaluation.extra_measures()

    def describe_row(self, rollouts: Rollouts, row: int) -> dict[str, Any]:
        """Text, images and frames of videos."""
        payload, group = VlmPayload.of(rollouts), int(rollouts.group[row])
        task = payload.tasks[group]
        # decoded once per group: its rows show the same images
        if self._shown is None or self._shown[0] is not task:
            self._shown = task, task_images(task, self.policy.layout.patch_size)
        found = {
            "id": task.id,
            "prompt": payload.prompts[group].text,
            "response": payload.texts[row],
            "answer": str(task.columns.get("answer", "")),
            "images": self._shown[1],
            "finish": payload.finish[row],
        }
        return found | {"reward": None} if self.supervised else found

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
                "such prompts are counted in response/beyond_positions; shorten prompts or responses",
                *(len(prompt.input_ids), left, policy.positions, wanted),
            )
        self.cramped["prompts"] += 1

    @classmethod
    def export(cls, config: Any, checkpoint: Path, output: Path) -> Exported:
        """Write a standard model folder with tokenizer and processor, adapters merged into the weights."""
        return export_model(config, checkpoint, output, cls.policy_class)


class VlmRecipe(VlmDomain, Recipe[VlmPolicy, VlmTask]):
    """Samples, scores and evaluates with a vision-language model; the objective provides the loss.

    Args:
        config: options of the run.
        questions: hooks that change questions; None leaves them unchanged.

    Raises:
        UserError: the model, data or rewards cannot be used.
    """

    config: VlmConfig
    view: View | None = None
    """Adds a second form of each prompt for the loss term of a method."""

    def __init__(self, config: VlmConfig, questions: Questions | None = None) -> None:
        super().__init__(config)
        self.objective = config.made_objective()
        # before the model is loaded, which takes minutes
        check_engine(config.sampler, config.rollers)
        self.open(config, questions or Questions(), config, value_head=self.objective.needs_values)
        # without a limit on prompts the engine takes the model's own maximum length
        limit = config.model.max_prompt_tokens
        engine = open_engine(config.sampler, self.policy, limit and limit + config.sampler.max_new_tokens)
        # the sampler's log-probabilities then differ by rounding, and are compared
        self.samples_elsewhere = engine is not None
        self.sampler: Sampler[VlmPolicy, Prompt, Samples]
        self.sampler = engine or self.own_sampler()
        self.opened.callback(self.sampler.close)
        self._controller: AdaptiveKL | None = None
        if (target := config.adaptive_kl.target) is not None:
            self._controller = AdaptiveKL(self.objective.kl_coef, target, config.adaptive_kl.horizon)
            self.parts["adaptive_kl"] = self._controller

    def own_sampler(self) -> Sampler[Any, Prompt, Samples]:
        """The sampler that draws from the policy itself."""
        return PolicySampler(self.config.sampler, self._keep_prefill())

    @property
    def samples_per_prompt(self) -> int:
        """Number of responses that `rollout` samples per question."""
        return int(self.config.trainer.samples_per_task)

    def asked(self, rollouts: Rollouts) -> tuple[list[VlmTask], list[str]]:
        """Question of each row, and its prompt as text."""
        payload, groups = VlmPayload.of(rollouts), rollouts.group.tolist()
        return [payload.tasks[group] for group in groups], [payload.prompts[group].text for group in groups]

    def rollout(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> Rollouts:
        """Sample G responses to each question; count and skip questions that cannot be encoded."""
        with stopwatch("encode"):
            usable, prompts = self.encode(policy, tasks)
        # a question keeps its own stream even if others before it were skipped
        size, streams = self.samples_per_prompt, streams.among(tasks, usable)
        # with the weights of before the step, which the sampler below uses too
        greedy = self._greedy_answers(policy, prompts)
        self.sampler.load(policy, step.number)
        samples = self.sampler.sample(prompts, size, streams)
        payload = VlmPayload(prompts, usable, samples.response_ids, samples.texts, samples.finish, greedy=greedy)
        if self.view is not None:
            with stopwatch("encode"):
                payload = self.view(payload, policy, streams)
        rollouts = Rollouts(
            # groups are numbered without the questions that were left out
            group=torch.arange(len(usable), device=samples.mask.device).repeat_interleave(size),
            mask=samples.mask,
            logp_old=samples.logp,
            # not scored yet; a row that no reward can score keeps NaN and leaves the loss
            reward=torch.full((len(samples.texts),), float("nan"), device=samples.mask.device),
            payload=payload,
            extras={"nucleus_mass": samples.nucleus_mass} if self.config.sampler.truncates else {},
        )
        return streams.noted(rollouts)

    def _greedy_answers(self, policy: VlmPolicy, prompts: Sequence[Prompt]) -> list[tuple[str, list[int]]]:
        """Text and tokens of the policy's greedy answer to each prompt, if the objective needs it."""
        if "greedy" not in self.objective.needs:
            return []
        with stopwatch("sample"):
            found = sample(policy, prompts, 1, self.config.sampler, None)
        return list(zip(found.texts, token_lists(found.response_ids, found.mask), strict=True))

    def score(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """Weighted sum of the reward functions; a row with a failed term gets NaN and is excluded from the loss."""
        payload = VlmPayload.of(rollouts)
        tasks, prompts = self.asked(rollouts)
        tokens = payload.sampled_tokens(rollouts.mask)
        result = self.score_texts(tasks, payload.texts, tokens, step)
        self.errors.count(result)
        # some blocks read columns or tokens of the rows
        extras = rollouts.extras | self._block_inputs(rollouts, tasks, prompts, tokens)
        # greedy answers are scored by group and handed to each of its rows
        if payload.greedy:
            texts, ids = zip(*payload.greedy, strict=True)
            greedy = self.score_texts(payload.tasks, texts, ids, step)
            self.errors.count(greedy)
            reward = torch.tensor(greedy.total, dtype=torch.float32)[rollouts.group.cpu()]
            extras[GREEDY_REWARD] = to_device(reward, rollouts.mask.device)
        return with_rewards(rollouts.replace(extras=extras), result, lambda scored: self.completed(scored, step))

    def completed(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """Add what a method makes of the rewards; all processes call it, also for rows that no reward could score."""
        return rollouts

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Advantages of the objective's estimator; optionally masks truncated responses out of the update."""
        # the mask, not the rows: a truncated response keeps its reward in the group's baseline
        if self.config.mask_truncated_completions:
            whole = [finish != "length" for finish in VlmPayload.of(rollouts).finish]
            kept = torch.tensor(whole, dtype=rollouts.mask.dtype, device=rollouts.mask.device)
            # the mask and not the reward: a truncated response still counts in the statistics of its group
            rollouts = rollouts.replace(mask=rollouts.mask * kept[:, None])
        return super().advantages(rollouts, accelerator, step)

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Teacher-forced scores at the sampling temperature."""
        return policy(rollouts, temperature=self.config.sampler.temperature, outputs=outputs)

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float | Metric]:
        """Adds the fraction of finished responses, the KL coefficient and the probability kept by truncation."""
        finished = VlmPayload.of(rollouts).finished_fraction
        own: dict[str, float | Metric] = {"response/finished_fraction": finished}
        own["policy/kl_coef"] = self.objective.kl_coef
        return super().step_metrics(rollouts) | own | self._nucleus_mass(rollouts)

    def on_step_end(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Move the KL coefficient so that the KL approaches its target."""
        # absent without a reference; only a finite value may move the coefficient
        divergence = metrics.get("policy/kl_ref", float("nan"))
        if self._controller is not None and math.isfinite(divergence):
            trainer = self.config.trainer
            self._set_kl_coef(self._controller.update(divergence, trainer.tasks_per_step * trainer.samples_per_task))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`, with the adaptive coefficient."""
        super().load_state_dict(state)
        if self._controller is not None:
            # the objective has its own copy of the coefficient, which was made from the configuration
            self._set_kl_coef(self._controller.coefficient)

    def correct(self, rollouts: Rollouts) -> Tensor:
        """(B,) bool, rows with a correct response."""
        return rollouts.reward_terms[self.accuracy_term] == 1.0

    def _block_inputs(
        self, rollouts: Rollouts, tasks: Sequence[VlmTask], prompts: Sequence[Chat], tokens: Sequence[list[int]]
    ) -> dict[str, Tensor]:
        """Data about responses that the objective needs, such as tokens (B, T) and answer numbers (B,)."""
        payload, needs = VlmPayload.of(rollouts), self.objective.needs
        found: dict[str, Tensor] = {}
        if "code_starts" in needs:
            decode = self.policy.processor.tokenizer.decode
            found["code_start"] = torch.tensor([code_start(row, decode) for row in tokens])
        if "budgets" in needs:
            found["budget"] = torch.tensor([int(task.columns.get(BUDGET) or USUAL_BUDGET) for task in tasks])
        if "tokens" in needs:
            found[TOKENS] = payload.response_ids[:, : rollouts.num_decisions]
        if "answers" in needs:
            found[ANSWER] = torch.tensor(number_answers(rollouts.group.tolist(), prompts, payload.texts))
        return {name: to_device(values, rollouts.mask.device) for name, values in found.items()}

    def _keep_prefill(self) -> KeepPrefill:
        """How much of the prefill sampling keeps for the update.

        The graph is kept only if the step has one update on all rows, where it needs no extra memory, and if training
        mode computes the same as sampling: no dropout, no checkpointing.
        """
        trainer = self.config.trainer
        if not (self.config.sampler.keep_prefill and self.policy.shares_prefix):
            return KeepPrefill.NOTHING
        # a step that resamples combines several rounds of sampling, each with its own graph
        once = single_update(trainer) and trainer.micro_batch == 0 and not self.objective.filter.resamples
        drops = any(isinstance(part, nn.Dropout) and part.p for part in self.policy.modules())
        # sampling runs in evaluation mode: its graph fits the update only if training mode computes the same numbers
        same = not (self.config.model.gradient_checkpointing or drops)
        if once and same:
            return KeepPrefill.GRAPH
        return KeepPrefill.VALUES if scores_before_update(self) else KeepPrefill.NOTHING

    def _nucleus_mass(self, rollouts: Rollouts) -> dict[str, Metric]:
        mass = rollouts.extras.get("nucleus_mass")
        return {} if mass is None else {"response/nucleus_mass": mean_metric(mass, rollouts.mask)}

    def _set_kl_coef(self, value: float) -> None:
        self.objective = self.objective.with_kl_coef(value)


def code_start(tokens: list[int], decode: Callable[[list[int]], str]) -> int:
    """Index of the token that completes the opening of a response's first code block or tool call; -1 without one."""

    def coded(length: int) -> bool:
        text = decode(tokens[:length])
        return any(mark in text for mark in CODE_MARKS)

    if not coded(len(tokens)):
        return -1
    return bisect.bisect_left(range(1, len(tokens) + 1), True, key=coded)
