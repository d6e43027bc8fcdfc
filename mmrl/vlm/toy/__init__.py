"""Digit questions, clips, tiny models and the demos; nothing of the library imports it."""
