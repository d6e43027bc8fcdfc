"""Verifiable rewards: built-in ones, users' own, and their weighted sum; never imports torch."""

from mmrl.rewards.builtin import REWARDS, RewardEntry
from mmrl.rewards.combine import RewardSum
from mmrl.rewards.config import RewardConfig, RewardResult, TrainerState

__all__ = ["REWARDS", "RewardConfig", "RewardEntry", "RewardResult", "RewardSum", "TrainerState"]
