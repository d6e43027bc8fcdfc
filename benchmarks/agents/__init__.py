"""benchmarks/agents."""
