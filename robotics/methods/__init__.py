"""robotics/methods."""
