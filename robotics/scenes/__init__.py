"""Table scenes: arms, tasks, looks, experts and their environments."""
