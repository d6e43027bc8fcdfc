"""Losses that match velocities or states, and the forward process."""
