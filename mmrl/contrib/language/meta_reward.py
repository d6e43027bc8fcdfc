"""MPO, meta policy optimisation: a meta judge rewrites the judge's rubric during training (arXiv 2504.20157).

Reward functions get the rubric as the column `rubric`. Every `rubric.interval` steps `rubric.meta` reads some of the
step's answers with their rewards and returns the next rubric, so a policy that has learned to please the judge meets
stricter criteria. Evaluations use the current rubric; to measure real progress, add a reward that does not read it.

The built-in judge (reward `rubric`) and meta judge (`rubric.meta: chat`) call OpenAI-compatible endpoints; either can
be replaced by a Python function.

Differences from minnesotanlp/mpo: any objective (default GRPO) instead of PPO; one rubric for all tasks, without
clustering, prescreening and merging; samples for the meta judge are spread evenly over the step's rewards; the prompts
are worded differently.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded
from mmrl.hub.chat_endpoint import ask_chat, check_url
from mmrl.rewards import RewardResult
from mmrl.rewards.reward_loading import load_function
from mmrl.training.processes import merge_in_order
from mmrl.training.recipe import Step
from mmrl.vlm.critic.flaws import filled
from mmrl.vlm.data.dataset import LoadedTasks
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe

LOGGER = logging.getLogger("mmrl")
RUBRIC = "rubric"
LONGEST = 8000
"""Maximum characters of a rubric; a longer or empty rubric is rejected, and the last one stays."""
"""Column with the rubric, for reward functions."""
ANALYSE = (
    "A judge scores responses by a rubric, and a model is trained on the scores. Find out where scores are wrong, "
    "where the model may exploit the rubric, and what the rubric does not ask for.\n\nRubric:\n{rubric}\n\n{samples}"
)
REFINE = "Rewrite the rubric. Answer with the rubric alone.\n\nRubric:\n{rubric}\n\nAnalysis:\n{analysis}"

Sample = Mapping[str, Any]
"""A sample for the meta judge: prompt, response, reward and answer (the correct answer, if the data has one)."""


@dataclass
class RubricSettings:
    """Rubric and meta judge."""

    text: str = "The response is correct, complete and clear."
    """The first rubric."""
    interval: int = bounded(10, at_least=1)
    """Number of steps between rubric updates."""
    samples: int = bounded(20, at_least=1)
    """Number of the step's responses that the meta judge reads."""
    meta: str = "chat"
    """Meta judge: chat, or `module:function` (rubric, samples, **options) -> the next rubric."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the meta judge; of chat: url, model, max_tokens and request_timeout_s."""


@dataclass
class MetaRewardConfig(VlmConfig):
    """An MPO run."""

    rubric: RubricSettings = field(default_factory=RubricSettings)
    """Rubric and meta judge."""


class Rubric:
    """The current rubric, and how often it changed."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.version = 0

    def state_dict(self) -> dict[str, Any]:
        """The rubric."""
        return {"text": self.text, "version": self.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.text = str(state["text"])
        self.version = int(state["version"])


class MetaRewardRecipe(VlmRecipe):
    """GRPO, or another objective, on the scores of a judge whose rubric changes during the run."""

    config: MetaRewardConfig

    def __init__(self, config: MetaRewardConfig) -> None:
        # super() prepares the tasks, which get the rubric as a column
        self.rubric = Rubric(config.rubric.text)
        self.meta: Callable[..., str] = META.get(config.rubric.meta) or load_function(config.rubric.meta, what="meta")
        super().__init__(config)
        self.parts[RUBRIC] = self.rubric

    def prepare_tasks(self, loaded: LoadedTasks, *, training: bool) -> LoadedTasks:
        """Add the column `rubric` to every question."""
        loaded = super().prepare_tasks(loaded, training=training)
        loaded.tasks = self._with_rubric(loaded.tasks)
        return loaded

    def score_texts(
        self,
        tasks: Sequence[VlmTask],
        texts: Sequence[str],
        tokens: Sequence[list[int]],
        step: Step,
    ) -> RewardResult:
        """Score responses by the current rubric."""
        # the column is that of the tasks' preparation; the rubric may have changed since
        return super().score_texts(self._with_rubric(tasks), texts, tokens, step)

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Advantages as usual; in some steps the meta judge writes the rubric for the following steps."""
        # before `advantages`, so that the whole step was scored by one rubric
        if (step.number + 1) % self.config.rubric.interval == 0:
            self._rewrite(rollouts, accelerator)
        self.noted["rubric/version"] = float(self.rubric.version)
        return super().advantages(rollouts, accelerator, step)

    def rollout_state(self, tasks: Sequence[VlmTask]) -> dict[str, Any]:
        """The rubric."""
        return self.rubric.state_dict()

    def load_rollout_state(self, state: Mapping[str, Any]) -> None:
        """Restore `rollout_state`."""
        self.rubric.load_state_dict(state)

    def describe(self) -> str:
        """The objective's formula, and who scores."""
        own = self.config.rubric
        return f"{super().describe()}\nwhere R is by a rubric that {own.meta} rewrites every {own.interval} steps"

    def _with_rubric(self, tasks: Sequence[VlmTask]) -> list[VlmTask]:
        return [replace(task, columns={**task.columns, RUBRIC: self.rubric.text}) for task in tasks]

    def _rewrite(self, rollouts: Rollouts, accelerator: Accelerator) -> None:
        """Ask the meta judge in the main process, and give its rubric to all."""
        # a collective call, so every process makes it, though only the main one asks
        found = merge_in_order(self._samples(rollouts))
        text = [self._ask(spread(found, self.config.rubric.samples)) if accelerator.is_main_process else ""]
        if accelerator.num_processes > 1:
            broadcast_object_list(text)
        if text[0]:
            self.rubric.text = text[0]
            self.rubric.version = self.rubric.version + 1
            LOGGER.info("rubric %d: %s", self.rubric.version, self.rubric.text)

    def _ask(self, samples: Sequence[Sample]) -> str:
        """The next rubric; empty if there is none."""
        own = self.config.rubric
        try:
            text = str(self.meta(self.rubric.text, samples, **own.options)).strip()
        # a judge that is down for a while must not end the run
        except (RuntimeError, OSError, ValueError) as error:
            LOGGER.warning("rubric.meta failed, and the rubric stays as it is: %s", error)
            return ""
        if not text or len(text) > LONGEST:
            LOGGER.warning(
                "rubric.meta returned %d characters (1 to %d are allowed); the rubric stays as it is",
                len(text),
                LONGEST,
            )
            return ""
        return "" if text == self.rubric.text else text

    def _samples(self, rollouts: Rollouts) -> list[tuple[tuple[int, int], Sample]]:
        """Scored rows by place and number, an order that does not depend on the number of processes."""
        payload, groups = VlmPayload.of(rollouts), rollouts.host.group.tolist()
        places = rollouts.places or range(rollouts.num_groups)
        rows = enumerate(zip(groups, payload.texts, rollouts.reward.tolist(), strict=True))
        return [
            (
                (places[group], row),
                {
                    "prompt": payload.prompts[group].text,
                    "response": text,
                    "reward": reward,
                    "answer": payload.tasks[group].columns.get("answer", ""),
                },
            )
            for row, (group, text, reward) in rows
            # not NaN
            if reward == reward
        ]


def spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Some samples, evenly from the lowest reward to the highest."""
    ordered = sorted(samples, key=lambda sample: sample["reward"])
    taken = min(count, len(ordered))
    # both ends included: the best and the worst answer of the step are always among them
    return [ordered[round(place * (len(ordered) - 1) / max(taken - 1, 1))] for place in range(taken)]


def chat_meta(
    rubric: str,
    samples: Sequence[Sample],
    *,
    url: str,
    model: str,
    max_tokens: int = 4096,
    request_timeout_s: float = 600.0,
) -> str:
    """Have a model analyse scored responses and rewrite the rubric accordingly."""
    check_url(url, "rubric.options")
    shown = "\n\n".join(
        f"Task {number}:\n{sample['prompt']}\nResponse:\n{sample['response']}\nScore: {sample['reward']:g}"
        for number, sample in enumerate(samples, 1)
    )
    limits: dict[str, Any] = {"max_tokens": max_tokens, "timeout_s": request_timeout_s}
    analysis = ask_chat(url, model, filled(ANALYSE, rubric=rubric, samples=shown), **limits)
    return ask_chat(url, model, filled(REFINE, rubric=rubric, analysis=analysis), **limits)


META: dict[str, Callable[..., str]] = {"chat": chat_meta}
