"""mmrl/gui/browser."""
