"""The commands under `mmrl gui`: modules with `run(args, say)`, which returns the exit code, and `add_arguments`."""

from __future__ import annotations

import argparse
import importlib

from mmrl.recipes import world_table

COMMANDS = world_table("GUI_COMMANDS") | {
    "convert": "mmrl.gui.benchmarks.convert_command",
    "validate": "mmrl.gui.benchmarks.benchmark_command",
}
"""The modules are light because they are loaded on every use of `mmrl`; they import the rest when they run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the commands; the function of the chosen command becomes `run_gui`, and its docstring is the help."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for name, module in COMMANDS.items():
        command = importlib.import_module(module)
        sentence = command.run.__doc__
        sub = actions.add_parser(name, help=sentence, description=sentence, allow_abbrev=False)
        command.add_arguments(sub)
        sub.set_defaults(run_gui=command.run)
