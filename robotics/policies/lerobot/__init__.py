"""Policies of lerobot, served from a Python of their own."""
