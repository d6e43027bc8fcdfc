"""What a run writes down: checkpoints, metrics, samples, times, and the intervals of its numbers."""
