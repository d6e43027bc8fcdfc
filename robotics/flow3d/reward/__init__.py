"""Progress along a predicted flow as a reward of any policy."""
