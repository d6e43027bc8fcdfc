"""Images of coloured shapes with captions, and a detector that reads them back.

A text-to-image task that needs no download: captions that ask for colours, shapes, counts and relations, renders of
them to train on, and an exact way to check what a generated image shows.
"""

from diffusion.toy.shapes.captions import (
    COLOURS,
    KINDS,
    RELATIONS,
    SHAPES,
    Scene,
    ShapeGroup,
    all_scenes,
    parse_caption,
    split_scenes,
    write_prompt_file,
)
from diffusion.toy.shapes.detector import Detection, detect, relative_position
from diffusion.toy.shapes.render import render_dataset, render_scene

__all__ = [
    "COLOURS",
    "KINDS",
    "RELATIONS",
    "SHAPES",
    "Detection",
    "Scene",
    "ShapeGroup",
    "all_scenes",
    "detect",
    "parse_caption",
    "relative_position",
    "render_dataset",
    "render_scene",
    "split_scenes",
    "write_prompt_file",
]
