"""Episodes of an agent: the runner, its turns, and how they become rollouts."""
