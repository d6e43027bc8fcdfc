"""Grid worlds and their tiny models."""

EXAMPLES = {"agent": "mmrl.agents.toy.grid:GridWorld"}
"""What a starter of `mmrl init` names where the user gives no data."""
