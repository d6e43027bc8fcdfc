"""The commands under `mmrl gui`: their arguments and what each of them runs; COMMANDS at the foot names them.

A command imports what it needs when it runs: this table is read whenever `mmrl` builds its usage.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mmrl.errors import UserError

if TYPE_CHECKING:
    from mmrl.gui.benchmarks.validation import Validation

Say = Callable[[str], None]
LISTED = 50


class GuiCommand(NamedTuple):
    """One command; its help is the docstring of `run`."""

    run: Callable[[argparse.Namespace, Say], int]
    """Carries it out, prints lines with its second argument and returns the exit code."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    """Declares its arguments."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the commands of the table; the chosen one's function becomes `run_gui`."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for name, command in COMMANDS.items():
        sentence = command.run.__doc__
        sub = actions.add_parser(name, help=sentence, description=sentence, allow_abbrev=False)
        command.add_arguments(sub)
        sub.set_defaults(run_gui=command.run)


def validate(args: argparse.Namespace, say: Say) -> int:
    """Check the rows, images and box convention of a grounding benchmark; exit code 2 where it cannot be evaluated."""
    from mmrl.gui.benchmarks.validation import validate

    result = validate(str(args.path), args.benchmark, None if args.images is None else str(args.images))
    if args.json:
        say(json.dumps(_as_json(result), indent=2))
    else:
        _print_validation(result, say)
    return 0 if result.is_usable else 2


def screens(args: argparse.Namespace, say: Say) -> int:
    """Draw web pages with a browser and write them with instructions and boxes, as a data set for training."""
    from mmrl.gui.pages.screens import build_screens

    path = args.folder / f"{args.split}.jsonl"
    if path.exists():
        raise UserError(f"{path} exists already; name another folder, or remove it")
    options = {name: getattr(args, name) for name in ("width_px", "height_px", "per_screen", "all_boxes")}
    languages = {"languages": args.language} if args.language else {}
    build_screens(path, count=args.count, seed=args.seed, split=args.split, **options, **languages)
    say(f"{args.count} instructions with their screens: {path}")
    return 0


def _print_validation(result: Validation, say: Say) -> None:
    say(f"{result.benchmark.title}: {result.rows} rows in {', '.join(map(str, result.files))}")
    for note in result.notes:
        say(f"note: {note}")
    if result.convention is not None:
        say(f"boxes: {result.convention.sentence}")
    _print_places("malformed rows", result.malformed, say)
    _print_places("suspicious boxes", result.suspicious, say)
    say("usable as published" if result.is_usable else "not usable as it is")


def _print_places(heading: str, places: Sequence[tuple[str, str]], say: Say) -> None:
    say(f"{heading}: {len(places) or 'none'}")
    for place, reason in places[:LISTED]:
        say(f"  {place}: {reason}")
    if len(places) > LISTED:
        say(f"  ... and {len(places) - LISTED} more; --json lists all")


def _as_json(result: Validation) -> dict[str, Any]:
    convention = result.convention
    return {
        "benchmark": result.benchmark.name,
        "files": [str(file) for file in result.files],
        "rows": result.rows,
        "usable": result.is_usable,
        "malformed": [{"place": place, "reason": reason} for place, reason in result.malformed],
        "suspicious": [{"place": place, "reason": reason} for place, reason in result.suspicious],
        "convention": None
        if convention is None
        else {
            "declared": convention.declared,
            "fits": convention.fits,
            "other": convention.other,
            "other_fits": convention.other_fits,
            "verdict": convention.verdict,
        },
        "notes": result.notes,
    }


def _add_validate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="FILE", type=Path, help="annotation file, or the folder of a copy")
    parser.add_argument("--benchmark", metavar="NAME", help="such as screenspot_pro; default: recognised by the file")
    parser.add_argument("--images", metavar="DIR", type=Path, help="folder of the images; default: the published one")
    parser.add_argument("--json", action="store_true", help="print JSON, with every row that was found")


def _add_screens_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="gets SPLIT.jsonl and a folder of images")
    parser.add_argument("--count", metavar="N", type=int, default=1000, help="instructions; default 1000")
    parser.add_argument(
        "--split",
        choices=["train", "layouts", "test"],
        default="train",
        help="layouts: known words in unknown templates; test: both unknown; default train",
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="default 0")
    parser.add_argument("--width", dest="width_px", metavar="PX", type=int, default=448, help="default 448")
    parser.add_argument("--height", dest="height_px", metavar="PX", type=int, default=336, help="default 336")
    parser.add_argument("--per-screen", metavar="N", type=int, default=3, help="most instructions of a page; default 3")
    parser.add_argument("--language", choices=["en", "de", "es"], action="append", help="repeatable; default all three")
    parser.add_argument("--all-boxes", action="store_true", help="keep instructions that several controls fulfil")


COMMANDS: dict[str, GuiCommand] = {
    "screens": GuiCommand(screens, _add_screens_arguments),
    "validate": GuiCommand(validate, _add_validate_arguments),
}
