"""`mmrl options` and the descriptions of dataclass options."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from omegaconf import MISSING

from mmrl.cli import main
from mmrl.cli.options import options_of, own_first, select_options
from mmrl.config import load_run
from mmrl.errors import UserError
from mmrl.fields import bounded, by_kind, choice
from mmrl.recipes import RECIPES


@dataclass
class Sampler:
    """Sampling settings."""

    temperature: float = bounded(1.0, above=0)
    """Logits are
    divided by it."""
    solver: str = choice("euler", ("euler", "heun"))
    unseen: int = 3


@dataclass
class Base:
    sampler: Sampler = field(default_factory=Sampler)
    """Sampling."""
    path: str = MISSING
    """Location of the file."""


@dataclass
class Run(Base):
    sampler: Sampler = field(default_factory=lambda: Sampler(temperature=0.5))
    splits: dict[str, Sampler] = field(default_factory=dict)
    """Options by name."""
    terms: list[Sampler] = field(default_factory=list)
    limit: int | None = bounded(None, at_least=1)
    """Most of them."""
    extra: dict[str, Any] = field(default_factory=dict)


def test_every_option_has_its_sentence_type_default_and_bounds():
    found = {option.key: option for option in options_of(Run)}
    inside = ("temperature", "solver", "unseen")
    assert list(found) == [
        *("sampler", *(f"sampler.{name}" for name in inside), "path"),
        *("splits", *(f"splits.<name>.{name}" for name in inside)),
        *("terms", *(f"terms[].{name}" for name in inside), "limit", "extra"),
    ]
    assert found["sampler"].part
    assert found["sampler"].help == "Sampling."  # the field is repeated without a sentence, the base has one
    temperature = found["sampler.temperature"]
    assert temperature.help == "Logits are divided by it."
    assert (temperature.type, temperature.bounds, temperature.default) == ("float", "positive", 0.5)
    assert found["splits.<name>.temperature"].default == 1.0
    assert found["sampler.unseen"].help == ""
    assert found["sampler.solver"].facts == "str; one of euler, heun; default euler"
    assert found["path"].facts == "str; required"
    assert found["limit"].facts == "int | None; at least 1; default null"
    assert found["extra"].facts == "dict[str, Any]; default {}"
    assert found["terms"].type == "list[Sampler]"


@dataclass
class Small:
    width: int = bounded(8, at_least=1)
    """Width."""
    seed: int = 0
    """Seed."""


@dataclass
class Large:
    width: int = bounded(64, at_least=1)
    """Width."""
    seed: int = 0
    """Seed."""
    size: int = 1


@dataclass
class ByKind:
    options: dict[str, Any] = by_kind(lambda: {"small": Small, "large": Large}, without=("size",))
    row: dict[str, Any] = by_kind(lambda: {"small": Small, "large": Large}, named=True, default_from="the row's")


def test_options_that_depend_on_a_kind_name_it():
    found = [(option.key, option.kinds, option.default_text) for option in options_of(ByKind)]
    assert found == [
        ("options", (), "{}"),
        ("options.width", ("small",), "8"),
        ("options.seed", ("small", "large"), "0"),
        ("options.width", ("large",), "64"),
        ("row", (), "{}"),
        ("row.kind", (), "the row's"),
        ("row.width", ("small", "large"), "the row's"),
        ("row.seed", ("small", "large"), "the row's"),
        ("row.size", ("large",), "the row's"),
    ]


def test_options_of_an_objective_are_those_of_its_blocks():
    options = options_of(RECIPES["papo"].load_config_class())
    (kind,) = (option for option in options if option.key == "objective.clip.kind")
    assert kind.bounds.startswith("one of ppo_clip, gspo")
    dual = [option.facts for option in options if option.key == "objective.clip.dual"]
    assert any(facts.startswith("float | None; for ppo_clip") for facts in dual)
    assert all(facts.endswith("; above 1; default the preset's") for facts in dual)


def test_an_option_says_which_others_it_needs():
    found = {option.key: option.facts for option in options_of(RECIPES["papo"].load_defaults())}
    assert found["papo.gamma_end"] == "float; default 0.0; only with papo.schedule: annealing"
    assert found["trainer.final_learning_rate"].endswith("; only with trainer.schedule: linear or cosine")
    assert found["data.video.fps"].endswith("; only with data.video.nframes unset")


def test_options_below_a_key():
    options = options_of(Run)
    assert [option.key for option in select_options(options, "limit")] == ["limit"]
    assert len(select_options(options, "sampler")) == 4
    assert len(select_options(options, "terms")) == 4
    with pytest.raises(UserError, match=r"unknown option 'samplr'; did you mean sampler\b"):
        select_options(options, "samplr")


def test_a_word_finds_the_options_that_have_it_in_their_key_or_sentence():
    options = options_of(Run)
    places = ("sampler", "splits.<name>", "terms[]")
    assert [option.key for option in select_options(options, "solver")] == [f"{place}.solver" for place in places]
    assert [option.key for option in select_options(options, "DIVIDED")] == [f"{place}.temperature" for place in places]
    with pytest.raises(UserError, match="unknown option 'ivided'"):  # words begin so
        select_options(options, "ivided")


def test_the_options_of_a_recipe_come_before_those_of_its_bases():
    found = [option.key.partition(".")[0].partition("[")[0] for option in own_first(options_of(Run), Run)]
    assert list(dict.fromkeys(found)) == ["splits", "terms", "limit", "extra", "sampler", "path"]
    assert {option.key for option in own_first(options_of(Run), Run)} == {option.key for option in options_of(Run)}
    defaults = RECIPES["papo"].load_defaults()
    assert own_first(options_of(defaults), defaults)[0].key == "papo"


@pytest.mark.parametrize("name", RECIPES)
def test_every_option_of_every_recipe_has_a_sentence(name):
    options = options_of(RECIPES[name].load_config_class())
    assert len(options) > 70
    assert [option.key for option in options if not option.help] == []


def test_defaults_are_those_that_a_run_gets(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("recipe: papo\nmodel: {path: m}\ndata: {path: d.jsonl}\nrewards: [{name: exact}]\n")
    _, config = load_run(path)
    absent = ("evaluation.self_critic.", "evaluation.revision.")  # parts that a run has only where they are asked for
    assert config.evaluation.self_critic is config.evaluation.revision is None
    for option in options_of(type(config)):
        if option.key.startswith(absent):
            continue
        varies = option.kinds or option.default_from or "<" in option.key or "[" in option.key
        if option.part or option.required or varies:
            continue
        value = config
        for name in option.key.split("."):
            value = getattr(value, name)
        if option.key not in ("recipe", "rewards"):
            assert option.default == value, option.key


def test_the_command_prints_options_as_text_and_as_json(capsys):
    assert main(["options", "papo", "papo.gamma"]) == 0
    assert capsys.readouterr().out == "papo.gamma  (float; default 0.02)\n    Weight of the perception KL.\n"
    assert main(["options", "papo", "sampler", "--json"]) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["sampler.top_p"]["bounds"] == "in (0, 1]"
    assert rows["sampler"]["part"] is True
    assert main(["options", f"{__name__}:Recipe:Run", "limit"]) == 0
    assert "Most of them." in capsys.readouterr().out


class Recipe:
    supervised = False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["papp"], "unknown recipe 'papp'; did you mean 'papo'?"),
        (["papo", "trainr"], "unknown option 'trainr'; did you mean trainer"),
        (["papo", "lr"], "did you mean trainer.learning_rate?"),
        (["no.module:A:B"], "cannot be loaded"),
    ],
)
def test_what_does_not_exist_is_an_error_with_a_suggestion(arguments, message, capsys):
    assert main(["options", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_class_without_source_has_options_without_sentences():
    made = dataclasses.make_dataclass("Made", [("steps", int, bounded(3, at_least=1))])
    (option,) = options_of(made)
    assert (option.key, option.help, option.facts) == ("steps", "", "int; at least 1; default 3")


def test_default_listing_leaves_out_what_few_set_and_says_how_many(capsys):
    assert main(["options", "papo"]) == 0
    *listed, last = capsys.readouterr().out.strip().splitlines()
    shown = [line for line in listed if line and not line.startswith(" ") and "  (" in line]
    assert len(shown) <= 62
    assert any(line.startswith("trainer.learning_rate  (") for line in shown)
    assert not any(line.startswith("trainer.adam_eps") for line in shown)
    assert main(["options", "papo", "--all"]) == 0
    everything = capsys.readouterr().out
    assert "\ntrainer.adam_eps  (" in everything
    assert everything.count("  (") <= 210
    total = sum(line[:1].strip() != "" and "  (" in line for line in everything.splitlines())
    assert last == f"{total - len(shown)} more rarely used options: mmrl options papo --all"


def test_blocks_of_an_objective_have_the_options_of_the_presets_kind_and_a_key_lists_all(capsys):
    assert main(["options", "papo", "--all"]) == 0
    everything = capsys.readouterr().out
    assert everything.count("\nobjective.advantage.eps  (") == 1
    assert "\nobjective.clip.dual  (float | None; above 1; default the preset's)" in everything
    assert "\nobjective.clip.tau_pos" not in everything
    assert "default the preset's, ppo_clip)" in everything
    assert "\neval_data.<name>.path" not in everything
    assert main(["options", "papo", "objective.advantage"]) == 0
    assert capsys.readouterr().out.count("\nobjective.advantage.eps  (") > 3
    assert main(["options", "papo", "tau_pos"]) == 0
    assert "objective.clip.tau_pos  (float; for sapo;" in capsys.readouterr().out
    for arguments in ([], ["--all"], ["objective.clip"]):
        main(["options", "papo", *arguments])
        text = capsys.readouterr().out
        main(["options", "papo", *arguments, "--json"])
        rows = json.loads(capsys.readouterr().out)
        assert all(f"{row['key']}: " in text if row["part"] else f"{row['key']}  (" in text for row in rows)
        assert sum(not row["part"] for row in rows) == sum(
            line.startswith(row_starts(rows)) for line in text.split("\n")
        )


def row_starts(rows):
    return tuple(f"{row['key']}  (" for row in rows if not row["part"])


def test_what_is_inside_a_rare_part_is_rare_and_a_prefix_shows_it(capsys):
    found = {option.key: option for option in options_of(RECIPES["papo"].load_defaults())}
    assert found["evaluation.self_critic.n"].rare
    assert found["eval_data.<name>.path"].rare  # entries are like `data`
    assert main(["options", "papo", "evaluation.self_critic"]) == 0
    assert "evaluation.self_critic.n  (" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["papo", "flow_grpo_fast", "srpo"])
def test_schema_has_keys_types_bounds_and_sentences(name, capsys):
    assert main(["schema", name]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["additionalProperties"] is False
    trainer = schema["properties"]["trainer"]
    assert trainer["additionalProperties"] is False
    assert (trainer["properties"]["steps"]["type"], trainer["properties"]["steps"]["minimum"]) == ("integer", 1)
    assert trainer["properties"]["learning_rate"]["type"] == "number"
    assert "cosine" in trainer["properties"]["schedule"]["enum"]
    assert all(entry["description"] for entry in trainer["properties"].values())
    assert schema["properties"]["extends"]["type"] == "string"
