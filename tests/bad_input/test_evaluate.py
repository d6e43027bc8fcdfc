"""`mmrl evaluate` and `mmrl report` on folders that are not runs."""

import json
import shutil

from tests.bad_input.conftest import truncate


def test_evaluate_a_folder_that_is_not_a_run(made, lab, refused):
    empty = lab.folder / "empty"
    empty.mkdir()
    assert f"{empty} is not a run folder: it contains no config.yaml" in refused("evaluate", empty)
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


def test_report_of_a_folder_that_is_not_a_run(lab, refused):
    empty = lab.folder / "empty"
    empty.mkdir()
    for folder in (empty, lab.folder / "nowhere", lab.config):
        assert f"{folder} is not a run folder: it contains no config.yaml" in refused("report", folder)
    assert not (empty / "report.html").exists()
