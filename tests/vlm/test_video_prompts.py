"""Prompts with videos: equality with transformers' own processors, and named faults of a video."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.hub.video_sampling import frame_times
from mmrl.vlm.data.task import VIDEO_ERRORS, TaskError, VideoClip, VlmTask, load_videos
from mmrl.vlm.model.processor import load_processor
from tests.hub.numbered_clips import even_times, write_clip
from tests.vlm.builders import noise_image, video_task

pytest.importorskip("av", reason="needs pip install 'mmrl-suite[vlm]'")


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clips") / "a.mp4", even_times(30))


def of_transformers(policy, folder, task: VlmTask) -> dict[str, torch.Tensor]:
    """Inputs of a user who follows the model card: processor and qwen-vl-utils' frames, positions from the model."""
    processor = load_processor(str(folder))
    videos = load_videos(task, policy.layout.patch_size)
    text = processor.apply_chat_template(task.messages, tokenize=False, add_generation_prompt=True)
    inputs = processor(
        text=[text],
        images=task.load_images() or None,
        videos=[frames for frames, _ in videos],
        video_metadata=[metadata for _, metadata in videos],
        videos_kwargs={"do_sample_frames": False, "do_resize": False},
        return_tensors="pt",
    )
    grids = {name: inputs.get(name) for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")}
    positions, _ = policy.network.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], **{k: v for k, v in grids.items() if v is not None}
    )
    return {**inputs, "position_ids": positions}


def pixels_that_fit(policy) -> dict[str, int]:
    """Options whose frames transformers need not resize, as images have the processor's own budget."""
    side = 4 * policy.layout.patch_size
    return {"resized_height": side, "resized_width": 2 * side}


@pytest.mark.parametrize(
    "options", [{}, {"nframes": 6, "video_start": 1.0}, {"nframes": 10, "video_end": 1.4}], ids=str
)
def test_prompts_are_those_of_transformers(policy, folder, clip, options):
    task = video_task("t", "Sum?", clip, images=1, count=2, **{**pixels_that_fit(policy), **options})
    prompt, expected = policy.encode(task), of_transformers(policy, folder, task)
    for name in ("input_ids", "mm_token_type_ids"):
        assert torch.equal(getattr(prompt, name), expected[name][0])
    for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        assert torch.equal(prompt.media[name], expected[name])
    assert torch.equal(prompt.position_ids, expected["position_ids"][:, 0])
    assert prompt.next_position == int(expected["position_ids"].max()) + 1


def test_time_is_in_the_prompt(policies, clip):
    """Four frames of 0.9 and of 2.9 seconds: Qwen3-VL reads the times, Qwen2.5-VL has them in its positions."""
    texts, spans = {}, {}
    for family, policy in policies.items():
        for part in (0.9, 2.9):
            task = video_task("t", "Sum?", clip, video_end=part, **pixels_that_fit(policy))
            prompt = policy.encode(task)
            texts[family, part] = policy.processor.tokenizer.decode(prompt.input_ids)
            video = prompt.position_ids[0][prompt.mm_token_type_ids == 2]
            spans[family, part] = int(video[-1] - video[0])
    for part, frames in ((0.9, (0, 3, 6, 9)), (2.9, (0, 10, 19, 29))):
        pairs = [(frames[first] + frames[first + 1]) / 20 for first in (0, 2)]  # 10 frames a second
        assert re.findall(r"<(\d\.\d) seconds>", texts["qwen3_vl", part]) == [f"{time:.1f}" for time in pairs]
    assert spans["qwen2_5_vl", 2.9] > spans["qwen2_5_vl", 0.9]
    assert texts["qwen2_5_vl", 0.9] == texts["qwen2_5_vl", 2.9]


def test_times_in_the_prompt_are_those_of_a_variable_rate(policies, tmp_path):
    """Ten seconds at a frame a second, then 30 a second: four frames appear at 0, 3 and 7 s and at the end."""
    times = [*map(float, range(10)), *[10 + number / 30 for number in range(30)]]
    clip, policy = write_clip(tmp_path / "a.mp4", times), policies["qwen3_vl"]
    prompt = policy.encode(video_task("t", "Sum?", clip, nframes=4, **pixels_that_fit(policy)))
    text = policy.processor.tokenizer.decode(prompt.input_ids)
    pairs = [(0 + 3) / 2, (7 + times[-1]) / 2]
    assert re.findall(r"<(\d+\.\d) seconds>", text) == [f"{time:.1f}" for time in pairs]


def test_a_list_of_frames_is_a_video(policy, tmp_path):
    frames = [noise_image(56, 56, number) for number in range(3)]
    frames[0].save(tmp_path / "0.png")
    options = {"sample_fps": 2.0, "min_pixels": 784, "max_pixels": 20_000}
    clip = VideoClip([str(tmp_path / "0.png"), *frames[1:]], options)
    task = VlmTask(
        "t", [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "x"}]}], videos=[clip]
    )
    prompt = policy.encode(task)
    assert prompt.media["video_grid_thw"][0, 0] == 2  # the last frame is repeated
    (loaded,) = load_videos(task, policy.layout.patch_size)
    assert frame_times(loaded) == [0.0, 0.5, 1.0, 1.5]
    assert torch.equal(loaded[0][2], loaded[0][3])
    broken = VideoClip([str(tmp_path / "0.png"), b"no image"], options)
    with pytest.raises(TaskError, match="frame 2 of video 1") as caught:
        policy.encode(VlmTask("t", task.messages, videos=[broken]))
    assert caught.value.kind == "unreadable_image"


def test_what_is_wrong_with_a_video_is_named(policies, tmp_path):
    policy = policies["qwen2_5_vl"]
    noise = np.random.default_rng(0).integers(0, 256, (20, 48, 96, 3), dtype=np.uint8)
    whole = write_clip(
        tmp_path / "whole.mp4", even_times(20), options={"movflags": "faststart"}, frame=noise.__getitem__
    )
    (tmp_path / "cut.mp4").write_bytes(whole.read_bytes()[:-3000])
    (tmp_path / "zero.mp4").touch()
    (tmp_path / "text.mp4").write_text("no video")
    kinds = {
        "none.mp4": "missing_video",
        "zero.mp4": "empty_video",
        "text.mp4": "unreadable_video",
        "cut.mp4": "truncated_video",
    }
    for name, kind in kinds.items():
        with pytest.raises(TaskError, match=name) as caught:
            policy.encode(video_task("t", "Sum?", tmp_path / name))
        assert caught.value.kind == kind
    with pytest.raises(TaskError, match="nframes should in interval") as caught:
        policy.encode(video_task("t", "Sum?", whole, nframes=30))
    assert caught.value.kind == "unusable_video"
    assert {*kinds.values(), "unusable_video"} == {*VIDEO_ERRORS, "missing_video"}
    content = [{"type": "video"}, {"type": "text", "text": "x"}]
    with pytest.raises(TaskError, match=r"1 <\|video_pad\|> tokens for 0 videos"):
        policy.encode(VlmTask("t", [{"role": "user", "content": content}]))


def test_other_frames_same_tokens(policy, clip):
    """As PAPO requires, masked frames change only the pixels."""
    task = video_task("t", "Sum?", clip)
    (frames, metadata) = load_videos(task, policy.layout.patch_size)[0]
    original, masked = policy.encode(task), policy.encode(task, videos=[(torch.zeros_like(frames), metadata)])
    assert torch.equal(original.input_ids, masked.input_ids)
    assert torch.equal(original.position_ids, masked.position_ids)
    assert not torch.equal(original.media["pixel_values_videos"], masked.media["pixel_values_videos"])


def test_images_alone_do_not_load_the_video_library(policy, monkeypatch):
    from mmrl.hub import video_sampling

    monkeypatch.setattr(video_sampling, "qwen_vl_utils", None)
    task = VlmTask("t", [{"role": "user", "content": [{"type": "image"}]}], [Image.new("RGB", (56, 56))])
    assert "pixel_values" in policy.encode(task).media
