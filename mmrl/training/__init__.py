"""The loop: recipe stages, updates, checkpoints, tracking, reports and comparisons."""
