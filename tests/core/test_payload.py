"""Fields of a payload are cut, joined, padded, moved and checked as declared."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from mmrl.core import Payload, Rollouts, per_decision, per_group, per_row, shared


@dataclass
class Pair:
    """A separate batch inside a field."""

    left: Tensor

    def __len__(self):
        return len(self.left)

    def select(self, rows):
        return Pair(self.left[rows])

    @classmethod
    def concat(cls, parts):
        return cls(torch.cat([part.left for part in parts]))

    def to(self, device):
        return Pair(self.left.to(device))


@dataclass
class Everything(Payload):
    prompts: list[str] = per_group()
    features: Tensor = per_group()
    ids: Tensor = per_decision(padding=-7)
    states: Tensor = per_decision()
    images: np.ndarray = per_row()
    pairs: Pair = per_row()
    views: dict[str, list[str | None]] = per_group(blank=None, default_factory=dict)
    notes: list[str] = per_row(blank="", default_factory=list)
    extra: dict[str, Tensor] = per_decision(default_factory=dict)
    old: Tensor | None = per_row(default=None)
    scale: float = shared(default=1.0)


def make(first=0, rows=4, groups=2, width=3, **changes):
    numbers = torch.arange(first, first + rows)
    fields = {
        "prompts": [f"prompt {first + group}" for group in range(groups)],
        "features": torch.arange(first, first + groups).float()[:, None],
        "ids": numbers[:, None].repeat(1, width),
        "states": numbers.float()[:, None, None].repeat(1, width + 1, 2),
        "images": numbers.numpy().astype(np.uint8)[:, None].repeat(2, 1),
        "pairs": Pair(numbers * 10),
        "extra": {"row": numbers.float(), "decision": numbers.float()[:, None].repeat(1, width)},
    }
    return Everything(**fields | changes)


def test_selection_follows_rows_and_groups():
    part = make(views={"other": ["a", None]}, scale=3.0).select(torch.tensor([3, 0, 0]), torch.tensor([1]))
    assert part.prompts == ["prompt 1"]
    assert part.features.tolist() == [[1.0]]
    assert part.ids[:, 0].tolist() == [3, 0, 0]
    assert part.images[:, 1].tolist() == [3, 0, 0]
    assert part.images.dtype == np.uint8
    assert part.pairs.left.tolist() == [30, 0, 0]
    assert part.views == {"other": [None]}
    assert part.notes == []
    assert part.extra["row"].tolist() == [3.0, 0.0, 0.0]
    assert part.old is None
    assert part.scale == 3.0


def test_joining_pads_decisions_only():
    joined = Everything.concat([make(rows=2, groups=1, width=1), make(5, rows=1, groups=1, width=3, scale=9.0)])
    assert joined.prompts == ["prompt 0", "prompt 5"]
    assert joined.ids.tolist() == [[0, -7, -7], [1, -7, -7], [5, 5, 5]]
    assert joined.states.shape == (3, 4, 2)
    assert joined.states[:, :, 1].tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [5, 5, 5, 5]]
    assert joined.images.tolist() == [[0, 0], [1, 1], [5, 5]]
    assert joined.images.dtype == np.uint8
    assert joined.pairs.left.tolist() == [0, 10, 50]
    assert joined.extra["row"].tolist() == [0.0, 1.0, 5.0]
    assert joined.extra["decision"][1].tolist() == [1.0, -0.0, 0.0]
    assert joined.scale == 1.0


def test_blank_entries_stand_for_a_part_without_the_field():
    left, right = make(notes=["a", "b", "c", "d"], views={"one": ["x", None]}), make(views={"two": ["y", "z"]})
    joined = Everything.concat([left, right])
    assert joined.notes == ["a", "b", "c", "d", "", "", "", ""]
    assert joined.views == {"one": ["x", None, None, None], "two": [None, None, "y", "z"]}
    assert Everything.concat([make(), make()]).notes == []


@pytest.mark.parametrize("change", [{"old": torch.zeros(4)}, {"extra": {"row": torch.zeros(4)}}])
def test_a_field_without_a_blank_entry_has_to_be_in_every_part(change):
    with pytest.raises(ValueError, match=r"old|extra\[decision\]"):
        Everything.concat([make(), make(**change)])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"features": torch.zeros(3, 1)}, "features has 3"),
        ({"images": np.zeros((3, 1))}, "images has 3"),
        ({"notes": ["one"]}, "notes has 1"),
        ({"views": {"other": []}}, r"views\[other\] has 0"),
        ({"extra": {"row": torch.zeros(5)}}, r"extra\[row\] has 5"),
        ({"pairs": Pair(torch.zeros(1))}, "pairs has 1"),
    ],
)
def test_fields_that_disagree_are_named(change, name):
    with pytest.raises(ValueError, match=f"{name} entries; there are 4 rows in 2 groups"):
        make(**change)


def test_moving_reaches_into_lists_and_leaves_the_rest():
    moved = make(notes=["a"] * 4).to("meta")
    assert {moved.ids.device.type, moved.pairs.left.device.type, moved.extra["row"].device.type} == {"meta"}
    assert isinstance(moved.images, np.ndarray)
    assert moved.notes == ["a"] * 4


def test_undeclared_fields_are_refused():
    @dataclass
    class Careless(Payload):
        ids: Tensor = per_row()
        scores: list[float] = field(default_factory=list)

    with pytest.raises(TypeError, match="Careless does not declare what the entries of scores belong to"):
        Careless(torch.zeros(2))


def rollouts_with(payload, rows=4, groups=2):
    return Rollouts(
        group=torch.arange(rows) % groups,
        mask=torch.ones(rows, 3),
        logp_old=torch.zeros(rows, 3),
        reward=torch.zeros(rows),
        payload=payload,
    )


def test_of_returns_the_payload_as_its_class():
    payload = make()
    assert Everything.of(rollouts_with(payload)) is payload

    @dataclass
    class Other(Payload):
        ids: Tensor = per_row()

    with pytest.raises(TypeError, match="have a Other; a Everything is needed"):
        Everything.of(rollouts_with(Other(torch.zeros(4))))
    with pytest.raises(TypeError, match="have no payload"):
        Everything.of(rollouts_with(None))


@pytest.mark.parametrize(("rows", "groups"), [(5, 2), (4, 3)])
def test_rollouts_refuse_a_payload_of_other_rows_or_groups(rows, groups):
    with pytest.raises(ValueError, match=f"4 rows and 2 groups; the rollouts have {rows} rows in {groups} groups"):
        rollouts_with(make(), rows, groups)
