"""Pages of methods and results: everything has one, and their numbers are those of the experiments."""

import re
from pathlib import Path

import pytest

from mmrl.cli.explain import GOLDEN, GOLDEN_OF, ROWS
from mmrl.comparison.reproduce import evidence_of
from mmrl.core.catalogue import CATALOGUE, PREFERENCES
from mmrl.recipes import RECIPES, all_recipes
from tests.fitting import experiments_with, measured_experiments
from tests.pages import read_page
from tests.scripts import methods

PROJECT = Path(__file__).resolve().parent.parent
RESULTS = PROJECT / "docs" / "results"
KNOWN = experiments_with("evidence")
STORED = experiments_with("figure.stored")


def test_the_table_has_every_method_of_the_library_and_links_to_its_page():
    rows = read_page("docs/methods/index.md").table("All methods")
    names = [re.fullmatch(r"\[`(\w+)`\]\(#(\w+)\)", row[0]).groups() for row in rows]
    assert [name for name, _ in names] == [anchor for _, anchor in names] == list(methods.LIBRARY)
    assert set(methods.LIBRARY) == {*CATALOGUE, *PREFERENCES, *RECIPES}
    for row in rows:
        assert all(cell for cell in row), row


@pytest.mark.parametrize("name", methods.LIBRARY)
def test_a_method_has_a_page_with_its_formula_configuration_results_and_sources(name):
    text = methods.page(name)
    assert re.match(rf"# .*: `{name}`\n", text)
    for title in ("When to use it", "Configuration", "Results", "How it was checked"):
        found = re.search(rf"^## {title}\n\n(.+?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        assert found is not None, title
        assert len(found[1].split()) > 3, title
    assert ("## Formula" in text) == (name in ROWS)
    for page in re.findall(r"\]\(\.\./results/(\w+)\.md", text):
        assert page == "index" or (RESULTS / f"{page}.md").is_file()


def test_a_page_shows_what_its_recipe_adds_to_the_objective():
    assert methods.TERMS.keys() <= all_recipes().keys()
    assert "PAPO adds, with <i>l</i> = log π and <i>a</i> = log π with 60% of the patches black" in methods.page("papo")


def test_formulas_are_typeset():
    line = "x: paper\n  A_it = (R_i - mean_g R) / (std_g R + 1e-06)^2, where logp_old_it >= 0"
    assert methods.formula(line) == (
        '<div class="formula"><i>A</i><sub>it</sub> = (<i>R</i><sub>i</sub> − mean<sub>g</sub> <i>R</i>) / '
        "(std<sub>g</sub> <i>R</i> + 10<sup>−6</sup>)<sup>2</sup>, where log π<sub>old, it</sub> ≥ 0</div>"
    )


def test_every_objective_has_a_promise_of_one_line():
    for name, row in ROWS.items():
        assert 20 < len(row.claim) < 120, name
        assert not row.claim.endswith("."), name


def test_every_page_of_results_is_reached():
    linked = {link.partition(".md")[0] for link in read_page("docs/results/index.md").links}
    assert {path.stem for path in RESULTS.glob("*.md")} - {"index"} <= linked


def test_no_experiment_is_left_out():
    assert list(measured_experiments()) == KNOWN
    assert [name for name, known in measured_experiments().items() if known.figure.stored is not None] == STORED


@pytest.mark.parametrize("name", KNOWN)
def test_numbers_and_intervals_are_those_of_the_page(name):
    evidence = evidence_of(measured_experiments()[name])
    text = re.sub(r"\s+", " ", (RESULTS / f"{evidence.page}.md").read_text(encoding="utf-8").replace("**", ""))
    assert name in text, "the page has the command of its experiment"
    for found in evidence.findings:
        assert any(form in text for form in printed(found)), f"{found.arm}: {found.shown}"


@pytest.mark.parametrize("name", STORED)
def test_a_figure_without_runs_states_what_its_page_states(name):
    experiment = measured_experiments()[name]
    figure, stored = experiment.figure, experiment.figure.stored
    evidence = evidence_of(experiment)
    page = (RESULTS / f"{evidence.page}.md").read_text(encoding="utf-8")
    alt, picture = re.search(rf"!\[([^]]*)\]\(({evidence.page}\.svg)\)", page).groups()
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
