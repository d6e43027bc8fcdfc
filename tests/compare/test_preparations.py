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
