"""TSPO, Temporal Sampling Policy Optimization (arXiv 2508.04369; public code Hui-design/TSPO).

A small agent picks T_s of the T_c candidate frames of a long video for a video model; it learns from the rewards of the
answers, without labels of frames. Each question is a group of G draws, and each pick is a decision:

    A_i = (R_i - mean R) / (std R + 1e-4)
    loss = -(1/G) sum_i A_i mean_{t in picks_i} exp(l_t - sg(l_t)),    l = log softmax(S / tau)

where R = R_A (is the answer right?) + R_T (share of the picks in the needle, where the row has one; else 1). The
temperature tau falls from 0.025 to 0.01. S is the agent's score (`agent.py`), the draws and other forms of l are in
`picking.py`, the answerers in `answering.py`. A frozen language model answers greedily, so its ratio is 1; with
`answerer.train` its sampled tokens are decisions too and both parts of pi_l * pi_ts are trained.

Differences from the public code: the reward's type belongs to each row, there the first row of a batch decides; the
order of a draw is kept, so that its exact probability exists; a video with fewer frames than picks gives all of them
(there top-k fails); the unused KL coefficient 0.04 is left out, a KL to the start is `objective.kl`; features of a
video are computed once and kept. Defaults: 16 picks with a needle and 8 without, window 12, 8 heads, G 8, AdamW at 5e-4
with linear decay, from the public train_deepspeed.sh; a step has 16 questions as its 8 GPUs x 2 accumulated batches.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.loss import Metric
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.hub.building import build_if_missing
from mmrl.hub.video_reading import VideoError
from mmrl.runs.dry_run import model_follows
from mmrl.runs.export import Exported
from mmrl.runs.run_log import stopwatch
from mmrl.training.evaluation import held_out_tasks
from mmrl.training.processes import Streams, stream_seed
from mmrl.training.recipe import NoUsableTasksError, Recipe, Step, opening
from mmrl.training.scoring import EveryRewardFailedError, RewardErrors, failure_of
from mmrl.vlm.data.dataset import DataConfig
from mmrl.vlm.data.task import Skipped, TaskError
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.tspo.agent import AgentSettings, TemporalAgent, load_agent, save_agent
from mmrl.vlm.tspo.answerers import Answerer, Answers, make_answerer, without_unreadable
from mmrl.vlm.tspo.features import ClipEncoder, FeatureStore
from mmrl.vlm.tspo.frame_policy import TspoPayload, TspoPolicy, VideoFeatures
from mmrl.vlm.tspo.measure import PickMeasure, picked_strip
from mmrl.vlm.tspo.needle_tasks import NeedleTask, load_needle_tasks
from mmrl.vlm.tspo.picking import draw_picks, gumbel_noise, pick_logprobs, temperature_at
from mmrl.vlm.tspo.tspo_config import TspoConfig, objective_of

LOGGER = logging.getLogger("mmrl")


class TspoRecipe(Recipe[TspoPolicy, NeedleTask]):
    """Draws frames, has the questions answered from them, and trains the agent; see the module."""

    config: TspoConfig

    def __init__(self, config: TspoConfig) -> None:
        super().__init__(config)
        self.objective = objective_of(config)
        self.skipped = Skipped()
        self.errors = RewardErrors()
        self._failure = ""
        """Reason why no answer of the last rollout could be judged."""
        self.parts |= {"skipped": self.skipped, "errors": self.errors}
        self.added |= {"skipped": self.skipped, "errors": self.errors.step}
        self.train_tasks = self._load(config.data, "data")
        self.eval_tasks = held_out_tasks(config, self._load)
        model_follows(self)
        features = config.features
        build_if_missing(features, "features")
        clip = ClipEncoder(features.path, features.batch, features.device)
        self.store = FeatureStore(clip, features.cache, features.memory_mb)
        self.added["videos"] = self.store.counts
        reader = load_policy(config.answerer.model) if config.answerer.kind == "vlm" else None
        # the answerer is part of the policy only if it is trained
        trained = reader if config.answerer.train else None
        agent = _make_agent(config, self.store.encoder.width)
        rate = config.trainer.learning_rate
        settings = AgentSettings(features.path, features.fps, features.max_frames, config.picks.count)
        # its own rate, as a factor of the agent's
        self.policy = TspoPolicy(agent, settings, trained, (config.answerer.learning_rate or rate) / rate)
        with opening(self.opened) as opened:
            self.answerer: Answerer = make_answerer(config.answerer, reader)
            opened.callback(self.answerer.close)
            self.answerer.check(self.train_tasks, "data")
            for name, tasks in self.eval_tasks.items():
                self.answerer.check(tasks, f"eval_data.{name}")
        self._warn_of_short_videos()

    def rollout(self, policy: TspoPolicy, tasks: Sequence[NeedleTask], streams: Streams, step: Step) -> Rollouts:
        """Draw the frames of G rows for each question and have it answered from them."""
        with stopwatch("encode"):
            usable, features = self.encode(tasks)
        drawn = without_unreadable(
            usable,
            features,
            lambda some, own: self._draw(policy, some, own, streams.among(tasks, some), step),
            self.skipped.note,
        )
        if drawn is None:
            raise NoUsableTasksError(f"the picked frames of none of {len(tasks)} videos can be read")
        return drawn

    def _draw(
        self,
        policy: TspoPolicy,
        usable: Sequence[NeedleTask],
        features: Sequence[VideoFeatures],
        streams: Streams,
        step: Step,
    ) -> Rollouts:
        size, temperature = self.config.trainer.samples_per_task, self.temperature(step.number)
        form = self.config.picks.logprob
        group = torch.arange(len(usable)).repeat_interleave(size)
        # on the CPU, where the noise is drawn
        logits = policy.logits(features, temperature).cpu()[group]
        noise = torch.zeros_like(logits)
        for number, own in enumerate(features):  # each video is encoded at its own length, not padded to the longest
            drawn = gumbel_noise((size, len(own.frames)), streams.of(number, "picks"))
            noise[number * size : (number + 1) * size, : drawn.shape[1]] = drawn
        counts = torch.tensor([self.picks_of(task) for task in usable])[group]
        picks, mask = draw_picks(logits, noise, counts)
        logp = pick_logprobs(form, logits, picks, mask, noise)
        rows = [usable[number] for number in group.tolist()]
        with stopwatch("answer"):
            tokens = self.config.answerer.sampler.max_new_tokens
            trains = self.config.answerer.train
            # a frozen answerer answers greedily and draws nothing
            draws = streams.uniform(len(usable), size, tokens, purpose="answer") if trains else None
            answers = self._answer(rows, picks, mask, draws)
        payload = TspoPayload(
            tasks=list(usable),
            features=list(features),
            picks=picks,
            pick_mask=mask,
            texts=answers.texts,
            correct=torch.tensor(answers.correct, dtype=torch.float32),
            temperature=temperature,
            noise=list(noise) if form == "noisy_product" else [],
        )
        rollouts = Rollouts(
            group=group,
            mask=mask,
            logp_old=logp,
            reward=torch.full((len(rows),), float("nan")),
            payload=payload,
            # picks are turn 0, the answer's tokens are turn 1
            turn=torch.where(mask > 0, 0, -1),
        )
        return streams.noted(self._joined(rollouts, answers).to(policy.device))

    def score(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """R_A + R_T with their weights; NaN, and no gradient, for an answer that could not be judged."""
        payload = TspoPayload.of(rollouts)
        located = [
            payload.tasks[group].share_in_needle(payload.picks[row][payload.pick_mask[row] > 0].tolist())
            for row, group in enumerate(rollouts.group.tolist())
        ]
        accuracy = payload.correct.to(rollouts.reward.device)
        locating = torch.tensor(located, device=rollouts.reward.device)
        reward = self.config.accuracy_weight * accuracy + self.config.locating_weight * locating
        scored = rollouts.replace(reward=reward, reward_terms={"accuracy": accuracy, "locating": locating})
        # no answer could be judged, which ends the run if it is so on every process
        if self._failure:
            raise EveryRewardFailedError(self._failure, scored)
        return scored

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Log-probability of each pick and of each trained token, at the temperatures of the draw."""
        config = self.config
        return policy(rollouts, config.picks.logprob, config.answerer.sampler.temperature)  # type: ignore[no-any-return]

    def measures(self, policy: TspoPolicy, split: str, step: Step) -> list[PickMeasure]:
        """Needle recall and accuracy of the agent's best frames, of even ones and of those most like the question."""
        measure = PickMeasure(
            policy=policy,
            encode=self.encode,
            answerer=self.answerer,
            evaluation=self.config.evaluation,
            count_of=lambda task: self.config.evaluation.count or self.picks_of(task),
            seed=stream_seed(self.config.seed, "bootstrap", split),
            skip=self.skipped.note,
        )
        return [measure]

    def describe_row(self, rollouts: Rollouts, row: int) -> dict[str, Any]:
        """A strip of the frames that were picked."""
        payload = TspoPayload.of(rollouts)
        task = payload.tasks[int(rollouts.group[row])]
        picks = sorted(payload.picks[row][payload.pick_mask[row] > 0].tolist())
        return {
            "id": task.id,
            "prompt": task.query,
            "response": payload.texts[row],
            "answer": task.answer,
            "outputs": picked_strip(task, picks),
            "finish": f"{len(picks)} of {len(task.video)} frames",
        }

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float | Metric]:
        """Videos that were embedded, questions skipped so far and reward errors of the step."""
        return {
            "tspo/videos_embedded": float(self.store.computed),
            "data/skipped": float(sum(self.skipped.values())),
            **self.errors.take(),
        }

    def encode(
        self, tasks: Sequence[NeedleTask], *, allow_none: bool = False
    ) -> tuple[list[NeedleTask], list[VideoFeatures]]:
        """Features of questions and their videos."""
        usable: list[NeedleTask] = []
        features: list[VideoFeatures] = []
        last: VideoError | None = None
        for task in tasks:
            try:
                frames = self.store.frames(task.video)
            except VideoError as error:
                last = error
                self.skipped.note(TaskError(error.kind, task.id, str(error)))
                continue
            usable.append(task)
            features.append(VideoFeatures(frames, self.store.text(task.query)))
        if not usable and not allow_none:
            raise NoUsableTasksError(f"none of {len(tasks)} videos could be used; the last one: {last}")
        return usable, features

    def temperature(self, step: int) -> float:
        """Temperature of the picks after a number of steps."""
        picks = self.config.picks
        return temperature_at(step, self.config.trainer.steps, picks.temperature, picks.final_temperature)

    def picks_of(self, task: NeedleTask) -> int:
        """Frames that are picked for a question."""
        return min(self.config.picks.of(task.specific), len(task.video))

    def on_step_end(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Log the temperature of the next step."""
        self.noted["tspo/temperature"] = self.temperature(step.number + 1)

    @classmethod
    def export(cls, config: TspoConfig, checkpoint: Path, output: Path) -> Exported:
        """Write the agent alone: a small folder that `load_frame_picker` loads, for any video model."""
        agent, settings = load_agent(checkpoint / "model")
        save_agent(agent, settings, output)
        return Exported(
            "mmrl.vlm.tspo.picker.load_frame_picker",
            "from mmrl.vlm.tspo.picker import load_frame_picker\n\npicker = load_frame_picker(folder)",
            facts={"use": "picker.pick(video, question, count=16) returns the frames that answer the question"},
        )

    def _answer(self, rows: Sequence[NeedleTask], picks: Tensor, mask: Tensor, draws: Tensor | None) -> Answers:
        # in the order of time, not in that of the draw
        chosen = [sorted(own[real > 0].tolist()) for own, real in zip(picks, mask, strict=True)]
        answers = self.answerer.answer(rows, chosen, draws)
        if answers.result is not None:
            self.errors.count(answers.result)
        self._failure = "" if answers.result is None else failure_of(answers.result)
        return answers

    def _joined(self, rollouts: Rollouts, answers: Answers) -> Rollouts:
        """Rows whose decisions are the picks and then, of a trained model, the tokens of the answer."""
        if not self.config.answerer.train or answers.samples is None:
            return rollouts
        payload, samples = TspoPayload.of(rollouts), answers.samples
        payload.prompts = answers.prompts
        payload.finish = samples.finish
        payload.response_ids = samples.response_ids.cpu()
        mask = samples.mask.cpu()
        assert rollouts.turn is not None
        return rollouts.replace(
            mask=torch.cat([rollouts.mask, mask], 1),
            logp_old=torch.cat([rollouts.logp_old, samples.logp.cpu()], 1),
            turn=torch.cat([rollouts.turn, torch.where(mask > 0, 1, -1)], 1),
        )

    def _load(self, data: DataConfig, key: str) -> list[NeedleTask]:
        try:
            tasks, skipped = load_needle_tasks(data, self.config.features.fps, self.config.features.max_frames)
        except UserError as error:
            raise UserError(f"{key}: {error}") from error
        if key == "data":
            self.skipped.update(skipped)
        return tasks

    def _warn_of_short_videos(self) -> None:
        short = [task for task in self.train_tasks if len(task.video) <= self.config.picks.of(task.specific)]
        if short:
            LOGGER.warning(
                "%d of %d training videos have no more candidate frames than picks (%s has %d): all their frames are "
                "picked and teach nothing; lower picks.count, or raise features.fps",
                len(short),
                len(self.train_tasks),
                short[0].id,
                len(short[0].video),
            )


def _make_agent(config: TspoConfig, width: int) -> TemporalAgent:
    if config.agent.path:
        agent, _ = load_agent(config.agent.path)
        if agent.width != width:
            raise UserError(f"the agent in {config.agent.path} has width {agent.width}; the CLIP gives {width}")
        return agent
    # a separate stream: loading other models must not change the agent's start
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(config.seed, "agent"))
        return TemporalAgent(width, config.agent.heads, config.agent.window)
