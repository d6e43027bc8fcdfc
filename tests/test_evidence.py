"""The page of evidence names everything, and its numbers are those of the pages of results."""

import re
from pathlib import Path

import pytest

from mmrl.cli.explain import GOLDEN, GOLDEN_OF, ROWS
from mmrl.comparison.reproduce import evidence_of, measured
from mmrl.recipes import all_recipes

PROJECT = Path(__file__).resolve().parent.parent
RESULTS = PROJECT / "docs" / "results"
PAGE = (PROJECT / "docs" / "evidence.md").read_text(encoding="utf-8")
KNOWN = measured()


def section(title):
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(("title", "names"), [("Objectives", ROWS), ("Recipes", all_recipes())])
def test_everything_has_a_row_with_its_promise_its_code_and_a_verdict(title, names):
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section(title), re.MULTILINE))
    assert list(rows) == [*dict.fromkeys(rows)]
    assert rows.keys() == names.keys()
    for name, text in rows.items():
        cells = re.split(r" (?<!\\)\| ", text)
        assert all(cells[:4]), name  # paper, promise, code, numbers
        assert re.fullmatch(r"\[[\w/]+\.py\]\(\.\./[\w/]+\.py\) \d+( \+ \d+)?", cells[2]), name
        assert re.fullmatch(r"not measured|(\[[a-z ]+\]\(results/\w+\.md\)(; )?)+", cells[-1]), name


def test_every_objective_has_a_promise_of_one_line():
    for name, row in ROWS.items():
        assert 20 < len(row.claim) < 120, name
        assert not row.claim.endswith("."), name


def test_every_page_of_results_is_reached():
    linked = set(re.findall(r"\]\(results/(\w+)\.md", PAGE))
    assert {path.stem for path in RESULTS.glob("*.md")} == linked


@pytest.mark.parametrize("name", KNOWN)
def test_numbers_and_intervals_are_those_of_the_page(name):
    evidence = evidence_of(KNOWN[name])
    text = re.sub(r"\s+", " ", (RESULTS / f"{evidence.page}.md").read_text(encoding="utf-8").replace("**", ""))
    assert name in text, "the page has the command of its experiment"
    for found in evidence.findings:
        assert any(form in text for form in printed(found)), f"{found.arm}: {found.shown}"


STORED = [name for name, experiment in KNOWN.items() if experiment.figure.stored is not None]


@pytest.mark.parametrize("name", STORED)
def test_a_figure_without_runs_states_what_its_page_states(name):
    experiment = KNOWN[name]
    figure, stored = experiment.figure, experiment.figure.stored
    evidence = evidence_of(experiment)
    page = (RESULTS / f"{evidence.page}.md").read_text(encoding="utf-8")
    alt, picture = re.search(rf"!\[([^]]*)\]\(({evidence.page}\.png)\)", page).groups()
    assert (RESULTS / picture).is_file()
    assert {arm.value for arm in stored.arms.values()} <= numbers(alt)
    on_page = numbers(page.replace(alt, ""))
    scale = 100 if "%" in (stored.unit or figure.unit) else 1
    for row, arm in stored.arms.items():
        for number in (arm.value, *arm.difference, *arm.seeds):
            assert {abs(number), round(abs(number) / scale, 6)} & on_page, f"{row}: {number}"
    assert numbers(figure.claim) <= on_page
    for found in evidence.findings:
        baselines = {found.against or experiment.baseline, stored.baseline or experiment.baseline}
        if found.metric is None and len(baselines) == 1 and (found.unit, scale) != ("points", 1):
            factor = scale if found.unit == "score" else 1
            known = [factor * number for number in (found.difference, found.low, found.high)]
            shown = stored.arms[found.arm].difference
            assert shown == pytest.approx(known[-len(shown) :]), found.arm


def numbers(text):
    """Every number of a text, without its sign."""
    return {float(found.replace(",", "")) for found in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", text)}


def printed(found):
    """Forms in which a page may print an interval: with or without signs, turned round, in brackets."""
    low, high = found.interval.split(" to ")
    for first, last in ((low, high), (flipped(high), flipped(low))):
        yield f"{first} to {last}"
        yield f"[{first}, {last}]".replace("+", "")
        if first[0] == last[0]:
            yield f"({first[1:]} to {last[1:]}"


def flipped(number):
    return number.translate(str.maketrans("+-", "-+"))


def test_golden_files_of_recipes_exist():
    assert GOLDEN_OF.keys() <= all_recipes().keys()
    assert all((GOLDEN / f"{stem}.json").is_file() for stems in GOLDEN_OF.values() for stem in stems)
