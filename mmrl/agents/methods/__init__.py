"""mmrl/agents/methods."""
