"""Agents that look and act over several turns: environments, actions, rollouts and what their recipes share."""
