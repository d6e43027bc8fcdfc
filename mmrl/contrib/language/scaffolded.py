"""Scaf-GRPO: questions that the policy always gets wrong get the fewest hints that help (arXiv 2510.19807).

A row of the data has a column of hints, from the first step to the whole solution. After `warmup_steps` steps, each
question of which no sample is right is asked again with the first hint, the first two, and so on, one answer each. The
right answer with the fewest hints takes the place of one sample of its group, with its own reward, and advantages are
those of the new group. Evaluations ask without hints.

The exchanged answer was sampled behind the hints, and by default it is scored and trained behind them: its old
log-probabilities are those of the prompt that it was sampled with. `prompt: bare` scores it behind the question alone,
as the public code does with `replace_hint_prompt`; its old log-probabilities are then the policy's for that question.

All numbers of hints are sampled at once, as in the code (the paper stops at the first success, with the same result).
Where the column holds lists, each is a separate stage, like the code's knowledge and solution hints. Differences: the
reward of the exchanged answer is the whole of its reward terms; the code's hints are in English templates, here the
template is an option. Constants of sh/hint_mix_grpo/bs256_6k_mix.sh: one row, 50 steps without hints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mmrl.core.rollouts import Rollouts
from mmrl.errors import ConfigError, UserError
from mmrl.fields import bounded, choice
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams
from mmrl.training.recipe import RolloutStage, Step
from mmrl.vlm.data.prompt import Context, Prompt, VlmPayload, token_lists
from mmrl.vlm.data.task import TaskError, VlmTask
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import sample
from mmrl.vlm.methods.augmentation import augment_task, rewrite_question
from mmrl.vlm.methods.replacing import Exchange, Replacing, behind
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe

HINTED = 1
HINTS = "hints"
"""Column with the hints, a list of texts, or a list of such lists."""


@dataclass
class ScaffoldSettings:
    """Hints for questions that all samples get wrong."""

    template: str = "{question} Hints: {hints}"
    """Question with hints; {question} and {hints} are replaced."""
    prompt: str = choice("hinted", ("hinted", "bare"))
    """Prompt with which a replacement response is scored and trained: hinted, or bare (the question alone)."""
    warmup_steps: int = bounded(50, at_least=0)
    """Number of initial steps without hints."""

    def validate(self) -> None:
        """Reject a template without {hints}; raises ConfigError."""
        if "{hints}" not in self.template:
            raise ConfigError(f"scaffold.template is {self.template!r}; it must contain {{hints}}")


@dataclass
class ScaffoldedConfig(VlmConfig):
    """A Scaf-GRPO run."""

    scaffold: ScaffoldSettings = field(default_factory=ScaffoldSettings)
    """Hints for questions that all samples get wrong."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="scaffolded"))
    """Objective that is optimised."""


def hint_levels(hints: Sequence[Any]) -> list[list[str]]:
    """The hints of each level, fewest first: the first, the first two, ...; stage by stage if they are lists."""
    stages = hints if hints and isinstance(hints[0], list | tuple) else [hints]
    return [list(stage[: count + 1]) for stage in stages for count in range(len(stage))]


class Scaffold(Replacing):
    """Hints for questions that all samples get wrong."""

    settings: ScaffoldSettings

    def check_data(self, tasks: Sequence[VlmTask]) -> None:
        """Reject questions without any hints; raises UserError."""
        if not any(task.columns.get(HINTS) for task in tasks):
            raise UserError(
                f"data: no question has hints in a column '{HINTS}', a list of texts; columns: "
                f"{', '.join(tasks[0].columns)}"
            )

    def replacements(
        self, policy: VlmPolicy, rollouts: Rollouts, failed: Sequence[int], streams: Streams, step: Step
    ) -> Exchange | None:
        """The correct response with the fewest hints, replacing the first sample of its group."""
        if step.number < self.settings.warmup_steps:
            return None
        payload = VlmPayload.of(rollouts)
        asked = [
            (place, level, prompt)
            for place, group in enumerate(failed)
            for level, prompt in self._prompts(policy, payload.tasks[group])
        ]
        if not asked:
            return None
        rows = self._answers(policy, rollouts, failed, asked, streams, step)
        first: dict[int, int] = {}  # levels come in order
        for number, right in enumerate(self.recipe.correct(rows).tolist()):
            if right:
                first.setdefault(failed[asked[number][0]], number)
        if not first:
            return None
        chosen = list(first.values())
        self.replaced["level"] += sum(asked[number][1] for number in chosen)
        own = rollouts.host.group.tolist()
        leaving = torch.tensor([own.index(group) for group in first])
        rows = rows.select_groups(torch.tensor(chosen))
        if self.settings.prompt == "bare":
            return leaving, self.with_logp(policy, rows)
        return leaving, behind(rows, [Context(0, asked[number][2]) for number in chosen])

    def metrics(self, rollouts: Rollouts, step: Step) -> dict[str, float]:
        """Adds the mean number of hints."""
        level = self.replaced["level"] / max(self.replaced["rows"], 1)
        return {"scaffold/level_mean": level} | super().metrics(rollouts, step)

    def formula(self) -> str:
        """The exchange."""
        settings = self.settings
        return (
            f"from step {settings.warmup_steps + 1} on, if no sample is right: the right answer with the fewest "
            f"hints takes the place of one, scored behind the {settings.prompt} prompt"
        )

    def _prompts(self, policy: VlmPolicy, task: VlmTask) -> list[tuple[int, Prompt]]:
        """Level and prompt of a question with more and more hints; those that cannot be encoded are left out."""
        settings, found = self.settings, []
        for level, hints in enumerate(hint_levels(task.columns.get(HINTS) or []), start=1):
            messages = rewrite_question(task, settings.template, hints=" ".join(hints))
            try:
                found.append((level, policy.encode(augment_task(task, messages=messages))))
            # a prompt with many hints may exceed the context; fewer ones still count
            except TaskError:
                continue
        return found

    def _answers(
        self,
        policy: VlmPolicy,
        rollouts: Rollouts,
        failed: Sequence[int],
        asked: Sequence[tuple[int, int, Prompt]],
        streams: Streams,
        step: Step,
    ) -> Rollouts:
        """One scored answer to each hinted prompt, as sampled."""
        most, sampler = max(level for _, level, _ in asked), self.recipe.config.sampler
        draws = streams.uniform(len(failed), most, sampler.max_new_tokens, purpose="hint")
        draws = draws[[place * most + level - 1 for place, level, _ in asked]]
        drawn = sample(policy, [prompt for _, _, prompt in asked], 1, sampler, draws)
        self.recipe.extra_samples += len(asked)
        ids = token_lists(drawn.response_ids, drawn.mask)
        rows = self.rows_of(rollouts, [failed[place] for place, _, _ in asked], ids, drawn.texts, HINTED)
        VlmPayload.of(rows).finish[:] = drawn.finish
        # sampled, and so truncated like all samples
        mass = {"nucleus_mass": drawn.nucleus_mass} if "nucleus_mass" in rows.extras else {}
        return self.with_scores(rows.replace(logp_old=drawn.logp, extras=rows.extras | mass), step)


class ScaffoldedRecipe(VlmRecipe):
    """GRPO, or another objective, with hints if every sample fails."""

    config: ScaffoldedConfig

    def make_stages(self) -> list[RolloutStage]:
        """Hints."""
        return [Scaffold(self, self.config.scaffold)]
