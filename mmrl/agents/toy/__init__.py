"""Grid environments and tiny models for them."""
