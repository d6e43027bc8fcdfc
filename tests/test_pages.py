"""Files, commands and code named in README and docs exist, parse and run."""

import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import re
import shlex
import typing
from pathlib import Path

import pytest
import yaml

from mmrl.cli.program import COMMANDS, _parse
from mmrl.config import load_run
from mmrl.recipes import EVALUATIONS, all_recipes
from mmrl.runs.tracking import describe_metric, metric_definitions
from mmrl.training.objectives import ObjectiveConfig, PreferenceConfig, make_objective, make_preference
from tests import example_runs
from tests.pages import PAGES, ROOT, read_page
from tests.programs import run_program
from tests.scripts import methods

PLACEHOLDERS = {
    "CONFIG": "configs/vlm/digits_papo.yaml",
    "RUN": "runs/x",
    "N": "2",
    "RECIPE": "papo",
    "KIND": "papo",
    "CONFIG_OR_RUN": "runs/x",
    "EXPERIMENT": "configs/experiments/papo_vs_grpo.yaml",
}
SHELL_TOOLS = ("mmrl", "ssh", "torchrun", "make", "export", "sudo", "python", "pip")
PATH = re.compile(r"(?:configs|mmrl|diffusion|robotics|tests|scripts)/[\w./*-]+")
MODULE = re.compile(r"(?:mmrl|diffusion|robotics)(?:\.\w+)+")
PARTS = "trainer|data|model|sampler|evaluation|tracking|checkpoint|acting|demonstrations|latent|sim|orw|papo|filter"
FILES = (".jsonl", ".yaml", ".json", ".py", ".safetensors")
KEY = re.compile(rf"(?:{PARTS})\.\w+(?:\.\w+)*")


def _make_run(folder):
    example_runs.make_metrics(folder)
    example_runs.make_results(folder)


PREPARED = {
    "docs/data.md": example_runs.make_images,
    "docs/run_folder.md": _make_run,
}
SLOW = tuple(
    f"docs/{name}.md"
    for name in ("data", "diffusion", "flow3d", "robot_policies", "robotics", "simulators", "run_folder")
)
"""Pages whose programs take longest."""
RUN = """
import json, sys
from mmrl.hub.compat import ensure_torchvision

ensure_torchvision()
names = {}
for number, text in enumerate(json.load(open(sys.argv[1]))):
    exec(compile(text, f"block {number}", "exec"), names)
"""


def every(find):
    """(page, item) for all pages, with the page's name as part of the test's."""
    return [pytest.param(page, item, id=f"{page.name}:{str(item)[:60]}") for page in PAGES for item in find(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_images_exist(page):
    for target in page.links:
        file, _, anchor = target.partition("#")
        path = (page.path.parent / file).resolve() if file else page.path
        if path.is_relative_to(ROOT / "docs/reference"):
            continue  # built with the site, and checked there
        assert path.is_file(), target
        if path == ROOT / "docs/methods/index.md" and anchor in methods.LIBRARY:
            continue  # on the site a link to the method's own page
        if anchor:
            assert anchor in read_page(str(path.relative_to(ROOT))).anchors, target


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "README.md"], ids=lambda page: page.name)
def test_every_page_can_be_reached_from_the_index(page):
    index = ROOT / "docs/index.md"
    seen, waiting = set(), [index]
    while waiting:
        path = waiting.pop()
        if path in seen or path.suffix != ".md":
            continue
        seen.add(path)
        links = read_page(str(path.relative_to(ROOT))).links
        links = [link for link in links if "reference/" not in link]
        waiting += [(path.parent / link.partition("#")[0]).resolve() for link in links if not link.startswith("#")]
    assert page.path in seen


@pytest.mark.parametrize(("page", "line"), every(lambda page: page.shell_lines))
def test_shell_lines_name_what_exists(page, line):
    words = shlex.split(line)
    assert words[0] in SHELL_TOOLS
    if words[0] == "mmrl":
        _parse(words[1:])
        for word in words:
            assert not word.endswith(".yaml") or word.startswith("my_") or (ROOT / word).is_file(), word
    if words[0] == "python" and words[1] != "-m":
        assert words[1] in [block.file for block in page.blocks]
    elif words[0] == "python":
        found = importlib.util.find_spec(words[2])
        assert found is not None
        if found.submodule_search_locations:  # a package runs its __main__
            found = importlib.util.find_spec(f"{words[2]}.__main__")
        if words[2] == "pytest":
            assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
            return
        options = set(re.findall(r"add(?:_argument)?\(\s*\"(--[\w-]+)", Path(str(found.origin)).read_text()))
        assert {word for word in words[3:] if word.startswith("-")} <= options
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M)


def commands(page):
    return [text for text in page.code if re.match(r"mmrl [a-z]|accelerate ", text)]


@pytest.mark.parametrize(("page", "text"), every(commands))
def test_commands_in_the_text_parse(page, text):
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(text) if word not in ("...", "[PREFIX]", "[FILE]")]
    if words == ["accelerate", "launch"]:
        return
    arguments = words[words.index("mmrl.cli") + 1 :] if words[0] == "accelerate" else words[1:]
    if len(arguments) == 1:  # the command as such
        assert arguments[0] in COMMANDS
    else:
        _parse(arguments)


def training_lines(page):
    return [line for line in page.shell_lines if line.split()[:2] == ["mmrl", "train"]]


@pytest.mark.parametrize(("page", "line"), every(training_lines))
def test_configurations_of_shell_lines_load(page, line):
    args = _parse(shlex.split(line)[1:])
    if str(args.config).startswith("configs/"):
        load_run(ROOT / args.config, args.overrides)


def chains(page):
    """Configurations of the shell lines that say after which others they run, in the order of running."""
    for block in page.shown("bash"):
        for config, before in re.findall(r"(\S+\.yaml)[^#\n]*# .*\bafter (\w+\.yaml(?: and \w+\.yaml)*)", block.text):
            yield (*before.split(" and "), Path(config).name)


@pytest.mark.parametrize(("page", "chain"), every(chains))
def test_a_configuration_reads_what_runs_before(page, chain):
    runs = [load_run(next((ROOT / "configs").glob(f"*/{name}")))[1] for name in chain]
    for before, run in itertools.pairwise(runs):
        assert before.output_dir in repr(run), before.output_dir


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_modules_that_are_named_exist(page):
    for text in page.code:
        if PATH.fullmatch(text):
            assert list(ROOT.glob(text.rstrip("/"))), text
        elif re.fullmatch(r"[a-z0-9_]+\.yaml", text) and text not in ("config.yaml", "other.yaml"):
            assert list((ROOT / "configs").glob(f"*/{text}")) or text in [block.file for block in page.blocks], text
        elif MODULE.fullmatch(text) and text != "mmrl.cli":
            module, _, attribute = text.rpartition(".")
            loaded = __import__(module, fromlist=[attribute])
            assert hasattr(loaded, attribute), text


@functools.cache
def schemas():
    return {name: entry.load_config_class() for name, entry in {**all_recipes(), **EVALUATIONS}.items()}


hints_of = functools.cache(typing.get_type_hints)


@functools.cache
def field_of(schema, key):
    """Type of a dotted key of a configuration, or None; any key below a plain dictionary exists."""
    hint = schema
    for part in key.split("."):
        hint = next((kind for kind in typing.get_args(hint) if dataclasses.is_dataclass(kind)), hint)
        if not dataclasses.is_dataclass(hint):
            return hint if typing.get_origin(hint) is dict else None
        made = next((item.default_factory for item in dataclasses.fields(hint) if item.name == part), None)
        hint = hints_of(hint).get(part)
        if hint is None:
            return None
        if dataclasses.is_dataclass(hint) and made not in (None, dataclasses.MISSING):
            hint = type(made())  # a default may have more options than its type
    return hint


def dotted(values, prefix=""):
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from dotted(value, f"{prefix}{key}.")
        yield f"{prefix}{key}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_in_the_text_exist(page):
    known = list(schemas().values())
    for text in page.code:
        key = re.split(r"[:= ]", text)[0]
        if KEY.fullmatch(key) and Path(key).suffix not in FILES:
            assert any(field_of(schema, key) is not None for schema in known), text


@pytest.mark.parametrize(("page", "block"), every(lambda page: page.shown("yaml")))
def test_configurations_shown_load(page, block, tmp_path, monkeypatch):
    values = yaml.safe_load(block.text)
    own = any(str(values.get("recipe", "")).startswith(name) for name in ("my_", "runs/"))
    if values.get("recipe") in schemas():
        schema = schemas()[values["recipe"]]
        for key in dotted({name: value for name, value in values.items() if name != "eval_data"}):
            assert field_of(schema, key) is not None, key
    elif not own:
        for key in dotted({name: value for name, value in values.items() if name != "extends"}):
            assert any(field_of(schema, key) is not None for schema in schemas().values()), key
    if "objective" in values:
        if values.get("recipe") in ("preference", "online_preference", "refuel", "diffusion_dpo"):
            make_preference(PreferenceConfig(**values["objective"]))
        else:
            make_objective(ObjectiveConfig(**values["objective"]))
    if block.file and not own:
        write_files(page, tmp_path)  # one may extend another
        load_run(tmp_path / block.file)


def named_checkpoints(page):
    text = "".join(block.text for block in page.shown("python"))
    return sorted(set(re.findall(r"\"(runs/[\w-]+)/checkpoints/step-(\d+)/model\"", text)))


@pytest.mark.parametrize(("page", "named"), every(named_checkpoints))
def test_checkpoints_that_are_named_are_those_of_the_last_step(page, named):
    folder, step = named
    paths = [path for path in (ROOT / "configs").glob("*/*.yaml") if f"output_dir: {folder}\n" in path.read_text()]
    assert [load_run(path)[1].trainer.steps for path in paths] == [int(step)] * len(paths)


def snippets(page):
    return [block.text for block in page.shown("python") if block.file is None]


def write_files(page, folder: Path) -> None:
    for block in page.blocks:
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")


def run(folder: Path, *words: str) -> str:
    return run_program(words, folder, PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=pytest.mark.slow if page.name in SLOW else ())
        for page in PAGES
        if snippets(page) and not page.name.startswith("docs/tutorials/")  # test_tutorials.py runs them
    ],
)
def test_python_of_a_page_runs_from_top_to_bottom(page, tmp_path):
    PREPARED.get(page.name, lambda folder: None)(tmp_path)
    write_files(page, tmp_path)
    (tmp_path / "blocks.json").write_text(json.dumps(snippets(page)))
    run(tmp_path, "-c", RUN, "blocks.json")


def test_the_recipe_of_adding_trains(tmp_path):
    page = read_page("docs/adding.md")
    write_files(page, tmp_path)
    write_files(read_page("docs/data.md"), tmp_path)
    example_runs.make_images(tmp_path)
    example_runs.make_model(tmp_path)
    run(tmp_path, "-m", "mmrl.cli", "train", "my_recipe.yaml")
    assert (tmp_path / "runs/gentle/report.html").is_file()


def test_the_stage_of_adding_changes_half_of_the_questions(tmp_path):
    page = read_page("docs/adding.md")
    write_files(page, tmp_path)
    write_files(read_page("docs/data.md"), tmp_path)
    example_runs.make_images(tmp_path)
    example_runs.make_model(tmp_path)
    config = (tmp_path / "my_recipe.yaml").read_text().replace("negative_weight: 0.25\n", "")
    config = config.replace("my_recipe:GentleRecipe:GentleConfig", "my_stage:StepsRecipe:VlmConfig")
    (tmp_path / "my_stage.yaml").write_text(config)
    run(tmp_path, "-m", "mmrl.cli", "train", "my_stage.yaml", "trainer.tasks_per_step=4")
    samples = (tmp_path / "runs/gentle/samples").glob("*/train.jsonl")
    asked = ["Think step by step." in line for path in samples for line in path.read_text().splitlines()]
    assert any(asked)
    assert not all(asked)


def test_every_python_block_is_run_or_says_that_it_is_not():
    languages = {block.language for page in PAGES for block in page.blocks}
    assert languages <= {"bash", "python", "python notest", "yaml", "json", "text", "bibtex"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_metrics_that_are_named_are_defined(page):
    prefixes = {name.partition("/")[0] for name in metric_definitions() if "/" in name} - {"data", "sim"}
    for text in page.code:
        if re.fullmatch(rf"(?:{'|'.join(prefixes)})/[\w/]+", text):
            assert describe_metric(text) is not None, text
