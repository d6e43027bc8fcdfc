"""Options of the loop: the dataclasses hold the defaults, a YAML file states what differs."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmrl.training.record.tracking import TrackingConfig

__all__ = [
    "SMALLEST_LOW_PRECISION_STEP",
    "CheckpointConfig",
    "EvaluationConfig",
    "GroupFilterConfig",
    "ReferenceConfig",
    "RunConfig",
    "TrainerConfig",
]

SCHEDULES = ("constant", "linear", "cosine")
NONFINITE_POLICIES = ("skip", "stop")
OLD_LOGP_SOURCES = ("recompute", "sampler")
REFERENCE_KINDS = ("auto", "none", "frozen", "adapter", "ema")
FILTER_KINDS = ("none", "drop", "resample")
SMALLEST_LOW_PRECISION_STEP = 1e-4
"""About how far bfloat16 numbers near a typical weight of 0.02 are apart; AdamW moves a weight by the learning rate."""
PRECISIONS = ("none", "bf16")  # not "no": YAML reads that as false


def _check_choice(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{key} is '{value}'; allowed: {', '.join(allowed)}")


def _check_at_least(key: str, value: float, minimum: float) -> None:
    if value < minimum:
        raise ValueError(f"{key} is {value}; must be at least {minimum}")


@dataclass
class TrainerConfig:
    """How much is sampled in a step and how it is turned into updates."""

    steps: int = 100
    """Rollout steps of the whole run."""
    tasks_per_step: int = 8
    """Tasks (groups) drawn in a step, over all processes."""
    samples_per_task: int = 8
    """Samples of each task, the group size G."""
    minibatches_per_step: int = 1
    """Optimiser steps that one pass over the rollouts is cut into, by whole groups."""
    epochs: int = 1
    """Passes over the rollouts of a step."""
    micro_batch: int = 0
    """Rows in one forward and backward; memory only, the result does not depend on it; 0 = all rows at once."""
    skip_zero_advantage_groups: bool = True
    """Leave out the update's forward pass of groups without a gradient (every advantage 0); the step is the same."""
    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    schedule: str = "constant"
    """constant, linear or cosine decay to `final_learning_rate` after the warm-up."""
    warmup_steps: int = 0
    """Optimiser steps over which the rate rises linearly from 0."""
    final_learning_rate: float = 0.0
    """Rate at the end of a linear or cosine schedule."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW's two moment decays."""
    adam_eps: float = 1e-8
    """AdamW's denominator constant."""
    max_grad_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down; 0 = never."""
    old_logp: str = "recompute"
    """Old log-probs: recompute (exact ratio 1 at the first update) or sampler (recorded while sampling)."""
    on_nonfinite: str = "skip"
    """What a NaN or infinite loss or gradient does: skip that optimiser step, or stop the run."""
    max_nonfinite: int = 10
    """Skipped optimiser steps after which the run stops."""
    mixed_precision: str = "none"
    """Autocast: none or bf16."""
    threads: int = 0
    """CPU threads of torch; 0 = leave as it is."""

    def validate(self) -> None:
        """Check ranges; raises ValueError."""
        for key in ("steps", "tasks_per_step", "samples_per_task", "minibatches_per_step", "epochs"):
            _check_at_least(f"trainer.{key}", getattr(self, key), 1)
        for key in ("micro_batch", "warmup_steps", "max_grad_norm", "weight_decay", "threads"):
            _check_at_least(f"trainer.{key}", getattr(self, key), 0)
        if self.minibatches_per_step > self.tasks_per_step:
            raise ValueError(
                f"trainer.minibatches_per_step is {self.minibatches_per_step} but a step has only "
                f"{self.tasks_per_step} tasks; minibatches are cut by whole groups"
            )
        if self.learning_rate <= 0:
            raise ValueError(f"trainer.learning_rate is {self.learning_rate}; must be positive")
        if len(self.betas) != 2:
            raise ValueError(f"trainer.betas has {len(self.betas)} values; AdamW takes two")
        _check_choice("trainer.schedule", self.schedule, SCHEDULES)
        _check_choice("trainer.on_nonfinite", self.on_nonfinite, NONFINITE_POLICIES)
        _check_choice("trainer.old_logp", self.old_logp, OLD_LOGP_SOURCES)
        _check_choice("trainer.mixed_precision", self.mixed_precision, PRECISIONS)

    @property
    def single_update(self) -> bool:
        """Whether the rollouts of a step serve one optimiser step only, so that old = new log-probs."""
        return self.epochs == 1 and self.minibatches_per_step == 1


@dataclass
class GroupFilterConfig:
    """Which groups may teach; zero-variance groups carry no signal (DAPO's dynamic sampling)."""

    kind: str | None = None
    """none, drop (train on the rest) or resample (draw more until the step is full); empty = as the objective says."""
    key: str = "reward"
    """`reward` or the name of a reward term whose group mean is compared with the bounds."""
    low: float | None = None
    """Keep groups whose mean of `key` is above this; empty = any."""
    high: float | None = None
    """Keep groups whose mean of `key` is below this; empty = any."""
    max_tries: int = 20
    """Sampling rounds of `resample` before the step goes on with what there is."""

    def validate(self) -> None:
        """Check ranges; raises ValueError."""
        if self.kind is not None:
            _check_choice("filter.kind", self.kind, FILTER_KINDS)
        _check_at_least("filter.max_tries", self.max_tries, 1)


@dataclass
class ReferenceConfig:
    """The policy that a KL term pulls towards."""

    kind: str = "auto"
    """auto (none without KL, adapter with LoRA, else frozen), none, frozen copy, adapter switched off, or ema."""
    ema_decay: float = 0.99
    """Weight kept by the moving average at each optimiser step when kind is ema."""

    def validate(self) -> None:
        """Check ranges; raises ValueError."""
        _check_choice("reference.kind", self.kind, REFERENCE_KINDS)
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"reference.ema_decay is {self.ema_decay}; must be in [0, 1)")


@dataclass
class CheckpointConfig:
    """When the run is saved and what is kept."""

    every: int = 0
    """Steps between checkpoints; 0 = only at the end."""
    keep: int = 2
    """Newest checkpoints kept, beside the best one; 0 = all."""
    best_metric: str = ""
    """Evaluation metric whose highest value marks the best checkpoint; empty = the first accuracy or score."""

    def validate(self) -> None:
        """Check ranges; raises ValueError."""
        _check_at_least("checkpoint.every", self.every, 0)
        _check_at_least("checkpoint.keep", self.keep, 0)


@dataclass
class EvaluationConfig:
    """When held-out tasks are evaluated and how."""

    every: int = 0
    """Steps between evaluations; 0 = only at the start and the end."""
    at_start: bool = True
    """Evaluate before the first update."""
    at_end: bool = True
    """Evaluate after the last update."""
    greedy: bool = True
    """One greedy sample a task."""
    samples: int = 1
    """Samples a task at `temperature`; 0 = none."""
    temperature: float = 1.0
    """Temperature of the sampled evaluation."""
    max_tasks: int = 0
    """Tasks evaluated, the first ones of the split; 0 = all."""
    batch_tasks: int = 64
    """Tasks generated together."""
    records: int = 24
    """Rollouts saved for the report at each evaluation."""

    def validate(self) -> None:
        """Check ranges; raises ValueError."""
        for key in ("every", "samples", "max_tasks", "records"):
            _check_at_least(f"evaluation.{key}", getattr(self, key), 0)
        _check_at_least("evaluation.batch_tasks", self.batch_tasks, 1)
        if self.temperature <= 0:
            raise ValueError(f"evaluation.temperature is {self.temperature}; must be positive")
        if not self.greedy and self.samples == 0:
            raise ValueError("evaluation.greedy is false and evaluation.samples is 0; nothing would be measured")


@dataclass
class RunConfig:
    """What every run has, whatever its domain."""

    recipe: str = ""
    """Name of the recipe (`mmrl list recipes`) or module:Recipe:Config."""
    output_dir: str = "runs/unnamed"
    """Folder of the run; must not hold another run unless --resume is given."""
    seed: int = 0
    """Seed of task order, sampling, dropout and initialisation."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Batch sizes, optimiser and guards."""
    filter: GroupFilterConfig = field(default_factory=GroupFilterConfig)
    """Which groups may teach."""
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    """Reference policy of the KL term."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Evaluation."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Where metrics go."""

    def validate(self) -> None:
        """Check every part; raises ValueError naming the key."""
        for part in (self.trainer, self.filter, self.reference, self.checkpoint, self.evaluation):
            part.validate()
