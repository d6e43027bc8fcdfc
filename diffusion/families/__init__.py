"""Model families of diffusers, one file each; `Family` in `base` is what a family is asked for."""
