"""Advantages shaped by the difficulty of a task, the length, the entropy or the meaning of an answer."""
