"""Every number of every row is felt: with one of them moved, a golden test of the row fails."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from mmrl.core import CATALOGUE, all_objectives, all_preferences
from mmrl.core.catalogue import PREFERENCES
from mmrl.core.objectives.objective import Objective
from mmrl.core.objectives.pairwise import PreferenceObjective
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
from tests.golden.numbers import load

ROWS = all_objectives() | all_preferences()
Row = Objective | PreferenceObjective
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
            if isinstance(getattr(block, option.name), int | float):
                yield key, option.name


def moves(value: float) -> tuple[float, ...]:
    """Other values near a number."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (value + 1, value - 1)
    return (value * 1.1, value * 0.9) if value else (0.1, -0.1)


def moved(row: Row, key: str, option: str, move: int) -> Row:
    block = getattr(row, key)
    if not hasattr(block, option):
        return row
    values = moves(getattr(block, option))
    return row.replace(**{key: block.replace(**{option: values[min(move, len(values) - 1)]})})


def fails(tests: list[Test]) -> bool:
    """Whether any of the tests does."""
    for test in tests:
        try:
            test()
        except AssertionError:
            return True
    return False


def felt(name, key, option, patch, loose):
    table, kind = (PREFERENCES, PreferenceObjective) if name in all_preferences() else (CATALOGUE, Objective)
    ROW = ROWS[name]
    values = moves(getattr(getattr(ROW, key), option))
    refused = 0
    original = kind.override
    for number in range(len(values)):
        row = moved(ROW, key, option, number)
        try: row.validate()
        except ValueError:
            refused += 1
            continue
        with pytest.MonkeyPatch.context() as patch:
            if option == "anneal": row = row.at(0.25)
            patch.setitem(table, name, row)
            if loose:
                def override(self, changes, number=number):
                    new = original(self, changes)
                    return moved(new, key, option, number) if option in changes.get(key, {}) else new
                patch.setattr(kind, "override", override)
            if fails(golden_tests(name)): return True
    return None if refused == len(values) else False


def main(only=""):
    import time
    t = time.time()
    for name in only.split(",") if only else ROWS:
        if not golden_tests(name): print(name, "NO TESTS"); continue
        for key, option in numeric_options(name):
            f = felt(name, key, option, None, False)
            if f is False:
                g = felt(name, key, option, None, True)
                print(name, key, getattr(ROWS[name], key).kind, option, getattr(getattr(ROWS[name], key), option), "only with changes" if g else "UNFELT")
    print(time.time() - t)


if __name__ == "__main__":
    main()
