"""mmrl/vlm/data."""
