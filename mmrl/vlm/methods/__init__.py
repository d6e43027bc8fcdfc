"""mmrl/vlm/methods."""
