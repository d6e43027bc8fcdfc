"""Commands, tables and the chain of runs that the README and its pages show; `test_pages.py` reads all pages."""

import json
import logging
import os
import re
import shlex
import sys
import tomllib
import warnings

import pytest
import torch
import yaml

from diffusion.rewards import IMAGE_REWARDS
from mmrl.cli import main
from mmrl.cli.program import COMMANDS, _parse
from mmrl.config import load_run
from mmrl.core import CATALOGUE
from mmrl.recipes import RECIPES, find_recipe
from mmrl.rewards import REWARDS
from mmrl.runs.tracking import describe_metric
from tests.fitting import fitting, group_size
from tests.pages import README, ROOT, read_page

INSTALL, VLM, REWARDS_PAGE = (read_page(f"docs/{name}.md") for name in ("install", "vlm", "rewards"))
ADDING, ERRORS, RUN_FOLDER = (read_page(f"docs/{name}.md") for name in ("adding", "troubleshooting", "run_folder"))


def code(text):
    return re.findall(r"`([^`]+)`", text)


COMMAND_PAGE = read_page("docs/commands.md")
COMMAND_LINES = [line for line in README.shell_lines if line.startswith("mmrl ")]
MAKE_LINES = [line for line in README.shell_lines if line.startswith("make ")]
INSTALL_LINES = [line for line in README.shell_lines if line.startswith("pip ")]


def test_every_line_of_the_shell_blocks_is_looked_at():
    assert len(COMMAND_LINES) + len(MAKE_LINES) + len(INSTALL_LINES) == len(README.shell_lines)


def test_the_page_of_commands_lists_every_command():
    listed = [code(row[0])[0].split() for row in COMMAND_PAGE.table("Commands")]
    assert {words[1] for words in listed if words[0] == "mmrl"} == set(COMMANDS)


@pytest.fixture
def own_run(tmp_path, monkeypatch):
    """The configuration that the README shows, in an empty folder."""
    (block,) = README.shown("yaml")
    (tmp_path / block.file).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    return block.file


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_command_parses_and_names_what_exists(line, own_run):
    arguments = shlex.split(line)[1:]
    args = _parse(arguments)
    _, config = load_run(own_run)
    for text in arguments:
        if text.endswith(".yaml"):
            assert text == own_run
        if text.startswith("runs/"):
            assert text == config.output_dir
    if arguments[0] == "train":
        load_run(own_run, args.overrides)


def test_the_extras_that_are_named_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in INSTALL_LINES:
        assert set(re.findall(r"\[(.*?)\]", line)[0].split(",")) <= set(extras)
    rows = [row for row in re.findall(r"^\| (`.*) \| (.*) \|$", INSTALL.text, re.MULTILINE) if "`all`" not in row[0]]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])} & {*extras}
    assert named == {*extras} - {"all", "dev", "site"}
    (left_out,) = re.findall(r"^\| `all` \| all except (.*) \|$", INSTALL.text, re.MULTILINE)
    contained = packages_of("all", extras)
    assert set(re.findall(r"`(\w+)`", left_out)) == {name for name in named if packages_of(name, extras) - contained}


def packages_of(extra, extras):
    """Packages that an extra installs; extras refer to each other."""
    found = set()
    for text in extras[extra]:
        inner = re.findall(r"mmrl-suite\[(.*?)\]", text)
        found |= {name for each in inner for part in each.split(",") for name in packages_of(part, extras)}
        found |= set() if inner else {re.split(r"[>=;]", text)[0]}
    return found


def test_make_targets_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert MAKE_LINES
    assert {line.split()[1] for line in MAKE_LINES} <= set(targets)


def test_python_of_the_import_section_runs(capsys):
    (snippet,) = README.shown("python")
    names = {}
    exec(snippet.text, names)
    assert "arXiv 2503.14476" in capsys.readouterr().out
    assert torch.isfinite(names["logp"].grad).all()
    assert names["logp"].grad.abs().sum() > 0


def test_reward_example_runs_with_its_configuration(tmp_path, monkeypatch, closing):
    from mmrl.rewards import RewardConfig, RewardSum

    (snippet,) = [block for block in REWARDS_PAGE.blocks if block.file == "my_rewards.py"]
    (settings,) = [block.text for block in REWARDS_PAGE.shown("yaml") if "my_rewards" in block.text]
    (tmp_path / snippet.file).write_text(snippet.text)
    monkeypatch.chdir(tmp_path)
    rewards = closing(RewardSum([RewardConfig(**reward) for reward in yaml.safe_load(settings)["rewards"]], workers=1))
    result = rewards.score(["What is 3 plus 4?"] * 2, ["\\boxed{7}", "x" * 300], {"answer": ["7", "7"]})
    assert result.errors == {}
    assert result.total == pytest.approx([1.0, 0.0])


def test_own_recipes_are_named_as_the_docs_say():
    entry = find_recipe("mmrl.vlm.vlm_recipe:VlmRecipe:VlmConfig")
    recipe = entry.load_recipe_class()
    (sentence,) = re.findall(r"overrides the stages that it changes:(.*?)\.", ADDING.text, re.DOTALL)
    assert len(code(sentence)) == 5
    assert all(hasattr(recipe, stage) for stage in code(sentence))


def test_the_modules_of_recipes_explain_their_papers():
    for entry in RECIPES.values():
        recipe = entry.load_recipe_class()
        text = f"{sys.modules[recipe.__module__].__doc__} {recipe.__doc__}"
        assert len(text.split()) > 30, entry.name
        if not entry.preset:
            assert [number for number in re.findall(r"\d{4}\.\d{5}", entry.citation) if number not in text] == []


def test_objectives_that_are_named_exist():
    (names,) = re.findall(r"any objective: (.*?) \|", VLM.text)
    keys = [name.strip().lower().replace("++", "_pp").replace("dr.", "dr_") for name in names.split(",")]
    assert set(keys) <= set(CATALOGUE)


def test_rewards_that_are_named_are_those_that_exist():
    assert {code(row[0])[0] for row in REWARDS_PAGE.table("Text")} == set(REWARDS)
    assert {code(row[0])[0] for row in REWARDS_PAGE.table("Images")} == set(IMAGE_REWARDS)


def test_settings_and_metrics_that_are_named_exist():
    _, config = load_run(ROOT / "configs/vlm/digits_papo.yaml")
    metrics = [name for name in ERRORS.code if re.match(r"(reward|checkpoint|data)/", name)]
    assert metrics
    for name in metrics:
        assert describe_metric(name) is not None, name
    for name in ("tasks_per_step", "samples_per_task", "minibatches_per_step", "micro_batch"):
        assert name in VLM.section("Batch sizes")
        assert hasattr(config.trainer, name)


def test_version_table_agrees_with_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(text for extra in extras.values() for text in extra)]
    floors = {re.split(r"[>=\[]", text)[0]: text.partition(">=")[2].partition(";")[0] for text in wanted}
    floors["Python"] = project["requires-python"].removeprefix(">=")
    rows = INSTALL.table("Tested versions")
    assert len(rows) >= 5
    for package, floor, tested in rows:
        assert package in floors
        assert floor == (floors[package] or "the one that goes with torch")
        assert re.match(r"\d+\.\d+", tested)


def test_exit_codes_are_those_of_the_help(capsys):
    assert main(["--help"]) == 0
    codes = "Exit codes: 0 done, 1 failed run, 2 bad usage or configuration, 128 + n stopped by signal n"
    assert codes in " ".join(COMMAND_PAGE.text.split())
    assert codes in " ".join(capsys.readouterr().out.split())


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """Overrides that make a configuration of the README tiny and keep its files in a temporary folder."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.chdir(ROOT)
    torch.set_num_threads(1)
    logger = logging.getLogger("mmrl")
    handlers, level = list(logger.handlers), logger.level

    def overrides(name, run_dir, model):
        _, config = load_run(ROOT / "configs/vlm" / name)
        data = tmp_path / "data"
        texts = [
            *(f"output_dir={run_dir}", f"model.path={model}", "trainer.steps=2", "trainer.tasks_per_step=2"),
            *("trainer.minibatches_per_step=1", "trainer.warmup_steps=0", group_size(config, 2)),
            *("evaluation.max_tasks=4", "sampler.max_new_tokens=6", "tracking.strict=true"),
            *(f"data.path={data}/{run_dir.name}.jsonl", "data.build_options.count=8"),
        ]
        for split in config.eval_data:
            place = f"eval_data.{split}"
            texts += [f"{place}.path={data}/{split}.jsonl", f"{place}.build_options.count=6"]
        return fitting(config, texts)

    with warnings.catch_warnings():
        yield overrides
    logger.handlers, logger.level = handlers, level


def test_a_chain_of_runs(quick, tmp_path, capsys):
    sft, papo = tmp_path / "digits-sft", tmp_path / "digits-papo"
    assert main(["sft", "configs/vlm/digits_sft.yaml", *quick("digits_sft.yaml", sft, tmp_path / "model")]) == 0
    model = sft / "checkpoints/step-000002/model"
    rl = ["train", "configs/vlm/digits_papo.yaml", *quick("digits_papo.yaml", papo, model)]
    assert main(rl) == 0
    out = capsys.readouterr()
    assert all(
        "greedy responses hit the limit of 6 tokens" in line for line in out.err.splitlines()
    )  # two steps teach no end
    assert f"report: {papo}/report.html" in out.out
    assert out.out.count("evaluation at step") == 2 * 2 * 2  # runs, splits, ends
    listed = [code(row[0])[0] for row in RUN_FOLDER.table("Run folder")]
    assert len(listed) == 15
    for name in listed:
        assert name in ("failures/", "warnings.jsonl", "run.lock", "export/", "earlier/") or (papo / name).exists(), (
            name
        )
    assert json.loads((papo / "result.json").read_text())["status"] == "done"

    assert main([*rl, "trainer.steps=3", "--resume"]) == 0
    out = capsys.readouterr()
    assert "resumed at step 2" in out.out
    assert "trainer.steps 2 -> 3" in out.err
    steps = [json.loads(line)["step"] for line in (papo / "metrics.jsonl").open()]
    assert steps == [1, 2, 3]

    assert main(["evaluate", "--all", str(papo)]) == 0
    shown = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert 0 <= float(shown["heldout/accuracy/greedy"]) <= 1
    assert float(shown["heldout/n"]) == 4

    (papo / "report.html").unlink()
    assert main(["report", str(sft), str(papo)]) == 0
    assert capsys.readouterr().out == f"report: {papo}/report.html\n"
    page = (papo / "report.html").read_text()
    for text in ("before digits-sft", "after digits-papo", "Sample rollouts", "advantage"):
        assert text in page


def test_list_runs(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in (*RECIPES, *CATALOGUE, *REWARDS))
