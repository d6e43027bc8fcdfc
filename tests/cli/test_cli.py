"""Commands, exit codes and messages of `mmrl`; the messages are part of the interface."""

import argparse
import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from mmrl.cli import main
from mmrl.cli.commands import COMMANDS
from mmrl.cli.listings import LINE_WIDTH, paper_of
from mmrl.cli.program import _build_parser, _parse
from mmrl.config import load_run
from mmrl.errors import RunError, RunStopped, UserError

PROJECT = Path(__file__).resolve().parents[2]
TOY_RECIPE = """
from dataclasses import dataclass
from mmrl.training.settings import RunConfig

@dataclass
class ToyConfig(RunConfig):
    slope: float = 1.0

class ToyRecipe:
    supervised = False
"""


@pytest.fixture(autouse=True)
def _untouched_process(monkeypatch):
    """Restore the library switches that `main` sets for its process."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with warnings.catch_warnings():
        yield


@pytest.fixture
def toy_config(tmp_path, monkeypatch):
    """A configuration of a user's own recipe, so that these tests need no model."""
    (tmp_path / "toy_recipe.py").write_text(TOY_RECIPE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "toy_recipe", raising=False)
    path = tmp_path / "toy.yaml"
    path.write_text(f"recipe: toy_recipe:ToyRecipe:ToyConfig\noutput_dir: {tmp_path}/run\n")
    return path


def one_error_line(capsys):
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("mmrl: ")
    return line


def test_help_names_every_command_below_its_group(capsys):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    places = [next(place for place, line in enumerate(lines) if line.startswith(f"  {name} ")) for name in COMMANDS]
    assert places == sorted(places)
    headings = [place for place, line in enumerate(lines) if line.endswith(":") and not line.startswith(" ")]
    for name, place in zip(COMMANDS, places, strict=True):
        assert lines[max(heading for heading in headings if heading < place)] == f"{COMMANDS[name].group}:"
    assert max(map(len, lines)) <= LINE_WIDTH


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    assert main([command, "--help"]) == 0
    assert f"usage: mmrl {command}" in capsys.readouterr().out


def test_help_imports_only_the_standard_library():
    program = (
        "import sys; before = set(sys.modules)\n"
        "from mmrl.cli import main; main(['--help'])\n"
        "roots = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print('extra:', *sorted(roots - set(sys.stdlib_module_names) - {'mmrl', 'diffusion', 'robotics'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "extra:"


def test_process_leaves_with_the_exit_code():
    done = subprocess.run(
        [sys.executable, "-m", "mmrl.cli", "train", "no/such.yaml"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "mmrl: error: configuration file not found: no/such.yaml\n"


def test_a_failed_one_of_several_processes_leaves_without_tearing_down():
    """The teardown of the interpreter aborts now and then with gloo, and the exit code would be that of the abort."""
    program = "import atexit, mmrl.cli; atexit.register(print, 'torn down'); mmrl.cli.main(['train', 'no/such.yaml'])"
    for processes, code, said in (("2", 2, ""), ("1", 0, "torn down\n")):
        variables = os.environ | {"WORLD_SIZE": processes}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, cwd=PROJECT, env=variables, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (code, said)
        assert "no/such.yaml" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no command given"),
        (["trian"], "did you mean 'train'?"),
        (["train"], "arguments are required: CONFIG"),
        (["train", "x.yaml", "--resum"], "unknown arguments: --resum;"),
        (["train", "x.yaml", "steps"], "override 'steps' is not of the form a.b=c"),
        (["train", "x.yaml", "=3"], "override '=3' is not of the form a.b=c"),
        (["train", "missing.yaml"], "configuration file not found: missing.yaml"),
        (["sft", "missing.yaml"], "configuration file not found: missing.yaml"),
        (["evaluate", "missing.yaml"], "configuration file not found: missing.yaml"),
        (["compare", "missing.yaml"], "experiment file not found: missing.yaml"),
        (["compare", "x.yaml", "--jobs", "many"], "invalid int value: 'many'"),
        (["compare", str(PROJECT / "pyproject.toml"), "--jobs", "0"], "--jobs is 0; must be at least 1"),
        (["report", "missing"], "missing is not a run folder"),
        (["list", "recipies"], "invalid choice: 'recipies'"),
        (["doctor", "now"], "now is not a run folder"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in one_error_line(capsys)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("slop=2", "did you mean 'slope'?"),
        ("trainer.step=3", "did you mean 'trainer.steps'?"),
        ("trainer.lr=3", "that is trainer.learning_rate here;"),
        ("learning_rate=3", "that is trainer.learning_rate here;"),
        ("eval_steps=3", "that is evaluation.every here;"),
        ("dataset_name=x", "unknown key 'dataset_name'; known keys"),  # this recipe has no data
        ("trainer.steps=many", "trainer.steps"),
        ("slope=[1]", "slope"),
        ("trainer.steps=-1", "trainer.steps"),
    ],
)
def test_bad_value_is_named_and_exit_2(override, message, toy_config, capsys):
    assert main(["train", str(toy_config), override]) == 2
    assert message in one_error_line(capsys)


def test_unknown_recipe_gets_a_suggestion(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("recipe: papp\n")
    assert main(["train", str(path)]) == 2
    assert "did you mean 'papo'?" in one_error_line(capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--resume"], "nothing to resume"),
        (["train", "--from-last-good"], "requires --resume"),
        (["sft"], "use `mmrl train`"),
    ],
)
def test_commands_that_do_not_fit_the_run_are_refused(words, message, toy_config, capsys):
    assert main([words[0], str(toy_config), *words[1:]]) == 2
    assert message in one_error_line(capsys)


def test_existing_run_is_not_overwritten(toy_config, capsys):
    run_dir = toy_config.parent / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text("{}\n")
    assert main(["train", str(toy_config)]) == 2
    assert "already contains a run; it has no checkpoint yet: --resume restarts it" in one_error_line(capsys)
    (run_dir / "checkpoints/step-000001").mkdir(parents=True)
    assert main(["train", str(toy_config)]) == 2
    assert "already contains a run; add --resume" in one_error_line(capsys)
    assert (run_dir / "metrics.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize("name", ["config.yaml", "report.html", "reference/mine.txt"])
def test_files_that_no_run_wrote_are_kept(toy_config, name, capsys):
    mine = toy_config.parent / "run" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert main(["train", str(toy_config)]) == 2
    assert f"has a {name.partition('/')[0]} that no run wrote" in one_error_line(capsys)
    assert mine.read_text() == "mine"


def test_evaluate_refuses_a_folder_that_is_not_a_run(tmp_path, capsys):
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "no config.yaml" in one_error_line(capsys)


@pytest.fixture
def recorded_train(monkeypatch):
    """Replaces the training loop; `outcome` is returned or raised."""
    import mmrl.training.run as runs

    class Recorder:
        outcome = Path("somewhere")
        config = None
        resume = None

        def __call__(self, entry, config, *, resume, from_last_good):
            self.config, self.resume = config, resume
            if isinstance(self.outcome, BaseException):
                raise self.outcome
            return self.outcome

    recorder = Recorder()
    monkeypatch.setattr(runs, "train", recorder)
    return recorder


@pytest.mark.parametrize(
    "order",
    [
        ["train", "CONFIG", "slope=2", "trainer.steps=7", "--resume"],
        ["train", "CONFIG", "--resume", "slope=2", "trainer.steps=7"],
        ["train", "CONFIG", "slope=2", "--resume", "trainer.steps=7"],
        ["train", "--resume", "CONFIG", "slope=2", "trainer.steps=7"],
    ],
)
def test_overrides_are_applied_wherever_the_option_is(order, toy_config, recorded_train, capsys):
    assert main([str(toy_config) if text == "CONFIG" else text for text in order]) == 0
    assert (recorded_train.config.slope, recorded_train.config.trainer.steps) == (2.0, 7)
    assert recorded_train.resume is True
    first, *last = capsys.readouterr().out.splitlines()
    assert first == f"{toy_config}: toy_recipe:ToyRecipe:ToyConfig, 7 steps, into {toy_config.parent}/run"
    assert last == ["run folder: somewhere", "report: somewhere/report.html"]


@pytest.mark.parametrize(
    ("outcome", "code", "message"),
    [
        (RunError("loss is NaN;\n see failures/"), 1, "mmrl: run failed: loss is NaN; see failures/"),
        (UserError("no images"), 2, "mmrl: error: no images"),
    ],
)
def test_exit_code_of_a_failed_run(outcome, code, message, toy_config, recorded_train, capsys):
    recorded_train.outcome = outcome
    assert main(["train", str(toy_config)]) == code
    assert one_error_line(capsys) == message


def test_a_run_that_learned_nothing_is_a_failed_one(toy_config, recorded_train, capsys, tmp_path):
    recorded_train.outcome = tmp_path
    (tmp_path / "result.json").write_text('{"status": "nothing_learned", "reason": "nothing was learned: why"}')
    assert main(["train", str(toy_config)]) == 1
    assert one_error_line(capsys) == "mmrl: run failed: nothing was learned: why"


def test_interrupt_before_the_first_step_says_how_to_start_again(toy_config, recorded_train, capsys):
    recorded_train.outcome = KeyboardInterrupt()
    assert main(["train", str(toy_config), "slope=2"]) == 130
    assert one_error_line(capsys).endswith(f"start again with: mmrl train {toy_config} slope=2")


def test_ctrl_c_that_a_library_turns_into_an_error_is_no_error(toy_config, recorded_train, monkeypatch, capsys):
    def load(*arguments, **options):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise UserError("the weights are broken") from None

    monkeypatch.setattr("mmrl.training.run.train", load)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # commands in the background ignore Ctrl-C
    try:
        assert main(["train", str(toy_config)]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert "start again with" in one_error_line(capsys)


def test_a_folder_that_cannot_be_written_is_named(toy_config, recorded_train, tmp_path, capsys):
    recorded_train.outcome = OSError(errno.EROFS, "Read-only file system", str(tmp_path / "report.html"))
    assert main(["train", str(toy_config)]) == 2
    assert one_error_line(capsys) == (
        f"mmrl: error: {tmp_path}/report.html: Read-only file system; choose another folder"
    )
    assert not list(tmp_path.rglob("mmrl-crash-*"))


def test_evaluate_refuses_a_folder_that_cannot_be_written_before_it_loads(toy_config, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    assert main(["evaluate", str(toy_config)]) == 2
    assert "cannot be written; choose another path" in one_error_line(capsys)


def test_home_is_expanded_in_output_dir(toy_config, recorded_train, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["train", str(toy_config), "output_dir=~/mine"]) == 0
    assert recorded_train.config.output_dir == str(tmp_path / "mine")


@pytest.mark.parametrize("name", ["::", ":a:b", "a::b", "math:x:", "..a:b:c"])
def test_an_incomplete_name_of_a_recipe_is_one_line(name, tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text(f"recipe: '{name}'\n")
    assert main(["train", str(tmp_path / "bad.yaml")]) == 2
    assert f"recipe '{name}' cannot be loaded" in one_error_line(capsys)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_stopped_run_says_how_to_continue(signum, code, toy_config, recorded_train, capsys):
    recorded_train.outcome = RunStopped(signum, "stopped after step 3")
    assert main(["train", str(toy_config), "slope=2"]) == code
    assert (
        one_error_line(capsys) == f"mmrl: stopped after step 3; continue with: mmrl train {toy_config} slope=2 --resume"
    )


def test_interrupted_comparison_continues_with_the_same_command(tmp_path, monkeypatch, capsys):
    import mmrl.comparison.run as compare

    def interrupt(*arguments, **keywords):
        raise KeyboardInterrupt

    experiment = tmp_path / "ab.yaml"
    experiment.write_text("")
    monkeypatch.setattr(compare, "run_experiment", interrupt)
    assert main(["compare", str(experiment), "--jobs", "2"]) == 130
    assert one_error_line(capsys).endswith(f"continue with: mmrl compare {experiment} --jobs 2")


class _TextlessError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (ZeroDivisionError("a bug\nin two lines \ud800"), "ZeroDivisionError: a bug in two lines"),
        (MemoryError(), "MemoryError: no message"),
        (_TextlessError(), "_TextlessError: no message"),
        (ValueError("x" * 10_000), "ValueError: " + "x" * 300 + "..."),
    ],
)
@pytest.mark.parametrize("place", ["run", "."])
def test_unexpected_error_is_one_line_and_a_file(
    place, outcome, message, toy_config, recorded_train, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / place).mkdir(exist_ok=True)
    recorded_train.outcome = outcome
    assert main(["train", str(toy_config)]) == 1
    line = one_error_line(capsys)
    assert line.startswith(f"mmrl: run failed: {message}")
    (file,) = (tmp_path / place).glob("mmrl-crash-*.txt")
    assert line.endswith(f"; traceback in {file}")
    text = file.read_text(encoding="utf-8")
    assert text.startswith(f"mmrl train {toy_config}\n")
    assert "Traceback (most recent call last)" in text
    assert "in _run_training" in text


def test_unexpected_error_where_nothing_can_be_written(toy_config, recorded_train, monkeypatch, capsys):
    def refuse(*_, **__):
        raise OSError("read-only")

    recorded_train.outcome = ZeroDivisionError("a bug")
    monkeypatch.setattr(Path, "write_text", refuse)
    assert main(["train", str(toy_config)]) == 1
    assert one_error_line(capsys).endswith("the traceback could not be written to any folder")


def test_user_environment_wins_over_quietness(toy_config, recorded_train, monkeypatch):
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    main(["train", str(toy_config)])
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "info"
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1"


def test_evaluate_reads_the_run_folder(toy_config, monkeypatch, capsys):
    import mmrl.training.run as runs

    run_dir = toy_config.parent / "finished"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("recipe: toy_recipe:ToyRecipe:ToyConfig\nslope: 3\n")
    seen = {}

    def evaluate(entry, config, folder):
        seen.update(name=entry.name, slope=config.slope, folder=folder)
        return {
            "test/n": 400.0,
            "test/accuracy/greedy": 0.5,
            "test/accuracy/greedy/low": 0.4512,
            "test/accuracy/greedy/high": 0.5488,
            "test/accuracy/greedy/form=a/b": 1.0,
            "test/accuracy/sampled": 0.25,
        }

    monkeypatch.setattr(runs, "evaluate", evaluate)
    assert main(["evaluate", str(run_dir)]) == 2  # nobody here ran it, so its recipe may be anybody's code
    assert not seen
    assert main(["evaluate", str(run_dir), "--allow", "toy_recipe:ToyRecipe:ToyConfig"]) == 0
    assert seen == {"name": "toy_recipe:ToyRecipe:ToyConfig", "slope": 3.0, "folder": run_dir}
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    assert [[cell.strip() for cell in line if cell.strip()] for line in lines] == [
        ["test", "greedy", "sampled"],
        ["all tasks", "50.0% [45.1, 54.9]", "25.0%"],
        ["form=a/b", "100.0%", "–"],
    ]
    assert main(["evaluate", str(run_dir), "--all", "--allow", "toy_recipe:ToyRecipe:ToyConfig"]) == 0
    assert "test/n                         400\n" in capsys.readouterr().out


def test_report_takes_the_last_folder_and_the_chain_before_it(tmp_path, monkeypatch, capsys):
    import mmrl.report.page as report

    folders = [tmp_path / "sft", tmp_path / "papo"]
    for folder in folders:
        folder.mkdir()
        (folder / "config.yaml").write_text("recipe: papo\n")
    monkeypatch.setattr(report, "write_report", lambda run_dir, chain, output: (run_dir, chain, output))
    assert main(["report", *map(str, folders)]) == 0
    assert capsys.readouterr().out == f"report: {(folders[1], [folders[0]], None)}\n"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], (Path("runs/ab"), {"jobs": None, "only_report": False, "allow": []})),
        (
            ["--output", "x", "--jobs", "2", "--only-report", "--allow", "a:b", "--allow", "c.py:d"],
            (Path("x"), {"jobs": 2, "only_report": True, "allow": ["a:b", "c.py:d"]}),
        ),
    ],
)
def test_compare_hands_over_its_options(options, expected, tmp_path, monkeypatch, capsys):
    import mmrl.comparison.run as compare

    calls = []

    def run_experiment(path, output, **keywords):
        calls.append((output, keywords))
        return output

    (tmp_path / "ab.yaml").write_text("")
    monkeypatch.setattr(compare, "run_experiment", run_experiment)
    assert main(["compare", str(tmp_path / "ab.yaml"), *options]) == 0
    assert calls == [expected]
    assert capsys.readouterr().out == f"comparison: {expected[0] / 'comparison.json'}\n"


def test_demo_prints_its_lines(tmp_path, monkeypatch, capsys):
    import mmrl.vlm.toy.demo as demo

    monkeypatch.setattr(demo, "run", lambda output, seed: [f"in {output} with {seed}", "report: r.html"])
    monkeypatch.chdir(tmp_path)
    cases = {"": "runs/demo with 0", "--seed=3": "runs/demo-seed3 with 3", "--output=x": "x with 0"}
    for option, expected in cases.items():
        assert main(["demo", *option.split()]) == 0
        *lines, last = capsys.readouterr().out.splitlines()
        assert lines == [f"in {expected}", "report: r.html"]
        assert last.startswith("time taken: ")


def test_list_shows_everything_with_its_citation(capsys):
    from diffusion.families.table import FAMILIES
    from diffusion.rewards import IMAGE_REWARDS
    from mmrl.core.catalogue import all_objectives, all_preferences
    from mmrl.recipes import all_recipes
    from mmrl.rewards import REWARDS

    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines if line.startswith("  ") and not line.startswith("   ")]
    tables = (all_recipes(), all_objectives(), all_preferences(), REWARDS, IMAGE_REWARDS, FAMILIES)
    assert sorted(names) == sorted(name for table in tables for name in table)
    assert max(map(len, lines)) <= LINE_WIDTH
    text = " ".join(" ".join(lines).split())
    for entry in (entry for table in tables for entry in table.values()):
        shown = paper_of(entry.citation) if hasattr(entry, "verified") else f"[{entry.citation}]"
        assert " ".join(shown.split()) in text
        assert len(entry.citation) > 2


@pytest.mark.parametrize(
    ("kind", "groups"),
    [("recipes", ["vlm", "masked", "agents", "gui", "diffusion", "robotics"]), ("rewards", ["answers", "images"])],
)
def test_list_of_one_kind_by_group(kind, groups, capsys):
    assert main(["list", kind]) == 0
    headings = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("  ")]
    library = [heading for heading in headings if not heading.startswith("contrib: ")]
    assert library == headings[: len(library)] == [f"{kind} for {group}:" for group in groups]
    assert main(["list", kind, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert list(dict.fromkeys(row["group"] for row in rows))[: len(groups)] == groups
    assert all(row["kind"] == kind and row["name"] and row["summary"] and row["source"] for row in rows)


@pytest.mark.parametrize("columns", ["60", "80", "120"])
def test_objectives_are_listed_by_family_one_a_line(capsys, monkeypatch, columns):
    from mmrl.core.catalogue import CATALOGUE, PREFERENCES, all_objectives, all_preferences

    monkeypatch.setenv("COLUMNS", columns)
    assert main(["list", "objectives"]) == 0
    lines = capsys.readouterr().out.splitlines()
    headings = [line for line in lines if not line.startswith("  ")]
    assert headings[0] == "Objectives that compare the samples of a group:"
    assert len(lines) == len(headings) + len(all_objectives()) + len(all_preferences())
    wall = next(place for place, line in enumerate(lines) if line.startswith("contrib: "))
    assert {line.split()[0] for line in lines[:wall] if line not in headings} == {*CATALOGUE, *PREFERENCES}
    assert all(line.startswith("contrib: ") for line in lines[wall:] if line in headings)
    rows = {line.split()[0]: line.split()[-1] for line in lines if line.startswith("  ")}
    assert (rows["dapo"], rows["aspo_tir"]) == ("2503.14476", "2508.19201")


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mmrl ")


@pytest.mark.parametrize(("words", "code"), [(["list", "recipes"], 0), (["train", "nothing.yaml"], 2)])
def test_a_command_continues_when_its_output_cannot_be_written(words, code):
    """A stream like that of a log on a full disk."""
    command = [sys.executable, "-m", "mmrl.cli", *words]
    with open("/dev/full", "w") as full:
        assert (
            subprocess.run(command, stdout=full, stderr=full, cwd=PROJECT, timeout=120, check=False).returncode == code
        )


def orders(positionals, options):
    """Every order of a command's words: positionals keep theirs, an option keeps its value."""
    count = len(positionals) + len(options)
    for places in itertools.combinations(range(count), len(positionals)):
        for mixed in itertools.permutations(options):
            rest, given = iter(mixed), iter(positionals)
            parts = [[next(given)] if place in places else next(rest) for place in range(count)]
            yield list(itertools.chain(*parts))


def leaves(parser, words=()):
    """Every command of the parser with its words."""
    (sub,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)] or [None]
    for name, inner in sub.choices.items() if sub else ():
        yield from leaves(inner, (*words, name))
    if sub is None:
        yield parser, words


def value_of(action):
    return str(next(iter(action.choices))) if action.choices else "x=1" if action.type in (None, Path) else "1"


@pytest.mark.parametrize(
    ("parser", "words"), [pytest.param(*leaf, id=" ".join(leaf[1])) for leaf in leaves(_build_parser())]
)
def test_options_and_other_arguments_come_in_any_order(parser, words):
    positionals = [action for action in parser._actions if not action.option_strings]
    options = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    options = sorted(options, key=lambda action: not action.required)[:3]  # of more there are too many orders
    given = [value_of(action) for action in positionals for _ in range(1 if action.nargs in (None, "?") else 2)]
    chosen = [[option.option_strings[0], *([] if option.nargs == 0 else [value_of(option)])] for option in options]
    found = [vars(_parse([*words, *order])) for order in orders(given, chosen)]
    assert all(each == found[0] for each in found)


def test_init_takes_its_words_in_any_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = [["--model", "M"], ["--data", r"${D} \${x}"], ["--force"]]
    texts = set()
    for order in orders(["papo", "FILE"], options):
        assert main(["init", *order]) == 0
        texts.add((tmp_path / "FILE").read_text())
        (tmp_path / "FILE").unlink()
    (text,) = texts
    (tmp_path / "FILE").write_text(text)
    assert load_run(tmp_path / "FILE")[1].data.path == options[1][1]


@pytest.mark.parametrize("number", ["inf", "nan", "-inf"])
def test_an_option_that_is_no_finite_number_is_refused(number, capsys):
    assert main(["train", "x.yaml", "--dry-run", f"--gpu-memory={number}"]) == 2
    assert f"--gpu-memory is {number}; must be finite" in one_error_line(capsys)


OUTPUTS = (
    ["init", "papo"],
    ["export", ".", "--output"],
    ["report", ".", "--output"],
    ["select", "x.yaml", "--output"],
    ["select", "x.yaml", "--output", "tasks.jsonl", "--record"],
    ["compare", "x.yaml", "--output"],
    ["reproduce", "x", "--output"],
    ["demo", "--output"],
    ["setup", "vllm", "--folder"],
    ["sim", "setup", "libero", "--folder"],
    ["sim", "play", "push", "--video"],
    ["sim", "play", "push", "--strip"],
    ["gui", "screens"],
)
"""Commands that write to a path, which comes last."""


@pytest.mark.parametrize("words", OUTPUTS, ids=" ".join)
def test_an_output_that_cannot_be_written_is_one_line_and_exit_2(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("dangling").symlink_to("gone")
    for path, message in (
        ("dangling", "dangling is a link to gone, which does not exist"),
        ("file/x", "file is not a folder"),
        ("x" * 256, "has a name of 256 bytes; file systems allow at most 255"),
    ):
        assert main([*words, path]) == 2
        assert message in one_error_line(capsys)
    assert sorted(os.listdir()) == ["dangling", "file"]


@pytest.mark.parametrize("words", [["train"], ["train", "--dry-run"], ["train", "--processes", "2"]], ids=" ".join)
def test_a_run_folder_that_cannot_be_written_is_one_line_and_exit_2(words, toy_config, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    (tmp_path / "linked").symlink_to(tmp_path / "file")
    for name, message in (
        ("dangling", f"is a link to {tmp_path / 'gone'}, which does not exist"),
        ("linked", "is not a folder; choose another path"),
        ("file/x", f"{tmp_path / 'file'} is not a folder; choose another path"),
    ):
        assert main([*words, str(toy_config), f"output_dir={tmp_path / name}"]) == 2
        line = one_error_line(capsys)
        assert line.startswith(f"mmrl: error: output_dir {tmp_path / name}")
        assert message in line
