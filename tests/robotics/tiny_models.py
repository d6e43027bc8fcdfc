"""Random models of real architectures that are small enough to train in a test."""

import pytest
import torch

from tests.robotics.line_sim import LineSim


def save_tiny_vlm(folder):
    """A vision-language model that knows the line's instructions; returns its folder."""
    pytest.importorskip("transformers", reason="needs pip install 'mmrl-suite[vlm]'")
    from mmrl.vlm.toy.tiny import build_tiny_vlm

    texts = list(LineSim().tasks().values())
    return build_tiny_vlm(folder, corpus=texts, initializer_range=0.15, max_positions=256)


def save_tiny_vjepa2(folder):
    """A V-JEPA 2 for 6 frames of 16 pixels; returns its folder."""
    pytest.importorskip("transformers", reason="needs pip install 'mmrl-suite[vlm]'")
    from mmrl.hub.compat import ensure_torchvision, quiet_transformers

    ensure_torchvision()
    from transformers import VJEPA2Config, VJEPA2Model

    layers = {"num_hidden_layers": 1, "pred_num_hidden_layers": 1, "pred_num_mask_tokens": 1}
    heads = {"num_attention_heads": 2, "pred_num_attention_heads": 2}
    sizes = {"patch_size": 8, "crop_size": 16, "frames_per_clip": 6, "hidden_size": 24, "pred_hidden_size": 24}
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        VJEPA2Model(VJEPA2Config(**layers, **heads, **sizes)).save_pretrained(folder)
    return folder


def save_tiny_video_encoder(folder):
    """An untrained video encoder of 16 x 16 pixels; returns its folder."""
    from robotics.methods.video_encoder import VideoEncoder, VideoEncoderConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = VideoEncoderConfig(height=16, width=16, channels=4, frame_channels=2, size=8, clip_frames=4)
        VideoEncoder(sizes).save_pretrained(folder)
    return folder
