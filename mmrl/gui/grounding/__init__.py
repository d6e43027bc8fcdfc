"""mmrl/gui/grounding."""
