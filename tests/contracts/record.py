"""How far runs in several processes, in workers, and on a device that is a label are from the run of one process.

    python -m tests.contracts.record [WAY ...] [--recipe NAME ...]

runs the tests that compare them and writes into record.json what those that pass have found; `scripts/docs.py` makes
the table of docs/equal_runs.md of it.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from mmrl.files import write_atomically
from mmrl.recipes import RECIPES

FOLDER = Path(__file__).parent
FILE = FOLDER / "record.json"
TESTS = {
    "two": "test_two_processes.py::test_two_processes_sample_and_learn_what_one_does",
    "three": "test_two_processes.py::test_three_processes_sample_and_learn_what_one_does",
    "fsdp2": "test_sharding.py::test_weights_in_parts_learn_what_whole_ones_do",
    "label": "../devices/test_label.py::test_a_recipe_trains_on_a_gpu_within_its_budget_of_host_syncs",
    "workers": "test_rollers.py::test_workers_of_which_one_is_killed_sample_and_learn_what_one_process_does",
}
WRITING = "WAYS_RECORD"
"""Variable that is set while the record is written."""


def note(way: str, recipe: str, share: float) -> None:
    """Keep the largest difference of a weight, as a share of the largest move, if the record is being written."""
    if WRITING in os.environ:
        record = read_record()
        record.setdefault(way, {})[recipe] = float(f"{share:.0e}")
        write_atomically(FILE, json.dumps(record, indent=1) + "\n")


def read_record() -> dict[str, dict[str, float]]:
    """Differences by way and recipe."""
    return json.loads(FILE.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def samples(recipe: str) -> bool:
    """Whether a recipe samples, so that workers can."""
    return "rollers" in RECIPES[recipe].load_config_class().__dataclass_fields__


def main(argv: list[str] | None = None) -> int:
    """Run the tests, one recipe after the other."""
    import pytest

    parser = argparse.ArgumentParser(prog="python -m tests.contracts.record", description=__doc__.partition("\n")[0])
    parser.add_argument("ways", nargs="*", metavar="WAY", help=", ".join(TESTS))  # Python 3.11 refuses none of choices
    parser.add_argument("--recipe", action="append", choices=list(RECIPES), metavar="NAME", help="repeatable")
    given = parser.parse_args(argv)
    if unknown := set(given.ways) - TESTS.keys():
        parser.error(f"unknown {', '.join(sorted(unknown))}; there are {', '.join(TESTS)}")
    os.environ[WRITING] = "1"
    ways = given.ways or TESTS
    chosen = [f"{FOLDER / TESTS[way]}" for way in ways]
    pairs = [(way, name) for name in given.recipe or () for way in ways if way != "workers" or samples(name)]
    names = [f"{FOLDER / TESTS[way]}[{name}]" for way, name in pairs]
    return int(pytest.main(["-m", "", "-p", "no:cacheprovider", *(names or chosen)]))


if __name__ == "__main__":
    sys.exit(main())
