"""Methods of single papers for agents."""
