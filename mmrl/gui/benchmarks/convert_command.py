"""`mmrl gui convert`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from mmrl.files import output_file

KINDS = ("gui_r1", "ui_r1", "ui_tars", "showui", "xywh", "rel1", "rel1000")
LISTED = 20


def run(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Convert another project's screens or steps into rows for training, with targets in pixels of the image."""
    from mmrl.gui.benchmarks.convert import convert

    options = {"images": args.images, "radius": args.radius, "skip_bad_rows": args.skip_bad_rows}
    result = convert(args.path, args.out, args.source, **options)
    steps = f", {result.without_target} of them steps without a target" if result.without_target else ""
    say(f"{result.rows} rows{steps}: {args.out}")
    if result.convention:
        say(f"boxes: {result.convention}")
    if result.skipped:
        say(f"left out: {len(result.skipped)}")
        for place, reason in result.skipped[:LISTED]:
            say(f"  {place}: {reason}")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("path", metavar="FILE", type=Path, help="file to convert: .json, .jsonl or .parquet")
    parser.add_argument("out", metavar="OUT", type=output_file, help="file to write: .jsonl")
    parser.add_argument(
        "--from", dest="source", choices=KINDS, required=True, help="project or convention that the file follows"
    )
    parser.add_argument("--images", metavar="DIR", type=Path, help="image folder; default: the folder of the file")
    parser.add_argument(
        "--radius",
        metavar="SHARE",
        type=float,
        default=0.0,
        help="radius of targets that are points, as a fraction of the image's diagonal; default: none",
    )
    parser.add_argument(
        "--skip-bad-rows", action="store_true", help="leave out rows that cannot be read, and list them"
    )
