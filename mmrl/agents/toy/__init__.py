"""Grid worlds and their tiny models."""
