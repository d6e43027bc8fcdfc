"""Methods from single papers for agents."""
