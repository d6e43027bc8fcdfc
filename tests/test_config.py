from __future__ import annotations

import pytest

from mmrl.config import load, load_run, save
from mmrl.errors import UserError
from mmrl.vlm.methods.papo import PapoConfig

GOOD = "recipe: papo\nmodel: {path: m}\ndata: {path: d.jsonl}\nrewards: [{name: exact}]\n"


@pytest.fixture
def write(tmp_path):
    def make(text: str, name: str = "run.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return make


def test_numbers_overrides_and_defaults(write):
    entry, config = load_run(write(GOOD + "trainer: {learning_rate: 3e-4}\n"), ["trainer.steps=7", "papo.gamma=0.5"])
    assert entry.name == "papo"
    assert (config.trainer.learning_rate, config.trainer.steps, config.papo.gamma) == (3e-4, 7, 0.5)
    assert config.objective.preset == "papo"


def test_extends_starts_from_another_file(write):
    write(GOOD + "trainer: {steps: 5, epochs: 2}\n", "base.yaml")
    _, config = load_run(write("extends: base.yaml\ntrainer: {steps: 9}\n"))
    assert (config.trainer.steps, config.trainer.epochs) == (9, 2)
    loop = write("extends: loop.yaml\n", "loop.yaml")
    with pytest.raises(UserError, match="leads back to itself"):
        load_run(loop)


def test_saved_configuration_loads_again(write, tmp_path):
    _, config = load_run(write(GOOD), ["model.lora.enabled=true"])
    save(config, tmp_path / "resolved.yaml")
    assert load(tmp_path / "resolved.yaml", PapoConfig) == config


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (GOOD + "trainr: {}\n", [], "unknown key 'trainr'; did you mean 'trainer'"),
        (
            GOOD,
            ["trainer.stps=3"],
            r"unknown key 'trainer.stps'; did you mean 'trainer.steps'.*known keys under 'trainer'",
        ),
        (GOOD.replace("name: exact", "nam: exact"), [], "unknown key 'nam'; did you mean 'name'"),
        (GOOD, ["trainer.steps=many"], r"'trainer.steps'.*many.*default: 100"),
        (GOOD, ["trainer.steps=0"], "trainer.steps is 0; must be at least 1"),
        (GOOD, ["output_dir="], r"'output_dir': nothing is given; an empty text is \"''\" on the command line"),
        (GOOD, ["trainer.steps"], "not of the form a.b=c"),
        (GOOD.replace("path: m", ""), [], "model.path"),
        ("model: {path: m}\n", [], "no `recipe:` key"),
        ("recipe: papoo\n", [], "unknown recipe 'papoo'; did you mean 'papo'"),
        ("recipe: grpo\n", [], r"grpo is an objective: use recipe: vlm .* with objective: {preset: grpo}"),
        ("recipe: dapoo\n", [], "did you mean 'dapo'"),
        (GOOD, ["trainer.gradient_accumulation_steps=4"], r"that is trainer\.micro_batch here"),
        (GOOD, ["num_generations=4"], r"that is trainer\.samples_per_task here"),
        ("recipe: no.such.module:A:B\n", [], "cannot be loaded"),
        ("- 1\n", [], "expected keys and values"),
        ("a: [\n", [], "not valid YAML"),
        (GOOD, ["objective.preset=grppo"], "grpo"),
        (GOOD, ["accuracy_reward=maths"], "accuracy_reward is 'maths' but the rewards are: exact"),
        (GOOD, ["rewards=[]"], "rewards is empty"),
        (
            GOOD,
            ["model.dtype=bfloat16"],
            "round such steps away; use model.dtype=float32 with trainer.mixed_precision=bf16",
        ),
        (GOOD, ["objective.kl.kind=full"], "use k1, k2, k3"),
        (GOOD, ["trainer.minibatches_per_step=99"], "cut by whole groups"),
    ],
)
def test_mistakes_are_named(write, text, overrides, message):
    with pytest.raises(UserError, match=message):
        load_run(write(text), overrides)


def test_bfloat16_weights_are_fine_with_lora(write):
    _, config = load_run(write(GOOD), ["model.dtype=bfloat16", "model.lora.enabled=true"])
    assert config.model.dtype == "bfloat16"


def test_missing_file():
    with pytest.raises(UserError, match=r"configuration file not found: nowhere\.yaml"):
        load_run("nowhere.yaml")


def test_null_takes_back_an_inherited_entry(write, tmp_path):
    (tmp_path / "base.yaml").write_text(GOOD + "eval_data: {easy: {path: a.jsonl}, hard: {path: b.jsonl}}\n")
    _, config = load_run(tmp_path / "base.yaml", ["eval_data.easy=null"])
    assert list(config.eval_data) == ["hard"]
    own = write("extends: base.yaml\neval_data: {hard: null, own: {path: c.jsonl}}\n")
    _, config = load_run(own)
    assert list(config.eval_data) == ["easy", "own"]
