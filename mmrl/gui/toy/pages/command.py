"""`mmrl gui screens`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from mmrl.errors import UserError
from mmrl.files import output_folder


def run(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Draw web pages with a browser and write them as a training dataset, with instructions and boxes."""
    from mmrl.gui.toy.pages.screens import build_screens

    path = args.folder / f"{args.split}.jsonl"
    if path.exists():
        raise UserError(f"{path} already exists; choose another folder, or remove it")
    options = {name: getattr(args, name) for name in ("width_px", "height_px", "per_screen", "all_boxes")}
    languages = {"languages": args.language} if args.language else {}
    build_screens(path, count=args.count, seed=args.seed, split=args.split, **options, **languages)
    say(f"{args.count} instructions with their screens: {path}")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "folder", metavar="DIR", type=output_folder, help=("output folder; receives SPLIT.jsonl and a folder of images")
    )
    parser.add_argument("--count", metavar="N", type=int, default=1000, help="number of instructions; default 1000")
    parser.add_argument(
        "--split",
        choices=["train", "layouts", "test"],
        default="train",
        help="layouts: known words in unknown templates; test: both unknown; default train",
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="default 0")
    parser.add_argument("--width", dest="width_px", metavar="PX", type=int, default=448, help="default 448")
    parser.add_argument("--height", dest="height_px", metavar="PX", type=int, default=336, help="default 336")
    parser.add_argument(
        "--per-screen", metavar="N", type=int, default=3, help=("maximum number of instructions per page; default 3")
    )
    parser.add_argument("--language", choices=["en", "de", "es"], action="append", help="repeatable; default all three")
    parser.add_argument("--all-boxes", action="store_true", help="keep instructions that match several controls")
