"""mmrl/core/objectives."""
