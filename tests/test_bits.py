"""Digests feel every number, and a comparison names what changed."""

import json
import tempfile

import pytest
import torch

from tests import bits


def test_a_digest_feels_one_bit_and_the_shape():
    x = torch.arange(4.0)
    y = x.clone()
    y[2] = torch.nextafter(y[2], torch.tensor(9.0))
    assert len({bits._digest([t]) for t in (x, y, x[None], x.double())}) == 4
    assert bits._digest([x.clone(), {"a": 1.0}]) == bits._digest([x, {"a": 1.0}])


def test_a_comparison_names_what_changed():
    before = {"papo": {"weights": "a", "card": "b"}, "awm": {"weights": "c"}}
    after = {"papo": {"weights": "a", "card": "x"}, "new": {"weights": "d"}}
    assert bits.differences(before, after) == ["new: not in the earlier file", "papo: card changed"]


def test_a_run_that_fails_is_not_digested(tmp_path, monkeypatch):
    monkeypatch.setattr(bits, "recipe_digests", lambda name, folder: 1 / 0)
    name, digests, error, _ = bits._measured("papo")
    assert (name, digests) == ("papo", {})
    assert error.startswith("ZeroDivisionError")


@pytest.mark.parametrize("name", ["grpo", "dpo"])
def test_the_digests_of_objectives_repeat(name):
    step = bits._one_step if name == "grpo" else bits._one_pair_step
    assert bits._digest(step(name)) == bits._digest(step(name))


def test_folders_and_times_of_a_card_are_left_out(tmp_path):
    assert (
        bits._plain(f"in {tempfile.gettempdir()}/bits-x/model after 3.2 s on 2026-11-28")
        == "in FOLDER/model after _ on _"
    )
    assert json.loads(json.dumps(bits._plain("3 steps"))) == "3 steps"
