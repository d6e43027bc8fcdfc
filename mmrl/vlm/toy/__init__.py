"""mmrl/vlm/toy."""
