"""The loop and what it is made of: recipe stages, trainer, updates, reference, settings, processes."""
