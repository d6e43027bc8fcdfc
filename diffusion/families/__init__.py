"""Model families of diffusers, one file each; `Family` in `base` defines their interface."""
