"""docs/internals/faults.md names tests that exist."""

import re

import pytest

from tests.pages import ROOT, read_page

NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", read_page("docs/internals/faults.md").text)


@pytest.mark.parametrize(("file", "name"), NAMED, ids=lambda text: text)
def test_a_test_that_the_page_names_exists(file, name):
    text = (ROOT / file).read_text()
    assert not name or f"def {name}(" in text


def test_every_row_names_one():
    rows = read_page("docs/internals/faults.md").table("Faults and their effects")
    assert len(rows) > 10
    assert all(re.search(r"`tests/[\w/]+\.py", row[-1]) for row in rows)
