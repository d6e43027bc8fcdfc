"""Training of a 3D-flow world model: the diffusion loss over encoded flow, in the RL training loop.

    L = mean over rows, channels, frames and points of (prediction - target)^2

with times and noise of `robotics.flow3d.model.processes`, the prediction of noise, velocity or flow, and the
instruction left out at random where the model is to be guided by it.

Source: 3DFlowAction, arXiv 2506.06199; Hoyyyaard/3DFlowAction
    scripts/flow_generation/train_flow_generation_libero.py.

Differences from the public code: gradients are clipped at every step (there, only at the first, because the list of
parameters is used up); visibility can be predicted and can mask the loss (there, the fourth channel is a constant);
a moving average of the weights is evaluated. The defaults are those of a small network on a CPU; the paper's are in
configs/robotics/flow3d_unet_motion.yaml.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffusion.models.ema import EvalAverage, EvalEmaConfig
from diffusion.sampling.trajectories import mean_over_decisions
from mmrl.core.loss import Denominators, Metric
from mmrl.core.objectives.objective import LossOutput, PolicyOutputs
from mmrl.core.payload import Payload, nested, per_row, to_device
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import SET, choice, only_with, rare
from mmrl.runs.dry_run import model_follows
from mmrl.training.evaluation import Measure, held_out_tasks
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.training.settings import BaseRunConfig, BaseTrainerConfig
from mmrl.training.supervised import SupervisedRecipe
from robotics.flow3d.clip import FlowClip
from robotics.flow3d.closed_loop.flow_episodes import FlowEpisodesConfig, LoopConfig, list_episodes
from robotics.flow3d.closed_loop.measure import measure_in_loop
from robotics.flow3d.methods.clip_sets import (
    ClipSetConfig,
    TrainingClips,
    depth_range_m,
    instructions_of,
    load_clips,
    stacked,
)
from robotics.flow3d.methods.flow3d_evaluation import FlowDomain, FlowEvaluationConfig, FlowMeasure
from robotics.flow3d.model.context import FlowInputs
from robotics.flow3d.model.world_model import FlowWorldModel
from robotics.flow3d.model.world_model_settings import FlowModelConfig
from robotics.policies.base.encoder import Vocabulary

LOGGER = logging.getLogger("mmrl")
DEPTH_RANGES = ("data", "given")
LOSS_MASKS = ("none", "visible")


def _trainer() -> BaseTrainerConfig:
    return BaseTrainerConfig(
        steps=6000,
        tasks_per_step=32,
        learning_rate=1.5e-3,
        schedule="cosine",
        warmup_steps=100,
        weight_decay=0.01,
        betas=[0.9, 0.99],
    )


@dataclass
class WorldModelConfig(FlowModelConfig):
    """The model to train."""

    path: str = ""
    """Folder of a saved world model, or of a run, to continue training from, with its own settings."""
    depth_range: str = rare(choice("data", DEPTH_RANGES))
    """Source of encoding.z_min_m and z_max_m: data (covers 98% of the training depths, plus a tenth at both ends) or
    given."""
    words: list[str] = field(default_factory=list)
    """Words of future instructions, added to the words of the training instructions."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        default = FlowModelConfig().encoding
        for name in ("z_min_m", "z_max_m"):
            if self.depth_range == "data" and getattr(self.encoding, name) != getattr(default, name):
                raise ValueError(
                    f"model.encoding.{name} is {getattr(self.encoding, name)}, but model.depth_range=data takes it "
                    "from the data; leave it out, or set model.depth_range=given"
                )


@dataclass
class FlowPayload(Payload):
    """B clips with the noise that they are trained under; C, T, N as in an encoded flow."""

    inputs: FlowInputs = nested()
    """Images, query points and instructions."""
    flow: Tensor = per_row()
    """(B, C, T, N, N) encoded."""
    noise: Tensor = per_row()
    """(B, C, T, N, N) standard normal."""
    time: Tensor = per_row()
    """(B,) of the process."""
    keep_text: Tensor = per_row()
    """(B,) bool, False if the instruction is blanked."""


@dataclass
class Flow3dConfig(BaseRunConfig):
    """A training run of a world model."""

    model: WorldModelConfig = field(default_factory=WorldModelConfig)
    """The model."""
    data: ClipSetConfig = field(default_factory=ClipSetConfig)
    """Training clips."""
    in_memory: bool = True
    """Encode all training clips at the start and keep them in memory; false reads each clip when it is drawn."""
    eval_data: dict[str, ClipSetConfig] = field(default_factory=dict)
    """Held-out clips by name; the first split is the headline."""
    episodes: dict[str, FlowEpisodesConfig] = field(default_factory=dict)
    """Sets of closed-loop episodes by name, run in physics by every evaluation after the clips; an episode takes a
    second or more."""
    loop: LoopConfig = only_with(field(default_factory=LoopConfig), episodes=SET)
    """Verifier, grasps and planner of these episodes; `loop.seed` is ignored in favour of `seed`."""
    loss_mask: str = choice("none", LOSS_MASKS)
    """none: every number counts, as in the public code; visible: only visible points count, plus the visibility of all
    points."""
    eval_ema: EvalEmaConfig = field(default_factory=lambda: EvalEmaConfig(decay=0.995))
    """Moving average used for evaluation and export."""
    trainer: BaseTrainerConfig = field(default_factory=_trainer)
    """Batch sizes, optimiser and guards."""
    evaluation: FlowEvaluationConfig = field(default_factory=FlowEvaluationConfig)
    """Evaluation on held-out clips."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if shared := sorted(set(self.episodes) & set(self.eval_data)):
            raise ValueError(f"episodes and eval_data share the names {', '.join(shared)}; names must be unique")
        if self.loop.seed:
            raise ValueError(f"loop.seed is {self.loop.seed}, but it is replaced by seed; leave it out and set seed")


class Flow3dRecipe(FlowDomain, SupervisedRecipe[FlowWorldModel, Any]):
    """Supervised training of a world model; see the module.

    Args:
        config: options of the run.

    Raises:
        UserError: model or clips cannot be used.
    """

    config: Flow3dConfig
    policy: FlowWorldModel
    own_loss = "flow3d"

    def __init__(self, config: Flow3dConfig) -> None:
        super().__init__(config)
        clips = load_clips(config.data, "data")
        limit = config.evaluation.max_tasks or None
        held_out = held_out_tasks(config, load_clips)
        episodes = {name: list_episodes(data)[:limit] for name, data in config.episodes.items()}
        self.eval_tasks: Mapping[str, Sequence[Any]] = held_out | episodes
        self.train_tasks: Sequence[Any] = clips
        model_follows(self)
        self.policy = _open_model(config, clips)
        self.clips = TrainingClips(
            clips, self.policy, only_visible=config.loss_mask == "visible", in_memory=config.in_memory
        )
        # encoded clips from here on; before, their flow had to be readable without a model
        self.train_tasks = self.clips
        # the first clip of a set is enough, since all clips of a set have one shape
        for tasks in held_out.values():
            self.policy.check_flow(tasks[0].flow)
        self.eval_ema = self.parts["eval_ema"] = EvalAverage(self.policy, config.eval_ema)

    def data_digest(self) -> str:
        """Digest of the training clips."""
        return self.clips.digest()

    def batch(self, policy: FlowWorldModel, tasks: Sequence[Any], streams: Streams, step: Step) -> Rollouts:
        """Draw times and noise, and which clips lose their instruction; nothing is sampled."""
        inputs, flow, counted = stacked(tasks)
        rows = len(tasks)
        payload = FlowPayload(
            inputs=inputs,
            flow=flow,
            noise=streams.stack(rows, lambda own: torch.randn(1, *flow.shape[1:], generator=own), "noise"),
            time=streams.stack(rows, functools.partial(policy.process.times, 1), "time"),
            keep_text=streams.uniform(rows, 1, purpose="text") >= policy.config.process.text_drop,
        ).to(policy.device)
        # by number and not by clip: hidden points may be left out
        mask = to_device(counted.flatten(1).float(), policy.device)
        return Rollouts(
            group=torch.arange(rows, device=mask.device),
            mask=mask,
            logp_old=torch.zeros_like(mask),
            reward=torch.zeros(rows, device=mask.device),
            advantage=torch.zeros_like(mask),
            payload=payload,
        )

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Minus the squared error of each number (B, C T N N) as its log-likelihood, up to a constant."""
        payload = FlowPayload.of(rollouts)
        process = self.policy.process
        noisy = process.noisy(payload.flow, payload.noise, payload.time)
        target = process.target(payload.flow, payload.noise, payload.time)
        found = policy(payload.inputs, noisy, payload.time, payload.keep_text)
        # float32 before the difference, as in the matching losses
        return PolicyOutputs(-(found.float() - target).square().flatten(1))

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators, step: Step) -> LossOutput:
        """Mean squared error over all numbers that count in the optimiser step."""
        errors = -self.scores(policy, minibatch, frozenset({"logp"})).logp
        loss = mean_over_decisions(errors, minibatch, denominators)
        return LossOutput(loss, {"loss/total": Metric.summed(loss.detach())})

    def measures(self, policy: FlowWorldModel, split: str, step: Step) -> list[Measure[Any]]:
        """Errors of sampled flow on held-out clips, or success in closed loop over a set of episodes."""
        config = self.config
        if split in config.episodes:
            settings = dataclasses.replace(config.loop, seed=config.seed)
            # scenes stay open for the whole evaluation: building one takes longer than an episode
            return [self._scenes.enter_context(measure_in_loop(policy, settings, split, Path(config.output_dir)))]
        return [FlowMeasure(policy, config.evaluation, config.seed, split)]

    @contextmanager
    def evaluating(self, policy: FlowWorldModel) -> Iterator[None]:
        """Evaluate the average of the model; scenes are open meanwhile."""
        with self.eval_ema.applied(policy), ExitStack() as self._scenes:
            yield

    def describe(self) -> str:
        """Formula of the loss."""
        process = self.policy.config.process
        what = {"eps": "noise", "v": "velocity", "x0": "flow"}[process.parameterisation]
        return f"mean ({what}(x_t, t, image, points, instruction) - {what})^2, {process.kind}"

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float | Metric]:
        """Number of clips."""
        return {"data/clips": float(len(self.clips))}


def _open_model(config: Flow3dConfig, clips: Sequence[FlowClip]) -> FlowWorldModel:
    """A new model for some clips, or a saved one."""
    given = config.model
    texts = instructions_of(clips)
    if given.path:
        model = FlowWorldModel.from_pretrained(given.path)
        _check_saved(given, model.config)
        _warn_of_words(model.vocabulary, texts)
        model.check_instructions(texts)
        return model
    if given.depth_range == "data":
        low, high = depth_range_m(clips)
        given = dataclasses.replace(given, encoding=dataclasses.replace(given.encoding, z_min_m=low, z_max_m=high))
    # only the fields of the saved configuration; `path`, `words` and `depth_range` are about this run
    parts = {item.name: getattr(given, item.name) for item in dataclasses.fields(FlowModelConfig)}
    model = FlowWorldModel(FlowModelConfig(**parts), Vocabulary.from_texts([*texts, *given.words]), config.seed)
    model.check_instructions(texts)
    return model


def _check_saved(given: WorldModelConfig, saved: FlowModelConfig) -> None:
    """Refuse settings that a saved model contradicts; raises UserError."""
    default = _flat(dataclasses.asdict(FlowModelConfig()))
    wanted, own = (_flat(dataclasses.asdict(part)) for part in (given, saved))
    # a setting may be left at its default or repeat the saved one
    for name, value in default.items():
        if wanted[name] not in (value, own[name]):
            raise UserError(
                f"model.{name} is {wanted[name]}, but the model in {given.path} has {own[name]}; leave it out, or "
                "train a new model without model.path"
            )


def _warn_of_words(vocabulary: Vocabulary, texts: Sequence[str]) -> None:
    """Say which words of the instructions a saved model does not know."""
    missing = set(Vocabulary.from_texts(texts).words) - set(vocabulary.words)
    if missing:
        LOGGER.warning(
            "the model's vocabulary lacks %s, which it cannot tell apart; add these words to model.words when the "
            "model is first trained",
            ", ".join(sorted(missing)),
        )


def _flat(entries: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in entries.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found
