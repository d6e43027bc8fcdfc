"""mmrl/agents/rollout."""
