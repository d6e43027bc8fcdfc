"""Folders of policies whose sizes no file bears out, or whose weights are no numbers: one line, at once."""

import json

import pytest
from safetensors.torch import load_file, save_file

from mmrl.errors import UserError
from robotics.flow3d.model.world_model import FlowWorldModel, read_config
from robotics.flow3d.model.world_model_settings import BODIES
from robotics.methods.video_encoder import VideoEncoder, VideoEncoderConfig
from robotics.policies.base.action_policy import open_policy
from tests.robotics.flow3d.model.builders import tiny_model
from tests.robotics.policies.builders import make_flow, make_gaussian, make_small

MAKE = {"small": make_small, "gaussian": make_gaussian, "flow": make_flow}


@pytest.fixture(params=MAKE)
def folder(request, tmp_path):
    MAKE[request.param]().save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def integers(entries, place=()):
    for name, value in entries.items():
        if isinstance(value, dict):
            yield from integers(value, (*place, name))
        elif isinstance(value, int | list) and not isinstance(value, bool):
            yield (*place, name)


def changed(file, place, value):
    entries = json.loads(file.read_text())
    inner = entries
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = [value, value] if isinstance(inner[place[-1]], list) and isinstance(value, int) else value
    file.write_text(json.dumps(entries))


def refused(load):
    with pytest.raises(UserError) as error:
        load()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_every_size_is_bounded_by_what_the_weights_hold(folder):
    file = folder / "policy.json"
    good = file.read_text()
    places = [*integers(json.loads(good))]
    assert len(places) >= 9
    for place in places:
        for value in (10**12, 32 * 10**8):
            changed(file, place, value)
            refused(lambda: open_policy(folder))
            file.write_text(good)
    open_policy(folder)


@pytest.mark.parametrize("value", ["x", "64", [64], [64, 64, 64], [], ["a", "b"], {"a": 1}, [64.5, 64]])
def test_an_image_size_that_is_none_is_refused(folder, value):
    changed(folder / "policy.json", ("encoder", "image_size"), value)
    assert "image_size" in refused(lambda: open_policy(folder))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(folder, value):
    weights = load_file(folder / "model.safetensors")
    name = next(key for key in weights if key.endswith("weight"))
    weights[name].view(-1)[-1] = value
    save_file(weights, folder / "model.safetensors")
    assert f"{name} in {folder / 'model.safetensors'} contains NaN or infinite entries" in refused(
        lambda: open_policy(folder)
    )


def test_sizes_of_a_video_encoder(tmp_path):
    VideoEncoder(VideoEncoderConfig()).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    good = file.read_text()
    for place in integers(json.loads(good)):
        changed(file, place, 32 * 10**10)
        refused(lambda: VideoEncoder.from_pretrained(tmp_path))
        file.write_text(good)
    VideoEncoder.from_pretrained(tmp_path)


@pytest.mark.parametrize("body", BODIES)
def test_sizes_of_a_world_model(body, tmp_path):
    tiny_model(body).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    good = file.read_text()
    places = [*integers(json.loads(good))]
    assert len(places) >= 15
    size = ("body", "unet", "channels") if body == "unet_motion" else ("body", "width")
    cases = [(place, value) for place in places for value in (10**12, 32 * 10**8)]
    for place, value in [*cases, (size, 4096)]:  # the last is no larger than the weights, but their shapes are others
        changed(file, place, value)
        refused(lambda: FlowWorldModel.from_pretrained(tmp_path))
        file.write_text(good)
    changed(file, ("condition", "heads"), 7)
    assert "model.condition.width is 16; must be a multiple of 56" in refused(lambda: read_config(tmp_path))
    file.write_text(good)
    FlowWorldModel.from_pretrained(tmp_path)
