"""What a user can get wrong, through the command line: one clear line and an exit code, or a counted skip."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from mmrl.cli import main
from mmrl.training.loop.trainer import Trainer
from mmrl.vlm.tiny import build_tiny_vlm
from tests.vlm.builders import CORPUS
from tests.vlm.runs import write_questions

torch.set_num_threads(1)

CONFIG = """
recipe: vlm
output_dir: {run}
model: {{path: {model}}}
data: {{path: {questions}}}
eval_data:
  heldout: {{path: {questions}}}
rewards:
  - {{name: format}}
  - {{name: exact}}
sampler: {{max_new_tokens: 3}}
objective: {{kl: {{coef: 0.0}}}}
trainer: {{steps: 2, tasks_per_step: 2, samples_per_task: 2, learning_rate: 1.0e-3}}
evaluation: {{max_tasks: 2, at_start: false, at_end: false}}
checkpoint: {{every: 1}}
tracking: {{quiet: true, tensorboard: false, strict: true}}
"""
# each fails for the question whose answer is 1, in a way of its own
REWARDS = """
import time

def raises(prompts, completions, answer):
    if "1" in answer:
        raise RuntimeError("no answer may be 1")
    return [1.0] * len(completions)

def hangs(prompts, completions, answer):
    if "1" in answer:
        time.sleep(60)
    return [1.0] * len(completions)

def gives_nan(prompts, completions, answer):
    return [float("nan") if text == "1" else 1.0 for text in answer]

def always_raises(prompts, completions):
    raise RuntimeError("out of order")

def no_prompts(completions):
    return [1.0] * len(completions)

def needs_colour(prompts, completions, colour):
    return [1.0] * len(completions)
"""


@dataclass
class Lab:
    """A tiny model, a few questions and a configuration that works."""

    folder: Path
    model: Path
    config: Path
    rows: list[dict]

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def data(self, *rows, name="rows.jsonl"):
        """Write rows (text as it stands) beside the images."""
        path = self.folder / "data" / name
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return f"data.path={path}"

    def metrics(self):
        return [json.loads(line) for line in (self.run / "metrics.jsonl").open()]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The files that no test changes, and one finished run."""
    root = tmp_path_factory.mktemp("bad_input")
    model = build_tiny_vlm(root / "model", family="qwen2_5_vl", corpus=CORPUS, max_positions=512)
    questions = write_questions(root / "data", text_only_last=False)
    config = root / "good.yaml"
    config.write_text(CONFIG.format(run=root / "finished", model=model, questions=questions))
    assert main(["train", str(config), "evaluation.at_end=true"]) == 0
    return root


@pytest.fixture(autouse=True)
def _untouched_process(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    logger = logging.getLogger("mmrl")
    handlers, level = list(logger.handlers), logger.level
    with warnings.catch_warnings():
        yield
    logger.handlers, logger.level = handlers, level


@pytest.fixture
def lab(made, tmp_path):
    shutil.copytree(made / "data", tmp_path / "data")
    (tmp_path / "rewards.py").write_text(REWARDS)
    questions = tmp_path / "data/questions.jsonl"
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(run=tmp_path / "run", model=made / "model", questions=questions))
    return Lab(tmp_path, made / "model", config, [json.loads(line) for line in questions.open()])


@pytest.fixture
def mmrl(capsys):
    """Runs a command; returns its exit code and the lines on standard error."""

    def call(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        lines = capsys.readouterr().err.splitlines()
        assert all(line.startswith("mmrl: ") for line in lines)
        return code, lines

    return call


@pytest.fixture
def refused(mmrl):
    """Runs a command that must end with one line and exit code 2; returns the line."""

    def call(*arguments):
        code, lines = mmrl(*arguments)
        assert code == 2
        (line,) = lines
        assert line.startswith("mmrl: error: ")
        return line

    return call


@pytest.mark.parametrize(
    ("override", "messages"),
    [
        ("trainer.stepz=3", ["unknown key 'trainer.stepz'", "did you mean 'steps'", "learning_rate"]),
        ("trainr.steps=3", ["unknown key 'trainr'", "did you mean 'trainer'"]),
        ("rewards=[{nam: exact}]", ["unknown key 'nam'", "did you mean 'name'"]),
        ("eval_data.heldout.pth=x", ["unknown key 'eval_data.heldout.pth'", "did you mean 'path'"]),
        ("trainer.steps=many", ["'trainer.steps'", "'many'", "Integer", "default: 100"]),
        ("trainer.steps=2.5", ["'trainer.steps'", "2.5", "Integer"]),
        ("trainer.steps=null", ["'trainer.steps'", "int"]),
        ("trainer=3", ["'trainer'", "expected keys and values", "tasks_per_step"]),
        ("model=somewhere", ["'model'", "expected keys and values", "freeze_vision"]),
        ("model.lora=[1]", ["'model.lora'", "expected keys and values", "rank"]),
        ("rewards=exact", ["'rewards'", "expected a list"]),
        ("rewards=[exact]", ["'rewards[0]'", "keys and values of RewardConfig", "'exact'"]),
        ("trainer.betas=0.9", ["'trainer.betas'", "expected a list"]),
        ("data.build_options=[1]", ["'data.build_options'", "expected keys and values"]),
        ("model.freeze_vision=perhaps", ["'model.freeze_vision'", "perhaps", "bool"]),
        ("trainer.schedule=cos", ["trainer.schedule is 'cos'", "allowed: constant, linear, cosine"]),
        ("sampler.top_p=2", ["sampler.top_p is 2", "(0, 1]"]),
        ("objective.preset=grpoo", ["'grpoo'", "Did you mean 'grpo'", "dapo"]),
        ("objective.advantage.kind=mean", ["'mean'", "group_mean_std"]),
        ("trainer.samples_per_task=1", ["samples_per_task is 1", "group_mean_std", "whitened_returns"]),
        ("rewards=[{name: exakt}]", ["'exakt'", "did you mean 'exact'", "format"]),
        ("rewards=[{name: exact, options: {answr: 1}}]", ["'exact'", "'answr'", "did you mean 'answer'"]),
        ("rewards=[{name: 'no_such_module:f'}]", ["no module 'no_such_module'"]),
        ("model.build_options={hiden: 3}", []),
    ],
)
def test_wrong_configuration(override, messages, lab, refused):
    extra = ["model.build=mmrl.vlm.digits:build_model", f"model.path={lab.folder}/new"] if not messages else []
    line = refused("train", lab.config, override, *extra)
    for message in messages or ["mmrl.vlm.digits:build_model", "'hiden'"]:
        assert message in line
    assert not lab.run.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "configuration file not found: "),
        ("a: [1", "is not valid YAML"),
        ("", "no `recipe:` key"),
        ("- a\n", "holds a list; expected keys and values"),
        ("recipe: papp\n", "did you mean 'papo'"),
        ("extends: nowhere.yaml\n", "configuration file not found"),
        ("recipe: vlm\noutput_dir: ${nope}\n", "'nope' not found"),
        ("recipe: vlm\nrewards: [{name: exact}]\ndata: {path: x.jsonl}\n", "'model.path' must be given"),
        ("recipe: vlm\nrewards: [{name: exact}]\nmodel: {path: x}\n", "'data.path' must be given"),
    ],
)
def test_configuration_files_that_cannot_be_used(text, message, lab, refused):
    path = lab.folder / "bad.yaml"
    if text is not None:
        path.write_text(text)
    line = refused("train", path)
    assert message in line
    assert str(path if "extends" not in (text or "") else lab.folder / "nowhere.yaml") in line


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nowhere.jsonl", None, "no such file"),
        ("empty.jsonl", "", "is empty"),
        ("blank.jsonl", "\n\n", "is empty"),
        ("empty.json", "[]", "is empty"),
        ("empty.parquet", "", "cannot be read as parquet"),
        ("rows.txt", "x", "unknown extension '.txt'; known are .jsonl, .json, .parquet"),
        ("rows.jsonl", '{"text": "x"}\n', "its columns are text; set data.prompt_key"),
        ("rows.jsonl", "{bad\n", "line 1: not valid JSON"),
    ],
)
@pytest.mark.parametrize("place", ["data", "eval_data.heldout"])
def test_data_files_that_cannot_be_used(place, name, content, message, lab, refused):
    path = lab.folder / "data" / name
    if content is not None:
        path.write_text(content)
    line = refused("train", lab.config, f"{place}.path={path}")
    assert message in line
    assert name in line
    assert ("eval_data.heldout: " in line) == (place != "data")


def without(row, key):
    return {name: value for name, value in row.items() if name != key}


ROWS = {
    "no image": (lambda row: without(row, "images"), "the text has 1 <image> place but the row has 0 images"),
    "no answer": (lambda row: without(row, "answer"), "no answer in column 'answer'"),
    "more places": (
        lambda row: {**row, "problem": "<image><image>What?"},
        "the text has 2 <image> places but the row has 1 image",
    ),
    "fewer places": (lambda row: {**row, "problem": "What?"}, "the text has 0 <image> places but the row has 1 image"),
    "missing image file": (lambda row: {**row, "images": ["nowhere.png"]}, "there is no image file"),
    "not JSON": (lambda row: "{bad", "not valid JSON"),
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_bad_row_is_named(kind, lab, refused):
    change, message = ROWS[kind]
    data = lab.data(*lab.rows[:2], change(lab.rows[2]))
    line = refused("train", lab.config, data)
    assert f"rows.jsonl line 3{'' if kind == 'not JSON' else ' (id q2)'}: {message}" in line
    assert "data.on_bad_row=skip" in line


def test_bad_rows_can_be_skipped_and_are_counted(lab, mmrl):
    bad = [change(lab.rows[2]) for change, _ in ROWS.values()]
    code, lines = mmrl("train", lab.config, lab.data(*lab.rows[:2], *bad), "data.on_bad_row=skip")
    assert code == 0
    assert [row["data/skipped"] for row in lab.metrics()] == [6, 6]
    kinds = {"placeholder_mismatch": 3, "missing_answer": 1, "missing_image": 1, "invalid_json": 1}
    for kind, count in kinds.items():
        (line,) = [line for line in lines if f"({kind})" in line]
        assert line.startswith("mmrl: warning: ")
        assert f"skipped {count} rows" in line
        assert "rows.jsonl line " in line


def test_only_bad_rows_are_an_error_even_when_skipped(lab, refused):
    bad = [change(lab.rows[2]) for change, _ in list(ROWS.values())[:4]]
    line = refused("train", lab.config, lab.data(*bad), "data.on_bad_row=skip")
    assert "no usable row is left (skipped: 3 placeholder_mismatch, 1 missing_answer)" in line


def test_columns_without_image_or_answer(lab, refused):
    trl = [without(row, "problem") | {"prompt": "What is 3 plus 4?"} for row in lab.rows[:3]]
    line = refused("train", lab.config, lab.data(*trl[:2], without(trl[2], "images")))
    assert "rows.jsonl line 3 (id q2): the row has no image" in line
    assert "data.text_only=true" in line
    line = refused("train", lab.config, lab.data(*[without(row, "answer") for row in trl]))
    assert "reward 'exact' needs answer" in line
    assert "the columns are: completion" in line


def culprit(lab, kind):
    """A question whose image or text shows its fault only when it is read."""
    row = {**lab.rows[3], "id": "culprit"}
    if kind == "too long":
        return {**row, "problem": "<image>" + "What is 3 plus 4? " * 100}
    png = (lab.folder / "data/3.png").read_bytes()
    content = {"not an image": b"nothing", "truncated": png[: len(png) // 2], "zero bytes": b""}[kind]
    (lab.folder / "data/bad.png").write_bytes(content)
    return {**row, "images": ["bad.png"]}


SKIPPED = {
    "not an image": "(unreadable_image): culprit: image 1 of 1",
    "truncated": "(unreadable_image): culprit: image 1 of 1",
    "zero bytes": "(empty_image): culprit: image 1 of 1",
    "too long": "(prompt_too_long): culprit: the prompt has",
}


@pytest.mark.parametrize("kind", SKIPPED)
def test_unusable_questions_are_skipped_counted_and_named(kind, lab, mmrl):
    data = lab.data(*lab.rows[:3], culprit(lab, kind))
    heldout = f"eval_data.heldout.{data.removeprefix('data.')}"
    small = ["trainer.steps=1", "trainer.tasks_per_step=4", "evaluation.at_end=true", "evaluation.max_tasks=0"]
    code, lines = mmrl("train", lab.config, data, heldout, *small)
    assert code == 0
    (line,) = lines
    assert line.startswith("mmrl: warning: question skipped ")
    assert SKIPPED[kind] in line
    assert ("511" if kind == "too long" else "bad.png") in line
    (metrics,) = lab.metrics()
    assert (metrics["data/skipped"], metrics["samples/total"]) == (1, 3 * 2)
    (evaluation,) = [json.loads(line) for line in (lab.run / "evaluations.jsonl").open()]
    assert (evaluation["n"], evaluation["skipped"]) == (3, 1)


def test_when_no_question_can_be_used_the_run_fails(lab, mmrl):
    code, lines = mmrl("train", lab.config, lab.data(culprit(lab, "zero bytes")))
    assert code == 1
    assert lines[-1].startswith("mmrl: run failed: none of 2 questions could be used")
    assert "bad.png" in lines[-1]


@pytest.mark.parametrize(("name", "kind"), [("raises", "raised"), ("hangs", "timeout"), ("gives_nan", "nan")])
def test_a_failing_reward_costs_its_sample_only(name, kind, lab, mmrl):
    reward = f"{{name: mine, function: '{lab.folder}/rewards.py:{name}', timeout_s: 1}}"
    small = ["trainer.steps=1", "trainer.tasks_per_step=6", "accuracy_reward=exact"]
    code, lines = mmrl("train", lab.config, f"rewards=[{{name: exact, weight: 0}}, {reward}]", *small)
    assert code == 0
    line, *trace = lines
    assert line.startswith(f"mmrl: warning: reward mine/{kind} failed: ")
    assert bool(trace) == (kind == "raised")
    if trace:  # of the user's function alone
        assert trace[0] == "mmrl: warning:   Traceback (most recent call last):"
        assert trace[-1] == "mmrl: warning:   RuntimeError: no answer may be 1"
        assert {line.split('"')[1] for line in trace if "File" in line} == {f"{lab.folder}/rewards.py"}
    (metrics,) = lab.metrics()
    assert metrics["reward/errors"] == metrics[f"reward/errors/mine/{kind}"] == 2
    assert metrics["reward/mean"] == 1.0


def test_a_reward_that_always_fails_ends_the_run(lab, mmrl):
    code, lines = mmrl("train", lab.config, f"rewards=[{{name: '{lab.folder}/rewards.py:always_raises'}}]")
    assert code == 1
    assert lines[-1].startswith("mmrl: run failed: every reward of this step failed: ")
    assert "always_raises/raised: RuntimeError: out of order (rewards.py:" in lines[-1]


@pytest.mark.parametrize("samples", [1, 2])
def test_a_reward_that_always_fails_ends_the_first_evaluation(samples, lab, mmrl):
    evaluation = ["evaluation.at_start=true", f"evaluation.samples={samples}"]
    code, lines = mmrl("train", lab.config, f"rewards=[{{name: '{lab.folder}/rewards.py:always_raises'}}]", *evaluation)
    assert code == 1
    assert lines[-1].startswith("mmrl: run failed: ")
    assert "RuntimeError: out of order (rewards.py:" in lines[-1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("needs_colour", "needs colour, given neither as a data column nor in its options; the columns are: answer"),
        ("no_prompts", "takes no prompts; it is called with prompts, completions and the data columns by name"),
        ("always_raise", "did you mean 'always_raises'"),
    ],
)
def test_a_reward_that_does_not_fit(name, message, lab, refused):
    assert message in refused("train", lab.config, f"rewards=[{{name: '{lab.folder}/rewards.py:{name}'}}]")


@contextlib.contextmanager
def small_disk(size):
    """Let no file grow above `size` bytes, which fails in the writers as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("part", ["model/model.safetensors", "state.pt"])
@pytest.mark.parametrize("full_at", [1, 2])
def test_full_disk_at_checkpoint_time(part, full_at, made, lab, mmrl, monkeypatch):
    size = (made / "finished/checkpoints/step-000002" / part).stat().st_size
    save = Trainer.save

    def save_with_little_space(trainer):
        with small_disk(size - 5000) if trainer.step == full_at else contextlib.nullcontext():
            save(trainer)

    monkeypatch.setattr(Trainer, "save", save_with_little_space)
    code, lines = mmrl("train", lab.config)
    (line,) = lines
    assert f"checkpoint at step {full_at} could not be written to {lab.run}/checkpoints" in line
    names = sorted(path.name for path in (lab.run / "checkpoints").iterdir() if path.name != "best.json")
    assert names == [f"step-00000{3 - full_at}"]
    if full_at == 2:
        assert code == 1
        assert line.startswith("mmrl: run failed: ")
        assert "kept steps: [1]" in line
    else:
        assert code == 0
        assert line.startswith("mmrl: error: ")
        assert [row["checkpoint/failed"] for row in lab.metrics()] == [0, 1]


def truncate(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def blank(path):
    path.write_bytes(bytes(path.stat().st_size))


DAMAGES = {
    "state truncated": (lambda folder: truncate(folder / "state.pt"), "state.pt has "),
    "weights truncated": (
        lambda folder: truncate(folder / "model/model.safetensors"),
        "model/model.safetensors has ",
    ),
    "file missing": (lambda folder: (folder / "model/config.json").unlink(), "model/config.json is missing"),
    "manifest missing": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
    "manifest truncated": (lambda folder: truncate(folder / "manifest.json"), "manifest.json cannot be read"),
    "manifest of another kind": (
        lambda folder: (folder / "manifest.json").write_text("[]"),
        "manifest.json cannot be read",
    ),
    "state blank": (lambda folder: blank(folder / "state.pt"), "state.pt is not what was written"),
    "weights blank": (
        lambda folder: blank(folder / "model/model.safetensors"),
        "model/model.safetensors is not what was written",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_on_resume(damage, made, lab, refused):
    shutil.copytree(made / "finished", lab.run)
    change, message = DAMAGES[damage]
    change(lab.run / "checkpoints/step-000002")
    line = refused("train", made / "good.yaml", "evaluation.at_end=true", f"output_dir={lab.run}", "--resume")
    assert message in line
    assert f"{lab.run}/checkpoints/step-000002" in line
    advice = f"step 1 is whole: add --from-last-good to resume from it, or delete {lab.run}/checkpoints/step-000002"
    assert line.endswith(advice)
    assert (lab.run / "checkpoints/step-000001").is_dir()


def test_resume_from_the_older_checkpoint_works(made, lab, mmrl):
    shutil.copytree(made / "finished", lab.run)
    shutil.rmtree(lab.run / "checkpoints/step-000002")
    assert mmrl("train", made / "good.yaml", "evaluation.at_end=true", f"output_dir={lab.run}", "--resume") == (0, [])
    assert [row["step"] for row in lab.metrics()] == [1, 2]


def test_nothing_to_resume(lab, refused):
    assert "nothing to resume" in refused("train", lab.config, "--resume")
    (lab.run / "checkpoints").mkdir(parents=True)
    assert "nothing to resume" in refused("train", lab.config, "--resume")


def test_resume_with_other_settings(made, lab, mmrl, refused):
    shutil.copytree(made / "finished", lab.run)
    rows = lab.data(*lab.rows[:3])
    code, lines = mmrl("train", lab.config, rows, "trainer.steps=3", "--resume")
    assert code == 2
    (warning, error) = lines
    assert "resuming with other settings than before: " in warning
    assert "trainer.steps 2 -> 3" in warning
    assert "the checkpoint was made with 6 training tasks, now there are 3" in error
    other = ["recipe=sft", "trainer.samples_per_task=1", "--resume"]
    config = lab.folder / "sft.yaml"
    config.write_text(lab.config.read_text().replace("objective: {kl: {coef: 0.0}}\n", ""))
    assert "is a run of recipe 'vlm', 'sft' cannot continue it" in refused("train", config, *other)


def test_resume_with_other_data_of_the_same_length(made, lab, mmrl):
    shutil.copytree(made / "finished", lab.run)
    before = (lab.run / "config.yaml").read_bytes()
    rows = lab.data(*[{**row, "answer": "another"} for row in lab.rows])
    code, (_, error) = mmrl("train", lab.config, rows, "trainer.steps=3", "--resume")
    assert code == 2
    assert "made with other training tasks: as many (6), but their contents differ" in error
    assert (lab.run / "config.yaml").read_bytes() == before


def test_folder_of_another_run(made, lab, refused):
    shutil.copytree(made / "finished", lab.run)
    before = {path: path.read_bytes() for path in lab.run.rglob("*") if path.is_file()}
    line = refused("train", lab.config, "seed=5")
    assert f"{lab.run} already holds a run; add --resume" in line
    assert "output_dir=" in line
    assert {path: path.read_bytes() for path in lab.run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("below", ["", "/run"])
def test_output_folder_that_is_a_file(below, lab, refused):
    assert f"output_dir {lab.config}{below} cannot be written" in refused(
        "train", lab.config, f"output_dir={lab.config}{below}"
    )


MODELS = {
    "no such folder": (shutil.rmtree, "there is no model folder"),
    "empty folder": (lambda folder: [path.unlink() for path in folder.iterdir()], "it has no config.json"),
    "config truncated": (
        lambda folder: truncate(folder / "config.json"),
        "config.json cannot be read, it is not valid JSON",
    ),
    "other architecture": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "gpt2"}'),
        "is of architecture 'gpt2'; supported are: qwen2_5_vl, qwen3_vl",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "weights truncated": (lambda folder: truncate(folder / "model.safetensors"), "cannot be loaded: Safetensor"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "the processor of"),
    "no processor": (lambda folder: (folder / "processor_config.json").unlink(), "the processor of"),
    "no chat template": (lambda folder: (folder / "chat_template.jinja").unlink(), "add chat_template.jinja"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_model_folder_that_cannot_be_used(kind, lab, refused):
    folder = lab.folder / "model"
    shutil.copytree(lab.model, folder)
    change, message = MODELS[kind]
    change(folder)
    line = refused("train", lab.config, f"model.path={folder}")
    assert message in line
    assert str(folder) in line
    assert not lab.run.exists()


def test_model_that_the_hub_does_not_give(lab, refused, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    line = refused("train", lab.config, "model.path=no-such-owner/no-such-model")
    assert "no local folder 'no-such-owner/no-such-model', and it cannot be fetched from the hub" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{cnt: 3}", "unexpected keyword argument 'cnt'"),
        ("{split: tset}", "split is 'tset'; allowed: train, test"),
    ],
)
def test_options_that_do_not_fit_the_function_that_builds_the_data(options, message, lab, refused):
    path = lab.folder / "new/questions.jsonl"
    build = ["data.build=mmrl.vlm.digits:build_questions", f"data.build_options={options}"]
    line = refused("train", lab.config, f"data.path={path}", *build)
    assert "data.build 'mmrl.vlm.digits:build_questions' with data.build_options failed" in line
    assert message in line
    assert not path.exists()


def test_supervised_run_without_completions(lab, refused):
    config = lab.folder / "sft.yaml"
    config.write_text(lab.config.read_text().replace("recipe: vlm", "recipe: sft").replace("objective:", "# "))
    line = refused("sft", config, "trainer.samples_per_task=1", "target_key=solution")
    assert "question q0 has no text in column 'solution' (target_key)" in line
    assert "columns: id, answer, completion" in line
    assert "use `mmrl train`" in refused("sft", lab.config)


def test_evaluate_what_is_no_run(made, lab, refused):
    empty = lab.folder / "empty"
    empty.mkdir()
    assert f"{empty} is not a run folder: it holds no config.yaml" in refused("evaluate", empty)
    assert "not found" in refused("evaluate", lab.folder / "nowhere")
    config = lab.config.read_text()
    lab.config.write_text(config[: config.index("eval_data")] + config[config.index("rewards") :])
    assert "has no evaluation data; set eval_data" in refused("evaluate", lab.config)


def test_evaluate_a_run_that_is_damaged(made, lab, mmrl, refused):
    shutil.copytree(made / "finished", lab.run)
    best = json.loads((lab.run / "checkpoints/best.json").read_text())["step"]
    truncate(lab.run / f"checkpoints/step-{best:06d}/model/model.safetensors")
    assert "model/model.safetensors has " in refused("evaluate", lab.run)
    shutil.rmtree(lab.run / f"checkpoints/step-{best:06d}")
    assert mmrl("evaluate", lab.run) == (0, [])
    (lab.run / "checkpoints/best.json").write_text("{")
    assert "best.json is damaged" in refused("evaluate", lab.run)
    shutil.rmtree(lab.run / "checkpoints")
    assert f"{lab.run} has no checkpoint to evaluate" in refused("evaluate", lab.run)


def test_report_of_what_is_no_run(lab, refused):
    empty = lab.folder / "empty"
    empty.mkdir()
    for folder in (empty, lab.folder / "nowhere", lab.config):
        assert f"{folder} is not a run folder: it holds no config.yaml" in refused("report", folder)
    assert not (empty / "report.html").exists()


EXPERIMENT = """
name: ab
baseline: a
seeds: [1, 2]
metric: accuracy/greedy
base: run.yaml
arms:
  a: {}
  b: {overrides: {trainer.learning_rate: 1.0e-4}}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: ab", "name: [", "is not valid YAML"),
        ("baseline: a", "basline: a", "unknown key 'basline'; did you mean 'baseline'"),
        ("baseline: a", "baseline: c", "`baseline` is 'c'; arms: a, b"),
        ("metric: accuracy/greedy\n", "", "'metric' must be given"),
        ("seeds: [1, 2]", "seeds: [one]", "'seeds[0]'"),
        ("seeds: [1, 2]", "seeds: []", "`seeds` is empty"),
        ("base: run.yaml", "base: nowhere.yaml", "there is no file nowhere.yaml"),
        ("trainer.learning_rate", "trainer.learning_rat", "run runs/b/seed-1 would be rejected"),
        ("1.0e-4", "quick", "'trainer.learning_rate': Value 'quick'"),
        (
            "name: ab",
            "name: ab\ncollapse: {metric: accuracy/greedy}\noverrides: {evaluation.at_start: false}",
            "before training, but evaluation.at_start of runs/a/seed-1 is false",
        ),
    ],
)
def test_compare_with_a_bad_experiment_file(old, new, message, lab, refused):
    path = lab.folder / "ab.yaml"
    assert old in EXPERIMENT
    path.write_text(EXPERIMENT.replace(old, new))
    assert message in refused("compare", path, "--output", lab.folder / "compared")
    assert not (lab.folder / "compared").exists()


def test_compare_of_nothing(lab, refused):
    assert "experiment file not found" in refused("compare", lab.folder / "nowhere.yaml")
    assert "unknown key 'recipe'" in refused("compare", lab.config, "--output", lab.folder / "compared")


@pytest.fixture
def unloaded(monkeypatch):
    """Fails where a model is loaded."""
    import diffusion.recipe
    import mmrl.vlm.given
    import mmrl.vlm.recipe

    def refuse(*arguments, **options):
        raise AssertionError("a model was loaded")

    for module in (mmrl.vlm.recipe, mmrl.vlm.given, diffusion.recipe):
        monkeypatch.setattr(module, "load_policy", refuse)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rewards=[{name: 'no_such_module:f'}]", "no module 'no_such_module'"),
        ("rewards=[{name: 'FOLDER/rewards.py:no_prompts'}]", "takes no prompts"),
        ("rewards=[{name: 'FOLDER/rewards.py:needs_colour'}]", "data: reward"),
        ("eval_data.heldout.path=FOLDER/no_answer.jsonl", "eval_data.heldout: reward 'exact' needs answer"),
        ("data.path=FOLDER/nowhere.jsonl", "no such file"),
        ("data.path=FOLDER/nowhere", "no such file"),
        ("data.path=FOLDER/data", "has no column for the question"),
        (f"data.path={'x' * 5000}", "File name too long"),
        ("data.path=~nobody-of-this-name/rows.jsonl", "no such file"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(override, message, lab, refused, unloaded):
    row = without(lab.rows[0], "answer")
    (lab.folder / "no_answer.jsonl").write_text(json.dumps(row | {"prompt": row.pop("problem")}))
    shutil.copy(lab.folder / "data/0.png", lab.folder / "0.png")
    assert message in refused("train", lab.config, override.replace("FOLDER", str(lab.folder)))


DIFFUSION = """
recipe: {recipe}
output_dir: {folder}/image_run
model: {{path: {folder}/no_model}}
data: {{path: {folder}/prompts.jsonl}}
eval_data: {{heldout: {{path: {folder}/prompts.jsonl}}}}
rewards: [{{name: jpeg_incompressibility}}]
heldout_rewards: [{{name: shapes_geneval}}]
trainer: {{steps: 1, tasks_per_step: 2, samples_per_task: 2}}
"""


@pytest.mark.parametrize(
    ("recipe", "override", "message"),
    [
        ("flow_grpo", "data.path=nowhere.jsonl", "data: no such file: nowhere.jsonl"),
        ("flow_grpo", "eval_data.heldout.path=nowhere.jsonl", "eval_data.heldout: no such file"),
        ("flow_grpo", "rewards=[{name: jpeg}]", "there is no image reward 'jpeg'"),
        ("flow_grpo", "heldout_rewards=[{name: clip_score, options: {path: nowhere}}]", "weights not found at nowhere"),
        ("flow_grpo", "heldout_rewards=[{name: 'FOLDER/rewards.py:needs_colour'}]", "data: reward"),
        ("flow_grpo", "heldout_rewards=[{name: 'FOLDER/rewards.py:no_prompts'}]", "takes no prompts"),
        ("flow_grpo", "sampler.fraction=0.05", "fraction=0.05 of 10 steps trains none"),
        ("flow_grpo", "sampler={steps: 4, window: 3, window_low: 1, window_high: 3}", "window_high is 3"),
        ("awm", "timesteps.fraction=0.05", "timesteps.times is 'discrete_wo_init', sampler.steps 14: fraction=0.05"),
        ("awm", "sampler.steps=1", "sampler.steps"),
        ("diffusion_nft", "sampler.solver=rk4", "sampler.solver is 'rk4'"),
    ],
)
def test_image_runs_are_checked_before_a_model_is_loaded(recipe, override, message, lab, refused, unloaded):
    (lab.folder / "prompts.jsonl").write_text('{"prompt": "a red circle"}\n{"prompt": "a blue square"}\n')
    config = lab.folder / "image.yaml"
    config.write_text(DIFFUSION.format(recipe=recipe, folder=lab.folder))
    assert message in refused("train", config, override.replace("FOLDER", str(lab.folder)))


def test_workers_of_the_rewards_end_where_the_model_cannot_be_loaded(lab, refused, monkeypatch):
    closed = []
    monkeypatch.setattr("mmrl.rewards.RewardSum.close", lambda rewards: closed.append(rewards))
    assert "there is no model folder" in refused("train", lab.config, f"model.path={lab.folder}/nowhere")
    assert len(closed) == 1


def test_responses_beyond_the_model_s_positions(lab, mmrl, refused):
    line = refused("train", lab.config, "sampler.max_new_tokens=512")
    assert "sampler.max_new_tokens is 512" in line
    assert "512 positions" in line
    code, lines = mmrl("train", lab.config, "sampler.max_new_tokens=505", "trainer.steps=1", "sampler.stop=[' ',a,e]")
    assert code == 0
    (line,) = lines
    assert "leaves" in line
    assert "fewer than sampler.max_new_tokens=505" in line
    assert lab.metrics()[0]["response/beyond_positions"] == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.steps=${nope}", "nope"),
        ("seed=1" + "0" * 400, "seed is a whole number of 401 digits"),
        ("trainer.betas=[[0.9],0.9]", "trainer.betas"),
        ("sampler.stop=[[a]]", "sampler.stop"),
        ('data.path="a\\0b"', "data.path"),
        ("model.path=a\ud800", "surrogates not allowed"),
        ("objective.clip={kind: {a: 1}}", "objective: clip.kind is {'a': 1}"),
        ("recipe=${nope}", "nope"),
        ("recipe=[vlm]", "unknown recipe"),
        ("data=[1]", "data=[1]"),
        ("rewards={a: 1}", "rewards={a: 1}"),
    ],
)
def test_values_that_no_configuration_can_hold(override, message, lab, refused):
    assert message in refused("train", lab.config, override)


TWO_ARMS = """
name: two
base: {config}
arms: {{a: , b: }}
baseline: a
seeds: [1]
metric: accuracy/greedy
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("seeds: [[1]]", "seeds"),
        ("seeds: [{a: 1}]", "seeds"),
        ("seeds: [1, null]", "seeds"),
        ("seeds: 1", "seeds"),
        ("seeds: [1.5]", "seeds"),
        ("seeds: ['${nope}']", "seeds"),
        (f"base: {'x' * 400}", "base: there is no file"),
        ("base: [a]", "base"),
        ("arms: [a, b]", "arms"),
        ("arms: {a: 1, b: 2}", "arms"),
        ("metric: [a]", "metric"),
        ("jobs: many", "jobs"),
        ("sweep: [1]", "sweep"),
        ("sweep: {values: [1], seeds: [[2]]}", "sweep.seeds"),
        ("work: {costs: {images: [1]}}", "work.costs"),
        ("secondary_metrics: [[a]]", "secondary_metrics"),
        ('name: "\\0"', "name"),
    ],
)
def test_experiments_that_cannot_be_read(line, message, lab, refused):
    key = line.partition(":")[0]
    kept = [old for old in TWO_ARMS.format(config=lab.config).splitlines() if not old.startswith(f"{key}:")]
    path = lab.folder / "experiment.yaml"
    path.write_text("\n".join([*kept, line]))
    assert message in refused("compare", path, "--output", lab.folder / "compared")
    assert not (lab.folder / "compared").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [("output_dir=''", "output_dir is empty"), (f"output_dir={'x' * 256}/y", "output_dir has a name of 256 bytes")],
)
def test_output_folders_that_cannot_be(override, message, lab, refused):
    assert message in refused("train", lab.config, override)
