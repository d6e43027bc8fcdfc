"""Invalid configurations."""

import json
import shutil

import pytest

from tests.bad_input.conftest import without


@pytest.mark.parametrize(
    ("override", "messages"),
    [
        ("trainer.stepz=3", ["unknown key 'trainer.stepz'", "did you mean 'trainer.steps'", "learning_rate"]),
        ("trainr.steps=3", ["unknown key 'trainr'", "did you mean 'trainer'"]),
        ("rewards=[{nam: exact}]", ["unknown key 'nam'", "did you mean 'name'"]),
        ("eval_data.heldout.pth=x", ["unknown key 'eval_data.heldout.pth'", "did you mean 'eval_data.heldout.path'"]),
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
        ("objective.preset=grpoo", ["'grpoo'", "did you mean 'grpo'", "dapo"]),
        ("objective.advantage.kind=mean", ["'mean'", "group_mean_std"]),
        ("trainer.samples_per_task=1", ["samples_per_task is 1", "group_mean_std", "whitened_returns"]),
        ("rewards=[{name: exakt}]", ["'exakt'", "did you mean 'exact'", "format"]),
        ("rewards=[{name: exact, options: {answr: 1}}]", ["'exact'", "'answr'", "did you mean 'answer'"]),
        ("rewards=[{name: 'no_such_module:f'}]", ["module 'no_such_module' not found"]),
        ("model.build_options={hiden: 3}", []),
    ],
)
def test_wrong_configuration(override, messages, lab, refused):
    extra = ["model.build=mmrl.vlm.toy.digits:build_model", f"model.path={lab.folder}/new"] if not messages else []
    line = refused("train", lab.config, override, *extra)
    for message in messages or ["mmrl.vlm.toy.digits:build_model", "'hiden'"]:
        assert message in line
    assert not lab.run.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "configuration file not found: "),
        ("a: [1", "is not valid YAML"),
        ("", "no `recipe:` key"),
        ("- a\n", "contains a list; expected keys and values"),
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
    ("override", "message"),
    [
        ("rewards=[{name: 'no_such_module:f'}]", "module 'no_such_module' not found"),
        ("rewards=[{name: 'FOLDER/rewards.py:no_prompts'}]", "does not take prompts"),
        ("rewards=[{name: 'FOLDER/rewards.py:needs_colour'}]", "data: reward"),
        ("eval_data.heldout.path=FOLDER/no_answer.jsonl", "eval_data.heldout: reward 'exact' needs answer"),
        ("data.path=FOLDER/nowhere.jsonl", "file not found"),
        ("data.path=FOLDER/nowhere", "file not found"),
        ("data.path=FOLDER/data", "has no question column"),
        (f"data.path={'x' * 5000}", "File name too long"),
        ("data.path=~nobody-of-this-name/rows.jsonl", "file not found"),
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
        ("flow_grpo", "data.path=nowhere.jsonl", "data: file not found: nowhere.jsonl"),
        ("flow_grpo", "eval_data.heldout.path=nowhere.jsonl", "eval_data.heldout: file not found"),
        ("flow_grpo", "rewards=[{name: jpeg}]", "unknown image reward 'jpeg'"),
        ("flow_grpo", "heldout_rewards=[{name: clip_score, options: {path: nowhere}}]", "weights not found at nowhere"),
        ("flow_grpo", "heldout_rewards=[{name: 'FOLDER/rewards.py:needs_colour'}]", "data: reward"),
        ("flow_grpo", "heldout_rewards=[{name: 'FOLDER/rewards.py:no_prompts'}]", "does not take prompts"),
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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.steps=${nope}", "nope"),
        ("seed=1" + "0" * 400, "seed is an integer with 401 digits"),
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


def test_what_the_environment_holds_is_in_no_file_of_a_run(lab, mmrl, monkeypatch, capsys):
    monkeypatch.setenv("MMRL_TEST_TOKEN", "s3cr3t")
    token = "token: '${oc.env:MMRL_TEST_TOKEN}'"
    questions = lab.folder / "made/questions.jsonl"
    overrides = [
        f"data={{path: {questions}, build: '{lab.folder}/rewards.py:copied', "
        f"build_options: {{source: {lab.folder}/data, {token}}}}}",
        f"rewards=[{{name: keyed, function: '{lab.folder}/rewards.py:with_token', options: {{{token}}}}}]",
        "evaluation.at_end=true",
        f"eval_data.heldout.path={questions}",
    ]
    code, lines = mmrl("train", lab.config, *overrides)
    assert code == 0, lines
    assert mmrl("train", lab.run / "config.yaml", "--resume", "trainer.steps=3")[0] == 0
    assert mmrl("evaluate", lab.run)[0] == 0
    assert mmrl("report", lab.run)[0] == 0
    assert mmrl("export", lab.run)[0] == 0
    files = [path for folder in (lab.run, lab.folder / "made") for path in folder.rglob("*") if path.is_file()]
    assert {"config.yaml", "protocol.json", "report.html", "README.md"} <= {path.name for path in files}
    assert [str(path) for path in files if b"s3cr3t" in path.read_bytes()] == []
    assert any(b"oc.env:MMRL_TEST_TOKEN" in path.read_bytes() for path in files if path.name == "protocol.json")
    monkeypatch.delenv("MMRL_TEST_TOKEN")
    for words in (["train", lab.run / "config.yaml", "--resume", "trainer.steps=4"], ["evaluate", lab.run]):
        code, lines = mmrl(*words)
        assert code == 2
        assert "Environment variable 'MMRL_TEST_TOKEN' not found" in lines[-1]
