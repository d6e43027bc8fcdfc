"""How far runs in several processes, in workers, and on a device that is a label are from the run of one process.

    python -m tests.contracts.record [WAY ...] [--recipe NAME ...]

`label` and `workers` run the tests that compare them and write into record.json what those that pass have found.
`processes` measures the settings that processes.jsonl lacks, and appends each; delete its rows to measure them again.
`scripts/docs.py` makes the tables of docs/internals/scaling.md of both files.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmrl.files import write_atomically
from mmrl.recipes import RECIPES
from tests.contracts.domains import ONE_PROCESS

FOLDER = Path(__file__).parent
FILE, ROWS = FOLDER / "record.json", FOLDER / "processes.jsonl"
TESTS = {
    "label": "../devices/test_label.py::test_a_recipe_trains_on_a_gpu_within_its_budget_of_host_syncs",
    "workers": "test_rollers.py::test_workers_of_which_one_is_killed_sample_and_learn_what_one_process_does",
}
WAYS = ("processes", *TESTS)
WRITING = "WAYS_RECORD"
"""Variable that is set while the record is written."""


class Setting(NamedTuple):
    """A run whose processes are compared."""

    seed: int
    tasks: int
    steps: int


SETTINGS = (Setting(0, 4, 3), Setting(1, 6, 3), Setting(2, 6, 8), Setting(1, 4, 8), Setting(2, 4, 3), Setting(0, 6, 8))
THOROUGH = ("distil", "papo", "robot_ppo", "vlm-dcpo", "agent", "flow3d_awm", "ac_flow")
"""Measured in all settings, since they differ most; the others are in the first two."""
OBJECTIVES = {"vlm-dcpo": ("vlm", {"objective.preset": "dcpo"})}
"""Further runs: a recipe and its options."""
PROCESSES = {"two": (2, {}), "three": (3, {}), "fsdp2": (2, {"trainer.sharding": "fsdp2"})}


class Distance(NamedTuple):
    """How far a run is from that of one process."""

    gradient: float
    """Norm of the difference of the first optimiser step's gradients, as a share of the gradient's."""
    update: float
    """Norm of the difference of the weights at the end, as a share of the whole move's."""
    weight: float
    """Largest difference of a weight at the end, as a share of the largest move of a weight."""
    same_samples: float
    """Steps whose samples have the same lengths, and rewards within 1e-3 of the largest, as a share of all."""


def note(way: str, recipe: str, share: float) -> None:
    """Keep the largest difference of a weight, as a share of the largest move, if the record is being written."""
    if WRITING in os.environ:
        record = read_record()
        record.setdefault(way, {})[recipe] = float(f"{share:.0e}")
        write_atomically(FILE, json.dumps(record, indent=1) + "\n")


def read_record() -> dict[str, dict[str, float]]:
    """Differences by way and recipe."""
    return json.loads(FILE.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def read_processes() -> dict[str, dict[Setting, dict[str, Distance]]]:
    """Distances by recipe, setting and number of processes."""
    found: dict[str, dict[Setting, dict[str, Distance]]] = {}
    for line in ROWS.read_text(encoding="utf-8").splitlines() if ROWS.is_file() else ():
        row = json.loads(line)
        ways = {way: Distance(*row[way]) for way in PROCESSES}
        found.setdefault(row["recipe"], {})[Setting(*row["setting"])] = ways
    return found


def settings_of(recipe: str) -> tuple[Setting, ...]:
    """The settings in which a recipe is measured."""
    return SETTINGS if recipe in THOROUGH else SETTINGS[:2]


def samples(recipe: str) -> bool:
    """Whether a recipe samples, so that workers can."""
    return "rollers" in RECIPES[recipe].load_config_class().__dataclass_fields__


def measure(recipe: str, setting: Setting) -> dict[str, Distance]:
    """Distances of a run with the recipe's own optimiser, by number of processes."""
    from tests.contracts.domains import domain_of
    from tests.contracts.options import with_changes
    from tests.contracts.test_two_processes import train_in_two

    name, changes = OBJECTIVES.get(recipe, (recipe, {}))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config = with_changes(domain_of(name).make_config(name, folder), changes)
        config.seed, config.trainer.tasks_per_step, config.trainer.steps, config.trainer.threads = *setting, 1
        config.checkpoint.every = 0
        config.evaluation.at_start = config.evaluation.at_end = False
        if name == "digirl":
            config.digirl.batch_episodes = 6  # which two and three processes can share
        config.validate()
        whole = train_with_gradient(config, folder / "one")
        found = {}
        for way, (count, own) in PROCESSES.items():
            other = with_changes(config, own)
            run = train_in_two(other, folder / way, setting.steps, run=train_with_gradient, processes=count)
            found[way] = distance(run, whole)
    return found


def train_with_gradient(config: Any, folder: Path, *options: Any) -> dict[str, Any]:
    """`train` of the tests, and the gradient of its first optimiser step."""
    import mmrl.training.update as update
    from tests.contracts.test_two_processes import train

    first: list[Tensor] = []
    make: Callable[..., torch.optim.Optimizer] = update.make_optimizer

    def make_noted(policy: nn.Module, *others: Any) -> torch.optim.Optimizer:
        optimizer = make(policy, *others)
        trained = [weight for weight in policy.parameters() if weight.requires_grad]

        def keep(*arguments: Any) -> None:
            if not first:
                first.append(torch.cat([_whole(weight) for weight in trained]))

        optimizer.register_step_pre_hook(keep)
        return optimizer

    update.make_optimizer = make_noted
    try:
        return {**train(config, folder, *(options or (config.trainer.steps,))), "gradient": first[0]}
    finally:
        update.make_optimizer = make  # type: ignore[assignment]


def _whole(weight: Tensor) -> Tensor:
    """The gradient of a weight, of which a process may hold a part."""
    gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole.detach().flatten().clone()


def distance(found: dict[str, Any], whole: dict[str, Any]) -> Distance:
    """Distance of a run from that of one process."""
    gradient, move = whole["gradient"].double(), (whole["weights"] - whole["begin"]).double()
    difference = (found["weights"] - whole["weights"]).double()
    pairs = list(zip(found["rows"], whole["rows"], strict=True))
    same = [_same_samples(one, other) for one, other in pairs]
    return Distance(
        gradient=float((found["gradient"].double() - gradient).norm() / gradient.norm()),
        update=float(difference.norm() / move.norm()),
        weight=float(difference.abs().max() / move.abs().max()),
        same_samples=sum(same) / len(same),
    )


def _same_samples(found: Tensor, whole: Tensor) -> bool:
    if found.shape != whole.shape:
        return False
    # a sample may have no reward
    seen, expected = (rows[..., :2].nan_to_num(-1.0) for rows in (found, whole))
    differences, largest = (seen - expected).abs(), expected[..., 1].abs().max()
    return bool((differences[..., 0] == 0).all() and (differences[..., 1] <= 1e-3 * largest).all())


def measure_processes(recipes: Sequence[str]) -> None:
    """Append what is not measured yet, the first setting of every recipe before the second of any."""
    for setting in SETTINGS:
        for name in recipes:
            if setting not in settings_of(name) or setting in read_processes().get(name, {}):
                continue
            found = measure(name, setting)
            numbers = {way: [float(f"{number:.1e}") for number in found[way]] for way in PROCESSES}
            with ROWS.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"recipe": name, "setting": setting, **numbers}) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Measure processes, and run the tests of the other ways, one recipe after the other."""
    import pytest

    parser = argparse.ArgumentParser(prog="python -m tests.contracts.record", description=__doc__.partition("\n")[0])
    parser.add_argument("ways", nargs="*", metavar="WAY", help=", ".join(WAYS))  # Python 3.11 refuses none of choices
    names = [*(name for name in RECIPES if name not in ONE_PROCESS), *OBJECTIVES]
    parser.add_argument("--recipe", action="append", choices=names, metavar="NAME", help="repeatable")
    given = parser.parse_args(argv)
    if unknown := set(given.ways) - set(WAYS):
        parser.error(f"unknown {', '.join(sorted(unknown))}; there are {', '.join(WAYS)}")
    if "processes" in (given.ways or WAYS):
        measure_processes(given.recipe or names)
    os.environ[WRITING] = "1"
    ways = [way for way in given.ways or WAYS if way in TESTS]
    chosen = [f"{FOLDER / TESTS[way]}" for way in ways]
    of_tests = [name for name in given.recipe or () if name in RECIPES]
    pairs = [(way, name) for name in of_tests for way in ways if way != "workers" or samples(name)]
    cases = [f"{FOLDER / TESTS[way]}[{name}]" for way, name in pairs] if given.recipe else chosen
    return int(pytest.main(["-m", "", "-p", "no:cacheprovider", *cases])) if cases else 0


if __name__ == "__main__":
    sys.exit(main())
