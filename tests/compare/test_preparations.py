import json

import pytest

from mmrl.errors import RunError, UserError


def test_preparations_run_once_and_arms_find_them(lab):
    (lab.folder / "sft.yaml").write_text("recipe: sft\n")
    prepare = [{"config": "sft.yaml", "run_dir": "prepare/sft", "overrides": {"seed": 5}}]
    arms = {"papo": {"overrides": {"model.path": "{output_dir}/prepare/sft/model"}}, "grpo": {}}
    lab.run(prepare=prepare, arms=arms, seeds=[1])
    lab.run(prepare=prepare, arms=arms, seeds=[1, 2])
    assert lab.starts("prepare/sft") == ["fresh"]
    settings = json.loads((lab.output / "runs/papo/seed-2/settings.json").read_text())
    assert settings["model.path"] == f"{lab.output}/prepare/sft/model"


def test_a_failed_preparation_stops_the_experiment(lab):
    prepare = [{"config": "base.yaml", "run_dir": "sft", "overrides": {"seed": 5, "trouble5": "crash"}}]
    with pytest.raises(RunError, match="preparation sft failed: exit code 1: loss is NaN"):
        lab.run(prepare=prepare)
    assert not (lab.output / "runs").exists()


def test_a_preparation_made_by_hand_is_used_when_its_settings_agree(lab):
    sft = lab.folder / "sft"
    sft.mkdir()
    (sft / "result.json").write_text('{"status": "done"}')
    (sft / "config.yaml").write_text("recipe: papo\nseed: 5\ntrainer: {steps: 9, learning_rate: 1e-3}\n")
    same = {"config": "base.yaml", "run_dir": str(sft), "overrides": {"seed": 5, "trainer.steps": 9}}
    assert lab.run(prepare=[same])["status"] == "done"
    for other in ({"seed": 6}, {"trainer": {"steps": 8}}):
        with pytest.raises(UserError, match="no experiment wrote"):
            lab.run(prepare=[{**same, "overrides": other}])
    assert (sft / "result.json").exists()


def test_runs_from_a_changed_preparation_are_repeated(lab):
    def call(gain):
        prepare = [
            {"config": "base.yaml", "run_dir": "sft", "overrides": {"gain": gain}},
            {"config": "base.yaml", "run_dir": "next", "overrides": {"model.path": "{output_dir}/sft/model"}},
            {"config": "base.yaml", "run_dir": "sft-2"},
        ]
        arms = {"papo": {"overrides": {"model.path": "{output_dir}/next/model"}}, "grpo": {}, "other": {}}
        arms["other"]["overrides"] = {"model.path": "{output_dir}/sft-2/model"}
        lab.run(prepare=prepare, arms=arms, seeds=[1])

    call(0.1)
    marker = lab.output / "runs/papo/seed-1/experiment_run.json"
    before = marker.stat().st_mtime_ns
    call(0.1)
    assert marker.stat().st_mtime_ns == before
    call(0.3)
    replaced = sorted(str(path.relative_to(lab.output)) for path in lab.output.rglob("*.replaced-1"))
    assert replaced == ["next.replaced-1", "runs/papo/seed-1.replaced-1", "sft.replaced-1"]


def test_runs_of_earlier_versions_do_not_name_their_preparations(lab):
    prepare = [{"config": "base.yaml", "run_dir": "sft"}]
    lab.run(prepare=prepare, overrides={"model.path": "{output_dir}/sft/model"}, seeds=[1])
    marker = lab.output / "runs/papo/seed-1/experiment_run.json"
    content = json.loads(marker.read_text())
    assert content.pop("after")
    marker.write_text(json.dumps(content))
    lab.run(prepare=prepare, overrides={"model.path": "{output_dir}/sft/model"}, seeds=[1])
    assert "2 of 2 runs have already finished" in lab.lines
