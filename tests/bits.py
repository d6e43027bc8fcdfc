"""Digests of what the suite computes: equal before and after a change that only moves or renames.

    python -m tests.bits OUT.json [--against BEFORE.json] [--only NAME ...]

For every recipe a tiny run of two steps, the second in a resumed run: its weights, metrics, evaluation, ledger rows,
exported model and model card. For every objective one step on tensors. Digests depend on the machine and on the
versions of its libraries, so compare files of one machine only. Exit status 1 if a run fails or a digest differs.
"""

import argparse
import dataclasses
import hashlib
import json
import logging
import multiprocessing
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mmrl.core import all_objectives, all_preferences, get, get_preference
from mmrl.core.loss import metric_values
from mmrl.recipes import all_recipes, find_recipe
from tests.faults.sameness import MEASURED

MEASURES = re.compile(r"\b\d+(\.\d+)? (?:s|min|ms|MB|GB)\b|\d{4}-\d{2}-\d{2}|\d{2}:\d{2} UTC")
"""Durations, sizes in memory, dates and times in a model card."""
LEFT_OUT = (*MEASURED, "protocol", "version")
"""Beginnings of keys of rows that hold times or hashes of code."""
FOLDERS = re.compile(rf"{re.escape(tempfile.gettempdir())}/[^/\s`'\"]+")
"""Temporary folders of the run and of its tiny models."""


def main(argv: list[str] | None = None) -> int:
    """Compute the digests, write them, and compare them with an earlier file."""
    parser = argparse.ArgumentParser(prog="python -m tests.bits", description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--against", type=Path, help="an earlier output to compare with")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="recipes, or 'objectives'")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args(argv)
    names = ["objectives", *all_recipes()]
    if unknown := set(given.only or ()) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    chosen = [name for name in names if name in (given.only or names)]
    found, failed = dict[str, dict[str, str]](), list[str]()
    with multiprocessing.get_context("spawn").Pool(given.processes, _prepare) as pool:
        for name, digests, error, seconds in pool.imap_unordered(_measured, chosen, chunksize=1):
            found[name] = digests
            failed += [name] if error else []
            print(f"{name:24} {seconds:5.1f} s  {error or ' '.join(digests.values())[:90]}", flush=True)
            given.output.parent.mkdir(parents=True, exist_ok=True)
            given.output.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
    changed = [] if given.against is None else differences(json.loads(given.against.read_text()), found)
    print(*changed, sep="\n", end="\n" if changed else "")
    print(f"{len(found)} digested, {len(failed)} failed, {len(changed)} changed")
    return int(bool(failed or changed))


def differences(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> list[str]:
    """One line for each digest that changed or is missing; names that were not run again are left out."""
    lines = []
    for name, digests in sorted(after.items()):
        earlier = before.get(name)
        if earlier is None:
            lines.append(f"{name}: not in the earlier file")
            continue
        keys = sorted(earlier.keys() | digests.keys())
        lines += [f"{name}: {key} changed" for key in keys if earlier.get(key) != digests.get(key)]
    return lines


def _prepare() -> None:
    """Set a worker process up: one thread, no log, no reports, which take most of the time and hold only charts."""
    from mmrl.training import run

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    run.WRITE_REPORT = "builtins:str"


def _measured(name: str) -> tuple[str, dict[str, str], str, float]:
    """Digests of a recipe or of all objectives, with the error and the seconds."""
    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="bits-") as folder:
            digests = objective_digests() if name == "objectives" else recipe_digests(name, Path(folder))
        return name, digests, "", time.monotonic() - start
    except Exception as error:
        traceback.print_exc()
        return name, {}, f"{type(error).__name__}: {error}", time.monotonic() - start


# Recipes


def recipe_digests(name: str, folder: Path) -> dict[str, str]:
    """Digests of a tiny run of a recipe, by part."""
    from mmrl.report.export import export_run
    from mmrl.training.processes import seed_everything
    from mmrl.training.run import evaluate, train

    entry = find_recipe(name)
    seed_everything(0)
    config = _configured(name, folder)
    config.trainer.steps = 1
    run_dir = train(entry, config)
    config.trainer.steps = 2
    train(entry, config, resume=True)
    digests = {
        "weights": _digest(_tensors(run_dir / "checkpoints" / "step-000002" / "model")),
        "metrics": _digest(_rows(run_dir / "metrics.jsonl")),
        "evaluation": _digest(_rows(run_dir / "evaluations.jsonl")),
    }
    if config.eval_data:
        evaluate(entry, config, run_dir)
        digests["ledger"] = _digest(_rows(run_dir / "ledger.jsonl"))
    export_run(entry, config, run_dir, folder / "export")
    digests["export"] = _digest(_tensors(folder / "export"))
    digests["card"] = _digest([_plain((folder / "export" / "README.md").read_text())])
    return digests


def _configured(name: str, folder: Path) -> Any:
    """The tiny run of the contract tests, with a held-out split where the recipe takes one."""
    from tests.contracts.domains import domain_of

    config = domain_of(name).make_config(name, folder)
    config.recipe, config.output_dir, config.checkpoint.every = name, str(folder / "run"), 1
    data = getattr(config, "data", None)
    if not config.eval_data and data is not None:
        config.eval_data = {"held_out": dataclasses.replace(data, seen=True) if hasattr(data, "seen") else data}
    if hasattr(config, "grounding"):
        config.grounding.seen = ["held_out"]
    config.validate()
    return config


def _tensors(folder: Path) -> Iterable[Any]:
    """Names and bytes of all tensors below a folder."""
    for path in sorted(folder.rglob("*.safetensors")):
        for key, tensor in sorted(load_file(path).items()):
            yield str(path.relative_to(folder)), key, tensor


def _rows(path: Path) -> Iterable[Any]:
    """Rows of a file of JSON lines without times and without hashes of code: protocol, version of an environment."""
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        yield sorted(
            (key, value) for key, value in row.items() if not key.startswith((*MEASURED, "protocol", "version"))
        )


def _plain(text: str) -> str:
    """A model card without folders, durations and dates."""
    return MEASURES.sub("_", FOLDERS.sub("FOLDER", text))


# Objectives


def objective_digests() -> dict[str, str]:
    """Digests of advantages, loss, gradients and metrics of each row of the catalogue on one batch of tensors."""
    digests = {name: _digest(_one_step(name)) for name in all_objectives()}
    return digests | {f"pairs/{name}": _digest(_one_pair_step(name)) for name in all_preferences()}


def _one_step(name: str) -> Iterable[Any]:
    from tests.core.test_objective import batch, gradients, scored, scores_of

    objective = get(name)
    rollouts, tensors = scored(objective, batch())
    output = objective.loss(scores_of(tensors), rollouts, objective.denominators(rollouts))
    yield rollouts.advantage
    yield output.loss.detach()
    yield from gradients(output.loss, tensors)
    yield sorted(metric_values(output.metrics).items())
    yield objective.describe()


def _one_pair_step(name: str) -> Iterable[Any]:
    from tests.core.test_preference import pairs, value

    objective, (rollouts, logp) = get_preference(name), pairs()
    logp.requires_grad_()
    loss = value(objective, rollouts, logp)
    yield loss.detach()
    yield from torch.autograd.grad(loss, [logp])
    yield objective.describe()


def _digest(parts: Iterable[Any]) -> str:
    """First 16 digits of the SHA-256 of tensors and of the `repr` of anything else."""
    sha = hashlib.sha256()
    for part in parts:
        for item in part if isinstance(part, tuple) else (part,):
            if isinstance(item, torch.Tensor):
                item = item.detach().contiguous().cpu()
                sha.update(f"{item.dtype}{tuple(item.shape)}".encode())
                sha.update(item.view(torch.uint8).numpy().tobytes() if item.dim() else repr(item.item()).encode())
            else:
                sha.update(repr(item).encode())
    return sha.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
