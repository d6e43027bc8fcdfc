"""Training of a success classifier, and how often it is wrong on episodes that it has not seen.

    L = mean over rows of the binary cross-entropy of the logit,

with as many frames that show success as frames that do not, in random crops of images padded by 4 pixels.

Episodes are held out whole, as their frames resemble each other. Verdicts are judged as they are used: an episode
counts as solved at the first look at which `model.looks` probabilities in a row exceed `model.threshold`. That is right
if this frame shows success, and a false positive otherwise, also in an episode that succeeds later. Frames of false
positives are written to `false_positives` in the run folder. Episodes that were collected after the training
(`eval_data`) tell more: a policy that is rewarded by the classifier looks for its mistakes.

Source: HIL-SERL, arXiv 2410.21845; rail-berkeley/hil-serl examples/train_reward_classifier.py, whose defaults these are
    (Adam with 1e-4, 128 frames of each kind, threshold 0.85). It has neither held-out episodes nor several looks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from mmrl.core.loss import Denominators, Metric
from mmrl.core.objectives.objective import LossOutput, PolicyOutputs
from mmrl.core.payload import Payload, per_row
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import bounded
from mmrl.runs.export import Exported
from mmrl.runs.fingerprint import content_digest
from mmrl.runs.records import Outcome, ResumableRows, SampleRecord
from mmrl.runs.statistics import wilson_interval
from mmrl.training.evaluation import Measure, Row, Trial, held_out_tasks
from mmrl.training.processes import Streams, make_generator
from mmrl.training.recipe import Step
from mmrl.training.settings import BaseRunConfig, BaseTrainerConfig, EvaluationConfig
from mmrl.training.supervised import SupervisedRecipe
from robotics.policies.base.encoder import EncoderConfig, Vocabulary
from robotics.rewards.success_classifier import SuccessClassifier, SuccessModelConfig, first_success
from robotics.rewards.success_data import LabelledEpisode, LabelledEpisodesConfig, read_episodes

PAD = 4
HELD_OUT = "held_out"


def _trainer() -> BaseTrainerConfig:
    return BaseTrainerConfig(steps=300, tasks_per_step=64, learning_rate=1e-3, schedule="cosine", warmup_steps=20)


@dataclass
class SuccessRunConfig(BaseRunConfig):
    """A training run of a success classifier."""

    model: SuccessModelConfig = field(default_factory=SuccessModelConfig)
    """The classifier."""
    data: LabelledEpisodesConfig = field(default_factory=LabelledEpisodesConfig)
    """Episodes to learn from."""
    held_out: float = bounded(0.25, above=0, below=1)
    """Fraction of these episodes that is only evaluated, as the split held_out."""
    eval_data: dict[str, LabelledEpisodesConfig] = field(default_factory=dict)
    """Further episodes to evaluate by name, such as those collected after the training."""
    trainer: BaseTrainerConfig = field(default_factory=_trainer)
    """Batch sizes, optimiser and guards."""

    def validate(self) -> None:
        """Check that there is data; raises ValueError."""
        super().validate()
        if not self.data.path:
            raise ValueError("data.path is empty; set it to the folder of a LeRobotDataset")
        if HELD_OUT in self.eval_data:
            raise ValueError(f"eval_data has the name {HELD_OUT}, which is that of the part of data; choose another")
        own, usual = self.evaluation, EvaluationConfig()
        if any(getattr(own, name) != getattr(usual, name) for name in ("greedy", "samples", "temperature")):
            raise ValueError(
                "evaluation.greedy, samples and temperature have no effect on a classifier; leave them out"
            )
        if self.model.encoder.image_size != EncoderConfig().image_size or self.model.encoder.state_size is not None:
            raise ValueError("model.encoder.image_size and state_size are read from the data; leave them out")


@dataclass
class FramePayload(Payload):
    """B frames."""

    images: Tensor = per_row()
    """(B, H, W, 3) uint8."""
    labels: Tensor = per_row()
    """(B,) float32, 1 if the frame shows success."""
    kept: Tensor = per_row()
    """(B, width) bool, the hidden entries that dropout keeps."""
    instructions: list[str] = per_row()


class SuccessRecipe(SupervisedRecipe[SuccessClassifier, Any]):
    """Learns which frames show success; see the module."""

    config: SuccessRunConfig
    policy: SuccessClassifier
    own_loss = "success"

    def __init__(self, config: SuccessRunConfig) -> None:
        super().__init__(config)
        episodes = read_episodes(config.data, "data")
        train, held = split_episodes(episodes, config.held_out, config.seed)
        self.eval_tasks: Mapping[str, Sequence[LabelledEpisode]] = {HELD_OUT: held} | held_out_tasks(
            config, read_episodes
        )
        frames = [(one, frame) for one in train for frame in range(len(one.labels))]
        self.kinds = [[(one, at) for one, at in frames if one.labels[at] == kind] for kind in (True, False)]
        if not all(self.kinds):
            raise UserError(
                f"data: {len(self.kinds[0])} frames of the training episodes of {config.data.path} show success and "
                f"{len(self.kinds[1])} do not; both kinds are needed"
            )
        # places in a batch, whose frames are drawn
        self.train_tasks = list(range(config.trainer.tasks_per_step))
        size = train[0].images.shape[1:3]
        given = dataclasses.replace(config.model.encoder, image_size=size, state_size=None)
        words = Vocabulary.from_texts(one.instruction for one in episodes)
        model = dataclasses.replace(config.model, encoder=given)
        self.policy = SuccessClassifier(model, words, config.data.camera, config.seed)
        self._digest = content_digest([[one.labels, one.images[:1], one.instruction] for one in train])

    def data_digest(self) -> str:
        """Digest of labels, instructions and first images of the training episodes."""
        return self._digest

    def batch(self, policy: SuccessClassifier, tasks: Sequence[Any], streams: Streams, step: Step) -> Rollouts:
        """Draw a frame for each place, in turn one that shows success and one that does not."""
        seeds = streams.seeds(len(tasks), 2, purpose="frame").view(-1, 2).tolist()
        kinds = [self.kinds[place % 2] for place in tasks]
        chosen = [kind[seed % len(kind)] for kind, (seed, _) in zip(kinds, seeds, strict=True)]
        crops = [random_crop(one.images[at], seed) for (one, at), (_, seed) in zip(chosen, seeds, strict=True)]
        labels = torch.tensor([float(one.labels[at]) for one, at in chosen])
        # drawn by row and not by the network, so that a row does not depend on the others
        kept = streams.uniform(len(tasks), 1, policy.config.width, purpose="dropout") >= policy.config.dropout
        payload = FramePayload(torch.stack(crops), labels, kept, [one.instruction for one, _ in chosen])
        payload = payload.to(next(policy.parameters()).device)
        ones = torch.ones_like(payload.labels)[:, None]
        zeros = torch.zeros_like(ones)
        group = torch.arange(len(tasks), device=ones.device)
        return Rollouts(group, ones, logp_old=zeros, reward=zeros[:, 0], advantage=zeros, payload=payload)

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Log-likelihood (B, 1) of the labels."""
        payload = FramePayload.of(rollouts)
        logits = policy(payload.images, payload.instructions, payload.kept)
        return PolicyOutputs(
            -functional.binary_cross_entropy_with_logits(logits, payload.labels, reduction="none")[:, None]
        )

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators, step: Step) -> LossOutput:
        """Mean binary cross-entropy over the rows of the optimiser step."""
        loss = -self.scores(policy, minibatch, frozenset({"logp"})).logp.sum() / denominators.tokens
        return LossOutput(loss, {"loss/total": Metric.summed(loss.detach())})

    def describe(self) -> str:
        """Name of the loss."""
        return f"binary cross-entropy of {len(self.kinds[0])} frames with success and {len(self.kinds[1])} without"

    def describe_row(self, rollouts: Rollouts, row: int) -> None:
        """Frames give no samples."""
        return None

    def measures(self, policy: SuccessClassifier, split: str, step: Step) -> list[Measure[LabelledEpisode]]:
        """Verdicts on whole episodes."""
        return [
            VerdictsMeasure(policy, split, Path(self.config.output_dir) / "false_positives" / f"step-{step.number:06d}")
        ]

    @classmethod
    def export(cls, config: Any, checkpoint: Path, output: Path) -> Exported:
        """Write a folder for `success.classifier`."""
        SuccessClassifier.from_pretrained(str(checkpoint / "model")).save_pretrained(output)
        module, name = "robotics.rewards.success_classifier", "SuccessClassifier"
        code = f"from {module} import {name}\n\njudge = {name}.from_pretrained(folder)"
        use = "success: {classifier: FOLDER} in the configuration of a robot run"
        return Exported(f"{module}.{name}.from_pretrained", code, task="robotics", facts={"use": use})


@dataclass
class VerdictsMeasure(Measure[LabelledEpisode]):
    """Verdicts on episodes, and images of the false positives."""

    model: SuccessClassifier
    split: str
    folder: Path
    batch_size: int = 8
    unit: str = "episodes"

    def run(self, batch: Sequence[Trial[LabelledEpisode]], start: int) -> list[Row]:
        """Look at every frame of some episodes."""
        return [self._row(trial) for trial in batch]

    def _row(self, trial: Trial[LabelledEpisode]) -> Row:
        one, own = trial.task, self.model.config
        chances = self.model.probabilities(torch.from_numpy(one.images), [one.instruction] * len(one.labels))
        at = first_success(chances, own.threshold, own.looks)
        # of the verdict, or the last one
        shown = len(chances) - 1 if at is None else at
        above = np.array(chances) > own.threshold
        return {
            "index": trial.index,
            "repeat": trial.repeat,
            "name": one.name,
            "instruction": one.instruction,
            "success": bool(one.labels.any()),
            "at": at,
            "right": at is not None and bool(one.labels[at]),
            "chance": chances[shown],
            "frame": one.images[shown],
            "frames": [int((above & one.labels).sum()), int(above.sum()), int(one.labels.sum())],
        }

    def metrics(self, rows: Sequence[Row], tasks: Sequence[LabelledEpisode]) -> dict[str, float]:
        """Precision, recall and false positives of episodes, and of single frames."""
        solved, judged = [row for row in rows if row["success"]], [row for row in rows if row["at"] is not None]
        right = sum(row["right"] for row in judged)
        wrong = len(judged) - right
        agreed = right + sum(row["at"] is None and not row["success"] for row in rows)
        counts = {
            "precision": (right, len(judged)),
            "recall": (right, len(solved)),
            "false_positives": (wrong, len(rows)),
            "early": (sum(row["success"] and not row["right"] for row in judged), len(rows)),
        }
        hits, above, positive = (sum(row["frames"][place] for row in rows) for place in range(3))
        counts |= {"frame_precision": (hits, above), "frame_recall": (hits, positive)}
        found = {
            f"classifier/{name}": part / whole if whole else float("nan") for name, (part, whole) in counts.items()
        }
        low, high = wilson_interval(agreed, len(rows))
        return {
            "accuracy/episodes": agreed / max(1, len(rows)),
            "accuracy/episodes/low": low,
            "accuracy/episodes/high": high,
        } | found

    def record(self, row: Row) -> SampleRecord:
        """The frame of the verdict, or the last one."""
        said = "no success" if row["at"] is None else f"success at frame {row['at']}"
        return SampleRecord(
            id=row["name"],
            prompt=row["instruction"],
            response=f"{said}, probability {row['chance']:.3f}",
            outputs=[Image.fromarray(row["frame"])],
            finish="false positive" if row["at"] is not None and not row["right"] else "",
            correct=row["right"] if row["at"] is not None else not row["success"],
        )

    def outcome(self, row: Row) -> Outcome:
        """Whether the verdict on an episode is right."""
        right = row["right"] if row["at"] is not None else not row["success"]
        return Outcome(f"{self.split}/{row['name']}", {"accuracy/episodes": float(right)})

    def finish(self, rows: Sequence[Row], saved: ResumableRows | None) -> None:
        """Write the frames of the false positives."""
        for row in rows:
            if row["at"] is not None and not row["right"]:
                self.folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(row["frame"]).save(self.folder / f"{self.split}-{row['name']}-frame-{row['at']}.png")


def split_episodes(
    episodes: Sequence[LabelledEpisode], share: float, seed: int
) -> tuple[list[LabelledEpisode], list[LabelledEpisode]]:
    """Training and held-out episodes, each with successes and failures in proportion."""
    train, held = [], []
    for kind in (True, False):
        own = [one for one in episodes if bool(one.labels.any()) == kind]
        count = max(1, round(share * len(own)))
        order = torch.randperm(len(own), generator=make_generator(seed, "held_out", int(kind))).tolist()
        held += [own[number] for number in sorted(order[:count])]
        train += [own[number] for number in sorted(order[count:])]
    return train, held


def random_crop(image: np.ndarray, seed: int, pad: int = PAD) -> Tensor:
    """(H, W, 3) uint8 of a place drawn by the seed in an image that repeats its border by `pad` pixels."""
    height, width = image.shape[:2]
    top, left = seed % (2 * pad + 1), seed // (2 * pad + 1) % (2 * pad + 1)
    padded = np.pad(image, ((pad, pad), (pad, pad), (0, 0)), mode="edge")
    return torch.from_numpy(padded[top : top + height, left : left + width].copy())
