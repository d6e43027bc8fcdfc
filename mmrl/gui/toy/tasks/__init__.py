"""The built-in browser tasks for agents, with experts that solve them."""
