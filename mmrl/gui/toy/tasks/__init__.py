"""The suite's own tasks for agents in a browser, with experts that solve them."""
