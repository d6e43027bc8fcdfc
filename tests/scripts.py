"""Modules of scripts/, which are no package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import methods

__all__ = ["methods"]
