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
"""About how far bfloat16 numbers near a typical weight of 0.02 are apart; AdamW moves a weight by the learning rate."""
PRECISIONS = ("none", "bf16", "fp16")  # not "no": YAML reads that as false
SHARDINGS = ("none", "fsdp2")
GATHERED = ("own", "bf16")


@dataclass
class BaseTrainerConfig:
    """Batches, optimiser and guards; supervised runs have no more."""

    steps: int = bounded(100, at_least=1)
    """Rollout steps of the whole run."""
    tasks_per_step: int = bounded(8, at_least=1)
    """Tasks drawn in a step, over all processes; each is a group of samples, or a row of a supervised run."""
    minibatches_per_step: int = bounded(1, at_least=1)
    """Optimiser steps that one pass over a step's rows is cut into, by whole groups."""
    epochs: int = bounded(1, at_least=1)
    """Passes over the rows of a step."""
    micro_batch: int = bounded(0, at_least=0)
    """Rows in one forward and backward; 0 = all rows at once. It bounds the memory of activations; weights, moments and
    gradients stay, and from the second part on the gradients lie beside the activations. The result does not depend on
    it. Objectives that compare the rows of a group (reg_grpo) keep each group together."""
    learning_rate: float = bounded(1e-6, above=0)
    """Peak learning rate of AdamW."""
    schedule: str = choice("constant", SCHEDULES)
    """constant, linear or cosine decay to `final_learning_rate` after the warm-up."""
    warmup_steps: int = bounded(0, at_least=0)
    """Optimiser steps over which the rate rises linearly from 0."""
    final_learning_rate: float = rare(only_with(0.0, schedule=("linear", "cosine")))
    """Rate at the end of a linear or cosine schedule."""
    weight_decay: float = bounded(0.0, at_least=0)
    """Decoupled weight decay."""
    betas: list[float] = rare(bounded([0.9, 0.999], length=2))
    """AdamW's two moment decays."""
    adam_eps: float = rare(1e-8)
    """AdamW's denominator constant."""
    max_grad_norm: float = bounded(1.0, at_least=0)
    """Global gradient norm above which gradients are scaled down; 0 = never."""
    on_nonfinite: str = rare(choice("skip", NONFINITE_POLICIES))
    """Reaction to a NaN or infinite loss or gradient: skip that optimiser step, or stop the run."""
    mixed_precision: str = choice("none", PRECISIONS)
    """Autocast: none, bf16 or fp16, which scales the loss so that small gradients do not become 0."""
    sharding: str = rare(choice("none", SHARDINGS))
    """none: every process keeps all weights, gradients and moments; fsdp2: of those that are trained and of a reference
    policy it keeps a part, and gathers the weights to sample and to compute gradients."""
    gathered: str = rare(only_with(choice("own", GATHERED), sharding="fsdp2"))
    """Precision of the weights that fsdp2 gathers: their own, or bf16, with float32 weights in the parts only."""
    timeout_minutes: float = rare(bounded(240.0, above=0))
    """Minutes that the processes of a run wait for one another in one operation, such as for the first one while it
    builds data and models or writes a checkpoint. One that fails or vanishes ends the others long before."""
    threads: int = rare(bounded(0, at_least=0))
    """CPU threads of torch; 0 = leave as it is."""
    release_memory: bool = rare(True)
    """Give free memory back to the system within and after each step on a CPU, and keep fewer compiled kernels, so
    that a long run does not grow."""

    def validate(self) -> None:
        """Check that the fields fit together; raises ValueError."""
        if self.minibatches_per_step > self.tasks_per_step:
            raise ValueError(
                f"trainer.minibatches_per_step is {self.minibatches_per_step} but a step has only "
                f"{self.tasks_per_step} tasks; minibatches are cut by whole groups"
            )
        if self.gathered == "bf16" and self.mixed_precision != "bf16":
            raise ValueError(
                f"trainer.gathered=bf16 needs trainer.mixed_precision=bf16, which is {self.mixed_precision}: only with "
                "it does a model of bfloat16 weights take float32 inputs"
            )


@dataclass
class TrainerConfig(BaseTrainerConfig):
    """Number of samples in a step and their use in updates."""

    samples_per_task: int = bounded(8, at_least=1)
    """Samples of each task, the group size G."""
    skip_zero_advantage_groups: bool = rare(True)
    """Leave out the update's forward pass of groups without a gradient (every advantage 0); the step is the same."""
    skip_steps_without_gradient: bool = rare(True)
    """Take no optimiser step on a minibatch of which no group has a gradient. AdamW would move the weights by momentum
    alone and average zeros into its second moment, so that the next gradient moves them further; false takes such
    steps, as most trainers do."""
    old_logp: str = rare(choice("recompute", OLD_LOGP_SOURCES))
    """Old log-probs: recompute (exact ratio 1 at the first update), sampler (recorded while sampling), or auto (sampler
    where images or robots' actions are drawn in float32, else recompute: bfloat16 rounds other batches otherwise, and
    objective.correction and objective.gate compare the two)."""


@dataclass
class TrustRegionConfig:
    """Natural-gradient steps instead of AdamW; a row of a step counts as one action."""

    max_kl: float = bounded(0.01, above=0)
    """KL to the policy before the step that the step may have, in nats an action, to second order."""
    damping: float = bounded(0.1, at_least=0)
    """Multiple of the identity that is added to the Fisher matrix."""
    iterations: int = bounded(10, at_least=1)
    """Iterations of the conjugate gradients; each costs three passes over the rows."""

    def check(self, trainer: BaseTrainerConfig) -> None:
        """Refuse options of AdamW, mixed precision and sharding; raises ValueError."""
        plain = BaseTrainerConfig(max_grad_norm=0.0)
        for name in ("weight_decay", "betas", "adam_eps", "max_grad_norm", "mixed_precision", "sharding"):
            if getattr(trainer, name) != getattr(plain, name):
                raise ValueError(
                    f"trainer.{name} is {getattr(trainer, name)}, but natural-gradient steps are taken in full "
                    f"precision, without AdamW and clipping; leave it at {getattr(plain, name)}"
                )


@dataclass
class ReferenceConfig:
    """The policy that a KL term pulls towards."""

    kind: str = choice("auto", REFERENCE_KINDS)
    """auto (where there is a KL term the policy at the start: adapter with a new LoRA adapter, else frozen), none,
    frozen (a copy of the policy at the start), adapter (the policy with its LoRA adapter switched off), or ema."""
    ema_decay: float = rare(only_with(bounded(0.99, at_least=0, below=1), kind="ema"))
    """Weight kept by the moving average at each optimiser step when kind is ema."""


@dataclass
class RollersConfig:
    """Where the tasks of a step are sampled and scored."""

    engine: str = choice("local", ENGINES)
    """local (the training process) or ray (workers, each with its copy of model, environments and rewards)."""
    workers: int = only_with(bounded(2, at_least=1), engine="ray")
    """Workers of all processes together."""
    address: str = only_with("", engine="ray")
    """Address of a running Ray cluster, or auto; empty = start Ray on this machine for the run."""
    unit: int = bounded(0, at_least=0)
    """Tasks that are sampled together; 0 = all of a process, and 1 with Ray."""
    num_cpus: float = only_with(bounded(1.0, at_least=0), engine="ray")
    """CPU cores that Ray reserves for a worker."""
    num_gpus: float = only_with(bounded(0.0, at_least=0), engine="ray")
    """GPUs that Ray reserves for a worker, which computes and renders there; 0.5 = two workers share one."""
    overlap: bool = only_with(False, engine="ray")
    """Sample a step's tasks during the update before, with weights that are one update old; the step after an
    evaluation or a checkpoint of `checkpoint.every` waits for its weights."""


@dataclass
class CheckpointConfig:
    """Intervals of checkpoints and number of them that are kept."""

    every: int = bounded(0, at_least=0)
    """Steps between checkpoints; 0 = only by time and at the end."""
    minutes: float = rare(bounded(15.0, at_least=0))
    """Minutes since the last checkpoint after which a step ends with one, regardless of `every`; 0 = never."""
    keep: int = bounded(2, at_least=0)
    """Newest checkpoints kept, besides the best one; 0 = all."""
    best_metric: str = rare("")
    """Evaluation metric that comes first in the report, and whose highest value marks the best checkpoint; empty = the
    first accuracy or score."""


@dataclass
class EvaluationConfig:
    """Intervals and protocol of held-out evaluations."""

    every: int = bounded(0, at_least=0)
    """Steps between evaluations; 0 = only at the start and the end."""
    at_start: bool = True
    """Evaluate before the first update."""
    at_end: bool = rare(True)
    """Evaluate after the last update."""
    greedy: bool = True
    """One greedy sample a task."""
    samples: int = bounded(1, at_least=0)
    """Samples a task at `temperature`; 0 = none."""
    temperature: float = rare(only_with(bounded(1.0, above=0), samples=SET))
    """Temperature of the sampled evaluation."""
    max_tasks: int = bounded(0, at_least=0)
    """Tasks evaluated, the first ones of the split; 0 = all."""
    batch_tasks: int = rare(bounded(64, at_least=1))
    """Tasks generated together."""
    records: int = rare(bounded(24, at_least=0))
    """Rollouts saved for the report at each evaluation."""

    def validate(self) -> None:
        """Check that the fields fit together; raises ValueError."""
        if not self.greedy and self.samples == 0:
            raise ValueError("evaluation.greedy is false and evaluation.samples is 0; nothing would be measured")


@dataclass
class BaseRunConfig:
    """Options that every run has; supervised runs add data and loss."""

    recipe: str = ""
    """Name of the recipe (`mmrl list recipes`) or module:Recipe:Config."""
    output_dir: str = "runs/unnamed"
    """Folder of the run; must not hold another run unless --resume is given."""
    seed: int = 0
    """Seed of task order, sampling, dropout and initialisation."""
    trainer: BaseTrainerConfig = field(default_factory=BaseTrainerConfig)
    """Batch sizes, optimiser and guards."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Evaluation."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Destinations of metrics."""

    def validate(self) -> None:
        """Check the bounds of all fields and the rules of all parts; a subclass adds the rules between its parts."""
        check_fields(self)
        self._check_output_dir()
        for name in getattr(self, "eval_data", None) or {}:
            if problem := label_problem(name):
                raise ValueError(f"eval_data names a split {name!r:.130}, which becomes a name of files: {problem}")
        for part in parts_of(self):
            if hasattr(part, "validate"):
                part.validate()

    def _check_output_dir(self) -> None:
        if not self.output_dir.strip():
            raise ValueError("output_dir is empty; name a folder for the run, such as runs/first")
        longest = max((len(os.fsencode(part)) for part in Path(self.output_dir).parts), default=0)
        if longest > LONGEST_NAME:
            raise ValueError(f"output_dir has a name of {longest} bytes; file systems allow {LONGEST_NAME}")


@dataclass
class RunConfig(BaseRunConfig):
    """Options that every reinforcement-learning run has."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Batch sizes, optimiser and guards."""
    reference: ReferenceConfig = rare(field(default_factory=ReferenceConfig))
    """Reference policy of the KL term."""
    rollers: RollersConfig = rare(field(default_factory=RollersConfig))
    """Workers that sample and score."""
