import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from diffusion.data.image_pairs import ImagePairConfig, load_pairs, write_pairs
from diffusion.methods.dpo import DiffusionDpoConfig, DiffusionDpoRecipe
from diffusion.methods.fifa import PairFilterConfig
from diffusion.sampling.trajectories import DiffusionPayload
from diffusion.toy.shapes.building import build_pairs
from mmrl.core.loss import metric_values
from mmrl.errors import UserError
from mmrl.recipes import RECIPES
from mmrl.runs.records import read_samples
from mmrl.training.processes import Streams
from mmrl.training.recipe import NoUsableTasksError, Step, make_reference
from mmrl.training.run import train
from mmrl.training.update import count_denominators, needs_reference, update_constants
from tests.diffusion.pairs import dpo_config, write_scenes
from tests.diffusion.runs import disturb, gradients, make_trainer, tiny_model, trained
from tests.rounding import assert_equal_up_to_rounding, assert_same_gradient


def built(config: DiffusionDpoConfig) -> tuple[DiffusionDpoRecipe, object]:
    """The recipe with its policy moved away from the reference."""
    config.validate()
    recipe = DiffusionDpoRecipe(config)
    reference = make_reference(config.reference, recipe.policy, needed=needs_reference(recipe), start=recipe.start)
    disturb(recipe.policy)
    return recipe, reference


def step_pairs(recipe, reference, count: int = 4):
    rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:count], Streams(0), Step())
    return update_constants(recipe, recipe.policy, reference, rollouts, Step())


def test_both_images_of_a_pair_have_the_same_time_noise_and_caption(tmp_path):
    config = dpo_config(tmp_path)
    config.timesteps.count, config.drop_caption = 3, 0.5
    recipe, reference = built(config)
    rollouts = step_pairs(recipe, reference)
    payload = DiffusionPayload.of(rollouts)
    assert rollouts.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert torch.equal(payload.sigma[::2], payload.sigma[1::2])
    assert torch.equal(payload.noise_seed[::2], payload.noise_seed[1::2])
    assert len(set(payload.noise_seed.tolist())) == 4
    assert len(set(payload.sigma[::2].flatten().tolist())) == 12
    rows = recipe.process.noisy(rollouts).rows
    clean = payload.latents.repeat_interleave(3, 0)
    noise = (rows.target + clean).view(4, 2, -1)
    assert_equal_up_to_rounding(noise[:, 0], noise[:, 1])
    assert {task.prompt for task in payload.tasks} > {""}, "some captions are dropped, of both sides"


@pytest.mark.parametrize("error", ["velocity", "noise"])
def test_the_loss_by_hand(tmp_path, error):
    config = dpo_config(tmp_path)
    config.timesteps.count, config.error = 2, error
    recipe, reference = built(config)
    rollouts = step_pairs(recipe, reference)
    versions = recipe.process.noisy(rollouts)
    rows = versions.rows
    with torch.no_grad():
        errors = []
        for score in (lambda f: f(recipe.policy), reference.score):
            velocity = score(lambda module: recipe.process.velocity(module, rollouts, rows))
            if error == "noise":  # x_t + (1 - t) v against the noise that was added
                weight = (1 - rows.sigma)[:, None, None, None]
                noise = rows.target + DiffusionPayload.of(rollouts).latents[versions.decisions.row]
                errors.append((rows.latents + weight * velocity - noise).square().flatten(1).mean(1).view(4, 2, 2))
            else:
                errors.append((velocity - rows.target).square().flatten(1).mean(1).view(4, 2, 2))
        inside = -0.5 * 100.0 * ((errors[0][:, 0] - errors[1][:, 0]) - (errors[0][:, 1] - errors[1][:, 1]))
        expected = -torch.nn.functional.logsigmoid(inside).mean()
        output = recipe.loss(recipe.policy, rollouts, count_denominators(recipe, rollouts), Step())
    assert float(output.loss) == pytest.approx(float(expected), rel=1e-3)
    found = metric_values(output.metrics)
    assert found["rewards/accuracies"] == pytest.approx(float((inside > 0).float().mean()))
    assert found["rewards/margins"] == pytest.approx(float(inside.mean()), rel=1e-2, abs=1e-4)


def test_micro_batches_change_only_rounding(tmp_path):
    config = dpo_config(tmp_path)
    config.timesteps.count = 2
    recipe, reference = built(config)
    rollouts = step_pairs(recipe, reference)
    loss, gradient = gradients(recipe, rollouts)
    for rows in (2, 4):
        other, other_gradient = gradients(recipe, rollouts, rows)
        assert_equal_up_to_rounding(torch.tensor(other), torch.tensor(loss))
        assert_same_gradient(other_gradient, gradient)


def test_fine_tuning_on_the_preferred_images_needs_no_reference(tmp_path):
    config = dpo_config(tmp_path)
    config.objective.loss = {"kind": "none"}
    config.objective.likelihood = {"kind": "nll", "coef": 2.0, "average": "decisions"}
    recipe, reference = built(config)
    assert reference.kind == "none"
    rollouts = step_pairs(recipe, reference)
    with torch.no_grad():
        loss = recipe.loss(recipe.policy, rollouts, count_denominators(recipe, rollouts), Step()).loss
        errors = recipe.process.evaluate(recipe.policy, rollouts).errors[::2]
    assert float(loss) == pytest.approx(float(errors.mean()), rel=1e-5)  # 2 * mean(error / 2)


def test_a_run_learns_the_order_and_shows_both_images(tmp_path):
    config = dpo_config(tmp_path, steps=12, tasks_per_step=6, learning_rate=3e-3)
    config.drop_caption = 0.0
    run_dir = train(RECIPES["diffusion_dpo"], config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert rows[0]["loss/total"] == pytest.approx(math.log(2), rel=1e-4), "policy and reference are the same at first"
    assert rows[-1]["loss/total"] < rows[0]["loss/total"]
    assert rows[-1]["rewards/margins"] > 0
    samples = read_samples(run_dir, 12, "train")
    assert [len(sample.outputs) for sample in samples] == [2] * len(samples)
    assert samples[0].reward == pytest.approx(samples[0].terms["rewards/margins"])


@pytest.mark.parametrize("lora", [True, False])
def test_equal_runs_are_equal_and_a_resumed_one_was_not_interrupted(tmp_path, lora):
    final = []
    for name in ("whole", "again", "resumed"):
        config = dpo_config(tmp_path / name, steps=3)
        config.model.lora = dataclasses.replace(config.model.lora, enabled=lora, rank=4, alpha=8)
        if name == "resumed":
            config.trainer.steps = 2
            make_trainer(config, tmp_path / name).run()
            config.trainer.steps = 3
        trainer = make_trainer(config, tmp_path / name)
        if name == "resumed":
            trainer.resume()
        trainer.run()
        trainer.recipe.close()
        final.append(trained(trainer.policy))
    assert torch.equal(final[0], final[1])
    assert torch.equal(final[0], final[2])


def test_the_filter_leaves_the_pairs_that_are_trained_on(tmp_path):
    config = dpo_config(tmp_path)
    config.pairs.path = str(write_scenes(tmp_path / "mixed.npz", text_quality=[10, 0, 10, 0, 10, 0]))
    config.filter = PairFilterConfig(kind="fifa", keep=3, alpha=100.0, gamma=0.5, neighbours=2)
    recipe, _ = built(config)
    assert [pair.numbers["text_quality"] for pair in recipe.train_tasks] == [10.0] * 3
    config.filter = PairFilterConfig(kind="random", keep=3, seed=1)
    assert len(built(config)[0].train_tasks) == 3


def test_pairs_with_equal_sides_are_an_error_or_counted(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3)).astype(np.uint8)
    other = images.copy()
    other[[0, 2]] = 7
    path = write_pairs(tmp_path / "pairs.npz", ["a red circle", "a blue square", "a green triangle"], images, other)
    with pytest.raises(UserError, match=r"pairs\.npz 1: both images are the same.*pairs\.on_bad_row=skip"):
        load_pairs(ImagePairConfig(path=str(path)))
    loaded = load_pairs(ImagePairConfig(path=str(path), on_bad_row="skip"))
    assert loaded.skipped == {"equal_sides": 1}
    assert [pair.caption for pair in loaded.tasks] == ["a red circle", "a green triangle"]
    write_pairs(path, ["a red circle"], images[:1], images[:1])
    with pytest.raises(UserError, match=r"no usable rows \(skipped: 1 equal_sides\)"):
        load_pairs(ImagePairConfig(path=str(path), on_bad_row="skip"))


def test_pairs_of_another_size_than_that_of_the_run_are_refused(tmp_path):
    config = dpo_config(tmp_path)
    config.model.height = 16
    recipe, reference = built(config)
    with pytest.raises(UserError, match=r"height=32, width=32, but the model draws .* height=16"):
        step_pairs(recipe, reference)


def test_pairs_in_their_own_files(tmp_path):
    from PIL import Image

    for name, grey in (("a.png", 10), ("b.png", 20), ("c.png", 10)):
        Image.new("RGB", (32, 32), (grey, grey, grey)).save(tmp_path / name)
    rows = [
        {"prompt": "a red circle", "chosen": "a.png", "rejected": "b.png", "score_chosen": 1, "score_rejected": 0.5},
        {"prompt": "a red circle", "chosen": "a.png", "rejected": "c.png"},
        {"prompt": "a red circle", "chosen": "a.png", "rejected": "a.png"},
        {"prompt": "a red circle", "chosen": "a.png", "rejected": "gone.png"},
        {"prompt": "a red circle", "chosen": "a.png"},
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    with pytest.raises(UserError, match=r"chosen and rejected are both a\.png"):
        load_pairs(ImagePairConfig(path=str(path)))
    loaded = load_pairs(ImagePairConfig(path=str(path), on_bad_row="skip"))
    assert loaded.skipped == {"equal_sides": 1, "missing_side": 2}
    assert dict(loaded.tasks[0].numbers) == {"score_chosen": 1.0, "score_rejected": 0.5}
    assert loaded.tasks[0].rejected()[0, 0, 0] == 20
    config = dpo_config(tmp_path / "run")
    config.pairs = ImagePairConfig(path=str(path), on_bad_row="skip")
    recipe, reference = built(config)
    assert step_pairs(recipe, reference).num_groups == 1, "equal pictures under two names are found when they are read"
    assert recipe.skipped["equal_sides"] == 2
    with pytest.raises(NoUsableTasksError, match="the two images of each are identical"):
        recipe.rollout(recipe.policy, recipe.train_tasks[1:], Streams(0), Step())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": 3, "chosen": "a", "rejected": "b"}], "expected the text of column prompt"),
        ([{"prompt": "x" * 20_000}], "has 20000 characters"),
        (["not an object"], "expected an object"),
    ],
)
def test_damaged_lists_are_refused(tmp_path, rows, message):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    with pytest.raises(UserError, match=message):
        load_pairs(ImagePairConfig(path=str(path)))


def test_damaged_packed_files_are_refused(tmp_path):
    path = write_scenes(tmp_path / "pairs.npz")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="is not a valid file of pairs of images"):
        load_pairs(ImagePairConfig(path=str(path)))
    with path.open("wb") as handle:
        np.savez(handle, captions=np.array(["a"]), chosen=np.zeros((1, 4, 4, 3)), rejected=np.zeros((1, 4, 4, 3)))
    with pytest.raises(UserError, match=r"must be uint8"):
        load_pairs(ImagePairConfig(path=str(path)))
    with pytest.raises(ValueError, match="known: score_chosen"):
        write_pairs(path, ["a"], np.zeros((1, 4, 4, 3), np.uint8), np.ones((1, 4, 4, 3), np.uint8), taste=[1.0])
    write_scenes(path, score_chosen=[math.nan] * 6)
    with pytest.raises(UserError, match="score_chosen is nan; must be a finite number"):
        load_pairs(ImagePairConfig(path=str(path)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: setattr(config.timesteps, "share_times", "image"), "same time with the same noise"),
        (lambda config: setattr(config.timesteps, "share_noise", False), "same time with the same noise"),
        (lambda config: setattr(config.evaluation.sampler, "guidance", 4.5), "uses no guidance"),
        (lambda config: setattr(config.evaluation.sampler, "window", 2), r"evaluation\.sampler\.window is 2"),
        (lambda config: setattr(config.trainer, "micro_batch", 1), "at least 2"),
        (lambda config: setattr(config.filter, "kind", "fifa"), "set both or neither"),
        (lambda config: setattr(config.objective, "preset", "awm"), "unknown preference objective 'awm'"),
    ],
)
def test_contradictions_are_refused_before_a_model_is_loaded(tmp_path, change, message):
    config = dpo_config(tmp_path)
    config.model.path = str(tmp_path / "no-model")
    change(config)
    with pytest.raises(ValueError, match=message):
        config.validate()


def test_pairs_are_drawn_by_a_model_and_ordered_by_a_noisy_judge(tmp_path):
    options = {"model": str(tiny_model()), "count": 8, "kinds": ["single"], "steps": 2, "garbled": 0.5, "seed": 3}
    clean = load_pairs(ImagePairConfig(path=str(build_pairs(str(tmp_path / "a.npz"), flipped=0.0, **options)))).tasks
    flipped = load_pairs(ImagePairConfig(path=str(build_pairs(str(tmp_path / "b.npz"), flipped=1.0, **options)))).tasks
    assert len(clean) == len(flipped) == 8
    assert all(pair.numbers["score_chosen"] >= pair.numbers["score_rejected"] for pair in clean)
    for one, other in zip(clean, flipped, strict=True):
        assert np.array_equal(one.chosen(), other.rejected())
        assert one.numbers["score_chosen"] == other.numbers["score_rejected"]
    qualities = {pair.numbers["text_quality"] for pair in clean}
    assert qualities == {0.0, 10.0}
    again = load_pairs(ImagePairConfig(path=str(build_pairs(str(tmp_path / "c.npz"), flipped=0.0, **options)))).tasks
    assert [pair.caption for pair in again] == [pair.caption for pair in clean]
