"""Group-based RL of a vision-language model with any objective.

Each step samples G responses per question with the prompt prefilled once, scores them with verifiable rewards,
estimates advantages within each group, and updates the policy with the objective's loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mmrl.core.blocks.baselines import GREEDY_REWARD
from mmrl.core.loss import Metric, mean_metric
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.rollouts import ANSWER, TOKENS, Rollouts
from mmrl.core.state import AdaptiveKL
from mmrl.core.transfer import to_device
from mmrl.rewards.answers import Chat, number_answers
from mmrl.runs.run_log import stopwatch
from mmrl.training.processes import Streams
from mmrl.training.recipe import Recipe, Sampler, Step, scores_before_update, single_update
from mmrl.training.scoring import with_rewards
from mmrl.vlm.data.prompt import Prompt, VlmPayload, token_lists
from mmrl.vlm.data.row_extras import row_extras
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.domain import Questions, VlmDomain
from mmrl.vlm.engine.prefix import KeepPrefill
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import PolicySampler, Samples, sample
from mmrl.vlm.inference.inference_sampler import check_engine, open_engine
from mmrl.vlm.vlm_config import VlmConfig

View = Callable[[VlmPayload, VlmPolicy, Streams], VlmPayload]
"""Function that adds another form of each prompt to a payload, such as one with masked images."""


class VlmRecipe(VlmDomain, Recipe[VlmPolicy, VlmTask]):
    """Samples, scores and evaluates with a vision-language model; the objective provides the loss.

    Args:
        config: options of the run.
        questions: hooks that change questions; None leaves them unchanged.

    Raises:
        UserError: the model, data or rewards cannot be used.
    """

    config: VlmConfig
    view: View | None = None
    """Adds a second form of each prompt for the loss term of a method."""

    def __init__(self, config: VlmConfig, questions: Questions | None = None) -> None:
        super().__init__(config)
        self.objective = config.made_objective()
        check_engine(config.sampler, config.rollers)
        self.open(config, questions or Questions(), config, value_head=self.objective.needs_values)
        # without a limit on prompts the engine takes the model's own maximum length
        limit = config.model.max_prompt_tokens
        engine = open_engine(config.sampler, self.policy, limit and limit + config.sampler.max_new_tokens)
        self.samples_elsewhere = engine is not None
        self.sampler: Sampler[VlmPolicy, Prompt, Samples]
        self.sampler = engine or self.own_sampler()
        self._controller: AdaptiveKL | None = None
        if (target := config.adaptive_kl.target) is not None:
            self._controller = AdaptiveKL(self.objective.kl_coef, target, config.adaptive_kl.horizon)
            self.parts["adaptive_kl"] = self._controller

    def own_sampler(self) -> Sampler[Any, Prompt, Samples]:
        """The sampler that draws from the policy itself."""
        return PolicySampler(self.config.sampler, self._keep_prefill())

    def rollout(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> Rollouts:
        """Sample G responses to each question; count and skip questions that cannot be encoded."""
        with stopwatch("encode"):
            usable, prompts = self.encode(policy, tasks)
        # a question keeps its own stream even if others before it were skipped
        size, streams = self.config.trainer.samples_per_task, streams.among(tasks, usable)
        greedy = self._greedy_answers(policy, prompts)
        self.sampler.load(policy, step.number)
        samples = self.sampler.sample(prompts, size, streams)
        payload = VlmPayload(prompts, usable, samples.response_ids, samples.texts, samples.finish, greedy=greedy)
        if self.view is not None:
            with stopwatch("encode"):
                payload = self.view(payload, policy, streams)
        rollouts = Rollouts(
            group=torch.arange(len(usable), device=samples.mask.device).repeat_interleave(size),
            mask=samples.mask,
            logp_old=samples.logp,
            # not scored yet; a row that no reward can score keeps NaN and leaves the loss
            reward=torch.full((len(samples.texts),), float("nan"), device=samples.mask.device),
            payload=payload,
            extras={"nucleus_mass": samples.nucleus_mass} if self.config.sampler.truncates else {},
        )
        return streams.noted(rollouts)

    def _greedy_answers(self, policy: VlmPolicy, prompts: Sequence[Prompt]) -> list[tuple[str, list[int]]]:
        """Text and tokens of the policy's greedy answer to each prompt, if the objective needs it."""
        if "greedy" not in self.objective.needs:
            return []
        with stopwatch("sample"):
            found = sample(policy, prompts, 1, self.config.sampler, None)
        return list(zip(found.texts, token_lists(found.response_ids, found.mask), strict=True))

    def score(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """Weighted sum of the reward functions; a row with a failed term gets NaN and is excluded from the loss."""
        payload = VlmPayload.of(rollouts)
        groups = rollouts.group.tolist()
        tasks, prompts = [payload.tasks[group] for group in groups], [payload.prompts[group].text for group in groups]
        tokens = payload.sampled_tokens(rollouts.mask)
        result = self.score_texts(tasks, prompts, payload.texts, tokens, step)
        self.errors.count(result)
        extras = rollouts.extras | self._block_inputs(rollouts, tasks, prompts, tokens)
        if payload.greedy:
            asked, (texts, ids) = [prompt.text for prompt in payload.prompts], zip(*payload.greedy, strict=True)
            greedy = self.score_texts(payload.tasks, asked, texts, ids, step)
            self.errors.count(greedy)
            reward = torch.tensor(greedy.total, dtype=torch.float32)[rollouts.group.cpu()]
            extras[GREEDY_REWARD] = to_device(reward, rollouts.mask.device)
        return with_rewards(rollouts.replace(extras=extras), result)

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Advantages of the objective's estimator; optionally masks truncated responses out of the update."""
        # the mask, not the rows: a truncated response keeps its reward in the group's baseline
        if self.config.mask_truncated_completions:
            whole = [finish != "length" for finish in VlmPayload.of(rollouts).finish]
            kept = torch.tensor(whole, dtype=rollouts.mask.dtype, device=rollouts.mask.device)
            # the mask and not the reward: a truncated response still counts in the statistics of its group
            rollouts = rollouts.replace(mask=rollouts.mask * kept[:, None])
        return super().advantages(rollouts, accelerator, step)

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Teacher-forced scores at the sampling temperature."""
        return policy(rollouts, temperature=self.config.sampler.temperature, outputs=outputs)  # type: ignore[no-any-return]

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float | Metric]:
        """Adds the fraction of finished responses, the KL coefficient and the probability kept by truncation."""
        finished = VlmPayload.of(rollouts).finished_fraction
        own: dict[str, float | Metric] = {"response/finished_fraction": finished}
        own["policy/kl_coef"] = self.objective.kl_coef
        return super().step_metrics(rollouts) | own | self._nucleus_mass(rollouts)

    def on_step_end(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Move the KL coefficient towards its target."""
        # absent without a reference; only a finite value may move the coefficient
        divergence = metrics.get("policy/kl_ref", float("nan"))
        if self._controller is not None and math.isfinite(divergence):
            trainer = self.config.trainer
            self._set_kl_coef(self._controller.update(divergence, trainer.tasks_per_step * trainer.samples_per_task))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`, with the adaptive coefficient."""
        super().load_state_dict(state)
        if self._controller is not None:
            # the objective has its own copy of the coefficient, which was made from the configuration
            self._set_kl_coef(self._controller.coefficient)

    def correct(self, rollouts: Rollouts) -> Tensor:
        """(B,) bool, rows with a correct answer."""
        return rollouts.reward_terms[self.accuracy_term] == 1.0

    def close(self) -> None:
        """End the reward workers and the sampler's engine."""
        super().close()
        self.sampler.close()

    def _block_inputs(
        self, rollouts: Rollouts, tasks: Sequence[VlmTask], prompts: Sequence[Chat], tokens: Sequence[list[int]]
    ) -> dict[str, Tensor]:
        """Data about responses that the objective needs, such as tokens (B, T) and answer numbers (B,)."""
        payload, needs = VlmPayload.of(rollouts), self.objective.needs
        found = row_extras(needs, tasks, tokens, self.policy.processor.tokenizer.decode)
        if "tokens" in needs:
            found[TOKENS] = payload.response_ids[:, : rollouts.num_decisions]
        if "answers" in needs:
            found[ANSWER] = torch.tensor(number_answers(rollouts.group.tolist(), prompts, payload.texts))
        return {name: to_device(values, rollouts.mask.device) for name, values in found.items()}

    def _keep_prefill(self) -> KeepPrefill:
        """How much of the prefill sampling keeps for the update.

        The graph is kept only if the step has one update on all rows, where it needs no extra memory, and if training
        mode computes the same as sampling: no dropout, no checkpointing.
        """
        trainer, text = self.config.trainer, self.policy.network.config.get_text_config()
        if not (self.config.sampler.keep_prefill and self.policy.shares_prefix):
            return KeepPrefill.NOTHING
        # a step that resamples combines several rounds of sampling, each with its own graph
        once = single_update(trainer) and trainer.micro_batch == 0 and not self.objective.filter.resamples
        drops = any(isinstance(part, nn.Dropout) and part.p for part in self.policy.modules())
        # sampling runs in evaluation mode: its graph fits the update only if training mode computes the same numbers
        same = not (self.config.model.gradient_checkpointing or drops or getattr(text, "attention_dropout", None))
        if once and same:
            return KeepPrefill.GRAPH
        return KeepPrefill.VALUES if scores_before_update(self) else KeepPrefill.NOTHING

    def _nucleus_mass(self, rollouts: Rollouts) -> dict[str, Metric]:
        mass = rollouts.extras.get("nucleus_mass")
        return {} if mass is None else {"response/nucleus_mass": mean_metric(mass, rollouts.mask)}

    def _set_kl_coef(self, value: float) -> None:
        self.objective = self.objective.with_kl_coef(value)
