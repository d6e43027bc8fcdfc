"""Commands that compare or repeat results; lightweight because every call of `mmrl` imports them."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmrl.errors import UserError
from mmrl.files import output_folder, own_config


def compare(args: argparse.Namespace) -> int:
    """Run the arms and seeds of an experiment, skip finished ones, write comparison.json and a plot."""
    args.experiment = own_config(args.experiment)
    if not args.experiment.is_file():
        raise UserError(f"experiment file not found: {args.experiment}")
    _check_at_least_one("jobs", args.jobs)
    from mmrl.comparison.run import planned, run_experiment, say

    output = args.output or Path("runs") / args.experiment.stem
    if args.plan:
        for line in planned(args.experiment, output, args.allow):
            say(line)
        return 0
    args.run_dir = output
    options = {"jobs": args.jobs, "only_report": args.only_report, "allow": args.allow}
    folder = run_experiment(args.experiment, output, **options)
    say(f"comparison: {folder / 'comparison.json'}")
    return 0


def reproduce(args: argparse.Namespace) -> int:
    """Repeat a small experiment on fresh seeds and report whether its result is within the stored interval."""
    _check_at_least_one("jobs", args.jobs)
    _check_at_least_one("seeds", args.seeds)
    if args.name is None and not args.list:
        raise UserError("give an experiment, objective or recipe; `mmrl reproduce --list` shows what was measured")
    from mmrl.comparison import reproduce as repeated
    from mmrl.comparison.run import say

    if args.list:
        for line in repeated.listed():
            say(line)
        return 0
    args.run_dir = args.output
    agreed = repeated.reproduce(args.name, args.output, seeds=args.seeds, jobs=args.jobs, say=say)
    return 0 if agreed else 1


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `mmrl compare`."""
    parser.add_argument(
        "experiment", metavar="EXPERIMENT.yaml", type=Path, help="experiment file with arms, seeds and metric"
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=output_folder,
        help="output folder; default: runs/ followed by the experiment's name",
    )
    parser.add_argument("--jobs", metavar="N", type=int, help="number of parallel runs; default: set in the file")
    parser.add_argument(
        "--plan",
        action="store_true",
        help="check every configuration and print the number of runs and CPU hours, without running them",
    )
    parser.add_argument("--only-report", action="store_true", help="only summarise runs that have finished")
    add_allow_argument(parser)


def add_allow_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--allow` for commands that read files which someone else may have written."""
    text = "allow this code (module:function or file.py:function) that the file refers to; repeat for each name"
    parser.add_argument("--allow", metavar="NAME", action="append", default=[], help=text)


def add_reproduce_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `mmrl reproduce`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="an experiment, objective or recipe")
    parser.add_argument(
        "--list", action="store_true", help="list what was measured, with minutes for two seeds on one core each"
    )
    parser.add_argument("--seeds", metavar="N", type=int, default=2, help="number of fresh seeds; default: 2")
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=output_folder,
        help="output folder; default: runs/reproduce/ followed by the name",
    )
    parser.add_argument("--jobs", metavar="N", type=int, help="number of parallel runs; default: set in the experiment")


def verify(args: argparse.Namespace) -> int:
    """Check the ledger of an evaluation and repeat some of its rows."""
    from mmrl.comparison.run import say
    from mmrl.comparison.verify import verify as check

    return check(args.target, say, args.rows, args.row, args.overrides, args.allow)


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `mmrl evaluate --verify`."""
    text = "check a ledger and repeat some of its rows; exit code 1 if any row differs"
    parser.add_argument("--verify", action="store_true", help=text)
    text = "with --verify: number of random rows to repeat; 0 = only check; default: 10, or all if there are fewer"
    parser.add_argument("--rows", metavar="N", type=int, help=text)
    text = "with --verify: repeat these rows (numbered from 1)"
    parser.add_argument("--row", metavar="I,J", type=_numbers, default=[], help=text)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected row numbers such as 4,60, got {text!r}") from None


def _check_at_least_one(option: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise UserError(f"--{option} is {value}; must be at least 1")
