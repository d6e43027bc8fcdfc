"""mmrl/agents/toy."""
