"""Robot runs that are killed around an evaluation: episodes, images and videos appear exactly once; export."""

import shutil

import numpy as np
import pytest
import torch

from mmrl.recipes import find_recipe
from mmrl.report.export import export_run
from mmrl.training.run import train
from mmrl.training.saving import RunSaver
from mmrl.training.trainer import Trainer
from robotics.episodes.episode_evaluation import RobotEvaluationConfig
from robotics.methods.robot_recipe import RobotRecipe
from tests.faults.sameness import differences
from tests.robotics.test_robot_recipes import grpo


class KilledError(BaseException):
    """An exception that the run does not catch, like a kill."""


def kill(*arguments, **keywords):
    raise KilledError


def config_of(folder):
    evaluation = RobotEvaluationConfig(every=1, batch_tasks=3, records=4, samples=1)
    return grpo(folder, evaluation=evaluation)


def files(run, *patterns):
    found = sorted(path for pattern in patterns for path in run.glob(pattern) if path.is_file())
    return {str(path.relative_to(run)): path.read_bytes() for path in found}


def killed_run(folder, monkeypatch, place):
    calls = []
    with monkeypatch.context() as patch:
        if place == "between evaluation and checkpoint":
            patch.setattr(RunSaver, "save", kill)
        elif place == "before the first step":
            patch.setattr(Trainer, "train_step", kill)
        else:  # in the evaluation after the first step, with the first batches done
            import robotics.episodes.episode_evaluation as evaluation

            run = evaluation.RobotMeasure.run
            evaluate = RobotRecipe.evaluate

            def counted(self, *arguments):
                calls.append("evaluation")
                return evaluate(self, *arguments)

            def cut(self, batch, start):
                if len(calls) == 2 and start:
                    raise KilledError
                return run(self, batch, start)

            patch.setattr(RobotRecipe, "evaluate", counted)
            patch.setattr(evaluation.RobotMeasure, "run", cut)
        with pytest.raises(KilledError):
            train(find_recipe("robot_grpo"), config_of(folder))


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("before the first step", marks=pytest.mark.slow),
        "in an evaluation",
        pytest.param("between evaluation and checkpoint", marks=pytest.mark.slow),
    ],
)
def test_nothing_of_an_evaluation_is_lost_or_written_twice(tmp_path, monkeypatch, place):
    whole = train(find_recipe("robot_grpo"), config_of(tmp_path / "whole"))
    killed_run(tmp_path / "killed", monkeypatch, place)
    resumed = train(find_recipe("robot_grpo"), config_of(tmp_path / "killed"), resume=True)
    assert any(name.endswith(".png") for name in files(whole, "samples/**/*"))
    assert differences(whole, resumed) == []


def test_export_of_a_module_of_the_users_own_is_its_folder(tmp_path):
    config = grpo(tmp_path)
    run = train(find_recipe("robot_grpo"), config)
    call = export_run(find_recipe("robot_grpo"), config, run, tmp_path / "out")
    assert call == f"tests.robotics.line_policies:make_walker(...).load_weights({str(tmp_path / 'out')!r})"
    model = run / "checkpoints/step-000003/model"
    exported = files(tmp_path / "out", "*")
    assert exported.pop("export.json")
    assert b"only in simulation" in exported.pop("README.md")
    assert exported == files(model, "*")


@pytest.mark.parametrize("kind", ["small", "adapter"])
def test_exported_policy_acts_as_the_trained_one(tmp_path, kind):
    from robotics import PolicyInputs, open_policy

    policy = make_policy(tmp_path, kind)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))), alpha=0.02)
    policy.export(tmp_path / "out")
    shutil.rmtree(tmp_path / "base", ignore_errors=True)
    inputs = PolicyInputs(
        images=torch.from_numpy(np.random.default_rng(0).integers(0, 255, (2, 32, 32, 3), np.uint8)),
        state=torch.zeros(2, 3),
        instructions=("go right", "go left"),
    )
    actions = [
        each.act(inputs, torch.Generator().manual_seed(0), greedy=True).actions
        for each in (policy, open_policy(tmp_path / "out"))
    ]
    torch.testing.assert_close(actions[0], actions[1], rtol=0, atol=1e-4)


def make_policy(folder, kind):
    if kind == "small":
        from robotics import SmallVlaConfig, SmallVlaPolicy
        from robotics.policies.base.encoder import EncoderConfig

        encoder = EncoderConfig(image_size=(32, 32), state_size=3)
        return SmallVlaPolicy.build(
            SmallVlaConfig(action_size=2, chunk=2, encoder=encoder), ["go right", "go left"], seed=0
        )
    from mmrl.vlm.model.model_config import LoraSettings, ModelConfig
    from mmrl.vlm.toy.tiny import build_tiny_vlm
    from robotics.policies.vlm import VlmActionConfig, VlmActionPolicy

    base = build_tiny_vlm(folder / "base", corpus=["go right", "go left"], initializer_range=0.15, max_positions=256)
    model = ModelConfig(path=str(base), lora=LoraSettings(enabled=True, rank=2, alpha=4))
    return VlmActionPolicy.from_model(model, VlmActionConfig(action_size=2, chunk=2, state_size=3, bins=32))
