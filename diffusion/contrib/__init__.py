"""Methods of single papers for diffusion and flow models."""
