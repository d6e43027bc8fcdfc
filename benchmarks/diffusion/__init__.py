"""benchmarks/diffusion."""
