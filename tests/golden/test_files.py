"""Every method has golden numbers, and every file names their source."""

import re
from importlib.util import find_spec

import pytest

from mmrl.core import all_objectives, all_preferences
from tests.golden.make.by_hand import ROWS as BY_HAND
from tests.golden.make.packages import TABLE
from tests.golden.numbers import FOLDER, PAPERS, load
from tests.golden.test_tokens import METHODS
from tests.peers.adaptor import made_by_packages
from tests.peers.record import RECORD, read_record

ROWS = all_objectives() | all_preferences()


@pytest.mark.parametrize("name", ROWS)
def test_every_row_of_the_catalogue_has_a_file(name):
    verified = ROWS[name].verified
    assert name in PAPERS, f"tests/golden/{name}.json is missing: see tests/golden/README.md"
    programs = {peer["program"].removeprefix("github.com/") for peer in load(name).peers}
    assert [program for program in programs if program not in verified] == [], f"`verified` of the row: {verified!r}"
    read = [path.read_text(encoding="utf-8") for path in FOLDER.glob("test_*.py")]
    assert name in METHODS or any(f'"{name}"' in text for text in read), f"no test reads tests/golden/{name}.json"


@pytest.mark.parametrize("paper", PAPERS)
def test_a_file_names_program_version_and_command(paper):
    file = load(paper)
    assert f"{file.command} ".startswith(f"python -m tests.golden.make {paper} ")
    assert paper in TABLE or paper in BY_HAND or find_spec(f"tests.golden.make.{paper}")
    assert file.made_with
    assert file.inputs
    for peer in file.peers:
        known = r"at [0-9a-f]{12}|^[a-z_0-9]+ \d+\.\d+|^hand computation$"
        assert re.search(known, peer["program"]), "a version, a commit or a computation by hand"
        assert peer["calls"]
        assert 0 < peer["relative"] <= 1e-12 or peer["because"]


def test_the_comparison_with_other_trainers_is_that_of_these_packages_and_rows():
    record, pinned = read_record(), RECORD.with_name("requirements.txt").read_text(encoding="utf-8")
    assert record["rows"].keys() <= ROWS.keys()
    for program in (program for program in record["programs"] if "openrlhf" not in program):
        assert program.replace(" ", "==") in pinned
    for name, peers in record["rows"].items():
        for package, found in peers.items():
            assert found["apart"] < 1e-6 or found.get("differs"), (name, package)
            verified = ROWS[name].verified
            assert package in verified or package not in ("verl", "trl") or found.get("differs"), (name, package)


def test_the_comparison_reruns_the_golden_files_of_the_pinned_packages():
    record, pinned = read_record(), RECORD.with_name("requirements.txt").read_text(encoding="utf-8")
    for name in made_by_packages():
        programs = {peer["program"] for peer in load(name).peers} - {"hand computation"}
        assert [program for program in programs if program.replace(" ", "==") not in pinned] == [], name
        assert not programs or name in record["rows"], f"run make test-peers PEERS=--record: {name}"
