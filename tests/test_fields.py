"""Bounds that dataclass fields declare."""

import dataclasses
import math
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from mmrl.errors import ConfigError, UserError
from mmrl.fields import (
    SET,
    UNSET,
    Bounds,
    Unless,
    bounded,
    check_config,
    check_fields,
    choice,
    default_of,
    field_problems,
    hints_of,
    only_with,
    part_of,
)
from mmrl.recipes import RECIPES

TABLE: dict[str, int] = {}


@dataclass
class Part:
    rate: float = bounded(1.0, above=0, at_most=1)
    kind: str = choice("euler", ("euler", "heun"))

    def validate(self) -> None:
        if self.kind == "heun" and self.rate < 0.5:
            raise ValueError("heun needs a rate of 0.5")


@dataclass
class Whole:
    steps: int | None = bounded(None, at_least=1)
    betas: list[float] = bounded([0.9, 0.99], length=2, at_least=0, below=1)
    size: tuple[int, ...] = bounded((32, 64), multiple_of=32)
    offset: float = 0.5
    options: dict[str, Any] = field(default_factory=dict)
    filler: float = bounded(math.nan, any_float=True)
    function: str = choice("a", lambda: TABLE, or_function=True)
    part: Part = field(default_factory=Part)
    named: dict[str, Part] = field(default_factory=dict)
    listed: list[Part] = field(default_factory=list)


TABLE |= {"a": 1, "b": 2}


def schemas_of(schema, found):
    """The dataclasses of a configuration, those of every kind of a part included."""
    if schema in found:
        return found
    found.add(schema)
    for item in dataclasses.fields(schema):
        kinds, default = item.metadata.get("kinds"), default_of(item)
        parts = [part_of(hints_of(schema)[item.name])[0], *(kinds.table().values() if kinds else ())]
        parts += [type(default)] if dataclasses.is_dataclass(default) else []
        for part in filter(None, parts):
            schemas_of(part, found)
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_no_option_of_any_recipe_may_be_infinite_or_nan(name):
    defaults = RECIPES[name].load_defaults()
    tried = 0
    for schema in schemas_of(defaults if isinstance(defaults, type) else type(defaults), set()):
        for item in dataclasses.fields(schema):
            hint = str(hints_of(schema)[item.name])
            if not re.search(r"float|Any", hint):
                continue
            for number in (math.inf, -math.inf, math.nan):
                value = {"a": [number]} if "dict" in hint else [number] if re.search("list|tuple", hint) else number
                config = object.__new__(schema)
                for other in dataclasses.fields(schema):
                    object.__setattr__(config, other.name, default_of(other))
                object.__setattr__(config, item.name, value)
                problem = rf"x\.{item.name}(\.a)?(\[0\])? is {number}; must be finite"
                assert any(re.fullmatch(problem, found) for found in field_problems(config, "x")), (schema, item.name)
                tried += 1
    assert tried > 30


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"steps": 0}, "x.steps is 0; must be at least 1"),
        ({"betas": [0.9]}, "x.betas is [0.9]; must be a list of 2, each in [0, 1)"),
        ({"betas": [0.9, 1.0]}, "x.betas is [0.9, 1.0]; must be a list of 2, each in [0, 1)"),
        ({"size": (32, 33)}, "x.size is (32, 33); must be a multiple of 32"),
        ({"offset": math.inf}, "x.offset is inf; must be finite"),
        ({"offset": np.float32(-math.inf)}, "x.offset is -inf; must be finite"),
        ({"betas": [0.9, math.nan]}, "x.betas[1] is nan; must be finite"),
        ({"filler": "x"}, "x.filler is 'x'; expected float"),
        ({"options": {"a": {"b": [0, math.inf]}}}, "x.options.a.b[1] is inf; must be finite"),
        ({"function": "z"}, "x.function is 'z'; allowed: a, b, or module:function"),
        ({"part": Part(rate=0.0)}, "x.part.rate is 0.0; must be in (0, 1]"),
        ({"part": Part(rate=math.nan)}, "x.part.rate is nan; must be finite"),
        (
            {"named": {"one": Part(kind="hein")}},
            "x.named.one.kind is 'hein'; did you mean 'heun'? allowed: euler, heun",
        ),
        ({"listed": [Part(), Part(rate=2.0)]}, "x.listed[1].rate is 2.0; must be in (0, 1]"),
    ],
)
def test_a_value_outside_its_bounds_is_named_with_what_is_allowed(changes, problem):
    assert list(field_problems(Whole(**changes), "x")) == [problem]
    with pytest.raises(ConfigError) as caught:
        check_fields(Whole(**changes), "x")
    assert str(caught.value) == problem
    assert isinstance(caught.value, UserError)
    assert isinstance(caught.value, ValueError)


@dataclass
class Switched:
    kind: str = choice("plain", ("plain", "decayed"))
    rate: float = only_with(bounded(0.5, above=0), kind="decayed")
    samples: int = bounded(0)
    heat: float = only_with(1.0, samples=SET)
    file: str | None = None
    seeds: int = only_with(3, file=UNSET)
    share: float = only_with(1.0, samples=(1, 2))
    exact: bool = only_with(False, file=Unless("a"))
    part: Part = only_with(field(default_factory=Part), kind="decayed")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"rate": 0.2},
            "x.rate is 0.2, but it has no effect while x.kind is 'plain'; leave it at 0.5, or set x.kind: ",
        ),
        ({"heat": 2.0}, "x.heat is 2.0, but it has no effect while x.samples is 0; leave it at 1.0, or set x.samples"),
        ({"file": "a", "seeds": 4}, "x.seeds is 4, but it has no effect while x.file is 'a'; leave it at 3, or unset"),
        (
            {"share": 0.5},
            "x.share is 0.5, but it has no effect while x.samples is 0; leave it at 1.0, or set x.samples: 1",
        ),
        (
            {"file": "a", "exact": True},
            "x.exact is True, but it has no effect while x.file is 'a'; leave it at False, or",
        ),
        (
            {"part": Part(rate=0.25)},
            "x.part is set, but it has no effect while x.kind is 'plain'; leave it out, or set",
        ),
    ],
)
def test_an_option_that_nothing_reads_is_refused(changes, problem):
    (found,) = field_problems(Switched(**changes), "x")
    assert found.startswith(problem)
    enough = {"kind": "decayed", "rate": 0.2, "samples": 1, "heat": 2.0, "seeds": 4, "share": 0.5, "exact": True}
    assert list(field_problems(Switched(**enough))) == list(field_problems(Switched(file="a"))) == []


def test_values_inside_their_bounds_pass():
    check_config(Whole(steps=1, betas=[0.0, 0.5], function="mine:own", named={"a": Part(0.5)}))
    check_config(Whole(steps=None, filler=-math.inf))


def test_bounds_come_before_rules_between_fields():
    broken = Whole(named={"one": Part(rate=0.1, kind="heun")}, listed=[Part(rate=3.0)])
    with pytest.raises(ConfigError, match=r"listed\[0\]\.rate is 3\.0"):
        check_config(broken)
    broken.listed = []
    with pytest.raises(ValueError, match="heun needs a rate"):
        check_config(broken)


def test_a_mutable_default_is_not_shared():
    one, other = Whole(), Whole()
    one.betas.append(0.5)
    assert other.betas == [0.9, 0.99]


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        (Bounds(above=0), "positive"),
        (Bounds(above=2.5), "above 2.5"),
        (Bounds(at_most=3), "at most 3"),
        (Bounds(below=1), "below 1"),
        (Bounds(at_least=32, multiple_of=32), "at least 32 and a multiple of 32"),
        (Bounds(length=2), "a list of 2"),
        (Bounds(at_least=0, unit="m"), "at least 0, in m"),
        (Bounds(above=0, length=2, unit="rad"), "a list of 2, each positive, in rad"),
        (Bounds(choices=lambda: (0, 1)), "one of 0, 1"),
    ],
)
def test_bounds_in_words(bounds, words):
    assert str(bounds) == words
