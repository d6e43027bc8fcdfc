"""Options of the loop: the dataclasses hold the defaults, a YAML file overrides them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from mmrl.fields import SET, bounded, check_fields, choice, only_with, parts_of, rare
from mmrl.files import LONGEST_NAME, label_problem
from mmrl.runs.tracking import TrackingConfig

SCHEDULES = ("constant", "linear", "cosine")
NONFINITE_POLICIES = ("skip", "stop")
OLD_LOGP_SOURCES = ("recompute", "sampler", "auto")
ENGINES = ("local", "ray")
REFERENCE_KINDS = ("auto", "none", "frozen", "adapter", "ema")
SMALLEST_LOW_PRECISION_STEP = 1e-4
"""Approximate spacing of bfloat16 numbers near a typical weight of 0.02; AdamW moves a weight by the learning rate."""
PRECISIONS = ("none", "bf16", "fp16")  # not "no": YAML reads that as false
SHARDINGS = ("none", "fsdp2")
GATHERED = ("own", "bf16")


@dataclass
class BaseTrainerConfig:
    """Batches, optimiser and guards; all options of supervised runs."""

    steps: int = bounded(100, at_least=1)
    """Number of rollout steps of the whole run."""
    tasks_per_step: int = bounded(8, at_least=1)
    """Number of tasks drawn per step, over all processes; each is a group of samples, or a row in a supervised run."""
    minibatches_per_step: int = bounded(1, at_least=1)
    """Number of optimiser steps into which one pass over a step's rows is split, by whole groups."""
    epochs: int = bounded(1, at_least=1)
    """Number of passes over the rows of a step."""
    micro_batch: int = bounded(0, at_least=0)
    """Number of rows in one forward and backward pass; 0 means all rows. It limits the memory of activations, but not
    of weights, moments and gradients; from the second micro-batch on, gradients are held in addition to the
    activations. The result does not depend on it. Objectives that compare the rows of a group (reg_grpo) keep each
    group together."""
    learning_rate: float = bounded(1e-6, above=0)
    """Peak learning rate of AdamW."""
    schedule: str = choice("constant", SCHEDULES)
    """constant, linear or cosine decay to `final_learning_rate` after the warm-up."""
    warmup_steps: int = bounded(0, at_least=0)
    """Number of optimiser steps over which the rate rises linearly from 0."""
    final_learning_rate: float = rare(only_with(bounded(0.0, at_least=0), schedule=("linear", "cosine")))
    """Learning rate at the end of a linear or cosine schedule."""
    weight_decay: float = bounded(0.0, at_least=0)
    """Decoupled weight decay."""
    betas: list[float] = rare(bounded([0.9, 0.999], length=2, at_least=0, below=1))
    """Decay rates of AdamW's two moments."""
    adam_eps: float = rare(bounded(1e-8, at_least=0))
    """Constant added to AdamW's denominator."""
    max_grad_norm: float = bounded(1.0, at_least=0)
    """Global gradient norm above which gradients are scaled down; 0 disables it."""
    on_nonfinite: str = rare(choice("skip", NONFINITE_POLICIES))
    """What to do after a NaN or infinite loss or gradient: skip the optimiser step, or stop the run."""
    mixed_precision: str = choice("none", PRECISIONS)
    """Autocast: none, bf16 or fp16 (which also scales the loss so that small gradients do not become 0)."""
    sharding: str = rare(choice("none", SHARDINGS))
    """none: every process keeps all weights, gradients and moments. fsdp2: every process keeps a shard of the reference
    policy and of the trained weights with their gradients and moments. Weights are gathered for sampling and for
    computing gradients."""
    gathered: str = rare(only_with(choice("own", GATHERED), sharding="fsdp2"))
    """Precision of the weights that fsdp2 gathers: own, or bf16, in which case only the shards are float32."""
    timeout_minutes: float = rare(bounded(240.0, above=0))
    """Timeout in minutes for processes of a run that wait for each other, e.g. for the first process while it builds
    data and models or writes a checkpoint. If a process fails or vanishes, the others end long before."""
    threads: int = rare(bounded(0, at_least=0))
    """Number of CPU threads of torch; 0 leaves it unchanged."""
    release_memory: bool = rare(True)
    """Return free memory to the system during and after each step on a CPU, and cache fewer compiled kernels, so that
    the memory of long runs does not grow."""

    def validate(self) -> None:
        """Check that the fields are consistent; raises ValueError."""
        if self.minibatches_per_step > self.tasks_per_step:
            raise ValueError(
                f"trainer.minibatches_per_step is {self.minibatches_per_step} but a step has only "
                f"{self.tasks_per_step} tasks; minibatches consist of whole groups"
            )
        if self.gathered == "bf16" and self.mixed_precision != "bf16":
            raise ValueError(
                f"trainer.gathered=bf16 requires trainer.mixed_precision=bf16, not {self.mixed_precision}: "
                "otherwise a model with bfloat16 weights does not accept float32 inputs"
            )


@dataclass
class TrainerConfig(BaseTrainerConfig):
    """Number of samples per step and how updates use them."""

    samples_per_task: int = bounded(8, at_least=1)
    """Number of samples per task (group size G)."""
    skip_zero_advantage_groups: bool = rare(True)
    """Skip the update's forward pass for groups without a gradient (all advantages 0); the update does not change."""
    skip_steps_without_gradient: bool = rare(True)
    """Skip the optimiser step of a minibatch in which no group has a gradient. Otherwise AdamW would move the weights
    by momentum only and average zeros into its second moment, so that the next gradient moves them further. false takes
    such steps, like most trainers."""
    old_logp: str = rare(choice("recompute", OLD_LOGP_SOURCES))
    """Source of old log-probabilities: recompute (the ratio is exactly 1 at the first update), sampler (recorded while
    sampling), or auto. auto uses sampler for images and robot actions sampled in float32. Otherwise it uses recompute,
    because bfloat16 rounds differently in different batches, and objective.correction and objective.gate compare the
    two."""


@dataclass
class TrustRegionConfig:
    """Natural-gradient steps instead of AdamW; each row of a step counts as one action."""

    max_kl: float = bounded(0.01, above=0)
    """Maximum KL to the policy before the step, in nats per action, to second order."""
    damping: float = bounded(0.1, at_least=0)
    """Multiple of the identity matrix added to the Fisher matrix."""
    iterations: int = bounded(10, at_least=1)
    """Number of conjugate-gradient iterations; each costs three passes over the rows."""

    def check(self, trainer: BaseTrainerConfig) -> None:
        """Raise ValueError for options of AdamW, mixed precision and sharding."""
        plain = BaseTrainerConfig(max_grad_norm=0.0)
        for name in ("weight_decay", "betas", "adam_eps", "max_grad_norm", "mixed_precision", "sharding"):
            if getattr(trainer, name) != getattr(plain, name):
                raise ValueError(
                    f"trainer.{name} is {getattr(trainer, name)}, but natural-gradient steps use full precision, "
                    f"without AdamW and clipping; leave it at {getattr(plain, name)}"
                )


@dataclass
class ReferenceConfig:
    """The policy towards which a KL term pulls."""

    kind: str = choice("auto", REFERENCE_KINDS)
    """Reference policy: none, frozen (a copy of the initial policy), adapter (the policy with its LoRA adapter
    disabled), ema (a moving average of the policy), or auto. With a KL term, auto is adapter if there is a new LoRA
    adapter, else frozen."""
    ema_decay: float = rare(only_with(bounded(0.99, at_least=0, below=1), kind="ema"))
    """Decay of the moving average per optimiser step if kind is ema."""


@dataclass
class RollersConfig:
    """Where the tasks of a step are sampled and scored."""

    engine: str = choice("local", ENGINES)
    """local (the training process) or ray (workers, each with its own copy of model, environments and rewards)."""
    workers: int = only_with(bounded(2, at_least=1), engine="ray")
    """Number of workers of all processes together."""
    address: str = only_with("", engine="ray")
    """Address of a running Ray cluster, or auto; if empty, Ray is started on this machine for the run."""
    unit: int = bounded(0, at_least=0)
    """Number of tasks sampled together; 0 means all tasks of a process, or 1 with Ray."""
    num_cpus: float = only_with(bounded(1.0, at_least=0), engine="ray")
    """Number of CPU cores that Ray reserves per worker."""
    num_gpus: float = only_with(bounded(0.0, at_least=0), engine="ray")
    """Number of GPUs that Ray reserves per worker for computing and rendering; with 0.5, two workers share a GPU."""
    overlap: bool = only_with(False, engine="ray")
    """Sample a step's tasks during the previous update, with weights that are one update old. The step after an
    evaluation or a checkpoint of `checkpoint.every` waits for the current weights."""


@dataclass
class CheckpointConfig:
    """Intervals between checkpoints, and how many are kept."""

    every: int = bounded(0, at_least=0)
    """Number of steps between checkpoints; 0 means only by time and at the end."""
    minutes: float = rare(bounded(15.0, at_least=0))
    """Minutes since the last checkpoint after which a step writes a new one, regardless of `every`; 0 disables it."""
    keep: int = bounded(2, at_least=0)
    """Number of newest checkpoints to keep in addition to the best one; 0 means all."""
    best_metric: str = rare("")
    """Evaluation metric that is shown first in the report and whose highest value marks the best checkpoint. Default:
    the first accuracy or score."""


@dataclass
class EvaluationConfig:
    """Intervals and protocol of held-out evaluations."""

    every: int = bounded(0, at_least=0)
    """Number of steps between evaluations; 0 means only at the start and the end."""
    at_start: bool = True
    """Evaluate before the first update."""
    at_end: bool = rare(True)
    """Evaluate after the last update."""
    greedy: bool = True
    """Evaluate one greedy sample per task."""
    samples: int = bounded(1, at_least=0)
    """Number of samples per task at `temperature`; 0 means none."""
    temperature: float = rare(only_with(bounded(1.0, above=0), samples=SET))
    """Temperature of the sampled evaluation."""
    max_tasks: int = bounded(0, at_least=0)
    """Number of tasks to evaluate, from the start of the split; 0 means all."""
    batch_tasks: int = rare(bounded(64, at_least=1))
    """Number of tasks generated together."""
    records: int = rare(bounded(24, at_least=0))
    """Number of rollouts saved for the report at each evaluation."""

    def validate(self) -> None:
        """Check that the fields are consistent; raises ValueError."""
        if not self.greedy and self.samples == 0:
            raise ValueError("evaluation.greedy is false and evaluation.samples is 0, so nothing would be evaluated")


@dataclass
class BaseRunConfig:
    """Options of every run; supervised runs add data and loss."""

    recipe: str = ""
    """Name of the recipe (`mmrl list recipes`) or module:Recipe:Config."""
    output_dir: str = "runs/unnamed"
    """Run folder; must not contain another run unless --resume is given."""
    seed: int = 0
    """Seed of task order, sampling, dropout and initialisation."""
    trainer: BaseTrainerConfig = field(default_factory=BaseTrainerConfig)
    """Batch sizes, optimiser and guards."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Held-out evaluations."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Destinations of metrics."""

    def validate(self) -> None:
        """Check the bounds of all fields and the rules of all parts; a subclass adds rules between its parts."""
        check_fields(self)
        self._check_output_dir()
        for name in getattr(self, "eval_data", None) or {}:
            if problem := label_problem(name):
                raise ValueError(f"eval_data contains a split {name!r:.130}, which is used in file names: {problem}")
        for part in parts_of(self):
            if hasattr(part, "validate"):
                part.validate()

    def _check_output_dir(self) -> None:
        if not self.output_dir.strip():
            raise ValueError("output_dir is empty; set a folder for the run, such as runs/first")
        longest = max((len(os.fsencode(part)) for part in Path(self.output_dir).parts), default=0)
        if longest > LONGEST_NAME:
            raise ValueError(f"output_dir has a name of {longest} bytes; file systems allow at most {LONGEST_NAME}")


@dataclass
class RunConfig(BaseRunConfig):
    """Options of every reinforcement-learning run."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Batch sizes, optimiser and guards."""
    reference: ReferenceConfig = rare(field(default_factory=ReferenceConfig))
    """Reference policy of the KL term."""
    rollers: RollersConfig = rare(field(default_factory=RollersConfig))
    """Workers that sample and score."""
