"""Responses filled in around chunks of a worked answer, for questions that every sample gets wrong.

Source: IGPO (inpainting-guided), arXiv 2509.10396; facebookresearch/igpo utils/generate.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmrl.core.blocks.foreign import HINTED, SOURCE
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.masked.masked_config import InpaintingConfig, MaskedConfig
from mmrl.masked.masked_policy import MaskedPayload, MaskedPolicy, with_masks
from mmrl.masked.masked_sampler import sample
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.methods.replacing import Exchange, Replacing
from mmrl.vlm.vlm_recipe import VlmRecipe

INPAINTED = 1

Chunk = tuple[int, int]
"""First token, and the token after the last one."""


class Inpainting(Replacing):
    """Correct responses filled in around chunks of worked answers, for questions that all samples get wrong."""

    settings: InpaintingConfig

    def __init__(self, recipe: VlmRecipe, config: MaskedConfig) -> None:
        super().__init__(recipe, config.inpainting)
        self.config = config

    def check_data(self, tasks: Sequence[VlmTask]) -> None:
        """Reject questions without any worked answer to inpaint; raises UserError."""
        key = self.settings.trace_key
        if self.settings.replacements and not any(task.columns.get(key) for task in tasks):
            raise UserError(
                f"data: no question has a worked answer in a column '{key}' (inpainting.trace_key); columns: "
                f"{', '.join(tasks[0].columns)}"
            )

    def replacements(
        self, policy: VlmPolicy, rollouts: Rollouts, failed: Sequence[int], streams: Streams, step: Step
    ) -> Exchange | None:
        """Correct responses around hints, which replace the first samples of their groups."""
        if not self.settings.replacements:
            return None
        assert isinstance(policy, MaskedPolicy)
        size = self.config.trainer.samples_per_task
        rows = self.with_scores(self._inpainted(policy, rollouts, failed, streams), step)
        right = self.recipe.correct(rows).view(len(failed), size)
        leaving: list[int] = []
        chosen: list[int] = []
        own = rollouts.host.group.tolist()
        for place, group in enumerate(failed):
            found = torch.nonzero(right[place].cpu()).flatten()
            order = torch.randperm(len(found), generator=streams.of(place, "replacement"))
            taken = found[order][: self.settings.replacements].tolist()
            chosen += [place * size + number for number in taken]
            leaving += [own.index(group) + number for number in range(len(taken))]
        self._count(rows, right)
        if not chosen:
            return None
        return torch.tensor(leaving), rows.select(torch.tensor(chosen))

    def metrics(self, rollouts: Rollouts, step: Step) -> dict[str, float]:
        """Adds the fraction of groups that inpainting rescued, and statistics of the inpainted responses."""
        if not self.settings.replacements:
            return super().metrics(rollouts, step)
        found, samples = self.replaced, max(self.replaced["inpainted"], 1)
        own = {
            "inpainting/rescued": found["rescued"] / max(found["groups"], 1),
            "inpainting/right": found["right"] / samples,
            "inpainting/given": found["given"] / samples / self.config.sampler.max_new_tokens,
        }
        return own | super().metrics(rollouts, step)

    def formula(self) -> str:
        """The exchange."""
        settings = self.settings
        if not settings.replacements:
            return ""
        return (
            f"if no sample is right: up to {settings.replacements} right answers filled in around "
            f"{100 * settings.low:g} to {100 * settings.high:g}% of the worked answer's chunks replace samples"
        )

    def _inpainted(self, policy: MaskedPolicy, rollouts: Rollouts, failed: Sequence[int], streams: Streams) -> Rollouts:
        """G answers around hints for each failed group, each row as a separate group; not scored."""
        payload, sampler = MaskedPayload.of(rollouts), self.config.sampler
        size = self.config.trainer.samples_per_task
        tasks, prompts = [payload.tasks[group] for group in failed], [payload.prompts[group] for group in failed]
        hints = self._hints(policy, prompts, tasks, streams)
        draws = streams.uniform(len(failed), size, sampler.draws, purpose="inpainting")
        drawn = sample(policy, prompts, size, sampler, draws, hints)
        self.recipe.extra_samples += len(hints)
        given = VlmPayload(
            [prompt for prompt in prompts for _ in range(size)],
            [task for task in tasks for _ in range(size)],
            drawn.response_ids,
            drawn.texts,
            drawn.finish,
        )
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
        rows = with_masks(rows, self.config.draws, len(failed), streams, "inpainting likelihood")
        self.replaced["given"] += int((hints != policy.mask_id).sum())
        if HINTED not in rows.extras:
            return rows
        return rows.replace(extras=rows.extras | {HINTED: (hints != policy.mask_id).to(rows.mask)})

    def _hints(
        self, policy: MaskedPolicy, prompts: Sequence[Any], tasks: Sequence[VlmTask], streams: Streams
    ) -> Tensor:
        """(N * G, L) int64, masked answers with chunks of each question's worked answer, if it has one."""
        config, width = self.settings, self.config.sampler.max_new_tokens
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


def hinted_answer(
    trace: Sequence[int], length: int, mask_id: int, config: InpaintingConfig, generator: torch.Generator
) -> list[int]:
    """A response of masked tokens with random chunks of a worked answer in it.

    Args:
        trace: tokens of the worked answer, without an end token.
        length: tokens L of an answer.
        mask_id: the mask token.
        config: sizes and fractions of chunks.
        generator: draws the chunks' sizes, the fraction that is given, and which ones.

    Returns:
        L tokens.
    """
    trace = trace[: max(length - config.free, 0)]
    chunks = cut(len(trace), config.min_chunk, config.max_chunk, generator)
    share = config.low + (config.high - config.low) * float(torch.rand((), generator=generator))
    order = torch.randperm(len(chunks), generator=generator).tolist()
    given = [chunks[number] for number in sorted(order[int(len(chunks) * (1.0 - share)) :])]
    return with_chunks(trace, given, length, mask_id, config)


def with_chunks(
    trace: Sequence[int], chunks: Sequence[Chunk], length: int, mask_id: int, config: InpaintingConfig
) -> list[int]:
    """L masked tokens with chunks of a worked answer in them."""
    room = max(length - config.free, 0)
    stretch = min(max(1.0, room / max(len(trace), 1)), config.stretch)
    answer = [mask_id] * length
    for (start, _), (first, stop) in zip(chunks, place(chunks, room, stretch, config.max_gap), strict=False):
        answer[first:stop] = trace[start : start + stop - first]
    return answer


def cut(length: int, smallest: int, largest: int, generator: torch.Generator) -> list[Chunk]:
    """Consecutive chunks of random sizes; a remainder below the minimum size is dropped."""
    chunks: list[Chunk] = []
    start = 0
    while start < length:
        size = min(int(torch.randint(smallest, largest + 1, (), generator=generator)), length - start)
        if size < smallest:
            break
        chunks.append((start, start + size))
        start += size
    return chunks


def place(chunks: Sequence[Chunk], room: int, stretch: float, max_gap: int) -> list[Chunk]:
    """Positions of chunks in a response: gaps grow by `stretch` up to `max_gap`, and the excess is cut off.

    Returns:
        Fewer chunks than given if there is no room for the last ones.
    """
    placed: list[Chunk] = []
    end = 0
    for start, stop in chunks:
        gap = int((start - end) * stretch)
        first = min(gap, max_gap) + placed[-1][1] if placed else gap
        if first >= room:
            break
        placed.append((first, min(first + stop - start, room)))
        end = stop
    return placed
