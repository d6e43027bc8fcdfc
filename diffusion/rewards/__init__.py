"""Rewards of images, as functions that `mmrl.rewards.RewardSum` calls."""

from diffusion.rewards.image_rewards import IMAGE_REWARDS, ImageReward, load_image_rewards

__all__ = ["IMAGE_REWARDS", "ImageReward", "load_image_rewards"]
