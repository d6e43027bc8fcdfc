"""mmrl/vlm/engine."""
