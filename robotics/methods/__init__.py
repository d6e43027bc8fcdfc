"""Recipes of papers on robot policies, one file per method."""

SCORES = ("entropy", "entropy_old", "logp_ref", "logp_rollout", "durations", "kl_old")
"""Scores of a robot policy in addition to log-probabilities."""
PPO_SCORES = (*(name for name in SCORES if name != "kl_old"), "values", "turns")
"""Scores of the policy and the critic of `robot_ppo`."""
