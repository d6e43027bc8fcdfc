"""Models that judge answers: LLaVA-Critic-R1 (which of two is better) and Critic-V (what is wrong with one)."""
