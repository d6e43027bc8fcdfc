"""`mmrl gui validate`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

LISTED = 50


def run(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Check rows, images and box format of a grounding benchmark or your own data; exits with 2 if it is unusable."""
    from mmrl.gui.benchmarks.benchmark_copies import validate

    result = validate(str(args.path), args.benchmark, None if args.images is None else str(args.images))
    convention = result.convention
    if args.json:
        columns = ("declared", "fits", "other", "other_fits", "verdict")
        found = {
            "benchmark": result.benchmark.name,
            "files": [str(file) for file in result.files],
            "rows": result.rows,
            "usable": result.is_usable,
            "malformed": [{"place": place, "reason": reason} for place, reason in result.malformed],
            "suspicious": [{"place": place, "reason": reason} for place, reason in result.suspicious],
            "convention": None if convention is None else {name: getattr(convention, name) for name in columns},
            "notes": result.notes,
            "refusal": result.refusal,
        }
        say(json.dumps(found, indent=2))
        return 0 if result.is_usable else 2
    say(f"{result.benchmark.title}: {result.rows} rows in {', '.join(map(str, result.files))}")
    for note in result.notes:
        say(f"note: {note}")
    if convention is not None:
        say(f"boxes: {convention.sentence}")
    for heading, places in (("malformed rows", result.malformed), ("suspicious boxes", result.suspicious)):
        say(f"{heading}: {len(places) or 'none'}")
        for place, reason in places[:LISTED]:
            say(f"  {place}: {reason}")
        if len(places) > LISTED:
            say(f"  ... and {len(places) - LISTED} more; --json lists all")
    if result.refusal and not result.malformed:
        say(f"training rejects it: {result.refusal}")
    say("usable as it is" if result.is_usable else "not usable as it is")
    return 0 if result.is_usable else 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "path", metavar="FILE", type=Path, help=("annotation file, folder of a benchmark copy, or your own data")
    )
    parser.add_argument(
        "--benchmark", metavar="NAME", help=("benchmark name, such as screenspot_pro; default: detected from the file")
    )
    parser.add_argument("--images", metavar="DIR", type=Path, help="image folder; default: the published location")
    parser.add_argument("--json", action="store_true", help="print JSON with all malformed and suspicious rows")
