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
from mmrl.training.recipe import Step
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.methods.augmentation import AugmentedTask, augment_task
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe


@dataclass
class ResetSettings:
    """Starts of rollouts inside reference answers."""

    probability: float = bounded(1.0, at_least=0, at_most=1)
    """Probability that a question starts inside its reference answer."""
    reference_key: str = rare("completion")
    """Column with the reference answer."""


@dataclass
class DatasetResetConfig(VlmConfig):
    """A DR-PO run."""

    reset: ResetSettings = field(default_factory=ResetSettings)
    """Starts of rollouts inside reference answers."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="dataset_reset"))
    """Objective that is optimised."""


class DatasetResetRecipe(VlmRecipe):
    """PPO, or another objective, from random points of reference answers."""

    config: DatasetResetConfig

    def check_data(self) -> None:
        """Refuse questions without a reference answer; raises UserError."""
        key = self.config.reset.reference_key
        without = next((task for task in self.train_tasks if not isinstance(task.columns.get(key), str)), None)
        if without is not None:
            raise UserError(
                f"data: question {without.id} has no text in column '{key}' (reset.reference_key), inside which "
                f"rollouts start; columns: {', '.join(without.columns)}"
            )

    def rollout(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> Rollouts:
        """Sample answers, from inside reference answers for some of the questions."""
        draws = streams.uniform(len(tasks), 1, 2, purpose="reset").tolist()
        asked = [self.started(policy, task, *draw) for task, draw in zip(tasks, draws, strict=True)]
        return super().rollout(policy, asked, streams, step)

    def started(self, policy: VlmPolicy, task: VlmTask, whether: float, where: float) -> VlmTask:
        """A question with the beginning of its answer, by two numbers in [0, 1)."""
        settings, tokenizer = self.config.reset, policy.processor.tokenizer
        ids = tokenizer.encode(task.columns[settings.reference_key], add_special_tokens=False)
        taken = int(where * len(ids))
        if whether >= settings.probability or not taken:
            return task
        # a character of several tokens is not cut in two
        start = tokenizer.decode(ids[:taken]).rstrip("\N{REPLACEMENT CHARACTER}")
        return augment_task(task, given_start=start, hint_fraction=taken / len(ids))

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float | Metric]:
        """Adds the fraction of questions that started inside an answer, and how far in."""
        tasks = VlmPayload.of(rollouts).tasks
        taken = [task.hint_fraction for task in tasks if isinstance(task, AugmentedTask)]
        number = float(len(taken))
        own = {"reset/share": Metric(number, len(tasks)), "reset/fraction_mean": Metric(sum(taken), number)}
        return super().step_metrics(rollouts) | own

    def describe(self) -> str:
        """The objective's formula and the starts."""
        return (
            f"{super().describe()}\nwith probability {self.config.reset.probability:g} an answer begins with a random "
            "part of its reference, which the loss leaves out"
        )
