"""mmrl/agents/environments."""
