"""The world model: its networks, its folder, and refused settings."""

import dataclasses

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from robotics.flow3d.model.context import Keypoints
from robotics.flow3d.model.unet_motion import ADAPTED
from robotics.flow3d.model.world_model import FlowWorldModel, sample_seeds
from robotics.flow3d.model.world_model_settings import BODIES, ConditionConfig, FlowModelConfig, UnetConfig
from robotics.policies.base.encoder import Vocabulary, octave_code
from tests.robotics.flow3d.model.builders import TEXTS, build_sd, build_vision, disturb, tiny_config, tiny_model
from tests.robotics.flow3d.model.synthetic import make_clips


def scenes(model, count=2):
    clips = make_clips(count, side=model.encoding.grid)
    return clips, model.inputs_of([clip.observation for clip in clips], [clip.points for clip in clips])


def noise_like(model, rows, seed=3):
    return torch.randn(rows, *model.flow_shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("body", BODIES)
def test_every_body_starts_neutral_and_reads_all_that_it_is_given(body):
    model = tiny_model(body)
    _, inputs = scenes(model)
    noisy, time = noise_like(model, 2), torch.tensor([0.3, 0.8])
    if body != "unet_motion":
        assert not model(inputs, noisy, time).any()
    disturb(model)
    found = model(inputs, noisy, time)
    assert found.shape == noisy.shape

    def changed(rows=inputs, flow=noisy, when=time, keep=None):
        with torch.no_grad():
            return float((model(rows, flow, when, keep)[0] - found[0]).abs().max())

    other = dataclasses.replace(inputs, instructions=inputs.instructions[::-1])
    assert changed() == 0
    assert changed(rows=other) > 1e-4
    assert changed(keep=torch.tensor([False, True])) > 1e-4
    assert changed(rows=dataclasses.replace(inputs, images=255 - inputs.images)) > 1e-4
    assert changed(rows=dataclasses.replace(inputs, points=inputs.points.flip(1))) > 1e-4
    assert changed(flow=noisy.flip(2)) > 1e-4
    assert changed(when=time.flip(0)) > 1e-4
    # the second row alone: rows do not see each other
    alone = model(inputs.select(torch.tensor([1]), torch.tensor([1])), noisy[1:], time[1:])
    torch.testing.assert_close(alone, found[1:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("body", BODIES)
def test_gradients_reach_every_weight(body):
    model = disturb(tiny_model(body))
    _, inputs = scenes(model)
    model(inputs, noise_like(model, 2), torch.tensor([0.3, 0.8]), torch.tensor([True, False])).square().sum().backward()
    idle = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    # the key's bias shifts all scores of a query alike, which softmax does not see
    assert [name for name in idle if "instruction" not in name and "key_value.bias" not in name] == []


@pytest.mark.parametrize("body", ["traj_dit", "dit_factored"])
def test_query_points_as_tokens_alone(body):
    config = tiny_config(body)
    config.body.point_condition = "tokens"
    model = disturb(FlowWorldModel(config, Vocabulary.from_texts(TEXTS)))
    assert model.body.point is None
    _, inputs = scenes(model)
    noisy, time = noise_like(model, 2), torch.tensor([0.3, 0.8])
    moved = dataclasses.replace(inputs, points=inputs.points + 0.3)
    with torch.no_grad():
        assert float((model(moved, noisy, time) - model(inputs, noisy, time)).abs().max()) > 1e-4


def test_motion_modules_have_no_effect_at_first():
    model = tiny_model("unet_motion")
    _, inputs = scenes(model)
    noisy = noise_like(model, 2)
    order = torch.tensor([2, 0, 3, 1])
    time = torch.tensor([0.3, 0.8])
    found = model(inputs, noisy, time)
    shuffled = model(inputs, noisy[:, :, order], time)
    torch.testing.assert_close(shuffled, found[:, :, order], rtol=0, atol=1e-5)  # frames do not see each other yet
    assert not any("mid_block.motion" in name for name, _ in model.named_parameters())


def test_samples_are_in_pixels_and_metres_and_do_not_depend_on_their_number():
    model = disturb(tiny_model(visibility="channel"))
    (clip, _), _ = scenes(model)
    found = model.predict(clip.observation, clip.points, samples=3, seed=5)
    assert found.shape == (3, 4, 3, 3, 4)
    assert (found[..., 3] >= 0).all()
    assert (found[..., 3] <= 1).all()
    np.testing.assert_allclose(model.predict(clip.observation, clip.points, seed=5), found[:1], rtol=0, atol=1e-4)
    assert np.abs(found[0] - found[1]).max() > 1e-3
    assert np.abs(model.predict(clip.observation, clip.points, seed=6) - found[:1]).max() > 1e-3
    assert sample_seeds(5, 2).equal(sample_seeds(5, 4)[:2])


def test_a_model_with_zero_output_predicts_no_motion():
    model = tiny_model()  # its last layer is zero: displacement 0
    (clip, _), _ = scenes(model)
    found = model.predict(clip.observation, clip.points, samples=1)
    np.testing.assert_allclose(found[0, ..., :3], np.broadcast_to(clip.points, (4, 3, 3, 3)), rtol=0, atol=1e-5)


def test_guidance_moves_away_from_the_blank_instruction():
    model = disturb(tiny_model(text_drop=0.1))
    clips, inputs = scenes(model)
    seeds = torch.tensor([1, 2])
    plain, far = (model.sample(inputs, seeds, steps=1, guidance=scale) for scale in (1.0, 3.0))
    noise = torch.stack(
        [torch.randn(1, *model.flow_shape, generator=torch.Generator().manual_seed(s))[0] for s in (1, 2)]
    )
    with torch.no_grad():
        blank = model(inputs, noise, torch.ones(2), torch.zeros(2, dtype=torch.bool))
    torch.testing.assert_close(
        far, blank + 3.0 * (plain - blank), rtol=0, atol=1e-4
    )  # one step of x0 is its prediction
    with pytest.raises(UserError, match="text_drop=0"):
        tiny_model().predict(clips[0].observation, clips[0].points, guidance=2.0)


@pytest.mark.parametrize("body", BODIES)
def test_a_folder_holds_the_whole_model(body, tmp_path):
    model = disturb(tiny_model(body, kind="ddim", parameterisation="v"))
    model.save_pretrained(tmp_path / "model")
    again = FlowWorldModel.from_pretrained(tmp_path / "model")
    assert again.config == model.config
    (clip, _), _ = scenes(model)
    found = again.predict(clip.observation, clip.points, seed=1)
    np.testing.assert_array_equal(found, model.predict(clip.observation, clip.points, seed=1))


def test_other_sizes_are_refused(tmp_path):
    model = tiny_model()
    clip = make_clips(1, frames=5, side=4)[0]
    with pytest.raises(UserError, match=r"\(4, 4, 3\); this model was trained with \(3, 3, 3\)"):
        model.predict(clip.observation, clip.points)
    with pytest.raises(UserError, match=r"num_frames=5 and grid=4"):
        model.check_flow(clip.flow)
    model.save_pretrained(tmp_path / "a")
    with pytest.raises(UserError, match="a different model"):
        tiny_model("dit_factored").load_weights(tmp_path / "a")
    with pytest.raises(UserError, match="differ from this policy's vocabulary"):
        FlowWorldModel(tiny_config(), Vocabulary(["other"])).load_weights(tmp_path / "a")
    with pytest.raises(UserError, match="not a saved world model"):
        FlowWorldModel.from_pretrained(tmp_path)
    (tmp_path / "a" / "config.json").write_text('{"encoding": {}}')
    with pytest.raises(UserError, match="does not belong to a world model"):
        FlowWorldModel.from_pretrained(tmp_path / "a")
    (tmp_path / "a" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="damaged"):
        tiny_model().load_weights(tmp_path / "a")


def test_options_without_an_effect_are_refused():
    for change, message in (
        (lambda c: setattr(c.condition, "bgr", True), "it has no effect while .*kind is 'small'"),
        (lambda c: setattr(c.condition, "text", "here"), "condition.text is 'here', but it has no effect"),
        (
            lambda c: setattr(c.condition, "kind", "clip"),
            "is empty; set it to a folder|it has no effect while .*kind is .clip",
        ),
        (lambda c: setattr(c.condition, "patch_px", 7), "multiple of 7"),
        (lambda c: setattr(c.body.unet, "trainable", "lora"), "adapters on random weights"),
        (lambda c: setattr(c.body.unet, "norm_groups", 3), "does not divide"),
        (lambda c: setattr(c.body.unet, "max_frames", 3), "positions for"),
    ):
        config = tiny_config("unet_motion")
        change(config)
        with pytest.raises(ValueError, match=message):
            FlowWorldModel(config, Vocabulary.from_texts(TEXTS))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    root = tmp_path_factory.mktemp("pretrained")
    return build_sd(root / "sd"), build_vision(root / "vision")


def paper_config(pretrained, **changes) -> FlowModelConfig:
    """The paper's model, tiny: CLIP towers, a pretrained U-Net, adapters."""
    config = tiny_config(
        "unet_motion", kind="ddim", parameterisation="eps", text_drop=0.1, guidance=2.0, visibility="ones"
    )
    config.encoding = dataclasses.replace(config.encoding, target="absolute")
    config.condition = ConditionConfig(
        kind="clip", width=16, image_px=32, text=str(pretrained[0]), vision=str(pretrained[1]), **changes
    )
    config.body.point_condition = "tokens"
    config.body.unet = UnetConfig(
        channels=[8, 16],
        layers=1,
        norm_groups=4,
        max_frames=8,
        pretrained=str(pretrained[0]),
        trainable="lora",
        lora_rank=2,
    )
    return config


def test_the_papers_model_from_pretrained_folders(pretrained, tmp_path):
    from diffusers import UNet2DConditionModel

    vocabulary = Vocabulary.from_texts(TEXTS)
    model = FlowWorldModel(paper_config(pretrained), vocabulary)
    end = model.context.tokenizer.eos_token
    ids = model.context.tokenizer(f"push {end} the cup").input_ids
    assert ids.count(model.context.tokenizer.eos_token_id) == 1, "an instruction cannot end itself"
    given = UNet2DConditionModel.from_pretrained(pretrained[0] / "unet").conv_in.weight
    assert model.body.unet.conv_in.weight.equal(given)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert all(
        "lora_" in n or "motion_modules" in n or n.startswith(("context.image", "context.point")) for n in trained
    )
    assert any("lora_" in name for name in trained)
    assert not any("lora_" in name and "motion_modules" in name for name in trained)
    clips, inputs = scenes(model)
    context = model.encode(inputs)
    assert context.tokens.shape == (2, 16 + 17 + 16, 16)  # text, image, points
    assert not context.tokens[:, 16:].any()  # projections start at zero
    assert context.tokens[:, :16].any()
    disturb(model, 0.3)
    found = model.predict(clips[0].observation, clips[0].points, samples=2, seed=1)
    model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "vision").exists()
    again = FlowWorldModel.from_pretrained(tmp_path / "saved")
    np.testing.assert_array_equal(again.predict(clips[0].observation, clips[0].points, samples=2, seed=1), found)
    model.export(tmp_path / "out")
    alone = FlowWorldModel.from_pretrained((tmp_path / "out").rename(tmp_path / "moved"))
    assert alone.config.condition.vision == str((tmp_path / "moved" / "vision").resolve())
    assert alone.config.body.unet.trainable == "full"
    np.testing.assert_allclose(
        alone.predict(clips[0].observation, clips[0].points, samples=2, seed=1), found, atol=1e-2
    )


def test_an_instruction_that_clip_would_cut_is_refused(pretrained):
    model = FlowWorldModel(paper_config(pretrained), Vocabulary.from_texts(TEXTS))
    model.check_instructions(TEXTS)
    long = "move the block " * 20 + "quickly"
    with pytest.raises(UserError, match=r"tokens; CLIP reads 16, so '.*quickly' would be dropped"):
        model.check_instructions([*TEXTS, long])
    (clip, _), _ = scenes(model)
    observation = dataclasses.replace(clip.observation, instruction=long)
    with pytest.raises(UserError, match="would be dropped"):
        model.predict(observation, clip.points)
    with pytest.raises(UserError, match="has 61 words; at most 24"):
        tiny_model().check_instructions([long])


def test_codes_and_colours_of_the_released_weights(pretrained):
    vocabulary = Vocabulary.from_texts(TEXTS)
    tokens = []
    for changes in ({}, {"bgr": True}, {"point_pe": "repo"}):
        config = paper_config(pretrained, **changes)
        model = disturb(FlowWorldModel(config, vocabulary))
        tokens.append(model.encode(scenes(model)[1]).tokens)
    text, image, points = slice(0, 16), slice(16, 33), slice(33, None)
    assert tokens[0][:, text].equal(tokens[1][:, text])
    assert not tokens[0][:, image].allclose(tokens[1][:, image])
    assert tokens[0][:, points].equal(tokens[1][:, points])
    assert tokens[0][:, image].equal(tokens[2][:, image])
    assert not tokens[0][:, points].allclose(tokens[2][:, points])


def test_folders_that_do_not_fit_are_refused(pretrained, tmp_path):
    vocabulary = Vocabulary.from_texts(TEXTS)
    for change, message in (
        (lambda c: setattr(c.condition, "text", str(tmp_path)), r"model\.condition\.text: no CLIPTextModel"),
        (lambda c: setattr(c.condition, "image_px", 64), "the vision tower needs 32"),
        (lambda c: setattr(c.body.unet, "pretrained", str(tmp_path)), "no U-Net in"),
        (lambda c: setattr(c.body.unet, "layers", 2), r"layers=1 and reads"),
    ):
        config = paper_config(pretrained)
        change(config)
        with pytest.raises(UserError, match=message):
            FlowWorldModel(config, vocabulary)


def test_adapters_are_on_the_attention_of_everything_but_motion_modules():
    import re

    assert re.fullmatch(ADAPTED, "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q")
    assert re.fullmatch(ADAPTED, "mid_block.attentions.0.transformer_blocks.0.attn2.to_out.0")
    assert not re.fullmatch(ADAPTED, "down_blocks.0.motion_modules.0.transformer_blocks.0.attn1.to_q")
    assert not re.fullmatch(ADAPTED, "down_blocks.0.resnets.0.conv1")


def test_keypoints_follow_their_targets():
    """A score that is high on red alone puts its keypoint on the red square, wherever that is."""
    keypoints = Keypoints(count=1, channels=8, width=16)
    for layer in (keypoints.first, keypoints.second, keypoints.scores):
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    with torch.no_grad():
        keypoints.first.weight[0, 0, 2, 2] = 1.0  # reads the red channel of the middle pixel
        keypoints.second.weight[0, 0, 1, 1] = 1.0
        keypoints.scores.weight[0, 0] = 40.0
    seen = []
    keypoints.token.register_forward_pre_hook(lambda layer, given: seen.append(given[0][0]))
    for row, column in ((8, 8), (8, 40), (48, 24)):
        image = -torch.ones(1, 3, 64, 64)
        image[:, 0, row : row + 4, column : column + 4] = 1.0
        assert keypoints(image, torch.zeros(1, 16)).shape == (1, 16)
        # each position of the 16 x 16 map stands for 4 pixels, the first and the last at -1 and 1
        wanted = torch.tensor([row / 4, column / 4]) / 15 * 2 - 1
        code = octave_code(wanted[None])[0]
        torch.testing.assert_close(seen[-1], code, atol=0.05, rtol=0)
