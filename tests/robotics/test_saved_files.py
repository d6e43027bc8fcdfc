"""The JSON files of saved policies after manual changes: one line that names the file."""

import json
import shutil

import pytest

from mmrl.errors import UserError
from robotics.methods.video_encoder import VideoEncoder, VideoEncoderConfig
from robotics.policies.base.action_policy import open_policy
from robotics.policies.base.action_statistics import ActionStatistics
from robotics.policies.base.encoder import EncoderConfig
from robotics.policies.small import SmallVlaConfig, SmallVlaPolicy


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "policy"
    encoder = EncoderConfig(image_size=None, state_size=3, width=16, heads=2, layers=1, channels=8, keypoints=2)
    SmallVlaPolicy.build(SmallVlaConfig(2, 4, encoder=encoder), ["push"]).save_pretrained(folder)
    return folder


@pytest.fixture
def policy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "policy")


def line(call, *arguments):
    with pytest.raises(UserError) as refused:
        call(*arguments)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000
    return str(refused.value)


WHOLE_FILES = ["", "[]", "3", "null", "{", "[" * 100_000, "\udcff", '{"kind": []}', '{"kind": {"a": 1}}']


@pytest.mark.parametrize("content", WHOLE_FILES)
def test_policy_json_of_another_kind(content, policy):
    (policy / "policy.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert str(policy) in line(open_policy, policy)


@pytest.mark.parametrize("value", [None, "x", -1, 0, 1.5, [1], [[1]], {}, float("nan"), 10**30, True])
@pytest.mark.parametrize("key", ["action_size", "chunk", "encoder", "encoder.width", "encoder.heads", "encoder.layers"])
def test_policy_json_with_wrong_values(key, value, policy):
    entries = json.loads((policy / "policy.json").read_text())
    place = entries["encoder"] if key.startswith("encoder.") else entries
    place[key.removeprefix("encoder.")] = value
    (policy / "policy.json").write_text(json.dumps(entries))
    if (key, value) in (("encoder.heads", True), ("encoder.layers", True), ("encoder.layers", 0)):
        return  # a number of heads or layers that can be, though not this policy's
    line(open_policy, policy)


@pytest.mark.parametrize("content", ["", "[]", "[1]", '{"a": 1}', '"push"', '["push", null]'])
def test_a_vocabulary_of_something_else(content, policy):
    (policy / "vocabulary.json").write_text(content)
    line(open_policy, policy)


@pytest.mark.parametrize("value", [None, "x", [1, "x"], [[1]], [1, 2, 3], {"a": 1}, [float("nan"), 1]])
def test_statistics_that_are_not_lists_of_numbers(value, tmp_path):
    path = tmp_path / "action_statistics.json"
    ActionStatistics.from_arrays([[0.0, 1.0], [1.0, 2.0]]).save(path)
    entries = json.loads(path.read_text())
    path.write_text(json.dumps(entries | {"q01": value}))
    assert str(path) in line(ActionStatistics.load, path)


@pytest.mark.parametrize("value", [None, "x", -8, 0, 1.5, [64], 10**30])
def test_a_video_encoder_of_no_size(value, tmp_path):
    VideoEncoder(VideoEncoderConfig()).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"height": value}))
    assert str(path) in line(VideoEncoder.from_pretrained, tmp_path)
