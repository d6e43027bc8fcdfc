"""`model_index.json` and `base.json` after manual changes: one line that names the file."""

import json

import pytest
import torch

from diffusion.models.pipelines import load_pipeline
from diffusion.models.saved import read_base
from mmrl.errors import UserError

PARTS = ("transformer", "vae", "scheduler")


def line(call, *arguments):
    with pytest.raises(UserError) as refused:
        call(*arguments)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("content", ["", "[]", "3", "null", "{", "[" * 100_000, "{}", '{"_class_name": ["a"]}'])
def test_an_index_of_another_kind(content, tmp_path):
    (tmp_path / "model_index.json").write_text(content)
    assert str(tmp_path) in line(load_pipeline, str(tmp_path), torch.float32)


@pytest.mark.parametrize("value", [None, "x", 3, [], [1], [1, 2], [None], ["a"], ["a", ["b"]], {"a": 1}, [[], {}]])
@pytest.mark.parametrize("part", PARTS)
def test_parts_that_are_not_names(part, value, tmp_path):
    index = {"_class_name": "StableDiffusion3Pipeline"} | {name: ["diffusers", "Any"] for name in PARTS}
    for name in PARTS:
        (tmp_path / name).mkdir()
    (tmp_path / "model_index.json").write_text(json.dumps(index | {part: value}))
    assert str(tmp_path) in line(load_pipeline, str(tmp_path), torch.float32)


@pytest.mark.parametrize("content", ["", "[]", "[1]", "3", "{}", '{"path": 3}', '{"path": null}'])
def test_a_base_that_names_no_pipeline(content, tmp_path):
    path = tmp_path / "base.json"
    path.write_text(content)
    assert str(path) in line(read_base, path)
