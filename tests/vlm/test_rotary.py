"""Rotary positions against transformers' own, for both families."""

import pytest
import torch

from mmrl.vlm.families.family import IMAGE, TEXT, VIDEO, rotary_positions, split_frames

MERGE = 2


def types_of(*runs: tuple[int, int]) -> torch.Tensor:
    return torch.cat([torch.full((count,), kind) for kind, count in runs])


def of_transformers(policy, types, **grids) -> torch.Tensor:
    ids = torch.ones_like(types)[None]
    positions, _ = policy.network.model.get_rope_index(ids, types[None], **grids)
    return positions[:, 0]


@pytest.mark.parametrize(
    ("runs", "grids"),
    [
        ([(TEXT, 5)], None),
        ([(TEXT, 3), (IMAGE, 6), (TEXT, 4)], [[1, 4, 6]]),
        ([(IMAGE, 8), (TEXT, 1), (IMAGE, 3), (TEXT, 2)], [[1, 8, 4], [1, 2, 6]]),
    ],
)
def test_images_are_counted_as_in_transformers(policy, runs, grids):
    types = types_of(*runs)
    images = None if grids is None else torch.tensor(grids)
    expected = of_transformers(policy, types, image_grid_thw=images)
    assert torch.equal(rotary_positions(types, MERGE, images), expected)


def test_videos_are_counted_as_in_transformers(policy, family):
    videos = torch.tensor([[3, 4, 4], [2, 2, 6]])
    if family == "qwen2_5_vl":
        types = types_of((TEXT, 2), (VIDEO, 12), (TEXT, 3), (VIDEO, 6), (TEXT, 1))
        seconds = torch.tensor([0.5, 1.7])
        rate = policy.network.config.vision_config.tokens_per_second
        expected = of_transformers(policy, types, video_grid_thw=videos, second_per_grid_ts=seconds)
        found = rotary_positions(types, MERGE, None, videos, [rate * second for second in seconds])
    else:  # a timestamp between the frames
        frames = [run for _ in range(3) for run in ((TEXT, 2), (VIDEO, 4))]
        frames += [run for _ in range(2) for run in ((TEXT, 1), (VIDEO, 3))]
        types = types_of(*frames, (TEXT, 2))
        expected = of_transformers(policy, types, video_grid_thw=videos)
        found = rotary_positions(types, MERGE, None, split_frames(videos))
    assert torch.equal(found, expected)


def test_images_and_videos_keep_their_own_order(policy, family):
    types = types_of((VIDEO, 4), (TEXT, 2), (IMAGE, 2), (TEXT, 1), (VIDEO, 1), (TEXT, 1))
    images, videos = torch.tensor([[1, 2, 4]]), torch.tensor([[1, 4, 4], [1, 2, 2]])
    expected = of_transformers(policy, types, image_grid_thw=images, video_grid_thw=videos)
    assert torch.equal(rotary_positions(types, MERGE, images, videos), expected)


def test_text_after_an_image_continues_after_its_longer_side():
    found = rotary_positions(types_of((TEXT, 1), (IMAGE, 6), (TEXT, 1)), MERGE, torch.tensor([[1, 4, 6]]))
    assert found.tolist() == [[0, 1, 1, 1, 1, 1, 1, 4], [0, 1, 1, 1, 2, 2, 2, 4], [0, 1, 2, 3, 1, 2, 3, 4]]


@pytest.mark.parametrize("grids", [None, [[1, 4, 4]]])
def test_a_grid_of_another_size_is_refused(grids):
    with pytest.raises(ValueError, match="6 image tokens follow one another"):
        rotary_positions(types_of((IMAGE, 6)), MERGE, None if grids is None else torch.tensor(grids))
