"""A preference objective of the catalogue, what a run changes in it, and how pairs enter the loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.core.blocks.preference import PREFERENCE_BLOCKS
from mmrl.core.catalogue import get_preference
from mmrl.core.objectives.pairwise import PreferenceObjective
from mmrl.core.pairs import CHOSEN
from mmrl.fields import by_kind, rare


@dataclass
class PreferenceConfig:
    """A row of the catalogue's preference objectives and what differs from it.

    Each part changes numbers of the row's block, or names another block by `kind`:
    `objective: {preset: dpo, loss: {beta: 0.3}, likelihood: {kind: nll, coef: 0.1}}`.
    """

    preset: str = "dpo"
    """Name in `mmrl list objectives`, one of those for pairs."""
    loss: dict[str, Any] = rare(by_kind(lambda: PREFERENCE_BLOCKS["loss"], named=True, default_from=PRESET))
    """Loss of a pair: sigmoid, robust, hinge, ipo, sppo, sppo_hard, refuel, or none (supervised)."""
    score: dict[str, Any] = rare(by_kind(lambda: PREFERENCE_BLOCKS["score"], named=True, default_from=PRESET))
    """What an answer is compared by: sum or mean of its log-probabilities, or decision (noisy versions of images)."""
    likelihood: dict[str, Any] = by_kind(lambda: PREFERENCE_BLOCKS["likelihood"], named=True, default_from=PRESET)
    """Likelihood of the preferred answers as a further term: nll or none, with coef and average."""


def make_preference(config: PreferenceConfig) -> PreferenceObjective:
    """Combine a catalogue row with what a configuration changes."""
    changes = {key: dict(getattr(config, key)) for key in PREFERENCE_BLOCKS if getattr(config, key)}
    try:
        objective = get_preference(config.preset).override(changes)
    except ValueError as error:
        raise ValueError(f"objective: {error}") from error
    objective.validate()
    return objective


def check_pair_batches(micro_batch: int) -> None:
    """Refuse micro-batches that no pair fits into; raises ValueError."""
    if micro_batch == 1:
        raise ValueError("trainer.micro_batch is 1; the two sides of a pair are compared, use at least 2, or 0 for all")


def pair_marks(pairs: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """`extras` of `Rollouts` whose rows are the preferred and the rejected side of each pair in turn.

    Returns:
        The mark of each row (2 N,), 1 on preferred sides.
    """
    return {CHOSEN: torch.tensor([1.0, 0.0], device=device).repeat(pairs)}
