"""DR-PO: rollouts that start inside a reference answer of the data (Chang et al., arXiv 2404.08495).

With probability `probability` a question is answered from a random point of its reference answer on: the answer begins
with the reference's first tokens, their number uniform from 0 to one less than all, and the policy writes the rest. The
beginning belongs to the prompt: the samples of the question share it, rewards see the whole answer, and the loss counts
the tokens behind it alone. Evaluations start from the question.

Differences from Cornell-RL/drpo src/tldr/drpo.py: the start is drawn for each question, not for each row, so that the
prompt is computed once for its group; the code's critic also learns at the reference's tokens. The objective
`dataset_reset` is its PPO, and any other can be set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mmrl.core.loss import Metric
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import bounded, rare
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams
from mmrl.training.recipe import RolloutStage, Step
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.methods.augmentation import AugmentedTask, augment_task
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe


@dataclass
class ResetSettings:
    """Starting points of rollouts inside reference answers."""

    probability: float = bounded(1.0, at_least=0, at_most=1)
    """Probability that a question starts inside its reference answer."""
    reference_key: str = rare("completion")
    """Column with the reference answer."""


@dataclass
class DatasetResetConfig(VlmConfig):
    """A DR-PO run."""

    reset: ResetSettings = field(default_factory=ResetSettings)
    """Starting points of rollouts inside reference answers."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="dataset_reset"))
    """Objective that is optimised."""


class ReferenceStarts(RolloutStage):
    """Starts responses at random points of their references."""

    name = "reset"

    def __init__(self, settings: ResetSettings) -> None:
        self.settings = settings

    def check_data(self, tasks: Sequence[VlmTask]) -> None:
        """Reject questions without a reference answer; raises UserError."""
        key = self.settings.reference_key
        without = next((task for task in tasks if not isinstance(task.columns.get(key), str)), None)
        if without is not None:
            raise UserError(
                f"data: question {without.id} has no text in column '{key}' (reset.reference_key), which rollouts "
                f"start from; columns: {', '.join(without.columns)}"
            )

    def before(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> list[VlmTask]:
        """Start a fraction of the responses inside their references."""
        draws = streams.uniform(len(tasks), 1, 2, purpose="reset").tolist()
        return [self.started(policy, task, *draw) for task, draw in zip(tasks, draws, strict=True)]

    def started(self, policy: VlmPolicy, task: VlmTask, whether: float, where: float) -> VlmTask:
        """A question with the beginning of its answer, chosen by two numbers in [0, 1)."""
        tokenizer = policy.processor.tokenizer
        ids = tokenizer.encode(task.columns[self.settings.reference_key], add_special_tokens=False)
        taken = int(where * len(ids))
        if whether >= self.settings.probability or not taken:
            return task
        # a character of several tokens is not cut in two
        start = tokenizer.decode(ids[:taken]).rstrip("\N{REPLACEMENT CHARACTER}")
        return augment_task(task, given_start=start, hint_fraction=taken / len(ids))

    def metrics(self, rollouts: Rollouts, step: Step) -> dict[str, Metric]:
        """Fraction of questions that started inside an answer, and how far in."""
        tasks = VlmPayload.of(rollouts).tasks
        taken = [task.hint_fraction for task in tasks if isinstance(task, AugmentedTask)]
        number = float(len(taken))
        return {"reset/share": Metric(number, len(tasks)), "reset/fraction_mean": Metric(sum(taken), number)}

    def formula(self) -> str:
        """The starts."""
        return (
            f"with probability {self.settings.probability:g} an answer begins with a random part of its reference, "
            "which the loss leaves out"
        )


class DatasetResetRecipe(VlmRecipe):
    """PPO, or another objective, from random points of reference answers."""

    config: DatasetResetConfig

    def make_stages(self) -> list[RolloutStage]:
        """Starts inside reference answers."""
        return [ReferenceStarts(self.config.reset)]
