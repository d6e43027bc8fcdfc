"""Further baselines of rewards, of other libraries and papers."""
