"""Every row of the catalogue and contrib in every domain: it trains, repeats and resumes, or is refused with a reason.

Which of the two is derived from what the row's blocks need and what the room's policies score, so that a new row or
block is covered without a change here.
"""

import math

import pytest
import torch

from mmrl.core import all_objectives, get
from mmrl.training.objectives import SCORES, ObjectiveConfig
from tests.contracts.domains import DOMAINS, Domain, run, weights
from tests.contracts.option_runs import TINY_ENCODER

CHEAPEST_FIRST = ("robotics", "diffusion", "vlm", "masked", "agents")
"""Rooms by the time of a case: 0.12, 0.5, 0.8, 0.8 and 1.5 s."""


def missing(domain: Domain, row: str) -> list[str]:
    """Requirements of the row's blocks that the domain's policies do not score."""
    return sorted((get(row).needs & SCORES.keys()) - domain.scores)


def rooms_of(row: str) -> list[str]:
    """Rooms that have what a row needs, the cheapest first."""
    return [room for room in CHEAPEST_FIRST if not missing(DOMAINS[room], row)]


def case(room: str, row: str):
    """A refusal takes no time; a row trains in its cheapest room, `grpo` in all, and elsewhere in the slow tests."""
    rooms = rooms_of(row)
    slow = room in rooms and room != rooms[0] and row != "grpo"
    return pytest.param(DOMAINS[room], row, id=f"{room}-{row}", marks=pytest.mark.slow if slow else ())


CASES = [case(room, row) for room in DOMAINS for row in all_objectives()]


def configured(domain: Domain, row: str, folder):
    for module in domain.needs:
        pytest.importorskip(module)
    config = domain.make_config(domain.recipe, folder)
    config.objective = ObjectiveConfig(preset=row)
    if row == "sec":  # tasks of these rooms have no field "category"
        config.objective.order = {"field": "task" if domain is DOMAINS["robotics"] else "id"}
    if "kl_old" in get(row).needs and domain is DOMAINS["robotics"]:
        config.model.kind, config.model.chunk, config.trainer.learning_rate = "flow", 2, 1e-3
        config.model.options = {"encoder": {**TINY_ENCODER, "image_size": None}}
    if row == "gtpo":  # whose limit is below the entropy of an untrained model
        config.objective.advantage = {"limit": 100.0}
    if "values" in get(row).needs and hasattr(config.model, "value_head"):
        config.model.value_head = True
    return config


@pytest.mark.parametrize(("domain", "row"), CASES)
def test_a_row_trains_repeats_and_resumes_or_is_refused(domain, row, tmp_path):
    config = configured(domain, row, tmp_path)
    if missing(domain, row):
        with pytest.raises(ValueError, match=r"objective\.\w+ is '\w+', which needs ") as refusal:
            config.validate()
        assert any(SCORES[need] in str(refusal.value) for need in missing(domain, row))
        return
    config.validate()
    whole, losses = run(config, tmp_path / "whole", steps=2)
    assert losses
    assert all(math.isfinite(loss) for loss in losses)

    first, losses_again = run(config, tmp_path / "parts", steps=1)
    start = weights(first)
    assert losses_again == losses[: len(losses_again)], "two equal runs"
    second, losses_later = run(config, tmp_path / "parts", steps=2, resume=True)
    assert losses_again + losses_later == losses, "a resumed run is one that was not interrupted"
    assert torch.equal(weights(whole), weights(second))
    assert not torch.equal(weights(second), start), "the second step moves the weights"


@pytest.mark.parametrize("row", all_objectives())
def test_every_row_trains_in_some_room(row):
    assert rooms_of(row)


def test_all_rooms_are_compared():
    assert set(CHEAPEST_FIRST) == set(DOMAINS)
