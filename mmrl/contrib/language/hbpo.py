"""HBPO: the responses to a question have different token budgets and are compared in one group.

The `trainer.samples_per_task` answers to a question are divided among `hierarchy.budgets`. Each answer begins with a
sentence that states its budget, behind the tag that opens the reasoning; the sentence belongs to the prompt, so that
the loss leaves it out and `rewards` see it. The reward `budget` pays a right answer by the budget that its row states,
and the objective `hbpo` adds two advantages of a row: its reward compared with all answers to the question, and the
mean reward of the answers of its budget compared with what that budget allows,

    A_ij = (R_ij - mean_g R) / std_g R + (mean_j R_ij - u(b_i)).

Evaluations state no budget: the policy chooses how long it thinks (natural reasoning in the paper).

Differences from ZJU-REAL/HBPO: the code reads the budget out of the answer's text, and takes 4,096 where it states
none; here it is known. The code pays an answer below its budget less the shorter it is, and the paper does not: option
`piecewise` of the reward `budget` chooses. The paper's second setting of evaluation, "with minimal tokens", is a prompt
of the data.

Source: Lyu et al., HBPO, arXiv 2507.15844, algorithm 1 (16 answers, budgets 512, 1024, 2048 and 2560);
ZJU-REAL/HBPO rllm/rewards/math_reward.py and verl/trainer/ppo/core_algos.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mmrl.core.payload import to_device
from mmrl.core.rollouts import Rollouts
from mmrl.errors import ConfigError
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams
from mmrl.training.recipe import NoUsableTasksError, Step
from mmrl.vlm.data.dataset import BUDGET
from mmrl.vlm.data.prompt import Context, VlmPayload
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.methods.augmentation import augment_task
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe


@dataclass
class HierarchySettings:
    """Token budgets of the responses to a question."""

    budgets: list[int] = field(default_factory=lambda: [512, 1024, 2048, 2560])
    """Token budgets; each gets an equal number of the responses to a question."""
    start: str = "I will answer the question within {budget} tokens. "
    """Beginning of a response; {budget} is replaced. If the chat template ends with `<think>`, this text follows it. If
    the model writes the tag itself, put it in front of the text."""

    def validate(self) -> None:
        """Reject invalid budgets, or a start text that does not state the budget; raises ConfigError."""
        if len(self.budgets) < 1 or min(self.budgets) < 1 or len(set(self.budgets)) < len(self.budgets):
            raise ConfigError(f"hierarchy.budgets is {self.budgets}; give different numbers of tokens, each at least 1")
        if "{budget}" not in self.start:
            raise ConfigError(f"hierarchy.start is {self.start!r}; it must contain {{budget}}")


@dataclass
class HbpoConfig(VlmConfig):
    """An HBPO run."""

    hierarchy: HierarchySettings = field(default_factory=HierarchySettings)
    """Token budgets of the responses to a question."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="hbpo"))
    """Objective that is optimised."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        samples, budgets = self.trainer.samples_per_task, len(self.hierarchy.budgets)
        if samples % budgets:
            raise ValueError(
                f"trainer.samples_per_task is {samples}, which is not divisible by the {budgets} budgets in "
                f"hierarchy.budgets; use a multiple of {budgets}"
            )


class HbpoRecipe(VlmRecipe):
    """GRPO, or another objective, on groups of responses with several budgets."""

    config: HbpoConfig

    @property
    def samples_per_prompt(self) -> int:
        """Responses per budget."""
        return self.config.trainer.samples_per_task // len(self.config.hierarchy.budgets)

    def rollout(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> Rollouts:
        """Sample the responses of each budget, and combine those to the same question in one group."""
        budgets = self.config.hierarchy.budgets
        asked = [self._with_budget(task, budget) for task in tasks for budget in budgets]
        # other streams for each budget of a question, which follow from its place in the step alone
        places = [streams.places[n // len(budgets)] * len(budgets) + n % len(budgets) for n in range(len(asked))]
        rollouts = super().rollout(policy, asked, Streams(streams.seed, places, streams.draw), step)
        found = {id(task): group for group, task in enumerate(VlmPayload.of(rollouts).tasks)}
        groups = [
            [found.get(id(each)) for each in asked[n : n + len(budgets)]] for n in range(0, len(asked), len(budgets))
        ]
        whole = [n for n, own in enumerate(groups) if None not in own]
        if not whole:
            raise NoUsableTasksError("no question fits in the model's context with every budget in hierarchy.budgets")
        rollouts = rollouts.select_groups(torch.tensor([groups[n] for n in whole]).flatten())
        return streams.select(whole).noted(self._joined(rollouts, [tasks[n] for n in whole]))

    def asked(self, rollouts: Rollouts) -> tuple[list[VlmTask], list[str]]:
        """Question of each row with its budget, and its prompt."""
        payload = VlmPayload.of(rollouts)
        tasks = [payload.tasks[group] for group in rollouts.host.group.tolist()]
        budgets = rollouts.extras[BUDGET].tolist()
        # one object for the rows of a budget, whose images are opened once
        known = {
            (id(task), budget): self._with_budget(task, budget) for task, budget in zip(tasks, budgets, strict=True)
        }
        prompts = [context[-1].prompt.text for context in payload.contexts]
        return [known[id(task), budget] for task, budget in zip(tasks, budgets, strict=True)], prompts

    def describe_row(self, rollouts: Rollouts, row: int) -> dict[str, Any]:
        """See `VlmDomain`; the prompt is that of the row's budget."""
        prompt = VlmPayload.of(rollouts).contexts[row][-1].prompt
        return super().describe_row(rollouts, row) | {"prompt": prompt.text}

    def describe(self) -> str:
        """The objective's formula and the budgets."""
        budgets = ", ".join(map(str, self.config.hierarchy.budgets))
        return f"{super().describe()}\nb_i in {budgets} for equal parts of each group, stated at the answer's beginning"

    def _with_budget(self, task: VlmTask, budget: int) -> VlmTask:
        """A question whose answer begins with its budget."""
        start = task.answer_start + self.config.hierarchy.start.replace("{budget}", str(budget))
        return augment_task(task, given_start=start, columns=task.columns | {BUDGET: budget})

    def _joined(self, rollouts: Rollouts, tasks: Sequence[VlmTask]) -> Rollouts:
        """Rows whose groups are those of the questions, and which are read behind the prompts of their budgets."""
        count, payload, own = len(self.config.hierarchy.budgets), VlmPayload.of(rollouts), rollouts.host.group
        contexts: list[tuple[Context, ...]] = [(Context(0, payload.prompts[group]),) for group in own.tolist()]
        budgets = torch.tensor([payload.tasks[group].columns[BUDGET] for group in own.tolist()])
        joined = rollouts.regrouped(own // count, torch.arange(0, len(payload.tasks), count))
        given = dataclasses.replace(VlmPayload.of(joined), tasks=list(tasks), contexts=contexts)
        extras = joined.extras | {BUDGET: to_device(budgets, rollouts.mask.device)}
        return joined.replace(payload=given, extras=extras)
