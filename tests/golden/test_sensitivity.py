"""Golden numbers feel every number of every row: with one of them a tenth larger or smaller, a golden test fails."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from mmrl.core import CATALOGUE, all_objectives, all_preferences
from mmrl.core.catalogue import PREFERENCES
from tests.golden import (
    test_adaptive,
    test_apo,
    test_image_steps,
    test_matching,
    test_mismatch,
    test_perception,
    test_preference,
    test_robot_srpo,
    test_segments,
    test_supervised,
    test_tokens,
    test_tracked,
    test_tspo,
    test_vl_dac,
)
from tests.golden.numbers import PROGRESS, load

ROWS = all_objectives() | all_preferences()
Test = Callable[[], None]


def each(test: Callable[..., None], *cases: object) -> list[Test]:
    """A test with each of its parameters."""
    return [partial(test, case) for case in cases]


OWN: dict[str, list[Test]] = {
    "icepop": each(test_mismatch.test_icepop_is_verls, *(peer for peer in load("icepop").peers if "row" in peer)),
    "papo": each(test_perception.test_papo_is_its_public_code, *load("papo").peers),
    "apo": each(test_apo.test_the_loss_is_that_of_the_public_code, *load("apo").peers),
    "srpo": [test_robot_srpo.test_the_loss_is_that_of_the_public_code],
    "tspo": [test_tspo.test_the_loss_of_the_catalogue_is_that_of_the_public_trainer],
    "vl_dac": each(test_vl_dac.test_an_update_is_that_of_the_public_code, *test_vl_dac.CASES),
    **{
        name: [partial(test_image_steps.test_advantages_and_loss_of_an_update, name, number) for number in (0, 1)]
        for name in test_image_steps.UPDATES
    },
    "flow_dppo": [test_image_steps.test_flow_dppo_loss],
    "step_nft": each(test_image_steps.test_ranked_steps_of_pi_step_nft, *load("step_nft").peers),
    "awm": [partial(test_matching.test_awm_update, *case) for case in test_matching.AWM],
    "sft": [test_supervised.test_sft_is_the_loss_of_transformers],
    "sec": [
        *each(test_tracked.test_the_loss_of_sec_is_that_of_grpo, *load("grpo").peers),
        *each(test_tracked.test_the_bandit_of_sec_is_its_code, True, False),
    ],
    "segment_tree": each(test_segments.test_trees_have_the_loss_of_chains, *load("segment_chain").peers),
    "kto": each(test_preference.test_kto_is_that_of_trl_with_and_without_pairs, *load("kto").peers),
    "diffusion_dpo": each(test_preference.test_diffusion_dpo_is_that_of_the_public_code, *load("diffusion_dpo").peers),
}
"""Golden tests of rows that are neither in `test_tokens` nor in the table of `test_preference`."""
FURTHER: dict[str, list[Test]] = {
    "single_stream": [test_tracked.test_single_stream_prefers_uncertain_tasks_as_its_code_does],
    "bapo": each(test_adaptive.test_the_bounds_of_bapo_are_those_of_its_code, *load("bapo").peers),
}
"""Tests of what the others of a row do not compute."""
ONE_AT_LEAST = "a share of so few decisions is one decision, with a little more or less too"
GUARD = "keeps exp from overflowing; the sources have no limit"
ONLY_SIGN = "the clip reads the sign of advantages alone"
UNUSED = "supervised rows bring their weights instead of rewards"
UNFELT = {
    ("clip_cov", "share"): ONE_AT_LEAST,
    ("kl_cov", "share"): ONE_AT_LEAST,
    ("inpainting_guided", "share"): ONE_AT_LEAST,
    ("rloo", "limit"): GUARD,
    ("p3o_separate", "limit"): GUARD,
    ("p3o_joint", "limit"): GUARD,
    ("disco", "scale"): ONLY_SIGN,
    ("decoupled_reward", "scale"): ONLY_SIGN,
    ("sft", "ddof"): UNUSED,
    ("sft", "eps"): UNUSED,
    ("sft", "scale"): UNUSED,
    ("pass_at_k", "low"): "its advantages are not negative",
    ("information_gain", "log"): "states how the reward function measures the gain, which is an input here",
}
"""Numbers that no golden number can feel, and why; the filters choose groups before an objective computes anything."""


def golden_tests(name: str) -> list[Test]:
    """The tests that compare a row with its golden numbers."""
    tokens = [partial(test_tokens.test_a_method_is_its_peers, *case) for case in test_tokens.CASES if case[0] == name]
    pairs = [
        partial(test_preference.test_losses_are_those_of_the_public_code, *case)
        for case in test_preference.CASES
        if case[0] == name
    ]
    return [*tokens, *pairs, *OWN.get(name, []), *FURTHER.get(name, [])]


def numeric_options(name: str) -> Iterator[tuple[str, str]]:
    """Block and option of every number of a row."""
    for key, block in ROWS[name].blocks.items():
        for option in dataclasses.fields(block):
            if key != "filter" and isinstance(getattr(block, option.name), int | float):
                yield key, option.name


def near(value: float) -> list[float]:
    """Values a little away from a number."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1]
    return [value * 1.1, value * 0.9] if value else [0.1]


def variants(name: str, key: str, option: str) -> Iterator[Any]:
    """The row with other numbers that it allows, after a share of a run."""
    row = ROWS[name]
    block = getattr(row, key)
    for value in near(getattr(block, option)):
        other = row.replace(**{key: block.replace(**{option: value})})
        with contextlib.suppress(ValueError):
            other.validate()
            yield other.at(PROGRESS) if option == "anneal" else other


def fails(test: Test) -> bool:
    try:
        test()
    except AssertionError:
        return True
    except ValueError as error:  # an option that needs inputs which the row does without
        return " is missing" in str(error)
    return False


@pytest.mark.parametrize("name", ROWS)
def test_a_moved_number_fails_a_golden_test(name, monkeypatch):
    tests = golden_tests(name)
    assert tests, f"add the tests of '{name}' to OWN"
    table: dict[str, Any] = PREFERENCES if name in PREFERENCES or name not in all_objectives() else CATALOGUE
    unfelt = []
    for key, option in numeric_options(name):
        rows = list(variants(name, key, option))
        felt = not rows
        for row in rows:
            monkeypatch.setitem(table, name, row)
            felt = felt or any(fails(test) for test in tests)
        if not felt:
            unfelt.append(option)
    assert unfelt == [option for row, option in UNFELT if row == name], "give the row a batch that feels it"
