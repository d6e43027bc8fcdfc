"""AEPO, arbitrary entropy: positive samples drawn at another temperature steer the policy's entropy (arXiv 2510.08141).

The first `share` of a step's questions are answered once more, at temperature `hot` if the entropy of the last update
was at most `entropy`, else at `cold`. Extra samples whose advantage in their own group exceeds `threshold` are learned
with the advantage `weight`; the others are dropped from the update. This is a REINFORCE term on correct answers of a
flatter or sharper version of the policy. At most `rows` of them count in a step, half as many if the entropy is above
the target.

Difference from 597358816/AEPO verl/trainer/ray_trainer.py: there, these rows overwrite the first rows of the batch by
index, regardless of content (`replace_first: true`); here they are added to the batch by default, and count in its
mean. They are scored at the sampling temperature, like all rows. The entropy is -mean logp of the sampled tokens. The
limit applies to each process. Metrics such as the mean reward include the extra samples.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import Tensor

from mmrl.core.blocks.foreign import SOURCE
from mmrl.core.loss import Metric
from mmrl.core.rollouts import PLACE, Rollouts
from mmrl.fields import bounded, rare
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams, from_all
from mmrl.training.recipe import Step
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import sample
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe

TEMPERED = 4
"""Source of rows that were sampled at another temperature."""


@dataclass
class EntropySettings:
    """Samples drawn at another temperature to steer the entropy."""

    entropy: float = bounded(0.5, at_least=0)
    """Target entropy in nats per token, -mean logp."""
    hot: float = bounded(1.2, above=0)
    """Temperature of the extra samples while the entropy is at or below the target."""
    cold: float = bounded(0.8, above=0)
    """Temperature of the extra samples while the entropy is above the target."""
    share: float = bounded(0.25, above=0, at_most=1)
    """Fraction of a step's questions to sample once more (the first ones)."""
    threshold: float = rare(bounded(0.05, at_least=0))
    """An extra sample is trained if its advantage within its group exceeds this."""
    weight: float = bounded(1.0, above=0)
    """Advantage assigned to the extra samples that are trained."""
    rows: int = bounded(60, at_least=1)
    """Maximum number of extra samples to train on per step; half as many while the entropy is above the target."""
    replace_first: bool = rare(False)
    """Drop the same number of the step's first samples, as the public code does."""


@dataclass
class ArbitraryEntropyConfig(VlmConfig):
    """An AEPO run with a target entropy."""

    steering: EntropySettings = field(default_factory=EntropySettings)
    """Samples drawn at another temperature."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="arbitrary_entropy"))
    """Objective that is optimised."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if self.trainer.old_logp == "sampler":
            raise ValueError(
                "trainer.old_logp is 'sampler', but some rows are sampled and scored at different temperatures; use "
                "recompute"
            )


def number_everywhere(marked: Tensor, rollouts: Rollouts) -> Tensor:
    """(B,) number of each row among the marked ones (B,) bool of all processes, from 1; rows follow their tasks."""
    places = range(rollouts.num_rows) if PLACE not in rollouts.extras else rollouts.extras[PLACE].tolist()
    keys = list(zip(places, range(rollouts.num_rows), strict=True))
    own = [key for key, found in zip(keys, marked.tolist(), strict=True) if found]
    everywhere = sorted(key for part in from_all(own) for key in part)
    # rows marked here or before: the limit falls on the same rows whatever the number of processes
    return torch.tensor([bisect.bisect_right(everywhere, key) for key in keys], device=marked.device)


class LastEntropy:
    """The entropy of the last update; 0 before the first."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        """The entropy."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore `state_dict`."""
        self.value = float(state["value"])


class ArbitraryEntropyRecipe(VlmRecipe):
    """GRPO, or another objective, with positive samples drawn at a higher or lower temperature."""

    config: ArbitraryEntropyConfig

    def __init__(self, config: ArbitraryEntropyConfig) -> None:
        super().__init__(config)
        self.last = self.parts["entropy"] = LastEntropy()

    @property
    def above(self) -> bool:
        """Whether the entropy is above the target."""
        return self.last.value > self.config.steering.entropy

    def rollout(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> Rollouts:
        """Sample as usual, and sample some questions once more at another temperature."""
        rollouts = super().rollout(policy, tasks, streams, step)
        # the rows of both kinds need the column before they are joined
        rollouts = rollouts.replace(extras={**rollouts.extras, SOURCE: torch.zeros_like(rollouts.group)})
        payload = VlmPayload.of(rollouts)
        settings = self.config.steering
        own = self.config.sampler
        limit = settings.share * self.config.trainer.tasks_per_step
        places = streams.among(tasks, payload.tasks).places
        chosen = [group for group, place in enumerate(places) if place + 1 <= limit]
        if not chosen:
            return rollouts
        size, streams = self.config.trainer.samples_per_task, streams.among(tasks, payload.tasks).select(chosen)
        draws = streams.uniform(len(chosen), size, own.max_new_tokens, purpose="tempered")
        other = dataclasses.replace(own.config, temperature=settings.cold if self.above else settings.hot)
        prompts, asked = [payload.prompts[group] for group in chosen], [payload.tasks[group] for group in chosen]
        drawn = sample(policy, prompts, size, other, draws)
        group = torch.arange(len(chosen), device=drawn.mask.device).repeat_interleave(size)
        extras = {SOURCE: torch.full_like(group, TEMPERED)}
        extras |= {"nucleus_mass": drawn.nucleus_mass} if "nucleus_mass" in rollouts.extras else {}
        missing = torch.full((len(group),), float("nan"), device=group.device)
        given = VlmPayload(prompts, asked, drawn.response_ids, drawn.texts, drawn.finish)
        further = Rollouts(group, drawn.mask, drawn.logp, missing, given, extras=extras)
        return rollouts.joined_by(streams.noted(further), torch.tensor(chosen).repeat_interleave(size))

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Advantages as usual; extra samples that did well get a constant advantage, the others are dropped."""
        settings, together = self.config.steering, rollouts.host.group
        alone, prompts = self._apart(rollouts)
        # further samples are compared with each other alone: another temperature shifts their mean reward
        rollouts = super().advantages(rollouts.regrouped(alone, prompts), accelerator, step)
        rollouts = rollouts.regrouped(together, torch.arange(int(together.max()) + 1))
        assert rollouts.advantage is not None
        further = rollouts.extras[SOURCE] == TEMPERED
        good = further & ((rollouts.advantage > settings.threshold) & (rollouts.loss_mask > 0)).any(1)
        number, most = number_everywhere(good, rollouts), settings.rows // (2 if self.above else 1)
        taken = good & (number <= most)
        keep = ~further | taken
        if settings.replace_first:
            leaving = sum(from_all(int(taken.sum())))
            keep &= further | (number_everywhere(~further, rollouts) > leaving)
        advantage = torch.where(taken[:, None], settings.weight, rollouts.advantage)
        mask = rollouts.mask * keep[:, None].to(rollouts.mask.dtype)
        self.noted |= {
            "steering/entropy": self.last.value,
            "steering/temperature": settings.cold if self.above else settings.hot,
            "steering/rows": Metric.summed(taken.sum()),
        }
        return rollouts.replace(advantage=advantage * (mask > 0), mask=mask)

    def _apart(self, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        """Groups (B,) in which further samples are apart from the others, and the group whose prompt each has."""
        group = rollouts.host.group
        further = rollouts.extras[SOURCE].cpu() == TEMPERED
        sampled = torch.unique(group[further])
        own = torch.searchsorted(sampled, group)
        number = rollouts.num_groups
        return torch.where(further, number + own, group), torch.cat([torch.arange(number), sampled])

    def on_step_end(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Record the entropy of the update."""
        super().on_step_end(step, metrics)
        # a step whose update was skipped has no entropy
        self.last.value = metrics.get("policy/entropy", self.last.value)

    def rollout_state(self, tasks: Sequence[VlmTask]) -> dict[str, float]:
        """The entropy."""
        return self.last.state_dict()

    def load_rollout_state(self, state: Mapping[str, float]) -> None:
        """Restore `rollout_state`."""
        self.last.load_state_dict(state)

    def describe(self) -> str:
        """The objective's formula and the extra samples."""
        settings = self.config.steering
        return (
            f"{super().describe()}\nand A_it = {settings.weight:g} on up to {settings.rows} positive samples of "
            f"temperature {settings.hot:g} while the entropy is at most {settings.entropy:g}, half as many of "
            f"{settings.cold:g} above"
        )
