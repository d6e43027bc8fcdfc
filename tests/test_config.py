import contextlib
import copy
import dataclasses
import random
import typing

import pytest
from omegaconf import OmegaConf

from mmrl.config import (
    as_given,
    as_override,
    escaped,
    fill,
    from_values,
    load,
    load_run,
    save,
    to_container,
)
from mmrl.errors import UserError
from mmrl.fields import hints_of
from mmrl.recipes import RECIPES
from mmrl.training.settings import BaseRunConfig
from mmrl.vlm.data.dataset import DataConfig
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


def test_options_of_a_base_files_builder_may_stay_without_it(write):
    write(GOOD + "eval_data: {a: {path: p, build: 'm:f', build_options: {count: 4}}}\n", "base.yaml")
    _, config = load_run(write("extends: base.yaml\neval_data: {a: {path: q, build: null}}\n"))
    assert (config.eval_data["a"].build, config.eval_data["a"].build_options) == (None, {"count": 4})


def test_saved_configuration_loads_again(write, tmp_path):
    _, config = load_run(write(GOOD), ["model.lora.enabled=true"])
    save(config, tmp_path / "resolved.yaml")
    assert load(tmp_path / "resolved.yaml", PapoConfig) == config


def test_texts_with_dollars_are_saved_so_that_they_load_again(write, tmp_path, monkeypatch):
    monkeypatch.setenv("MMRL_TEST_TOKEN", "s3cr3t")
    _, config = load_run(write(GOOD))
    texts = [r"Pay ${5", r"\${x} $ {", "${oc.env:MMRL_TEST_TOKEN}", "${recipe}", "$${", "\\"]
    config.data.system_prompt = "|".join(texts)
    config.rewards[0].options = {"texts": texts}
    save(config, tmp_path / "saved.yaml")
    assert load(tmp_path / "saved.yaml", PapoConfig) == config
    assert from_values(DataConfig, {"path": texts[2]}, "data").path == texts[2]


def test_every_text_is_escaped():
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choices(["\\", "$", "{", "}", "${", "a", "'", ":"], k=6))
        assert OmegaConf.create({"a": escaped(text)}).a == text


def test_values_of_the_environment_are_saved_as_references(write, tmp_path, monkeypatch):
    monkeypatch.setenv("MMRL_TEST_TOKEN", "s3cr3t")
    monkeypatch.setenv("MMRL_TEST_STEPS", "7")
    text = "token ${oc.env:MMRL_TEST_TOKEN}"
    path = write(GOOD + "trainer: {steps: '${oc.env:MMRL_TEST_STEPS}'}\n", "base.yaml")
    overrides = [f"data.system_prompt={text}", "data.split=${data.system_prompt}", r"data.subset=\${x}"]
    _, config = load_run(path, overrides)
    found = (config.data.system_prompt, config.data.split, config.data.subset, config.trainer.steps)
    assert found == ("token s3cr3t", "token s3cr3t", "${x}", 7)
    save(config, tmp_path / "saved.yaml")
    assert "s3cr3t" not in (tmp_path / "saved.yaml").read_text()
    assert to_container(config)["trainer"]["steps"] == 7, "a resumed run compares numbers"
    _, again = load_run(tmp_path / "saved.yaml")
    assert again == config
    assert to_container(again) == to_container(config)
    config.data.system_prompt = "another"
    assert to_container(config)["data"]["system_prompt"] == "another"
    monkeypatch.delenv("MMRL_TEST_TOKEN")
    with pytest.raises(UserError, match="MMRL_TEST_TOKEN"):
        load_run(tmp_path / "saved.yaml")


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
        (GOOD, ["trainer.learning_rate=.inf"], "trainer.learning_rate is inf; must be finite"),
        (GOOD, ["trainer.learning_rate=inf"], "trainer.learning_rate is inf; must be finite"),
        (GOOD, ["trainer.learning_rate=.nan"], "trainer.learning_rate is nan; must be finite"),
        (GOOD, ["objective.clip={high: .inf}"], "objective.clip.high is inf; must be finite"),
        (GOOD, ["rewards=[{name: exact, weight: -.inf}]"], r"rewards\[0\].weight is -inf; must be finite"),
        (GOOD, ["rewards=[{name: exact, options: {tolerance: .nan}}]"], r"options.tolerance is nan; must be finite"),
        (GOOD, ["trainer.steps=0"], "trainer.steps is 0; must be at least 1"),
        (GOOD, ["output_dir="], r"'output_dir': the value is empty; write an empty text as \"''\" on the command line"),
        (GOOD, ["trainer.steps"], "not of the form a.b=c"),
        (GOOD.replace("path: m", ""), [], "model.path"),
        ("model: {path: m}\n", [], "no `recipe:` key"),
        (GOOD, ["data.build_options={count: 4}"], r"data\.build_options are set, but data\.build is not; set"),
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
            "such steps are lost to rounding in bfloat16 weights; use model.dtype=float32 with "
            "trainer.mixed_precision=bf16",
        ),
        (GOOD, ["objective.kl.kind=full"], "use k1, k2, k3"),
        (GOOD, ["trainer.minibatches_per_step=99"], "minibatches consist of whole groups"),
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


@pytest.mark.parametrize("nothing", ["{}", "null"])
def test_nothing_empties_a_mapping_of_the_file(write, tmp_path, nothing):
    (tmp_path / "base.yaml").write_text(GOOD + "eval_data: {easy: {path: a.jsonl}, hard: {path: b.jsonl}}\n")
    for path, overrides in (
        (tmp_path / "base.yaml", [f"eval_data={nothing}"]),
        (write(f"extends: base.yaml\neval_data: {nothing}\n"), []),
    ):
        assert load_run(path, overrides)[1].eval_data == {}
    _, config = load_run(tmp_path / "base.yaml")
    assert fill(config, [f"eval_data={nothing}"], "here").eval_data == {}, "of a filled configuration, too"
    assert load_run(tmp_path / "base.yaml", ["trainer={}"])[1] == config, "a part with defaults stays"


@pytest.mark.parametrize(
    ("block", "way_out"), [("filter", "objective.filter.kind: none disables it"), ("advantage", "leave it out")]
)
def test_null_for_a_block_names_the_way_out(write, block, way_out):
    for path, overrides in (
        (write(GOOD), [f"objective.{block}=null"]),
        (write(GOOD + f"objective: {{{block}: }}"), []),
    ):
        with pytest.raises(UserError, match=rf"objective\.{block} is null, .*{way_out}"):
            load_run(path, overrides)


def test_null_takes_back_an_inherited_entry(write, tmp_path):
    (tmp_path / "base.yaml").write_text(GOOD + "eval_data: {easy: {path: a.jsonl}, hard: {path: b.jsonl}}\n")
    _, config = load_run(tmp_path / "base.yaml", ["eval_data.easy=null"])
    assert list(config.eval_data) == ["hard"]
    own = write("extends: base.yaml\neval_data: {hard: null, own: {path: c.jsonl}}\n")
    _, config = load_run(own)
    assert list(config.eval_data) == ["easy", "own"]


def test_options_of_the_engines_are_gone_but_runs_that_stored_them_are_read(tmp_path):
    from mmrl.config import given_values, load_run

    text = "recipe: vlm\nmodel: {path: some, lane: auto}\nsampler: {max_new_tokens: 4, lean: true}\n"
    text += "data: {build: 'mmrl.vlm.toy.digit_pairs:build'}\n"
    for key in ("model.lane=fast", "sampler.lean=false"):
        plain = tmp_path / "plain.yaml"
        plain.write_text("recipe: vlm\nmodel: {path: some}\n", encoding="utf-8")
        with pytest.raises(UserError, match=rf"the option '{key.split('=')[0]}' was removed: .*; leave it out"):
            load_run(plain, [key, "data.path=rows.jsonl", "output_dir=out"])
    stored = tmp_path / "run" / "config.yaml"
    (stored.parent / "checkpoints").mkdir(parents=True)
    stored.write_text(text, encoding="utf-8")
    assert given_values(stored) == {
        "recipe": "vlm",
        "model": {"path": "some"},
        "sampler": {"max_new_tokens": 4},
        "data": {"build": "mmrl.vlm.toy.digits:build"},
    }


DOLLARS = [r"Pay \${price}", "$", r"\${", "$5 {a}", r"C:\dir\new", "\\", r"\\\${x}", "a #b: 'c'", '"']
"""Texts of a configuration file, in which a backslash before `${` makes it a plain text."""


@pytest.mark.parametrize("text", DOLLARS)
def test_a_text_with_dollars_reaches_the_splits_that_inherit_it(write, tmp_path, text):
    more = {"eval_data": {"a": {"path": "p"}, "b": {"path": "q", "system_prompt": text}}}
    path = write(OmegaConf.to_yaml(OmegaConf.create({**OmegaConf.create(GOOD), **more})))
    _, config = load_run(path, [as_override("data.system_prompt", text)])
    plain = OmegaConf.create({"x": text}).x
    assert config.data.system_prompt == plain
    assert [split.system_prompt for split in config.eval_data.values()] == [plain, plain]
    save(config, tmp_path / "saved.yaml")
    assert load_run(tmp_path / "saved.yaml")[1] == config


def test_a_split_keeps_the_reference_that_it_inherits(write, monkeypatch):
    monkeypatch.setenv("MMRL_TEST_TOKEN", "s3cr3t")
    monkeypatch.setenv("MMRL_TEST_STEPS", "7")
    data = "{path: d, system_prompt: '${oc.env:MMRL_TEST_TOKEN}', max_prompt_chars: '${oc.env:MMRL_TEST_STEPS}'}"
    text = GOOD.replace("{path: d.jsonl}", data) + "eval_data: {a: {path: p}, b: null}\n"
    _, config = load_run(write(text))
    assert (config.eval_data["a"].system_prompt, config.eval_data["a"].max_prompt_chars) == ("s3cr3t", 7)
    assert list(config.eval_data) == ["a"]
    saved = to_container(config)
    for part in (saved["data"], saved["eval_data"]["a"]):
        assert part["system_prompt"] == "${oc.env:MMRL_TEST_TOKEN}"
        assert part["max_prompt_chars"] == 7
    copied = dataclasses.replace(copy.deepcopy(config).data, path="other")
    assert as_given({"x": [copied.system_prompt, "".join(["s3cr", "3t"])]}) == {
        "x": ["${oc.env:MMRL_TEST_TOKEN}", "s3cr3t"]
    }


@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        ("output_dir: yes\n", "seed=1", "'output_dir' is a text, but YAML reads its value as True"),
        (
            "output_dir: 0012\n",
            "seed=1",
            "line 5: YAML reads 0012 as another number, in base 8 or 60; write a text in quotes",
        ),
        ("data: {system_prompt: 12:30}\n", "seed=1", "YAML reads 12:30 as another number"),
        ("data: {system_prompt: 12:30.5}\n", "seed=1", "YAML reads 12:30.5 as another number"),
        ("", "sampler.stop=[yes, no]", "'sampler.stop[0]' is a text, but YAML reads its value as True"),
        ("eval_data: {a: {split: 1e3}}\n", "seed=1", "'eval_data.a.split' is a text, but YAML reads its value as 1000"),
        ("", "output_dir=1e3", "'output_dir' is a text, but YAML reads its value as 1000.0"),
        ("", "data.split=1.10", "'data.split' is a text, but YAML reads its value as 1.1; write it in quotes"),
        ("", "output_dir=0012", "YAML reads the value as 10; for a text write 'output_dir=\"0012\"'"),
        ("", "trainer.steps=010", "YAML reads the value as 8"),
        ("", "output_dir=12:30:45", "YAML reads the value as 45045"),
        ("", "rewards.0.weight=2", "rewards is a list, which is replaced as a whole"),
        ("", "rewards[0].weight=2", "rewards is a list, which is replaced as a whole"),
        ("", "trainer.betas=[0.9,1.0]", "each in"),
        ("", "trainer.adam_eps=-1", "at least 0"),
        ("trainer: {schedule: linear, final_learning_rate: -1.0}\n", "seed=1", "at least 0"),
        ("extends: [a.yaml, b.yaml]\n", "seed=1", "expected the path of one file"),
    ],
)
def test_values_that_would_be_misread_are_refused(write, text, override, message):
    with pytest.raises(UserError) as error:
        load_run(write(GOOD + text), [override])
    assert message in str(error.value)
    assert load_run(write(GOOD), ['output_dir="0012"', "data.split=1234567"])[1].data.split == "1234567"


def test_files_of_a_runs_folder_are_found_where_it_was_moved(tmp_path):
    old, new, elsewhere = tmp_path / "old run", tmp_path / "new run", tmp_path / "held.jsonl"
    (new / "checkpoints").mkdir(parents=True)
    changes = {"output_dir": str(old), "data": {"path": f"{old}/data/train.jsonl"}}
    changes["eval_data"] = {"a": {"path": str(elsewhere)}, "b": {"path": f"{old}/data/b.jsonl"}}
    (new / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.merge(OmegaConf.create(GOOD), changes)))
    config = load_run(new / "config.yaml")[1]
    paths = [part.path for part in (config.data, *config.eval_data.values())]
    assert paths == [f"{new}/data/train.jsonl", str(elsewhere), f"{new}/data/b.jsonl"]


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_split_whose_name_no_file_can_have_is_refused(recipe):
    config = RECIPES[recipe].load_defaults()
    config = config() if isinstance(config, type) else config
    for name in ("x" * 101, "漢" * 40, "a/b", ".hidden"):
        config.eval_data = {name: None}
        with pytest.raises(ValueError, match=r"eval_data contains a split '.*', which is used in file names: it "):
            BaseRunConfig.validate(config)


def containers(schema, seen, path=()):
    """Paths of the options that hold dataclasses, each class's once."""
    for item in dataclasses.fields(schema):
        hint, here = hints_of(schema)[item.name], (*path, item.name)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if hint not in seen:
                seen.add(hint)
                yield here
                yield from containers(hint, seen, here)
        elif dataclasses.is_dataclass((typing.get_args(hint) or (None,))[-1]) and (schema, item.name) not in seen:
            seen.add((schema, item.name))
            yield here


SEEN: set = set()
CONTAINERS = {name: list(containers(RECIPES[name].load_config_class(), SEEN)) for name in RECIPES}


@pytest.mark.parametrize("wrong", [5, {"a": "text"}], ids=repr)
def test_an_entry_of_a_wrong_kind_is_named(wrong):
    """A scalar as an entry of `eval_data` ended in an AttributeError."""
    for recipe, paths in CONTAINERS.items():
        for path in paths:
            content = copy.deepcopy(wrong)
            for key in reversed(path):
                content = {key: content}
            # a few are right, such as texts for a list of them
            with contextlib.suppress(UserError):
                from_values(RECIPES[recipe].load_defaults(), content, recipe)
