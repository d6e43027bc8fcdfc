"""robotics/scenes."""
