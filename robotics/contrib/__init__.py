"""Methods of single papers for robots."""
