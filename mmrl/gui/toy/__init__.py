"""mmrl/gui/toy."""
