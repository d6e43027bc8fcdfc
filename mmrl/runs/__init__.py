"""The run folder: checkpoints, metrics, samples, times, and the intervals of its numbers."""
