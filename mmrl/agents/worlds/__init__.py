"""A small world that agents see as images, its expert, and a tiny model for it."""
