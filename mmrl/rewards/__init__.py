"""Verifiable rewards: built-in ones, users' own, and their weighted sum; never imports torch."""

from mmrl.rewards.builtin import REWARDS, RewardEntry
from mmrl.rewards.reward_config import RewardConfig, RewardResult, TrainerState
from mmrl.rewards.sum import RewardSum

__all__ = ["REWARDS", "RewardConfig", "RewardEntry", "RewardResult", "RewardSum", "TrainerState"]
