"""Prompts, captioned images and pairs of images."""
