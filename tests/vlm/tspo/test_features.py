"""Features of frames and texts, and their cache."""

import logging

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.vlm.data.dataset import DataConfig
from mmrl.vlm.tspo.features import ClipEncoder, FeatureStore
from mmrl.vlm.tspo.needle_tasks import load_needle_tasks
from tests.vlm.tspo.builders import data_folder


@pytest.fixture(scope="module")
def encoder():
    return ClipEncoder(str(data_folder() / "clip"), batch=5)


@pytest.fixture(scope="module")
def video():
    return load_needle_tasks(DataConfig(path=str(data_folder() / "needles.jsonl")), 1.0, 0)[0][0].video


def test_embeddings_are_those_of_transformers_own_pipeline(encoder, video):
    from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

    path = data_folder() / "clip"
    model, processor = CLIPModel.from_pretrained(path).eval(), AutoImageProcessor.from_pretrained(path)
    frames = list(video.frames())
    text = AutoTokenizer.from_pretrained(path)(["What follows the red flash?"], return_tensors="pt")
    with torch.no_grad():
        found = model(
            input_ids=text.input_ids,
            attention_mask=text.attention_mask,
            pixel_values=processor(images=frames, return_tensors="pt").pixel_values,
        )
    ours = encoder.frames(iter(frames))
    assert ours.shape == (len(frames), 16)
    torch.testing.assert_close(torch.nn.functional.normalize(ours, dim=1), found.image_embeds, rtol=1e-4, atol=1e-5)
    own = torch.nn.functional.normalize(encoder.texts(["What follows the red flash?"]), dim=1)
    torch.testing.assert_close(own, found.text_embeds, rtol=1e-4, atol=1e-5)


def test_a_question_that_spells_a_control_token_is_read_to_its_end(encoder):
    end = encoder.tokenizer.eos_token
    one, other = encoder.texts([f"What {end} follows the red flash?", f"What {end} is seen?"])
    assert not torch.equal(one, other)


def test_a_long_question_is_cut_to_the_models_positions_where_the_tokenizer_names_no_limit(encoder, monkeypatch):
    longest = encoder.model.config.text_config.max_position_embeddings
    long = "red flash " * longest
    monkeypatch.setattr(encoder.tokenizer, "model_max_length", 10**30)
    assert encoder.texts([long]).shape == (1, encoder.width)


def test_features_are_computed_once_and_read_by_the_next_run(encoder, video, tmp_path):
    first = FeatureStore(encoder, tmp_path)
    features = first.frames(video)
    assert first.frames(video) is features
    assert first.computed == 1
    second = FeatureStore(encoder, tmp_path)
    assert torch.equal(second.frames(video), features)
    assert second.computed == 0


@pytest.mark.parametrize("damage", ["cut", "bit", "shape", "text"])
def test_a_damaged_file_is_computed_again_with_a_warning(damage, encoder, video, tmp_path, caplog):
    from safetensors.torch import save_file

    features = FeatureStore(encoder, tmp_path).frames(video)
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[:-7])
    elif damage == "bit":
        content[-3] ^= 1
        file.write_bytes(content)
    elif damage == "shape":
        save_file({"features": features[:-1].contiguous()}, file)
    else:
        file.write_text("not a file of features")
    store = FeatureStore(encoder, tmp_path)
    with caplog.at_level(logging.WARNING, "mmrl"):
        assert torch.equal(store.frames(video), features)
    assert store.computed == 1
    assert "are damaged" in caplog.text
    assert FeatureStore(encoder, tmp_path).frames(video).shape == features.shape


def test_memory_is_bounded_and_released_entries_are_read_again(encoder, tmp_path):
    tasks, _ = load_needle_tasks(DataConfig(path=str(data_folder() / "needles.jsonl")), 1.0, 0)
    store = FeatureStore(encoder, tmp_path, memory_mb=2e-3)  # one video has 22 x 16 x 4 bytes
    for task in tasks:
        store.frames(task.video)
    assert len(store._kept) == 1
    store.frames(tasks[0].video)
    assert store.computed == len(tasks)


def test_frames_are_taken_one_batch_at_a_time(encoder):
    taken = []

    def frames():
        for number in range(12):
            taken.append(number)
            yield np.full((56, 56, 3), number * 20, np.uint8)

    seen = []
    embed = encoder.model.get_image_features

    def noted(**inputs):
        seen.append(len(taken))
        return embed(**inputs)

    encoder.model.get_image_features = noted
    try:
        assert len(encoder.frames(frames())) == 12
    finally:
        encoder.model.get_image_features = embed
    assert seen == [5, 10, 12]


def test_what_is_no_clip_is_refused(tmp_path):
    with pytest.raises(UserError, match="no CLIP can be loaded from"):
        ClipEncoder(str(tmp_path))
    with pytest.raises(UserError, match=r"no CLIP can be loaded .*: Expected one of cpu, .*: nowhere"):
        ClipEncoder(str(data_folder() / "clip"), device="nowhere")
