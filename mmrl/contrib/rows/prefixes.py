"""Objectives of recipes whose rows do not begin or end with the response: hints, references, prefixes, windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mmrl.core.blocks.advantage import Advantage, AdvantageScaling, GroupMean, GroupMeanStd, group_mean
from mmrl.core.blocks.clip import PpoClip
from mmrl.core.blocks.credit import VALUE_AFTER, VALUE_BEFORE, VALUE_STD, Gae, ValueLoss
from mmrl.core.blocks.divergence import K1, K3
from mmrl.core.loss import SequenceSum, TokenMean, required
from mmrl.core.objectives.objective import Objective
from mmrl.core.rollouts import Rollouts
from mmrl.fields import rare

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SegmentDifference(Advantage):
    """Value at the end of a decision's segment minus the value at its beginning, as estimated by the recipe.

    Where no values are given a row is one segment, and the mean reward of its group is the value of its beginning.

    Source: SPO, arXiv 2505.23564; AIFrameResearch/SPO math_episode_generator_with_mc_advantages.py (chain),
        tree_episode_generator.py (tree).
    """

    kind = "segment_difference"
    reads_sum = True
    needs = frozenset({"samples"})
    std: bool = rare(False)
    """Whether to divide differences by the standard deviation of the values of the segments that begin in the same
    state (`adv_method: grpo` in the public code)."""

    @property
    def level(self) -> str:
        return "decision"

    def __call__(self, rollouts: Rollouts) -> Tensor:
        extras, mask = rollouts.extras, rollouts.loss_mask
        if VALUE_AFTER not in extras:
            rows = group_mean(rollouts.reward, rollouts.group, valid=rollouts.scored)
            return torch.where(mask > 0, rows[:, None], 0.0)
        found = extras[VALUE_AFTER] - extras[VALUE_BEFORE]
        if self.std:
            why = "advantage 'segment_difference' divides by it"
            found = found / (required(extras.get(VALUE_STD), f'rollouts.extras["{VALUE_STD}"]', why) + 1e-8)
        return torch.where(mask > 0, found.to(mask.dtype), 0.0)

    def formula(self) -> str:
        over = " / (std of V over the segments that begin there + 1e-08), std with ddof 0" if self.std else ""
        return f"A_it = (V(end of t's segment) - V(its beginning)){over}"


ROWS: tuple[Objective, ...] = (
    Objective(
        "scaffolded",
        GroupMeanStd(),
        PpoClip(dual=3.0),
        TokenMean(),
        claim="adding the least hint that helps makes questions that every sample misses learnable",
        citation="Scaf-GRPO, arXiv 2510.19807; GRPO of its bs256_6k_mix.sh (clip 0.2, dual clip 3, no KL)",
        verified="dvlab-research/Scaf-GRPO at 1085db539b92",
        differs="the loss alone: hints belong to recipe scaffolded",
    ),
    Objective(
        "dataset_reset",
        Gae(gamma=1.0, lam=0.95),
        PpoClip(),
        TokenMean(),
        scaling=AdvantageScaling(whiten="decisions"),
        kl=K1(0.05, in_reward=True),
        value=ValueLoss(coef=0.1, clip=0.2),
        claim="rollouts that restart from inside good answers learn more than those from the prompt alone",
        citation="Chang et al., DR-PO, arXiv 2404.08495; PPO of its src/tldr/drpo.py",
        verified="Cornell-RL/drpo at bd825df853ce",
        differs="starts belong to recipe dataset_reset; the code also divides rewards by their deviation, and whitens "
        "with n in the variance where n - 1 is used here",
    ),
    Objective(
        "arbitrary_entropy",
        GroupMeanStd(),
        PpoClip(dual=3.0),
        TokenMean(),
        claim="positive samples drawn at another temperature hold the entropy at any chosen value",
        citation="AEPO (arbitrary entropy), arXiv 2510.08141; GRPO of its qwen-math-7b-AEPO.sh (clip 0.2, no KL)",
        verified="597358816/AEPO at b353a05441e9",
        differs="the loss alone: samples of another temperature belong to recipe arbitrary_entropy",
    ),
    Objective(
        "segment_chain",
        SegmentDifference(),
        PpoClip(),
        TokenMean(),
        scaling=AdvantageScaling(whiten="decisions"),
        kl=K3(1e-4, clamp=False, aggregation=SequenceSum()),
        claim="Monte Carlo values at cut points give credit to segments, finer than answers and coarser than tokens",
        citation="Guo et al., SPO (segments), arXiv 2505.23564; SPO-chain of its configs (clip 0.2, k3 1e-4)",
        verified="AIFrameResearch/SPO at b9fc6a263dec",
        differs="the loss alone: cuts, their values and the mask of certain tokens belong to recipe segment",
    ),
    Objective(
        "segment_tree",
        SegmentDifference(),
        PpoClip(),
        TokenMean(),
        scaling=AdvantageScaling(whiten="decisions"),
        kl=K3(1e-4, clamp=False, aggregation=SequenceSum()),
        claim="trees of segments give the same segment credit for long answers at less cost",
        citation="Guo et al., SPO (segments), arXiv 2505.23564; SPO-tree of its configs (clip 0.2, k3 1e-4)",
        verified="AIFrameResearch/SPO at b9fc6a263dec",
        differs="the loss alone: trees and the mask of certain tokens belong to recipe segment; no replay of branches",
    ),
    Objective(
        "grace",
        GroupMean(),
        PpoClip(dual=3.0),
        TokenMean(),
        claim="rewarding rationales by a contrastive score gives better embeddings with readable reasons",
        citation="GRACE (contrastive reward), arXiv 2510.04506; GRPO without std of its train.sh (clip 0.2, no KL)",
        verified="GasolSun36/GRACE at f636fdc72a3d",
        differs="the loss alone: the reward from hidden states belongs to recipe contrastive",
    ),
    Objective(
        "tppo",
        Gae(gamma=1.0, lam=0.95, truncation="repeat"),
        PpoClip(),
        TokenMean(),
        value=ValueLoss(coef=0.1, clip=0.2),
        claim="updates on unfinished answers make training up to 2.5 times as efficient as PPO's",
        citation="Fan et al., T-PPO, arXiv 2506.15050, EGAE; clip 0.2, lambda 0.95 and the critic as in ppo",
        verified="hand computation",
        differs="the loss alone: windows and the critic's targets belong to recipe truncated; the parts share a loss",
    ),
)
