"""Masks by Grounding DINO and SAM 2, tiny and random, against direct calls of the same models."""

import dataclasses

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.hub.compat import ensure_torchvision
from robotics.flow3d.extract import GroundedMask, RejectedVideo, RevealedDepth, RgbdVideo, SegmentedBox, WithoutGripper

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "robot", "gripper", "hand", "mug"]


@pytest.fixture(scope="module")
def dino(tmp_path_factory):
    ensure_torchvision()
    from transformers import (
        BertTokenizer,
        GroundingDinoConfig,
        GroundingDinoForObjectDetection,
        GroundingDinoImageProcessor,
        GroundingDinoProcessor,
        SwinConfig,
    )

    folder = tmp_path_factory.mktemp("dino")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    torch.manual_seed(0)
    swin = SwinConfig(
        window_size=7, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], image_size=64, out_indices=[2, 3, 4]
    )
    text = {"model_type": "bert", "vocab_size": len(WORDS), "hidden_size": 8, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": 32}
    config = GroundingDinoConfig(
        backbone_config=swin,
        text_config=text,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_queries=5,
        encoder_n_points=2,
        decoder_n_points=2,
    )
    GroundingDinoForObjectDetection(config).save_pretrained(folder)
    tokenizer = BertTokenizer.from_pretrained(str(folder))
    images = GroundingDinoImageProcessor(size={"shortest_edge": 64, "longest_edge": 96})
    GroundingDinoProcessor(images, tokenizer).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def sam(tmp_path_factory):
    ensure_torchvision()
    from transformers import (
        Sam2Config,
        Sam2HieraDetConfig,
        Sam2ImageProcessor,
        Sam2Model,
        Sam2Processor,
        Sam2VisionConfig,
    )

    folder = tmp_path_factory.mktemp("sam")
    torch.manual_seed(0)
    backbone = Sam2HieraDetConfig(
        hidden_size=8,
        image_size=[64, 64],
        blocks_per_stage=[1, 2, 2, 1],
        embed_dim_per_stage=[8, 16, 32, 64],
        num_attention_heads_per_stage=[1, 2, 4, 8],
        window_size_per_stage=[8, 4, 4, 2],
        global_attention_blocks=[4],
    )
    vision = Sam2VisionConfig(
        backbone_config=backbone,
        backbone_channel_list=[64, 32, 16, 8],
        backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]],
        fpn_hidden_size=32,
    )
    prompt = {"hidden_size": 32, "image_size": 64, "patch_size": 16, "mask_input_channels": 8}
    decoder = {"hidden_size": 32, "mlp_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    decoder |= {"iou_head_hidden_dim": 32}
    config = Sam2Config(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder)
    Sam2Model(config).save_pretrained(folder)
    images = Sam2ImageProcessor(size={"height": 64, "width": 64}, mask_size={"height": 16, "width": 16})
    Sam2Processor(images).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def video():
    rgb = np.random.default_rng(0).integers(0, 256, (3, 48, 60, 3), dtype=np.uint8)
    return RgbdVideo(rgb, None, np.eye(3), instruction="Mug")


def sam_masks(sam, rgb, boxes):
    from transformers import Sam2Model, Sam2Processor

    processor, model = Sam2Processor.from_pretrained(sam), Sam2Model.from_pretrained(sam).eval()
    inputs = processor(images=rgb, input_boxes=[[list(map(float, box)) for box in boxes]], return_tensors="pt")
    with torch.no_grad():
        found = model(**inputs, multimask_output=False).pred_masks[0, :, 0]
    sized = torch.nn.functional.interpolate(found[None], rgb.shape[:2], mode="bilinear", align_corners=False)
    return (sized[0] > 0).numpy()


def test_descriptions_find_boxes_in_order_of_confidence(dino, sam, video):
    from transformers import AutoProcessor, GroundingDinoForObjectDetection

    found = GroundedMask(dino, sam, "Robot gripper. hand.", threshold=0.0).boxes(video.rgb[0], "Robot gripper. hand.")
    processor, model = AutoProcessor.from_pretrained(dino), GroundingDinoForObjectDetection.from_pretrained(dino).eval()
    inputs = processor(images=video.rgb[0], text="robot gripper. hand.", return_tensors="pt")
    assert WORDS.index("gripper") in inputs["input_ids"]
    with torch.no_grad():
        outputs = model(**inputs)
    scores, boxes = outputs.logits[0].sigmoid().amax(-1), outputs.pred_boxes[0].double()
    corners = torch.cat([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], -1)
    expected = corners[scores.argsort(descending=True, stable=True)].numpy() * [60, 48, 60, 48]
    assert found.shape == (5, 4)
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_the_mask_is_sams_within_the_box(dino, sam, video):
    one = GroundedMask(dino, sam, threshold=0.0)  # the words are the instruction
    boxes = one.boxes(video.rgb[0], "mug")
    masks = sam_masks(sam, video.rgb[0], boxes)
    assert masks.any(axis=(1, 2)).all()
    np.testing.assert_array_equal(one.detect(video), masks[0])
    np.testing.assert_array_equal(dataclasses.replace(one, all_boxes=True).detect(video), masks.any(0))


def test_the_box_of_another_detector_is_cut_out(sam, video):
    class Corner:
        def detect(self, video):
            mask = np.zeros(video.rgb.shape[1:3], bool)
            mask[5:20, 10:30] = True
            return mask

    (expected,) = sam_masks(sam, video.rgb[0], [(10, 5, 30, 20)])
    np.testing.assert_array_equal(SegmentedBox(Corner(), sam).detect(video), expected)


def test_the_gripper_is_left_out():
    depth = np.ones((8, 40, 40), np.float32)
    depth[:, 5:15, 5:15], depth[:, 25:35, 25:33] = 0.9, 0.9
    depth[6:, 5:15, 5:15] = depth[6:, 25:35, 25:33] = 1.0
    video = RgbdVideo(np.zeros((8, 40, 40, 3), np.uint8), depth, np.eye(3))

    class Gripper:
        def detect(self, video):
            return np.broadcast_to(np.arange(40) < 20, (40, 40))

    class Blind:
        def detect(self, video):
            raise RejectedVideo("no_moving_object")

    larger, smaller = np.zeros((40, 40), bool), np.zeros((40, 40), bool)
    larger[5:15, 5:15], smaller[25:35, 25:33] = True, True
    np.testing.assert_array_equal(WithoutGripper(RevealedDepth(least_frames=2), Gripper()).detect(video), smaller)
    np.testing.assert_array_equal(WithoutGripper(RevealedDepth(least_frames=2), Blind()).detect(video), larger)


def test_what_is_not_found_or_not_there_has_a_name(dino, sam, video, tmp_path):
    with pytest.raises(RejectedVideo, match="no box for 'mug'"):
        GroundedMask(dino, sam, "mug", threshold=1.0).detect(video)
    with pytest.raises(UserError, match="needs words"):
        GroundedMask(dino, sam).detect(dataclasses.replace(video, instruction=" "))
    with pytest.raises(UserError, match="cannot be loaded by AutoModelForZeroShotObjectDetection"):
        GroundedMask(str(tmp_path), sam, "mug").detect(video)
    with pytest.raises(UserError, match="cannot be loaded by Sam2Model"):
        GroundedMask(dino, str(tmp_path), "mug", threshold=0.0).detect(video)
