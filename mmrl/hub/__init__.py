"""Shared by all packages with models: torchvision repair, data tables, images, video, building missing models."""
