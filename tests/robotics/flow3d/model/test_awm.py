"""AWM on the verdict of a verifier: its numbers, its control, its outputs, and refused settings."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from diffusion.matching.times import TimestepConfig
from diffusion.sampling.latent_sampler import row_noise
from mmrl.config import load_run
from mmrl.errors import UserError
from mmrl.fields import check_config
from mmrl.runs.tracking import TrackingConfig
from mmrl.training.processes import Streams, make_accelerator
from mmrl.training.recipe import Reference, Step
from mmrl.training.run import train
from mmrl.training.settings import CheckpointConfig, TrainerConfig
from mmrl.training.trainer import Trainer, collect_metrics
from mmrl.training.update import count_denominators, update_constants
from robotics.flow3d.methods.awm import Flow3dAwmConfig, Flow3dAwmRecipe, SavedModelConfig
from robotics.flow3d.methods.clip_sets import ClipSetConfig
from robotics.flow3d.methods.flow3d_evaluation import FlowEvaluationConfig
from robotics.flow3d.methods.samples import ExplorationConfig, SampledFlows
from robotics.flow3d.model.world_model import FlowWorldModel
from robotics.flow3d.plan.judge import WeightedVerifierConfig
from tests.robotics.flow3d.model.builders import disturb, tiny_model
from tests.rounding import assert_same_gradient

HERE = "tests.robotics.flow3d.model.synthetic"
RIGHT = WeightedVerifierConfig(kind=f"{HERE}:goes_right")
BROKEN = WeightedVerifierConfig(kind=f"{HERE}:broken")


def awm_config(folder, model=None, **changes) -> Flow3dAwmConfig:
    path = folder / "start"
    if not path.exists():
        (model or disturb(tiny_model(), 0.3)).save_pretrained(path)
    settings = {
        "recipe": "flow3d_awm",
        "output_dir": str(folder / "run"),
        "model": SavedModelConfig(str(path)),
        "data": ClipSetConfig(function=f"{HERE}:make_clips", options={"count": 8}),
        "eval_data": {"held_out": ClipSetConfig(function=f"{HERE}:make_clips", options={"count": 4, "seed": 1})},
        "verifiers": [RIGHT],
        "trainer": TrainerConfig(
            steps=2, tasks_per_step=4, samples_per_task=4, learning_rate=1e-2, old_logp="recompute"
        ),
        "timesteps": TimestepConfig(count=4, fraction=1.0),
        "checkpoint": CheckpointConfig(every=1),
        "evaluation": FlowEvaluationConfig(samples=2, records=2),
        "tracking": TrackingConfig(quiet=True, tensorboard=False, strict=True),
    }
    config = Flow3dAwmConfig(**(settings | changes))
    config.validate()
    return config


def collected(recipe, tasks=4, number=0):
    step = Step(number)
    return recipe.score(recipe.rollout(recipe.policy, recipe.train_tasks[:tasks], Streams(0), step), step)


@pytest.mark.parametrize("parameterisation", ["x0", "v"])
def test_likelihoods_are_those_of_numpy(parameterisation, tmp_path):
    recipe = Flow3dAwmRecipe(awm_config(tmp_path, disturb(tiny_model(parameterisation=parameterisation), 0.3)))
    rollouts = collected(recipe)
    payload, count = SampledFlows.of(rollouts), recipe.config.timesteps.count
    noise = row_noise(payload.noise_seed, count, tuple(payload.flow.shape[1:])).double().numpy()
    sigma = payload.sigma.double().numpy()
    wide = sigma[..., None, None, None, None]
    clean = payload.flow.double().numpy()[:, None]
    noisy = (1 - wide) * clean + wide * noise
    # every row as a scene of its own, in place of one a group
    scene = rollouts.group.repeat_interleave(count)
    inputs = payload.scenes.select(scene, scene)
    with torch.no_grad():
        flat = torch.from_numpy(noisy).float().flatten(0, 1)
        found = recipe.policy(inputs, flat, payload.sigma.flatten()).double().numpy().reshape(noisy.shape)
    velocity = found if parameterisation == "v" else (noisy - found) / wide
    error = ((velocity - (noise - clean)) ** 2).mean((2, 3, 4, 5))
    expected = -sigma * 4 * ((error + 1e-10) ** 0.25 - 1e-10**0.25)
    logp = recipe.scores(recipe.policy, rollouts, frozenset({"logp"})).logp.detach()
    np.testing.assert_allclose(logp.numpy(), expected, rtol=1e-3, atol=1e-4)
    assert set(np.round(sigma.ravel(), 3)) <= {0.333, 0.667}


def test_rewards_are_weighted_verdicts_and_missing_without_a_judgement(tmp_path):
    score = dataclasses.replace(RIGHT, value="score", name="score", weight=0.5)
    recipe = Flow3dAwmRecipe(
        awm_config(tmp_path, verifiers=[RIGHT, score], heldout_verifiers=[WeightedVerifierConfig("geometric")])
    )
    rollouts = collected(recipe)
    terms = rollouts.reward_terms
    assert set(terms) == {"goes_right", "score", "geometric"}
    assert set(terms["goes_right"].tolist()) <= {0.0, 1.0}
    torch.testing.assert_close(rollouts.reward, terms["goes_right"] + 0.5 * terms["score"])
    assert len(set(terms["score"].tolist())) > 4
    records = recipe.records(rollouts, 2)
    assert "goes_right:" in records[0].response
    assert records[0].outputs[0].size == (384, 384)
    unjudged = _unjudged(Flow3dAwmRecipe(awm_config(tmp_path, verifiers=[RIGHT, BROKEN])))
    assert unjudged
    recipe = Flow3dAwmRecipe(awm_config(tmp_path, heldout_verifiers=[BROKEN]))
    rollouts = collected(recipe)
    assert collect_metrics(recipe, rollouts, Step())["reward/errors/broken/unjudged"] == unjudged
    assert rollouts.reward.isfinite().all()  # a held-out verifier has no effect on training
    found = recipe.evaluate(recipe.policy, "held_out", make_accelerator(), Step())
    assert "accuracy/broken" in found.metrics


def _unjudged(recipe) -> int:
    """Rows without a reward could not be judged; flow without a motion is only rejected."""
    rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:4], Streams(0), Step())
    payload, result = recipe._judged(rollouts)
    failed = ["Broken failed: TimeoutError: no answer" in reason for reason in payload.reasons]
    assert [math.isnan(total) for total in result.total] == failed
    return sum(failed)


def test_micro_batches_change_nothing(tmp_path):
    gradients = []
    for micro in (0, 3):
        config = awm_config(tmp_path, verifiers=[dataclasses.replace(RIGHT, value="score")])
        config.trainer.micro_batch = micro
        recipe = Flow3dAwmRecipe(config)
        rollouts = recipe.advantages(collected(recipe), make_accelerator(), Step())
        rollouts = update_constants(recipe, recipe.policy, Reference("frozen", recipe.policy), rollouts, Step())
        disturb(recipe.policy, 0.05)
        denominators = count_denominators(recipe, rollouts)
        for chunk in rollouts.micro_batches(micro or rollouts.num_rows):
            recipe.loss(recipe.policy, chunk, denominators, Step()).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in recipe.policy.parameters() if p.grad is not None]))
    assert_same_gradient(gradients[1], gradients[0])


def test_the_control_permutes_rewards_within_a_scene(tmp_path):
    score = [dataclasses.replace(RIGHT, value="score")]
    plain = collected(Flow3dAwmRecipe(awm_config(tmp_path, verifiers=score)))
    recipe = Flow3dAwmRecipe(awm_config(tmp_path, verifiers=score, shuffle_verdicts=True))
    shuffled = collected(recipe)
    assert not torch.equal(shuffled.reward, plain.reward)
    for group in range(4):
        rows = plain.group == group
        assert shuffled.reward[rows].sort().values.equal(plain.reward[rows].sort().values)
    assert shuffled.reward_terms["goes_right"].equal(plain.reward_terms["goes_right"])
    assert not torch.equal(collected(recipe, number=1).reward, shuffled.reward)


@pytest.mark.slow
def test_a_tiny_model_learns_by_verdicts_and_not_by_shuffled_ones(tmp_path):
    model, ways_cm = tiny_model(), {}
    for shuffled in (False, True):
        config = awm_config(
            tmp_path,
            model,
            data=ClipSetConfig(function=f"{HERE}:make_clips", options={"count": 4}),
            verifiers=[dataclasses.replace(RIGHT, value="score")],
            exploration=ExplorationConfig(shift_cm=5.0),
            timesteps=TimestepConfig(count=2, times="discrete_with_init", fraction=1.0),
            shuffle_verdicts=shuffled,
        )
        config.trainer.samples_per_task = 8
        recipe = Flow3dAwmRecipe(config)
        trainer = Trainer(recipe, config, tmp_path / f"run-{shuffled}", make_accelerator(), None)
        for _ in range(20):
            trainer.train_step()
        ends = [clip.with_flow(recipe.policy.predict(clip.observation, clip.points)[0]) for clip in recipe.train_tasks]
        ways_cm[shuffled] = 100 * np.mean([(end.flow_world_m[-1] - end.points_world_m)[:, 0].mean() for end in ends])
    assert ways_cm[False] > 5.0
    assert ways_cm[False] > ways_cm[True] + 5.0


def test_a_step_without_a_signal_moves_nothing(tmp_path):
    config = awm_config(tmp_path, verifiers=[dataclasses.replace(RIGHT, value="score")])
    config.trainer.weight_decay = 0.1
    recipe = Flow3dAwmRecipe(config)
    trainer = Trainer(recipe, config, tmp_path / "run", make_accelerator(), None)
    trainer.train_step()
    weights = [parameter.detach().clone() for parameter in recipe.policy.parameters()]
    sampled = collected(recipe)
    differing = (torch.arange(sampled.num_rows) % 2).to(sampled.reward)
    rollouts = recipe.advantages(sampled.replace(reward=differing), make_accelerator(), Step())
    rollouts = update_constants(recipe, recipe.policy, trainer.reference, rollouts, Step())
    assert bool((rollouts.advantage != 0).any())
    flat = rollouts.replace(advantage=torch.zeros_like(rollouts.advantage))
    found = trainer.updater.update(flat, Step(1))
    assert found["update/zero_advantage_groups"] == 1.0
    assert all(new.equal(old) for new, old in zip(recipe.policy.parameters(), weights, strict=True))
    trainer.updater.update(rollouts, Step(1))
    assert not all(new.equal(old) for new, old in zip(recipe.policy.parameters(), weights, strict=True))


def test_exploration_moves_only_samples_of_training(tmp_path):
    far = ExplorationConfig(shift_cm=4.0, turn_deg=10.0)
    plain, moved = (Flow3dAwmRecipe(awm_config(tmp_path, exploration=x)) for x in (ExplorationConfig(), far))
    before, after = (SampledFlows.of(collected(recipe)).flow for recipe in (plain, moved))
    assert bool((before != after).flatten(1).any(1).all())
    assert torch.equal(after, SampledFlows.of(collected(moved)).flow)
    found = [
        recipe.evaluate(recipe.policy, "held_out", make_accelerator(), Step()).metrics for recipe in (plain, moved)
    ]
    assert {**found[0], "cost/seconds": 0} == {**found[1], "cost/seconds": 0}


def test_a_run_leaves_a_report_and_a_model(tmp_path):
    from mmrl.recipes import RECIPES

    config = awm_config(tmp_path)
    config.eval_ema.decay = 0.5
    run_dir = train(RECIPES["flow3d_awm"], config)
    assert (run_dir / "report.html").is_file()
    checkpoint = sorted((run_dir / "checkpoints").glob("step-*"))[-1]
    Flow3dAwmRecipe.export(config, checkpoint, tmp_path / "out")
    exported, averaged = (FlowWorldModel.from_pretrained(p) for p in (tmp_path / "out", checkpoint / "eval_ema"))
    assert all(value.equal(averaged.state_dict()[name]) for name, value in exported.state_dict().items())


def test_what_cannot_work_is_refused(tmp_path):
    with pytest.raises(UserError, match="this one, of synthetic, lacks shape, layouts, seed in its metadata"):
        Flow3dAwmRecipe(awm_config(tmp_path, verifiers=[WeightedVerifierConfig("oracle")]))
    with pytest.raises(UserError, match="verifier names must be unique: goes_right"):
        Flow3dAwmRecipe(awm_config(tmp_path, heldout_verifiers=[RIGHT]))
    for wrong, message in (
        (WeightedVerifierConfig("geometric", options={"rmse": 1}), "geometric has no option rmse; it has rmse_m"),
        (WeightedVerifierConfig("oracle", options={"rmse": 1}), "oracle takes no options"),
        (WeightedVerifierConfig("endpoint", url="http://localhost:1/v1"), r"set verifier\.url"),
        (WeightedVerifierConfig("oracle", path="models/judge"), r"path is .* while verifier\.kind is 'oracle'"),
    ):
        with pytest.raises(ValueError, match=message):
            check_config(wrong, "verifier")
    for given, message in (({"shift_cm": -1.0}, "shift_cm"), ({"turn_deg": math.inf}, "turn_deg")):
        with pytest.raises(ValueError, match=message):
            awm_config(tmp_path, exploration=ExplorationConfig(**given))
    with pytest.raises(ValueError, match="value"):
        awm_config(tmp_path, verifiers=[dataclasses.replace(RIGHT, value="accepted")])
    with pytest.raises(ValueError, match="all weights are 0"):
        awm_config(tmp_path, verifiers=[dataclasses.replace(RIGHT, weight=0.0)])
    with pytest.raises(ValueError, match=r"heldout_verifiers: 'goes_right' has weight 0.5, but it is only reported"):
        awm_config(tmp_path, heldout_verifiers=[dataclasses.replace(RIGHT, weight=0.5)])
    with pytest.raises(ValueError, match=r"timesteps.fraction is 1.0, but timesteps.times 'uniform' does not read it"):
        awm_config(tmp_path, timesteps=TimestepConfig(times="uniform", fraction=1.0))
    with pytest.raises(ValueError, match=r"model\.path is empty"):
        SavedModelConfig().validate()
    with pytest.raises(UserError, match=r"rectified flow; this world model has model\.process\.kind ddim"):
        Flow3dAwmRecipe(awm_config(tmp_path / "ddim", tiny_model(kind="ddim", parameterisation="eps")))
    _, config = load_run("configs/robotics/flow3d_awm.yaml")
    assert config.verifiers[0].kind == "oracle"
