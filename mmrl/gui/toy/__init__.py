"""Generated pages and tasks, icons and the demo."""

DEMOS = {"gui": ("mmrl.gui.toy.gui_demo", "runs/gui-demo")}
"""Module and run folder of each demo of `mmrl demo`."""
GUI_COMMANDS = {"screens": "mmrl.gui.toy.pages.command"}
"""Modules of the commands under `mmrl gui`."""
