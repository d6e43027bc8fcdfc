"""Explanations that `mmrl explain` gives of objectives and recipes."""

import re
from pathlib import Path

import pytest
import yaml

from mmrl.cli import main
from mmrl.cli.explain import DOMAINS as GROUPS
from mmrl.cli.explain import ROWS, explained, find_name, places, usage
from mmrl.core import CATALOGUE, PREFERENCES, all_objectives, get
from mmrl.errors import UserError
from mmrl.recipes import RECIPES, all_recipes
from tests.contracts.domains import DOMAINS
from tests.contracts.test_objectives import missing

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ROWS)
def test_every_objective_is_explained(name):
    text, row = explained(name), ROWS[name]
    assert row.citation in text
    assert f"verified      {row.verified}" in text
    assert row.differs in text
    assert all(f" {block.kind} " in text for block in row.blocks.values() if block.formula())
    config = yaml.safe_load("\n".join(usage(row)))
    assert config["recipe"] in all_recipes()
    assert config["objective"]["preset"] == name


@pytest.mark.parametrize("name", all_objectives())
def test_domains_are_those_in_which_a_row_trains(name):
    domains = dict(zip((domain.name for domain in GROUPS), ("vlm", "agents", "diffusion", "robotics"), strict=True))
    for place in places(get(name)):
        lacking = missing(DOMAINS[domains[place.domain]], name)
        assert not place.lacks or lacking
        assert place.recipe in ("robot_ppo", "masked") or bool(place.recipe) == (not lacking)


@pytest.mark.parametrize("name", [name for name in all_recipes() if name not in ROWS])
def test_every_recipe_without_a_row_is_explained(name):
    text, entry = explained(name), all_recipes()[name]
    own = text if name in RECIPES else text.partition("\n")[2]
    assert own.startswith(f"recipe {name}: {entry.citation}\n  {entry.summary}\n")
    assert entry.load_config_class().__name__ in text
    files = re.findall(r"mmrl train (configs/\S+)", text)
    assert files
    assert all((ROOT / file).is_file() for file in files)


def test_what_is_in_contrib_says_so_first_with_its_verdict():
    assert explained("bapo").startswith("contrib: not here\nbapo: BAPO, arXiv 2510.18927")
    assert explained("hapo").startswith("contrib: not measured\nhapo: ")
    library = {*CATALOGUE, *PREFERENCES, *RECIPES}
    for name in {**ROWS, **all_recipes()}:
        assert explained(name).startswith("contrib: ") or name in library


def test_a_name_of_a_row_and_a_recipe_explains_both():
    text = explained("papo")
    assert text.index("papo: base objective") < text.index("recipe papo: Wang et al.")
    assert text.count("docs/results/papo_vs_grpo.md") == 2  # two findings, each once


def test_the_beginning_of_a_name_is_enough(capsys):
    assert main(["explain", "vesp"]) == 0
    out = capsys.readouterr().out
    for part in ("arXiv 2602.10693", "huggingface/trl GRPOTrainer.get_gamma_weights", "trl 1.16.0", "recipe: agent"):
        assert part in out
    assert find_name("dpo") == "dpo"  # a whole name is never ambiguous
    with pytest.raises(UserError, match="'dppo' may be dppo_tv, dppo_kl"):
        find_name("dppo")
    with pytest.raises(UserError, match="There is no objective or recipe 'grop'; did you mean 'grpo'"):
        find_name("grop")


def test_a_domain_that_cannot_use_an_objective_says_what_it_lacks():
    text = explained("dppo_tv")
    assert "images      no: it needs decisions with probabilities (tokens, picks)" in text
    assert "robots      recipe: robot_ppo" in explained("ppo")
    assert "docs/results/papo_vs_grpo.md" in explained("papo")
