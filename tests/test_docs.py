"""Generated parts are current: the tables of README.md and docs/, and the drawing of the architecture."""

import sys
from pathlib import Path

import pytest

from mmrl.cli import main
from mmrl.core.catalogue import CATALOGUE
from mmrl.errors import UserError
from mmrl.recipes import RECIPES
from tests.contracts.domains import ONE_PROCESS
from tests.contracts.record import OBJECTIVES, read_processes, read_record, settings_of

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT / "scripts"))

import architecture  # noqa: E402

from docs import refreshed, stale_files, table  # noqa: E402


def test_the_tables_of_the_documents_are_current():
    stale = [str(path.relative_to(PROJECT)) for path, _ in stale_files(PROJECT)]
    assert stale == [], "run `make docs`"


def test_recorded_differences_are_those_of_known_runs():
    for found in read_record().values():
        assert found.keys() <= set(RECIPES)
    processes = read_processes()
    assert processes.keys() == {*RECIPES, *OBJECTIVES} - {*ONE_PROCESS}
    assert all(settings.keys() == set(settings_of(name)) for name, settings in processes.items())


def test_the_drawing_of_the_architecture_is_current():
    assert architecture.DRAWING.read_text(encoding="utf-8") == architecture.draw(), "run `make docs`"


def test_what_stands_between_the_marks_is_replaced_and_nothing_else():
    inner = "<!-- generated: options papo papo.gamma -->\n<!-- end -->"
    marks = ("<!-- generated: rewards -->\nold\n<!-- end -->", inner)
    text = "# A\n" + "\nb\n".join(marks)
    new = refreshed(text)
    assert new.startswith(
        "# A\n<!-- generated: rewards -->\n| reward | what earns it | source |\n|---|---|---|\n| `format`"
    )
    assert "old" not in new
    assert "\n<!-- end -->\nb\n<!-- generated: options papo papo.gamma -->\n" in new
    assert new.endswith("| `papo.gamma` | `0.02` | `float` | Weight of the perception KL. |\n<!-- end -->")
    assert refreshed(new) == new


def test_marks_that_cannot_be_filled_are_refused():
    with pytest.raises(UserError, match="there is no table 'recipies'; did you mean 'recipes'"):
        refreshed("<!-- generated: recipies -->\n<!-- end -->")
    with pytest.raises(UserError, match=r"README.md: 1 marks .* 0 have an"):
        refreshed("<!-- generated: recipes -->\n", where="README.md")
    with pytest.raises(UserError, match="unknown option 'trainr'"):
        refreshed("<!-- generated: options papo trainr -->\n<!-- end -->")


def test_tables_have_a_row_for_each_entry():
    recipes = table("recipes").splitlines()
    assert [line.split("`")[1] for line in recipes[2:]] == list(RECIPES)
    (papo,) = [line for line in recipes if line.startswith("| `papo` |")]
    assert "[arXiv 2507.06448](https://arxiv.org/abs/2507.06448)" in papo
    assert "`digits_papo.yaml`" in papo
    assert "`digits_papo_d.yaml`" in papo  # through `extends:`
    assert [line.split("`")[1] for line in table("objectives").splitlines()[2:]] == list(CATALOGUE)


def test_options_with_a_bar_stay_in_their_cell():
    (row,) = [line for line in table("options papo model.min_pixels").splitlines() if line.startswith("| `model")]
    assert row.replace("\\|", "").count("|") == 5
    assert "at least 1" in row


def test_the_list_command_prints_the_tables(capsys):
    assert main(["list", "rewards", "--markdown"]) == 0
    out = capsys.readouterr().out
    assert out == table("rewards") + "\n" + table("image_rewards") + "\n"


def test_the_list_command_names_the_configurations_of_each_recipe(capsys):
    assert main(["list", "recipes", "--markdown"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "| recipe | what it does | source | configurations |"
    (papo,) = [row for row in rows if row.startswith("| `papo` |")]
    assert "`digits_papo.yaml`" in papo
