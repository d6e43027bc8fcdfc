"""Training of a world model: loss, learning, resuming from folders, and refused settings."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from mmrl.config import load_run
from mmrl.errors import UserError
from mmrl.fields import check_config
from mmrl.runs.tracking import TrackingConfig
from mmrl.training.processes import Streams, make_accelerator
from mmrl.training.recipe import Step
from mmrl.training.run import train
from mmrl.training.settings import BaseTrainerConfig, CheckpointConfig
from mmrl.training.trainer import Trainer
from mmrl.training.update import count_denominators
from robotics.flow3d.closed_loop.flow_episodes import LoopConfig
from robotics.flow3d.methods.clip_sets import ClipSetConfig, depth_range_m
from robotics.flow3d.methods.flow3d_evaluation import FlowEvaluationConfig
from robotics.flow3d.methods.flow3d_recipe import Flow3dConfig, Flow3dRecipe, FlowPayload, WorldModelConfig
from robotics.flow3d.model.world_model import FlowWorldModel
from tests.robotics.flow3d.model.builders import build_sd, build_vision, disturb, tiny_config
from tests.robotics.flow3d.model.synthetic import make_clips

CONFIGS = ("flow3d_traj_dit", pytest.param("flow3d_dit_factored", marks=pytest.mark.slow), "flow3d_unet_motion")
SYNTHETIC = "tests.robotics.flow3d.model.synthetic:make_clips"


def run_config(folder, model=None, **trainer) -> Flow3dConfig:
    options = {"steps": 2, "tasks_per_step": 8, "learning_rate": 5e-3} | trainer
    return Flow3dConfig(
        recipe="flow3d",
        output_dir=str(folder / "run"),
        model=model or WorldModelConfig(**vars(tiny_config())),
        data=ClipSetConfig(function=SYNTHETIC, options={"count": 16}),
        eval_data={"held_out": ClipSetConfig(function=SYNTHETIC, options={"count": 4, "seed": 1})},
        trainer=BaseTrainerConfig(**options),
        checkpoint=CheckpointConfig(every=1),
        evaluation=FlowEvaluationConfig(samples=2, records=2),
        tracking=TrackingConfig(quiet=True, tensorboard=False, strict=True),
    )


def a_step(recipe, count=8):
    return recipe.rollout(recipe.policy, recipe.train_tasks[:count], Streams(0), Step())


@pytest.mark.parametrize(
    ("kind", "parameterisation"), [("rectified", "x0"), ("rectified", "v"), ("ddim", "eps"), ("ddim", "v")]
)
def test_the_loss_is_that_of_numpy(kind, parameterisation, tmp_path):
    model = WorldModelConfig(**vars(tiny_config(kind=kind, parameterisation=parameterisation)))
    recipe = Flow3dRecipe(run_config(tmp_path, model))
    disturb(recipe.policy)
    rollouts = a_step(recipe)
    payload = FlowPayload.of(rollouts)
    time = payload.time.double().numpy()[:, None, None, None, None]
    clean, noise = payload.flow.double().numpy(), payload.noise.double().numpy()
    if kind == "rectified":
        noisy = (1 - time) * clean + time * noise
        target = {"x0": clean, "v": noise - clean}[parameterisation]
    else:
        share = np.cumprod(1 - np.linspace(0.00085, 0.012, 1000))[time.astype(int)]
        noisy = np.sqrt(share) * clean + np.sqrt(1 - share) * noise
        target = {"eps": noise, "v": np.sqrt(share) * noise - np.sqrt(1 - share) * clean}[parameterisation]
    with torch.no_grad():
        found = recipe.policy(payload.inputs, torch.from_numpy(noisy).float(), payload.time, payload.keep_text)
    expected = ((found.double().numpy() - target) ** 2).mean()
    loss = recipe.loss(recipe.policy, rollouts, count_denominators(recipe, rollouts), Step()).loss
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-3)


def test_hidden_points_are_left_out_of_the_loss_but_not_their_visibility(tmp_path, monkeypatch):
    clips = make_clips(4)
    for clip in clips:
        clip.flow[2, 0, 1, 3] = 0.0
    monkeypatch.setattr("robotics.flow3d.methods.flow3d_recipe.load_clips", lambda config, where: clips)
    config = run_config(tmp_path, WorldModelConfig(**vars(tiny_config(visibility="channel"))))
    config.loss_mask = "visible"
    recipe = Flow3dRecipe(config)
    rollouts = a_step(recipe, 4)
    counted = rollouts.mask.view(4, 4, 4, 3, 3)
    assert not counted[:, :3, 2, 0, 1].any()
    assert counted.sum() == counted.numel() - 4 * 3
    payload = FlowPayload.of(rollouts)
    with torch.no_grad():
        before = recipe.loss(recipe.policy, rollouts, count_denominators(recipe, rollouts), Step()).loss
        payload.flow[:, :3, 2, 0, 1] += 5.0  # the network starts at zero, so only the target changes
        assert recipe.loss(recipe.policy, rollouts, count_denominators(recipe, rollouts), Step()).loss == before
        payload.flow[:, 3, 2, 0, 1] += 5.0
        assert recipe.loss(recipe.policy, rollouts, count_denominators(recipe, rollouts), Step()).loss > before


def test_micro_batches_change_nothing(tmp_path):
    recipe = Flow3dRecipe(run_config(tmp_path))
    disturb(recipe.policy)
    rollouts = a_step(recipe)
    denominators = count_denominators(recipe, rollouts)
    whole = recipe.loss(recipe.policy, rollouts, denominators, Step()).loss
    parts = [recipe.loss(recipe.policy, part, denominators, Step()).loss for part in rollouts.micro_batches(3)]
    torch.testing.assert_close(torch.stack(parts).sum(), whole)


def test_instructions_are_blanked_at_the_given_rate(tmp_path):
    model = WorldModelConfig(**vars(tiny_config(text_drop=0.3)))
    config = run_config(tmp_path, model)
    config.data.options["count"] = 400
    kept = FlowPayload.of(a_step(Flow3dRecipe(config), 400)).keep_text
    assert 0.6 < float(kept.float().mean()) < 0.8
    assert FlowPayload.of(a_step(Flow3dRecipe(run_config(tmp_path)))).keep_text.all()


@pytest.mark.slow
def test_a_tiny_model_learns_to_follow_the_instruction(tmp_path):
    model = WorldModelConfig(**vars(tiny_config()))
    model.body = dataclasses.replace(model.body, width=32)
    model.condition = dataclasses.replace(model.condition, width=32)
    config = run_config(tmp_path, model, steps=260, tasks_per_step=32, learning_rate=6e-3, schedule="cosine")
    config.data.options["count"] = 600
    config.eval_data["held_out"].options["count"] = 24
    config.eval_ema.decay = 0.9
    trainer = Trainer(Flow3dRecipe(config), config, tmp_path / "run", make_accelerator(), None)
    for _ in range(260):
        trainer.train_step()
    found = trainer.recipe.evaluate(trainer.policy, "held_out", make_accelerator(), Step()).metrics
    assert found["flow/ade_cm"] < 0.5 * found["flow/zero_motion_ade_cm"]
    assert found["accuracy/language_swap"] > 0.9
    assert found["flow/best_ade_cm"] <= found["flow/ade_cm"] <= found["flow/fde_cm"]


def test_evaluation_by_task_and_source_with_images(tmp_path, monkeypatch):
    clips = [*make_clips(4, task="push"), *make_clips(4, seed=2, task="lift")]
    monkeypatch.setattr("robotics.flow3d.methods.flow3d_recipe.load_clips", lambda config, where: clips)
    recipe = Flow3dRecipe(run_config(tmp_path))
    result = recipe.evaluate(recipe.policy, "held_out", make_accelerator(), Step())
    parts = [result.metrics[f"flow/ade_cm/task={task}"] for task in ("push", "lift")]
    assert result.metrics["flow/ade_cm"] == pytest.approx(np.mean(parts))
    # an untrained network predicts what it starts from, zero displacement
    assert result.metrics["flow/ade_cm"] == pytest.approx(result.metrics["flow/zero_motion_ade_cm"], rel=1e-3)
    assert len(result.records) == 2
    assert len(result.records[0].outputs) == 2
    assert not any("source=" in name for name in result.metrics)
    again = recipe.evaluate(recipe.policy, "held_out", make_accelerator(), Step())
    assert again.metrics == result.metrics


def test_another_run_can_start_from_the_run_folder(tmp_path):
    config = run_config(tmp_path / "first")
    config.model.words = ["yellow"]
    entry_config = dataclasses.replace(config)
    from mmrl.recipes import RECIPES

    run_dir = train(RECIPES["flow3d"], entry_config)
    assert (run_dir / "report.html").is_file()
    checkpoint = sorted((run_dir / "checkpoints").glob("step-*"))[-1]
    saved = FlowWorldModel.from_pretrained(checkpoint / "eval_ema")
    assert "yellow" in saved.vocabulary.words
    low, high = depth_range_m(make_clips(16))
    assert (saved.encoding.z_min_m, saved.encoding.z_max_m) == pytest.approx((low, high))
    assert low < 0.9 < 1.0 < high
    out = Flow3dRecipe.export(config, checkpoint, tmp_path / "out")
    assert out.call.endswith("from_pretrained")
    exported = FlowWorldModel.from_pretrained(tmp_path / "out").state_dict()
    assert all(value.equal(exported[name]) for name, value in saved.state_dict().items())
    later = run_config(tmp_path / "second", WorldModelConfig(path=str(checkpoint / "model")))
    recipe = Flow3dRecipe(later)
    assert recipe.policy.encoding == saved.encoding
    later.model.body.width = 24
    with pytest.raises(UserError, match=r"model\.body\.width is 24, but the model in"):
        Flow3dRecipe(later)


def test_clips_that_do_not_fit_are_refused(tmp_path):
    config = run_config(tmp_path)
    config.data.options["frames"] = 5
    with pytest.raises(UserError, match="num_frames=5 and grid=3"):
        Flow3dRecipe(config)
    config = run_config(tmp_path)
    config.data.options["count"] = 0
    with pytest.raises(UserError, match="data: no clips found"):
        Flow3dRecipe(config)
    config.data = ClipSetConfig(path=str(tmp_path / "missing"))
    with pytest.raises(UserError, match="data: "):
        Flow3dRecipe(config)
    for wrong, message in (
        (ClipSetConfig(), "set either path"),
        (
            ClipSetConfig(function="a:b", split="train"),
            "split is .*, but it has no effect while function is 'a:b'",
        ),
        (ClipSetConfig(path="a", options={"a": 1}), "it has no effect while function is ''; .* or set function"),
    ):
        with pytest.raises((UserError, ValueError), match=message):
            check_config(wrong)


def test_options_of_episodes_need_episodes(tmp_path):
    config = run_config(tmp_path)
    config.validate()
    config.loop = LoopConfig(language_swap=False)
    with pytest.raises(UserError, match="loop is set, but it has no effect while episodes is"):
        check_config(config)


def test_clips_of_a_folder_are_the_same_from_disk_and_in_memory(tmp_path):
    pytest.importorskip("pyarrow")
    from robotics.flow3d.data import FlowWriter

    with FlowWriter(tmp_path / "clips", num_frames=4, grid=3) as writer:
        for number, clip in enumerate(make_clips(6)):
            writer.add(clip, split="train" if number < 4 else "held_out")
    found = []
    for in_memory in (True, False):
        config = run_config(tmp_path)
        config.data = ClipSetConfig(path=str(tmp_path / "clips"), split="train")
        config.in_memory = in_memory
        recipe = Flow3dRecipe(config)
        assert len(recipe.train_tasks) == 4
        found.append(FlowPayload.of(a_step(recipe, 4)))
        digest = recipe.data_digest()
    assert found[0].flow.equal(found[1].flow)
    assert found[0].inputs.images.equal(found[1].inputs.images)
    config.data.split = "held_out"
    assert Flow3dRecipe(config).data_digest() != digest


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_takes_two_steps(name, tmp_path):
    frames, side = (8, 8) if name == "flow3d_dit_factored" else (8, 4)
    options = {"count": 4, "frames": frames, "side": side}
    overrides = [
        f"output_dir={tmp_path / 'run'}",
        f"data={{path: '', split: '', build: null, function: '{SYNTHETIC}', options: {json.dumps(options)}}}",
        f"eval_data.held_out={{path: '', split: '', function: '{SYNTHETIC}', options: {json.dumps(options)}}}",
        *("trainer.steps=2", "trainer.tasks_per_step=2", "trainer.warmup_steps=0", "trainer.mixed_precision=none"),
        *("evaluation.samples=1", "evaluation.max_tasks=2", "evaluation.every=0", "checkpoint.every=0"),
        *("tracking.quiet=true", "tracking.tensorboard=false", "tracking.strict=true"),
    ]
    if name == "flow3d_unet_motion":  # at the paper's shapes it needs a GPU, and its weights a download
        sd, vision = build_sd(tmp_path / "sd"), build_vision(tmp_path / "vision")
        overrides += [
            f"model.body.unet={{pretrained: {sd}, channels: [8, 16], layers: 1, norm_groups: 4, lora_rank: 2}}",
            f"model.condition={{text: {sd}, vision: {vision}, width: 16, image_px: 32}}",
            *("model.encoding.num_frames=8", "model.encoding.grid=4", "model.process.steps=2"),
            *("trainer.micro_batch=1", "in_memory=true"),
        ]
    entry, config = load_run(f"configs/robotics/{name}.yaml", overrides)
    run_dir = train(entry, config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["loss/total"] > 0 for row in rows)


def test_a_configuration_builds_its_clips_on_a_fresh_machine(tmp_path):
    pytest.importorskip("mujoco")
    pytest.importorskip("pyarrow")
    overrides = [
        f"output_dir={tmp_path / 'run'}",
        *(f"{key}.path={tmp_path / 'clips'}" for key in ("data", "eval_data.held_out")),
        "data.build_options={scenes: 6, held_out_scenes: 3, image_size: 32, actors: [nobody]}",
        *("trainer.steps=1", "trainer.tasks_per_step=4", "evaluation.samples=1", "evaluation.every=0"),
        *("tracking.quiet=true", "tracking.tensorboard=false", "tracking.strict=true"),
    ]
    entry, config = load_run("configs/robotics/flow3d_traj_dit.yaml", overrides)
    result = json.loads((train(entry, config) / "result.json").read_text())
    evaluation = result["last_evaluation"]["held_out"]
    assert evaluation["n"] == 7  # three images with three, two and two instructions
    assert 0 <= evaluation["accuracy/language_swap"] <= 1
    assert evaluation["flow/ade_cm"] > 0


def test_a_depth_range_that_the_data_replace_is_refused():
    model = WorldModelConfig()
    model.encoding = dataclasses.replace(model.encoding, z_max_m=2.0)
    with pytest.raises(ValueError, match=r"encoding\.z_max_m is 2\.0, but model.depth_range=data takes it"):
        model.validate()
    dataclasses.replace(model, depth_range="given").validate()
