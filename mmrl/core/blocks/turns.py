"""Advantages of the turns of an agent."""
