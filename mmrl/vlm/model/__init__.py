"""mmrl/vlm/model."""
