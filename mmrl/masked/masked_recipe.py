"""Group-based RL of masked-diffusion language models (LLaDA, arXiv 2502.09992) with any objective of the catalogue.

BGPO and IGPO are among them.

Two kinds of decisions (`likelihood.kind`): one_step, each token given the question alone, with everything else masked,
as in d1 and IGPO; and elbo, Monte Carlo draws of a lower bound of the answer's log-likelihood, with the same masks for
the old, the new and the reference policy. BGPO's objective is linear in these draws, so that with `likelihood.chunk`
memory does not grow with their number; `ratio: {kind: sequence_full}` with `clip: {kind: unclipped}` is the objective
that it bounds.

With `inpainting.replacements`, questions that every sample gets wrong are answered again around chunks of the worked
answer, and correct answers replace samples (IGPO). They are scored like the others, although their hints were given;
the objective `inpainting_guided` learns only the hinted tokens with the highest entropy.

Differences from IGPO's code: each group is checked separately (there a device's whole batch, which is one group, must
be wrong); all inner iterations use the fully masked timestep (`d1_masking`, as in its script).

Sources: LLaDA, arXiv 2502.09992; BGPO, arXiv 2510.11683; IGPO (inpainting), arXiv 2509.10396, facebookresearch/igpo
trainer_igpo.py and run_igpo.sh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.blocks.foreign import HINTED, SOURCE
from mmrl.core.loss import Metric, row_metric
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.masked.inpainting import hinted_answer
from mmrl.masked.masked_config import MaskedConfig
from mmrl.masked.masked_policy import MaskedPayload, MaskedPolicy, hide_counts
from mmrl.masked.masked_sampler import MaskedSampler, sample
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.methods.replacing import Exchange, ReplacingRecipe

INPAINTED = 1


class MaskedRecipe(ReplacingRecipe):
    """Samples by filling in masked answers, scores them by one step or by an evidence lower bound."""

    config: MaskedConfig
    policy_class = MaskedPolicy
    draw_answers = staticmethod(sample)

    def check_data(self) -> None:
        """Refuse questions without any worked answer to inpaint; raises UserError."""
        key = self.config.inpainting.trace_key
        if self.config.inpainting.replacements and not any(task.columns.get(key) for task in self.train_tasks):
            raise UserError(
                f"data: no question has a worked answer in a column '{key}' (inpainting.trace_key); columns: "
                f"{', '.join(self.train_tasks[0].columns)}"
            )

    def own_sampler(self) -> Any:
        """The sampler that fills in answers."""
        return MaskedSampler(self.config.sampler)

    def rollout(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> Rollouts:
        """Sample G answers to each question, and draw the masks that they are scored with."""
        rollouts = super().rollout(policy, tasks, streams, step)
        # the questions that could be encoded, with their own streams
        streams = streams.among(tasks, VlmPayload.of(rollouts).tasks)
        return self._with_masks(rollouts, rollouts.num_groups, streams, "likelihood")

    def _with_masks(self, rollouts: Rollouts, groups: int, streams: Streams, purpose: str) -> Rollouts:
        """Rows of sampled answers, the same number for each of some groups, with their decisions and masks."""
        payload, draws = VlmPayload.of(rollouts), self.config.draws
        rows, width = payload.response_ids.shape
        hidden = torch.zeros(rows, 0, width, dtype=torch.bool)
        if draws:
            # the same masks for the old, the new and the reference policy, or ratios would compare different draws
            uniform = streams.uniform(groups, rows // groups * draws, width + 1, purpose=purpose)
            hidden = hide_counts(uniform).view(rows, draws, width)
        device = rollouts.mask.device
        length = rollouts.mask.sum(1).long()
        mask = torch.ones(rows, draws or width, device=device)
        # with one step, hinted tokens are told apart later
        hints = {} if draws else {HINTED: torch.zeros_like(mask)}
        return rollouts.replace(
            mask=mask,
            logp_old=torch.zeros_like(mask),
            payload=MaskedPayload(**vars(payload), hidden=hidden.to(device), length=length),
            extras=rollouts.extras | hints,
        )

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Log-probabilities of tokens or of draws, at temperature 1."""
        level = "draws" if self.config.draws else "one_step"
        found: PolicyOutputs = policy(rollouts, level=level, outputs=outputs)
        if not (self.config.likelihood.per_token and self.config.draws):
            return found
        tokens = VlmPayload.of(rollouts).response_ids.shape[1]
        return dataclasses.replace(
            found, logp=found.logp / tokens, entropy=None if found.entropy is None else found.entropy / tokens
        )

    def micro_batches(self, minibatch: Rollouts, rows: int, *, whole_groups: bool) -> Iterator[Rollouts]:
        """Also split each part by draws if the loss is a sum over draws."""
        # one part for each chunk of draws; the mask says which draws count
        most = self.config.likelihood.chunk or minibatch.num_decisions
        for part in super().micro_batches(minibatch, rows, whole_groups=whole_groups):
            for first in range(0, part.num_decisions, most):
                # rows stay whole: only the mask is cut
                own = torch.zeros_like(part.mask)
                own[:, first : first + most] = part.mask[:, first : first + most]
                yield part if most >= part.num_decisions else part.replace(mask=own)

    def replacements(
        self, policy: VlmPolicy, rollouts: Rollouts, failed: Sequence[int], streams: Streams, step: Step
    ) -> Exchange | None:
        """Correct answers around hints, which replace the first samples of their groups."""
        if not self.config.inpainting.replacements:
            return None
        assert isinstance(policy, MaskedPolicy)
        size = self.config.trainer.samples_per_task
        rows = self.with_scores(self._inpainted(policy, rollouts, failed, streams), step)
        right = self.correct(rows).view(len(failed), size)
        leaving: list[int] = []
        chosen: list[int] = []
        own = rollouts.host.group.tolist()
        for place, group in enumerate(failed):
            found = torch.nonzero(right[place].cpu()).flatten()
            # from the question's stream, so that other questions do not change the choice
            order = torch.randperm(len(found), generator=streams.of(place, "replacement"))
            taken = found[order][: self.config.inpainting.replacements].tolist()
            chosen += [place * size + number for number in taken]
            # the first samples of the group make room
            leaving += [own.index(group) + number for number in range(len(taken))]
        self._count(rows, right)
        if not chosen:
            return None
        return torch.tensor(leaving), rows.select(torch.tensor(chosen))

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float | Metric]:
        """Adds the lengths of answers up to their end token, which are not their numbers of decisions."""
        length = MaskedPayload.of(rollouts).length.float()
        own = {"response/length_mean": row_metric(length), "response/length_max": Metric(length.max(), 1.0, "max")}
        return self._inpainting() | super().step_metrics(rollouts) | own

    def _inpainting(self) -> dict[str, float]:
        """Shares of groups that a filled-in answer rescued, and of these answers."""
        if not self.config.inpainting.replacements:
            return {}
        found, samples = self.replaced, max(self.replaced["inpainted"], 1)
        return {
            "inpainting/rescued": found["rescued"] / max(found["groups"], 1),
            "inpainting/right": found["right"] / samples,
            "inpainting/given": found["given"] / samples / self.config.sampler.max_new_tokens,
        }

    def describe(self) -> str:
        """The objective's formula, the likelihood and the inpainting."""
        draws, inpainting = self.config.draws, self.config.inpainting
        decision = (
            "logp_it = (L / m) sum of log p(token | question, tokens that are not masked) over m masked tokens; "
            f"{draws} draws t of m uniform in 1..L"
            if draws
            else "logp_it = log p(token t | question, all L tokens masked)"
        )
        lines = [super().describe(), decision]
        if inpainting.replacements:
            lines.append(
                f"where no sample is right: up to {inpainting.replacements} right answers filled in around "
                f"{100 * inpainting.low:g} to {100 * inpainting.high:g} % of the worked answer's chunks replace samples"
            )
        return "\n".join(lines)

    def _inpainted(self, policy: MaskedPolicy, rollouts: Rollouts, failed: Sequence[int], streams: Streams) -> Rollouts:
        """G answers around hints for each failed group, each row as a separate group; not scored."""
        payload, sampler = MaskedPayload.of(rollouts), self.config.sampler
        size = self.config.trainer.samples_per_task
        tasks, prompts = [payload.tasks[group] for group in failed], [payload.prompts[group] for group in failed]
        hints = self._hints(policy, prompts, tasks, streams)
        draws = streams.uniform(len(failed), size, sampler.draws, purpose="inpainting")
        drawn = sample(policy, prompts, size, sampler, draws, hints)
        self.extra_samples += len(hints)
        given = VlmPayload(
            [prompt for prompt in prompts for _ in range(size)],
            [task for task in tasks for _ in range(size)],
            drawn.response_ids,
            drawn.texts,
            drawn.finish,
        )
        # per-row extras such as the task are those of the group
        first = [rollouts.host.group.tolist().index(group) for group in failed for _ in range(size)]
        shared = {name: value[first] for name, value in rollouts.extras.items() if value.dim() == 1}
        count = len(first)
        rows = Rollouts(
            torch.arange(count, device=drawn.mask.device),
            drawn.mask,
            torch.zeros_like(drawn.mask),
            torch.full((count,), float("nan"), device=drawn.mask.device),
            given,
            extras=shared | {SOURCE: torch.full_like(shared[SOURCE], INPAINTED)},
        )
        rows = self._with_masks(rows, len(failed), streams, "inpainting likelihood")
        # hints are counted as a share of the answers
        self.replaced["given"] += int((hints != policy.mask_id).sum())
        if HINTED not in rows.extras:
            return rows
        return rows.replace(extras=rows.extras | {HINTED: (hints != policy.mask_id).to(rows.mask)})

    def _hints(
        self, policy: MaskedPolicy, prompts: Sequence[Any], tasks: Sequence[VlmTask], streams: Streams
    ) -> Tensor:
        """(N * G, L) int64, masked answers with chunks of each question's worked answer, if it has one."""
        config, width = self.config.inpainting, self.config.sampler.max_new_tokens
        found: list[list[int]] = []
        for number, (prompt, task) in enumerate(zip(prompts, tasks, strict=True)):
            text, generator = str(task.columns.get(config.trace_key) or ""), streams.of(number, "hints")
            trace = policy.encode_answer(prompt, text, ends=False) if text else []
            for _ in range(self.config.trainer.samples_per_task):
                found.append(hinted_answer(trace, width, policy.mask_id, config, generator))
        return torch.tensor(found)

    def _count(self, rows: Rollouts, right: Tensor) -> None:
        self.replaced["inpainted"] += rows.num_rows
        self.replaced["right"] += int(right.sum())
        self.replaced["rescued"] += int(right.any(1).sum())
