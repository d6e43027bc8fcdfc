"""Held-out images: the same seeds at every evaluation, distances to the start, costs."""

import json

import numpy as np
import pytest
import torch

from diffusion.diffusion_evaluation import latent_diversity
from mmrl.recipes import RECIPES
from mmrl.training.processes import make_accelerator
from mmrl.training.recipe import Step, make_reference
from mmrl.training.run import train
from tests.diffusion.runs import build, disturb, make_trainer, read_lines, run_config


def shown(evaluation):
    return [np.asarray(image) for record in evaluation.records for image in record.outputs]


def evaluated(recipe):
    return recipe.evaluate(recipe.policy, "held_out", make_accelerator(), Step())


@pytest.mark.parametrize("lora", [True, False])
def test_evaluation_repeats_and_starts_at_distance_zero(lora, tmp_path):
    config = run_config("awm", tmp_path)
    config.model.lora.enabled = lora
    recipe = build(config)
    first, second = evaluated(recipe), evaluated(recipe)
    assert first.metrics == second.metrics
    assert first.metrics["distance/base"] == 0.0
    assert first.metrics["n"] == 3.0
    assert first.metrics["unscored"] == 0.0
    assert len(shown(first)) == 4  # records of two prompts, two images each
    for one, other in zip(shown(first), shown(second), strict=True):
        assert np.array_equal(one, other)
    assert not np.array_equal(shown(first)[0], shown(first)[1])
    disturb(recipe.policy)
    moved = evaluated(recipe)
    assert moved.metrics["distance/base"] > 0
    assert not np.array_equal(shown(first)[0], shown(moved)[0])


def test_a_run_from_an_adapter_compares_with_its_own_start(tmp_path):
    """Both the evaluation's distance and the reference of a KL term."""
    recipe = build(run_config("flow_grpo", tmp_path))
    disturb(recipe.policy)
    recipe.policy.save_pretrained(tmp_path / "adapter")
    config = run_config("flow_grpo", tmp_path)
    config.model.path = str(tmp_path / "adapter")
    recipe = build(config)
    assert evaluated(recipe).metrics["distance/base"] == 0.0
    assert make_reference(config.reference, recipe.policy, needed=True, start=recipe.start) is recipe.start
    disturb(recipe.policy)
    assert evaluated(recipe).metrics["distance/base"] > 0.0


def test_seeds_depend_on_split_and_prompt_alone(tmp_path):
    config = run_config("awm", tmp_path)
    one = shown(evaluated(build(config)))
    config.evaluation.batch_tasks, config.sampler.batch_rows = 1, 1
    for image, other in zip(one, shown(evaluated(build(config))), strict=True):
        assert abs(image.astype(int) - other.astype(int)).max() <= 1
    config.seed = 1
    assert not np.array_equal(one[0], shown(evaluated(build(config)))[0])


def test_rewards_and_judges_have_their_own_names_and_intervals(tmp_path):
    config = run_config("awm", tmp_path)
    recipe = build(config)
    metrics = evaluated(recipe).metrics
    for name in ("score/caption_colour", "heldout/jpeg_incompressibility"):
        assert metrics[f"{name}/low"] <= metrics[name] <= metrics[f"{name}/high"]
    assert not any(name.startswith(("heldout/caption_colour", "score/jpeg")) for name in metrics)
    assert metrics["diversity/latent"] > 0.1


def test_costs_are_those_of_training_alone(tmp_path):
    config = run_config("flow_grpo", tmp_path, minibatches_per_step=1)
    trainer = make_trainer(config, tmp_path)
    trainer.evaluate("before")
    assert trainer.log.evaluations[0]["cost/forward_rows"] == 0.0
    trainer.train_step()
    trainer.evaluate("after")
    after = trainer.log.evaluations[1]
    # eight images of four steps with guidance; three trained steps: the negative half and two of the reference without
    # a graph, the positive half with one
    assert after["cost/forward_rows"] == 8 * 4 * 2 + 8 * 3 * (1 + 2)
    assert after["cost/train_rows"] == 8 * 3
    assert after["cost/samples"] == 8.0
    trainer.recipe.close()


def test_evaluations_use_the_average(tmp_path):
    config = run_config("awm", tmp_path)
    config.eval_ema.decay = 0.9
    recipe = build(config)
    start = shown(evaluated(recipe))
    first = torch.cat([v.flatten() for v in recipe.eval_ema.state_dict().values()])
    disturb(recipe.policy, 0.3)
    weights = [p.clone() for p in recipe.policy.parameters()]
    for one, other in zip(start, shown(evaluated(recipe)), strict=True):
        assert np.array_equal(one, other)  # the average has not moved yet
    assert all(torch.equal(p, kept) for p, kept in zip(recipe.policy.parameters(), weights, strict=True))
    recipe.on_step_end(Step(), {})  # keeps 2 / 11 of the old average
    assert not np.array_equal(start[0], shown(evaluated(recipe))[0])
    values = torch.cat([v.flatten() for v in recipe.eval_ema.state_dict().values()])
    now = torch.cat([p.detach().flatten() for p in recipe.policy.parameters() if p.requires_grad])
    torch.testing.assert_close(values, (2 * first + 9 * now) / 11)


def test_images_that_cannot_be_scored_are_counted(tmp_path, monkeypatch):
    import diffusion.diffusion_evaluation

    real = diffusion.diffusion_evaluation.sample_latents

    def spoilt(*arguments, **options):
        latents = real(*arguments, **options)
        latents[0] = float("nan")
        return latents

    monkeypatch.setattr(diffusion.diffusion_evaluation, "sample_latents", spoilt)
    metrics = evaluated(build(run_config("awm", tmp_path))).metrics
    assert metrics["unscored"] == 2.0  # of one image, one for each of two terms
    assert np.isfinite(metrics["score/caption_colour"])
    assert np.isfinite(metrics["distance/base"])


def test_diversity_by_hand():
    latents = torch.zeros(3, 2, 1, 2)
    latents[1] = 2.0
    latents[2, 0] = 2.0
    # root mean squares 2, sqrt(2), sqrt(2)
    assert latent_diversity(latents) == pytest.approx((2 + 2 * 2**0.5) / 3)
    assert latent_diversity(latents[:1]) == 0.0
    noise = torch.randn(40, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    assert latent_diversity(noise) == pytest.approx(2**0.5, rel=0.01)


def test_a_whole_run_writes_evaluations_images_and_a_report(tmp_path):
    run_dir = train(RECIPES["awm"], run_config("awm", tmp_path))
    assert json.loads((run_dir / "result.json").read_text())["status"] == "done"
    evaluations = read_lines(run_dir / "evaluations.jsonl")
    assert [row["tag"] for row in evaluations] == ["before", "after"]
    assert evaluations[0]["distance/base"] == 0.0
    assert evaluations[1]["distance/base"] > 0.0
    assert read_lines(run_dir / "metrics.jsonl")[0]["policy/ratio_mean"] == 1.0
    assert (run_dir / "report.html").stat().st_size > 10_000
