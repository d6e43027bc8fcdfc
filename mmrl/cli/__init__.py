"""The command line: `mmrl`, also as `python -m mmrl.cli`."""

from mmrl.cli.program import main

__all__ = ["main"]
