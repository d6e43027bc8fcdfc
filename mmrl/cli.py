"""The `mmrl` command: reads the arguments, loads the room that is asked for, turns errors into exit codes.

Exit codes: 0 done, 1 failed run, 2 bad usage or configuration, 130 interrupted. Nothing heavy is imported
before a command runs, so that `mmrl --help` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import logging
import os
import shlex
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mmrl.errors import RunError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mmrl.core.objective import Objective

__all__ = ["main"]

DISTRIBUTION = "mmrl-suite"
BENCH_DIR = Path("runs/bench")
QUIET_ENVIRONMENT = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",  # else each retry of an unreachable hub is a line
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",  # reward workers are forked; the tokenizer's threads warn about it
    "PYTHONWARNINGS": "ignore::FutureWarning",  # for worker processes; this process gets a filter below
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments after the program's name; those of the process when None.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parse(arguments)
        _quieten_libraries()
        _show_log()
        return int(args.run(args))
    except SystemExit as stop:  # argparse leaves this way after --help and --version
        return int(stop.code or 0)
    except UserError as error:
        return _complain(f"error: {error}", code=2)
    except RunError as error:
        return _complain(f"run failed: {error}", code=1)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough; nothing may be flushed to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return _complain(f"interrupted; {_how_to_continue(arguments)}", code=130)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `{self.prog} --help` shows the usage")


def _build_parser() -> _Parser:
    parser = _Parser(
        prog="mmrl",
        description="Reinforcement learning of vision-language models, diffusion models and robot policies.",
        epilog="Exit codes: 0 done, 1 failed run, 2 bad usage or configuration.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, (add, run) in COMMANDS.items():
        sub = commands.add_parser(name, help=run.__doc__, description=run.__doc__, allow_abbrev=False)
        add(sub)
        sub.set_defaults(run=run, takes_overrides=name in TAKES_OVERRIDES)
    return parser


def _parse(arguments: list[str]) -> argparse.Namespace:
    _check_command(arguments)
    # argparse stops collecting `a.b=c` at an option, so `train x.yaml --resume a.b=c` leaves some over.
    args, rest = _build_parser().parse_known_args(arguments)
    if args.version:
        args.run = _version
        return args
    if not hasattr(args, "run"):
        raise UserError(f"a command is needed: {', '.join(COMMANDS)}; `mmrl --help` explains them")
    surplus = [text for text in rest if text.startswith("-") or not args.takes_overrides]
    if surplus:
        usage = f"`mmrl {arguments[0]} --help` shows the usage"
        raise UserError(f"unknown arguments: {' '.join(surplus)}; {usage}")
    if args.takes_overrides:
        args.overrides = _checked_overrides([*args.overrides, *rest])
    return args


def _check_command(arguments: list[str]) -> None:
    name = next(iter(arguments), "-")
    if name.startswith("-") or name in COMMANDS:
        return
    raise UserError(f"unknown command '{name}'; {_suggestion(name, COMMANDS)}commands: {', '.join(COMMANDS)}")


def _checked_overrides(overrides: list[str]) -> list[str]:
    for text in overrides:
        key, equals, _ = text.partition("=")
        if not equals or not key.strip():
            raise UserError(f"override '{text}' is not of the form a.b=c, for example trainer.steps=10")
    return overrides


def _suggestion(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean '{close[0]}'? " if close else ""


def _quieten_libraries() -> None:
    """Silence third-party progress bars and advice; a variable or `-W` option set by the user wins."""
    for name, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not sys.warnoptions:
        warnings.simplefilter("ignore", FutureWarning)


class _LogLines(logging.Handler):
    """Messages on the streams of the moment, which a progress bar redirects; warnings in one line on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno < logging.WARNING:
            _say(text)
        else:
            sys.stderr.write(f"mmrl: {record.levelname.lower()}: {' '.join(text.split())}\n")


def _show_log() -> None:
    """Show the suite's own messages; of several processes, all but the first show warnings only."""
    logger = logging.getLogger("mmrl")
    logger.setLevel(logging.INFO if _is_first_process() else logging.WARNING)
    if not any(isinstance(handler, _LogLines) for handler in logger.handlers):
        logger.addHandler(_LogLines())


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _how_to_continue(arguments: list[str]) -> str:
    command = shlex.join(["mmrl", *arguments])
    if arguments and arguments[0] in ("train", "sft"):
        resume = "" if "--resume" in arguments else " --resume"
        return f"continue from the last checkpoint with: {command}{resume}"
    keeps_finished_parts = arguments and arguments[0] in ("compare", "demo")
    return f"{'continue' if keeps_finished_parts else 'start again'} with: {command}"


def _complain(message: str, code: int) -> int:
    sys.stderr.write(f"mmrl: {' '.join(message.split())}\n")
    return code


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _version(args: argparse.Namespace) -> int:
    from importlib.metadata import PackageNotFoundError, version

    try:
        _say(f"mmrl {version(DISTRIBUTION)}")
    except PackageNotFoundError:
        _say("mmrl (not installed; run from a checkout)")
    return 0


def _train(args: argparse.Namespace) -> int:
    """Train a recipe from a configuration file."""
    return _run_training(args, supervised_only=False)


def _sft(args: argparse.Namespace) -> int:
    """Supervised warm start from a configuration file."""
    return _run_training(args, supervised_only=True)


def _run_training(args: argparse.Namespace, supervised_only: bool) -> int:
    from mmrl.config import load_run

    entry, config = load_run(args.config, args.overrides)
    if supervised_only and not entry.supervised:
        raise UserError(f"{args.config}: recipe '{entry.name}' learns from rewards; use `mmrl train` for it")
    from mmrl.training.loop.distributed import leave
    from mmrl.training.runs import train

    if _is_first_process():
        _say(f"{args.config}: recipe {entry.name}, {config.trainer.steps} steps, into {config.output_dir}")
    run_dir = train(entry, config, resume=args.resume)
    if _is_first_process():
        _say(f"run folder: {run_dir}")
        _say(f"report: {run_dir / 'report.html'}")
    leave()
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    """Evaluate a configuration's model, or the best checkpoint of a run folder."""
    from mmrl.config import load_run

    run_dir = _existing_run(args.target) if args.target.is_dir() else None
    entry, config = load_run(run_dir / "config.yaml" if run_dir else args.target, args.overrides)
    from mmrl.training.runs import evaluate

    if run_dir and not any(text.startswith("output_dir=") for text in args.overrides):
        config.output_dir = str(run_dir)  # the folder may have been moved since it was written
    metrics = evaluate(entry, config, run_dir)
    width = max(map(len, metrics), default=0)
    for name, value in metrics.items():
        _say(f"{name:<{width}}  {value:.6g}")
    return 0


def _existing_run(folder: Path) -> Path:
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder} is not a run folder: it holds no config.yaml")
    return folder


def _report(args: argparse.Namespace) -> int:
    """Write report.html of the last run folder; earlier ones are the stages before it."""
    *chain, run_dir = [_existing_run(folder) for folder in args.run_dirs]
    from mmrl.training.report.page import write_report

    _say(f"report: {write_report(run_dir, chain=chain)}")
    return 0


def _compare(args: argparse.Namespace) -> int:
    """Run the arms and seeds of an experiment, skip finished ones, write comparison.json and a plot."""
    if not args.experiment.is_file():
        raise UserError(f"experiment file not found: {args.experiment}")
    if args.jobs is not None and args.jobs < 1:
        raise UserError(f"--jobs is {args.jobs}; must be at least 1")
    from mmrl.training.compare.run import run_experiment

    output = args.output or Path("runs") / args.experiment.stem
    folder = run_experiment(args.experiment, output, jobs=args.jobs, only_report=args.only_report)
    _say(f"comparison: {folder / 'comparison.json'}")
    return 0


def _list(args: argparse.Namespace) -> int:
    """List the recipes, objectives and rewards with their citations."""
    for kind in [args.kind] if args.kind else list(LISTINGS):
        rows = LISTINGS[kind]()
        width = max(len(name) for name, _, _ in rows)
        _say(f"{kind}:")
        for name, summary, citation in rows:
            _say(f"  {name:<{width}}  {' '.join(summary.split())} [{citation}]")
    return 0


def _recipe_rows() -> list[tuple[str, str, str]]:
    from mmrl.recipes import RECIPES

    return [(name, entry.summary, entry.citation) for name, entry in RECIPES.items()]


def _objective_rows() -> list[tuple[str, str, str]]:
    from mmrl.core.catalogue import CATALOGUE

    return [(name, _parts_of(objective), objective.citation) for name, objective in CATALOGUE.items()]


def _parts_of(objective: Objective) -> str:
    parts = [objective.advantage, f"{objective.ratio} ratio", objective.surrogate, objective.aggregation]
    if objective.kl is not None:
        parts.append(f"KL {objective.kl} {objective.kl_coef:g}{' in the reward' if objective.kl_in_reward else ''}")
    if objective.filter != "none":
        parts.append(f"{objective.filter} groups of equal reward")
    return ", ".join(parts)


def _reward_rows() -> list[tuple[str, str, str]]:
    from diffusion.rewards import IMAGE_REWARDS
    from mmrl.rewards import REWARDS

    rows = [(name, entry.summary, entry.citation) for name, entry in REWARDS.items()]
    return rows + [(name, f"images: {entry.summary}", entry.citation) for name, entry in IMAGE_REWARDS.items()]


def _doctor(args: argparse.Namespace) -> int:
    """Check versions, devices, libraries and name clashes, and say what to do."""
    from mmrl.doctor import run

    return run(runs_dir=args.output, as_json=args.json)


def _bench(args: argparse.Namespace) -> int:
    """Measure time and memory against row-per-sample code, or another library, and print JSON."""
    from mmrl.bench import run
    from mmrl.bench.harness import BenchOptions

    names = ("blocks", "repetitions", "threads", "quick", "device", "only", "against", "model", "family", "folder")
    options = BenchOptions(**{name: getattr(args, name) for name in names})
    with contextlib.redirect_stdout(sys.stderr):  # what the arms say; standard output is the result's
        text, passed = run(args.room, options, args.out)
    _say(text)
    return 0 if passed else 1


def _demo(args: argparse.Namespace) -> int:
    """A warm start and reinforcement learning of a tiny model from end to end, then a report."""
    module, folder = DEMOS[args.name]
    for line in importlib.import_module(module).run(args.output or Path(folder)):
        _say(line)
    return 0


def _sim(args: argparse.Namespace) -> int:
    """Install a simulator suite in a Python of its own, or check a simulator with its scripted experts."""
    rooms = importlib.import_module("robotics.sim.commands")
    if args.action == "setup":
        rooms.setup(args.name, args.folder, _say)
        return 0
    return 0 if rooms.experts(args.name, args.episodes, args.options, _say) else 1


def _add_training_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", type=Path, help="YAML file")
    _add_overrides(parser)
    parser.add_argument("--resume", action="store_true", help="continue the run from its last checkpoint")


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", metavar="a.b=c", nargs="*", help="values that replace the file's")


def _add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="CONFIG_OR_RUN_DIR", type=Path, help="YAML file or folder of a run")
    _add_overrides(parser)


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="folders of runs, in order")


def _add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", metavar="EXPERIMENT.yaml", type=Path, help="arms, seeds and metric")
    parser.add_argument("--output", metavar="DIR", type=Path, help="default: runs/ and the experiment's name")
    parser.add_argument("--jobs", metavar="N", type=int, help="runs at a time; default: the file's")
    parser.add_argument("--only-report", action="store_true", help="only summarise finished runs")


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", choices=list(LISTINGS), help="default: all three")


def _add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", metavar="DIR", type=Path, default=Path("runs"), help="where runs will go")


def _add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("room", choices=["vlm", "diffusion", "sim"], help="what is measured")
    parser.add_argument("--against", choices=["trl"], help="compare with this library as well; needs the extra `bench`")
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help="one comparison; repeatable")
    parser.add_argument("--blocks", metavar="N", type=int, default=0, help="processes of each arm, in turns; default 5")
    parser.add_argument("--repetitions", metavar="N", type=int, default=0, help="that count in each; default 2")
    parser.add_argument("--threads", metavar="N", type=int, default=1, help="of each process; default 1")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default cpu")
    parser.add_argument("--family", choices=["qwen2_5_vl", "qwen3_vl"], default="qwen2_5_vl", help="of the built model")
    parser.add_argument("--model", metavar="DIR", type=Path, help="model folder in place of a built one")
    parser.add_argument("--folder", metavar="DIR", type=Path, default=BENCH_DIR, help=f"built things; {BENCH_DIR}")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the JSON to a file as well")
    parser.add_argument("--quick", action="store_true", help="tiny sizes that only show that everything runs")


def _add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    first = next(iter(DEMOS))
    parser.add_argument("name", nargs="?", choices=list(DEMOS), default=first, help=f"default: {first}")
    folders = ", ".join(folder for _, folder in DEMOS.values())
    parser.add_argument("--output", metavar="DIR", type=Path, help=f"default: {folders}")


DEMOS = {"vlm": ("mmrl.vlm.demo", "runs/demo"), "robot": ("robotics.demo", "runs/robot-demo")}


def _add_sim_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["setup", "experts"], help="install a suite, or run scripted experts")
    suites = "libero, metaworld, robosuite or gymnasium_robotics; for experts tabletop or metaworld"
    parser.add_argument("name", help=suites)
    parser.add_argument(
        "options", metavar="a=b", nargs="*", help="experts: fields of the simulator, such as tasks=[push]"
    )
    parser.add_argument("--folder", metavar="DIR", type=Path, help="setup: where to; default: MMRL_SUITES or the cache")
    parser.add_argument("--episodes", metavar="N", type=int, default=5, help="experts: of each task; default: 5")


LISTINGS: dict[str, Callable[[], list[tuple[str, str, str]]]] = {
    "recipes": _recipe_rows,
    "objectives": _objective_rows,
    "rewards": _reward_rows,
}
TAKES_OVERRIDES = ("train", "sft", "evaluate")
COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]] = {
    "train": (_add_training_arguments, _train),
    "sft": (_add_training_arguments, _sft),
    "evaluate": (_add_evaluate_arguments, _evaluate),
    "report": (_add_report_arguments, _report),
    "compare": (_add_compare_arguments, _compare),
    "list": (_add_list_arguments, _list),
    "doctor": (_add_doctor_arguments, _doctor),
    "demo": (_add_demo_arguments, _demo),
    "bench": (_add_bench_arguments, _bench),
    "sim": (_add_sim_arguments, _sim),
}


if __name__ == "__main__":
    sys.exit(main())
