import numpy as np
import pytest
import torch

from diffusion.toy.shapes import KINDS, all_scenes, parse_caption, render_dataset
from diffusion.toy.shapes.judge import LOOKS, ShapesJudge, shapes_judge, wanted_counts
from mmrl.errors import UserError


@pytest.fixture(scope="module")
def judge():
    return ShapesJudge.fit(1, images=900)


def right_and_wrong(judge, kind, count):
    """Scores under the image's own caption and under another one."""
    scenes = all_scenes([kind])
    images, index = render_dataset(scenes, count, seed=99)
    right = [scenes[scene].metadata for scene in index]
    wrong = [scenes[(scene + 1) % len(scenes)].metadata for scene in index]
    return np.asarray(judge.score(images, right)), np.asarray(judge.score(images, wrong))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "least"), [("single", 0.85), ("two", 0.85), ("count", 0.6)])
def test_a_short_training_already_separates_right_from_wrong(judge, kind, least):
    right, wrong = right_and_wrong(judge, kind, 120)
    assert right.max() <= 1.0
    assert wrong.min() >= 0.0
    assert np.mean(right > 2 * wrong) > least


@pytest.mark.slow
def test_the_default_training_reads_fresh_renders():
    judge = ShapesJudge.fit(5)
    for kind in KINDS:
        right, wrong = right_and_wrong(judge, kind, 400)
        assert np.mean(right > 0.5) >= 0.95
        if kind != "position":
            assert np.mean(wrong > 0.5) < 0.02


@pytest.mark.slow
def test_score_is_the_product_over_the_looks(judge):
    images, _ = render_dataset(all_scenes(["single"]), 3, seed=4)
    metadata = parse_caption("two red squares").metadata
    table = judge.probabilities(images)
    assert table.shape == (3, 12, 4)
    torch.testing.assert_close(table.sum(-1), torch.ones(3, 12))
    for value, row in zip(judge.score(images, [metadata] * 3), table.numpy(), strict=True):
        wanted = [2 if look == ("red", "square") else 0 for look in LOOKS]
        assert value == pytest.approx(np.prod([row[look, count] for look, count in enumerate(wanted)]), rel=1e-4)


def test_an_empty_image_has_no_detections(judge):
    blank = np.full((1, 32, 32, 3), 236, dtype=np.uint8)
    assert judge.probabilities(blank)[0, :, 0].min() > 0.5
    assert judge.score(blank, [all_scenes()[0].metadata])[0] < 0.1


def test_other_sizes_are_resampled(judge):
    scenes = all_scenes(["single"])
    images, index = render_dataset(scenes, 48, size=64, seed=8)
    right = judge.score(list(images), [scenes[scene].metadata for scene in index])
    wrong = judge.score(list(images), [scenes[(scene + 1) % 12].metadata for scene in index])
    assert np.mean(np.asarray(right) > 2 * np.asarray(wrong)) > 0.7


def test_training_repeats_and_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    images, _ = render_dataset(all_scenes(["single"]), 4, seed=0)
    one, same, other = (ShapesJudge.fit(seed, images=64).probabilities(images) for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_reward_trains_once_and_keeps_the_judge(tmp_path, monkeypatch):
    path = str(tmp_path / "deep" / "judge")
    images, index = render_dataset(all_scenes(["single"]), 5, seed=0)
    prompts = [all_scenes(["single"])[scene].caption for scene in index]
    first = shapes_judge(prompts, list(images), path=path, images=64)
    monkeypatch.setattr(ShapesJudge, "fit", None)
    assert shapes_judge(prompts, list(images), path=path, images=64) == first
    loaded = ShapesJudge.load(path)
    assert (loaded.size, loaded.seed) == (32, 0)
    assert loaded.score(images, [parse_caption(prompt).metadata for prompt in prompts]) == first


def test_wanted_counts_by_hand():
    counts = wanted_counts(parse_caption("three green triangles").metadata)
    assert counts.sum() == counts[LOOKS.index(("green", "triangle"))] == 3
    many = {"include": [{"class": "circle", "color": "red", "count": 5}]}
    assert wanted_counts(many)[LOOKS.index(("red", "circle"))] == 3


def test_what_is_missing_is_named(tmp_path, judge):
    with pytest.raises(UserError, match=r"no judge at .*expected judge\.safetensors"):
        ShapesJudge.load(tmp_path)
    with pytest.raises(UserError, match="images=10 must be at least 64"):
        ShapesJudge.fit(images=10)
    with pytest.raises(ValueError, match="2 images and 1 descriptions"):
        judge.score(np.zeros((2, 32, 32, 3), dtype=np.uint8), [all_scenes()[0].metadata])
    assert judge.score([], []) == []
