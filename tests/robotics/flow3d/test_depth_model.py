"""Depth by a model of transformers, tiny and random."""

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.hub.compat import ensure_torchvision
from robotics.flow3d.extract import ModelDepth, RgbdVideo


def tiny_depth_anything(folder, kind):
    ensure_torchvision()
    from transformers import DepthAnythingConfig, DepthAnythingForDepthEstimation, Dinov2Config, DPTImageProcessor

    torch.manual_seed(0)
    backbone = Dinov2Config(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        out_features=["stage1", "stage2", "stage3", "stage4"],
        reshape_hidden_states=False,
    )
    config = DepthAnythingConfig(
        backbone_config=backbone,
        reassemble_hidden_size=32,
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        head_in_channels=8,
        head_hidden_size=8,
        depth_estimation_type=kind,
        max_depth=2,
    )
    model = DepthAnythingForDepthEstimation(config)
    for weights in model.parameters():  # as initialised, every image gives the same depth
        torch.nn.init.normal_(weights, std=0.2)
    model.save_pretrained(folder)
    DPTImageProcessor(size={"height": 28, "width": 28}, ensure_multiple_of=14).save_pretrained(folder)
    return str(folder)


def test_depth_of_each_frame_in_metres(tmp_path):
    rgb = np.random.default_rng(0).integers(0, 256, (2, 20, 30, 3), dtype=np.uint8)
    video = RgbdVideo(rgb, None, np.eye(3))
    folder = tiny_depth_anything(tmp_path / "model", "metric")
    depth = ModelDepth(folder).depth_m(video)
    assert depth.shape == (2, 20, 30)
    assert depth.dtype == np.float32
    assert ((depth > 0) & (depth <= 2)).all()
    assert not np.array_equal(depth[0], depth[1])
    np.testing.assert_allclose(ModelDepth(folder, scale=1.5).depth_m(video), 1.5 * depth, rtol=1e-5)


def test_relative_depth_and_missing_models_are_refused(tmp_path):
    video = RgbdVideo(np.zeros((2, 20, 30, 3), np.uint8), None, np.eye(3))
    with pytest.raises(UserError, match="relative depth"):
        ModelDepth(tiny_depth_anything(tmp_path / "model", "relative")).depth_m(video)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="cannot be loaded"):
        ModelDepth(str(tmp_path / "empty")).depth_m(video)
