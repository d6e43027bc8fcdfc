"""TSPO, Temporal Sampling Policy Optimization (arXiv 2508.04369; public code Hui-design/TSPO).

A small agent picks T_s of the T_c candidate frames of a long video for a video model; it learns from the rewards of the
answers, without labels of frames. Each question is a group of G draws, and each pick is a decision:

    A_i = (R_i - mean R) / (std R + 1e-4)
    loss = -(1/G) sum_i A_i mean_{t in picks_i} exp(l_t - sg(l_t)),    l = log softmax(S / tau)

where R = R_A (is the answer right?) + R_T (fraction of the picks in the needle, where the row has one; else 1). The
temperature tau falls from 0.025 to 0.01. S is the agent's score (`agent.py`), the draws and other forms of l are in
`picking.py`, the answerers in `answering.py`. A frozen language model answers greedily, so its ratio is 1; with
`answerer.train` its sampled tokens are decisions too and both parts of pi_l * pi_ts are trained.

Differences from the public code: the reward's type belongs to each row, there the first row of a batch decides; the
order of a draw is kept, so that its exact probability exists; a video with fewer frames than picks gives all of them
(there top-k fails); the unused KL coefficient 0.04 is left out, a KL to the start is `objective.kl`; features of a
video are computed once and kept. Defaults: 16 picks with a needle and 8 without, window 12, 8 heads, G 8, AdamW at 5e-4
with linear decay, from the public train_deepspeed.sh; a step has 16 questions as its 8 GPUs x 2 accumulated batches.

Held-out evaluation of picks: the fraction of the needle that they hold, and whether the answer is right.

Three strategies are measured on the same questions: the agent, evenly spaced frames, and the frames whose CLIP
embeddings are most like the question's. Where the needle is known, its own frames are answered from too: no strategy
can be expected to do better, and a model that fails there cannot read the picked frames.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from mmrl.core.loss import Metric
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.errors import RunError, UserError
from mmrl.hub.building import build_if_missing
from mmrl.hub.video_reading import VideoError
from mmrl.runs.dry_run import model_follows
from mmrl.runs.export import Exported
from mmrl.runs.records import Outcome, SampleRecord
from mmrl.runs.run_log import stopwatch
from mmrl.runs.statistics import with_interval
from mmrl.training.evaluation import Measure, Row, Trial, held_out_tasks
from mmrl.training.processes import Streams, stream_seed
from mmrl.training.recipe import NoUsableTasksError, Recipe, Step, opening
from mmrl.training.scoring import EveryRewardFailedError, RewardErrors, failure_of
from mmrl.vlm.data.dataset import DataConfig
from mmrl.vlm.data.task import Skipped, TaskError
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.tspo.agent import AgentSettings, TemporalAgent, load_agent, save_agent
from mmrl.vlm.tspo.answerers import Answerer, Answers, make_answerer, without_unanswerable
from mmrl.vlm.tspo.features import ClipEncoder, FeatureStore
from mmrl.vlm.tspo.frame_policy import TspoPayload, TspoPolicy, VideoFeatures
from mmrl.vlm.tspo.needle_tasks import NeedleTask, load_needle_tasks
from mmrl.vlm.tspo.picking import (
    METHODS,
    draw_picks,
    gumbel_noise,
    pick_logprobs,
    temperature_at,
    top_frames,
    uniform_frames,
)
from mmrl.vlm.tspo.tspo_config import TspoConfig, TspoEvaluationConfig, objective_of

if TYPE_CHECKING:
    from PIL.Image import Image


CELL, BORDER, CAPTION, LINE = 84, 4, 14, 26
FEWEST_COLUMNS = 4
GROUND, INK, TRACK = (24, 26, 30), (235, 235, 235), (70, 74, 82)
INSIDE, OUTSIDE = (64, 190, 110), (200, 90, 80)
SHOWN = 32
"""Maximum number of frames to show; if there are more, evenly spaced ones."""


def pick_strip(frames: Sequence[Image], picks: Sequence[int], needle: np.ndarray, seconds: Sequence[float]) -> Image:
    """Draw K picked frames in chronological order.

    `picks` are their rising indices among the T candidates, `needle` (T,) is True on frames of the needle, which are
    green on the line and have a green border, `seconds` (T) are the times of the candidates.
    """
    from PIL import Image as Images
    from PIL import ImageDraw

    shown = np.unique(np.linspace(0, len(picks) - 1, min(len(picks), SHOWN)).round().astype(int)).tolist()
    # about square, since reports show images side by side
    columns = max(FEWEST_COLUMNS, math.ceil(math.sqrt(len(shown) * (CELL + CAPTION) / CELL)))
    rows = -(-len(shown) // columns)
    width, height = CELL * columns, CELL + CAPTION
    strip = Images.new("RGB", (width, LINE + rows * height), GROUND)
    draw = ImageDraw.Draw(strip)
    _draw_line(draw, width, picks, needle)
    for cell, number in enumerate(shown):
        left, top = (cell % columns) * CELL, LINE + cell // columns * height
        colour = INSIDE if needle[picks[number]] else OUTSIDE if needle.any() else TRACK
        draw.rectangle((left + 1, top, left + CELL - 2, top + CELL - 1), fill=colour)
        inner = CELL - 2 * BORDER
        scale = inner / max(frames[number].size)
        frame = frames[number].resize(tuple(max(1, round(side * scale)) for side in frames[number].size))
        strip.paste(frame, (left + (CELL - frame.width) // 2, top + (CELL - frame.height) // 2))
        centre = (left + CELL // 2, top + CELL + CAPTION // 2)
        draw.text(centre, f"{seconds[picks[number]]:.1f} s", INK, anchor="mm")
    return strip


def picked_strip(task: NeedleTask, picks: Sequence[int]) -> list[Image]:
    """An image of the picked frames; empty if the video can no longer be read."""
    try:
        images = task.video.images(picks)
    except VideoError:
        return []
    return [pick_strip([images[pick] for pick in picks], picks, task.needle, task.video.seconds)]


def _draw_line(draw: object, width: int, picks: Sequence[int], needle: np.ndarray) -> None:
    scale = (width - 8) / len(needle)

    def span(first: float, stop: float, top: int, bottom: int, colour: tuple[int, int, int]) -> None:
        left = 4 + first * scale
        draw.rectangle((left, top, max(4 + stop * scale, left + 1), bottom), fill=colour)  # type: ignore[attr-defined]

    span(0, len(needle), 8, 16, TRACK)
    for frame in np.flatnonzero(needle).tolist():
        span(frame, frame + 1, 8, 16, INSIDE)
    for frame in picks:
        span(frame + 0.35, frame + 0.65, 3, 21, INK)


STRATEGIES = ("agent", "uniform", "clip_topk")
CEILING = "needle"


def needle_recall(needle: np.ndarray, picks: Sequence[int]) -> float:
    """Picked needle frames (T,) bool, divided by the maximum that K picks could hit; NaN without a needle."""
    most = min(int(needle.sum()), len(picks))
    return float(needle[list(picks)].sum()) / most if most else float("nan")


@dataclass
class PickMeasure(Measure[NeedleTask]):
    """Needle recall and accuracy of three strategies.

    The metrics are recall/<strategy> with a bootstrap interval, accuracy/<strategy> and accuracy/needle with Wilson's,
    and skipped.
    """

    policy: TspoPolicy
    encode: Callable[..., tuple[list[NeedleTask], list[VideoFeatures]]]
    """`TspoRecipe.encode`: returns the usable questions and their features."""
    answerer: Answerer
    evaluation: TspoEvaluationConfig
    count_of: Callable[[NeedleTask], int]
    """Number of frames to pick for a question."""
    seed: int
    """Seed of the bootstrap."""
    skip: Callable[[TaskError], None]
    """Called with each question that cannot be answered from its picked frames."""
    unanswered: NoUsableTasksError | None = None
    """Why no question of a batch could be answered."""

    @property
    def batch_size(self) -> int:
        """Number of questions answered together."""
        return self.evaluation.batch_tasks

    def run(self, batch: Sequence[Trial[NeedleTask]], start: int) -> list[Row]:
        """Pick and answer with every strategy; questions whose video cannot be decoded are skipped."""
        usable, features = self.encode([trial.task for trial in batch], allow_none=True)
        index_of = {id(trial.task): trial.index for trial in batch}
        if not usable:
            return []
        try:
            return without_unanswerable(usable, features, lambda some, own: self._rows(some, own, index_of), self.skip)
        except NoUsableTasksError as error:
            self.unanswered = error
            return []

    def _rows(
        self, usable: Sequence[NeedleTask], features: Sequence[VideoFeatures], index_of: Mapping[int, int]
    ) -> list[Row]:
        scores = self.policy.logits(features, 1.0).cpu()
        rows: list[Row] = [{"index": index_of[id(task)], "repeat": 0, "task": task, "scores": {}} for task in usable]
        for strategy in STRATEGIES:
            picks = [
                self._picks(strategy, task, own, scores[number, : len(own.frames)])
                for number, (task, own) in enumerate(zip(usable, features, strict=True))
            ]
            answers = self.answerer.answer(usable, picks, None)
            for row, chosen, text, correct in zip(rows, picks, answers.texts, answers.correct, strict=True):
                row["scores"][f"accuracy/{strategy}"] = [correct]
                row["scores"][f"recall/{strategy}"] = [needle_recall(row["task"].needle, chosen)]
                if strategy == "agent":
                    row |= {"picks": chosen, "response": text}
        # the ceiling: answers from as many frames of each needle as are picked
        known = [row for row in rows if row["task"].needle.any()]
        picks = [_of_needle(row["task"].needle, self.count_of(row["task"])) for row in known]
        right = self.answerer.answer([row["task"] for row in known], picks, None).correct if known else []
        for row, correct in zip(known, right, strict=True):
            row["scores"][f"accuracy/{CEILING}"] = [correct]
        return rows

    def metrics(self, rows: Sequence[Row], tasks: Sequence[NeedleTask]) -> dict[str, float]:
        """Means with intervals; raises RunError if no question was usable."""
        if tasks and not rows:
            self.encode(tasks)  # raises with the cause
            raise self.unanswered or RunError(f"none of {len(tasks)} held-out questions could be answered")
        metrics = {"skipped": float(len(tasks) - len(rows))}
        for name in dict.fromkeys(name for row in rows for name in row["scores"]):
            values = [row["scores"].get(name, [float("nan")]) for row in rows]
            share = name.startswith("accuracy/")
            metrics |= with_interval(name, values, None if share else np.random.default_rng(self.seed))
        return metrics

    def outcome(self, row: Row) -> Outcome:
        """Recall and accuracy of each strategy."""
        return Outcome(row["task"].id, {name: values[0] for name, values in row["scores"].items()})

    def record(self, row: Row) -> SampleRecord:
        """The frames that the agent picked, on a timeline with the needle."""
        task, scores = row["task"], {name: values[0] for name, values in row["scores"].items()}
        return SampleRecord(
            id=task.id,
            prompt=task.query,
            response=row["response"],
            answer=task.answer,
            outputs=picked_strip(task, row["picks"]),
            terms=scores,
            finish=f"{len(row['picks'])} of {len(task.video)} frames",
            correct=scores["accuracy/agent"] == 1.0,
        )

    def _picks(self, strategy: str, task: NeedleTask, features: VideoFeatures, scores: Tensor) -> list[int]:
        count = min(self.count_of(task), len(features.frames))
        if strategy == "uniform":
            return uniform_frames(len(features.frames), count).tolist()
        if strategy == "clip_topk":
            similarity = torch.cosine_similarity(features.frames, features.text[None], dim=-1)
            return top_frames(similarity, count).tolist()
        return METHODS[self.evaluation.method](scores, count).tolist()


def _of_needle(needle: np.ndarray, count: int) -> list[int]:
    """Indices of at most `count` frames of a needle, evenly spaced."""
    frames = np.flatnonzero(needle)
    return frames[uniform_frames(len(frames), count).numpy()].tolist()


LOGGER = logging.getLogger("mmrl")


class TspoRecipe(Recipe[TspoPolicy, NeedleTask]):
    """Draws frames, gets the questions answered from them, and trains the agent; see the module."""

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
        """Draw the frames of G rows for each question and get the question answered from them."""
        with stopwatch("encode"):
            usable, features = self.encode(tasks)
        return without_unanswerable(
            usable,
            features,
            lambda some, own: self._draw(policy, some, own, streams.among(tasks, some), step),
            self.skipped.note,
        )

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
        """R_A + R_T with their weights; NaN (and no gradient) for an answer that could not be judged."""
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
        return policy(rollouts, config.picks.logprob, config.answerer.sampler.temperature)

    def measures(self, policy: TspoPolicy, split: str, step: Step) -> list[PickMeasure]:
        """Needle recall and accuracy for the agent's best frames, uniform frames, and those most like the question."""
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
        """A strip of the picked frames."""
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
        """Number of frames to pick for a question."""
        return min(self.config.picks.of(task.specific), len(task.video))

    def on_step_end(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Log the temperature of the next step."""
        self.noted["tspo/temperature"] = self.temperature(step.number + 1)

    @classmethod
    def export(cls, config: TspoConfig, checkpoint: Path, output: Path) -> Exported:
        """Write only the agent: a small folder that `load_frame_picker` loads, for any video model."""
        agent, settings = load_agent(checkpoint / "model")
        save_agent(agent, settings, output)
        return Exported(
            "mmrl.vlm.tspo.picking.load_frame_picker",
            "from mmrl.vlm.tspo.picking import load_frame_picker\n\npicker = load_frame_picker(folder)",
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
                "%d of %d training videos have no more candidate frames than picks (%s has %d), so all their frames "
                "are picked and nothing can be learned; lower picks.count, or raise features.fps",
                len(short),
                len(self.train_tasks),
                short[0].id,
                len(short[0].video),
            )


def _make_agent(config: TspoConfig, width: int) -> TemporalAgent:
    if config.agent.path:
        agent, _ = load_agent(config.agent.path)
        if agent.width != width:
            raise UserError(f"the agent in {config.agent.path} has width {agent.width}, but the CLIP has width {width}")
        return agent
    # a separate stream: loading other models must not change the agent's start
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(config.seed, "agent"))
        return TemporalAgent(width, config.agent.heads, config.agent.window)
