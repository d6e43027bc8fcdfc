"""robotics/episodes."""
