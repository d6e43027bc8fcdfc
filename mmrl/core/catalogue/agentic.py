"""Objectives that give credit to the turns of an agent."""

from mmrl.core.blocks.advantage import GroupMeanStd
from mmrl.core.blocks.clip import PolicyGradient, PpoClip
from mmrl.core.blocks.divergence import K3
from mmrl.core.blocks.turns import EntropyBalanced, GradientPreserving, GroupInGroup, TurnNormalised, TurnReturns
from mmrl.core.loss import TokenMean, TurnMean
from mmrl.core.objectives.objective import Objective

ROWS: tuple[Objective, ...] = (
    Objective(
        "gigpo",
        GroupInGroup(),
        PpoClip(dual=3.0),
        TokenMean(),
        kl=K3(0.01),
        claim="comparing actions taken from the same state assigns credit to single turns without a critic",
        citation="Feng et al., GiGPO, arXiv 2505.10978, eq. 3-8; its public scripts (w 1, gamma 0.95, k3 0.01)",
        verified="langfengQ/DrMAS at 1bc15d2e5756",
        differs="a group of one episode gets 0, not its reward; the penalty of unreadable answers is reward.format",
    ),
    Objective(
        "information_gain",
        TurnNormalised(),
        PpoClip(dual=3.0),
        TokenMean(),
        kl=K3(0.001),
        claim="rewarding each turn by how much it raises the probability of the right answer gives dense turn rewards",
        citation="Wang et al., IGPO, arXiv 2510.14967; its public code (gamma 1, k3 0.001)",
        verified="debajoycs98/IGPO at 866019637ff3, GuoqingWang1/IGPO at bff163b72718",
        differs="token mean, no entropy bonus (later code: sums per row, 0.001); a gain of 0 counts as a turn; no F1",
    ),
    Objective(
        "explicit_strategy",
        TurnReturns(),
        PolicyGradient(),
        TurnMean(),
        claim="a strategy model trained with process rewards by multi-turn RL improves the dialogue agent it advises",
        citation="Liu et al., EPO (explicit policy optimization), arXiv 2502.12486; gamma 0.99 of its preprocessing.py",
        verified="lxqpku/EPO at e363c7619dd2",
        differs="turns of the step are averaged, where the code averages those of an episode and adds episodes up; "
        "process rewards are those of the environment, turn by turn",
    ),
    Objective(
        "agentic_branching",
        GroupMeanStd(),
        PpoClip(dual=3.0),
        TokenMean(),
        claim="branching where entropy is high after a tool call beats GRPO with half of the tool calls",
        citation="Dong et al., Agentic Reinforced Policy Optimization (ARPO), arXiv 2507.19849; its scripts (no KL)",
        verified="dongguanting/ARPO at e257337d1f10",
        differs="the loss alone: the branching of episodes is recipe agentic_branching",
    ),
    Objective(
        "agentic_entropy_balanced",
        GroupMeanStd(),
        GradientPreserving(dual=3.0),
        TokenMean(),
        weight=EntropyBalanced(),
        claim="balancing entropy in branching rollouts and in the update avoids over-branching and clipped gradients",
        citation="Dong et al., Agentic Entropy-Balanced PO (AEPO), arXiv 2510.14545; its public scripts (no KL)",
        verified="mowenruan/ARPO at 410211f8a3ea",
        differs="entropies of the policy before the update, compared over the step; no weight below 0",
    ),
)
