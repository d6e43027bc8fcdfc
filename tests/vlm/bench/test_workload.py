"""Prompts of an exact length, models of given sizes, rewards that differ."""

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.vlm.workload import (
    MODELS,
    Shape,
    build_model,
    checksum_reward,
    half_dead_reward,
    questions_file,
    shape_of,
    suppressed_tokens,
)
from mmrl.errors import UserError
from mmrl.vlm.data.dataset import DataConfig, load_tasks
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.model.model_config import ModelConfig
from mmrl.vlm.toy.tiny import FAMILIES, build_tiny_vlm
from tests.vlm.builders import CORPUS


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_have_exactly_their_length_and_image_tokens(tmp_path, family):
    model = build_model(tmp_path, family, "quick")
    policy = load_policy(ModelConfig(path=str(model)))
    for shape in (Shape((2, 2), 40, 4), Shape((2, 3), 61, 4), Shape((2, 2), 80, 4, frames=4)):
        tasks = load_tasks(DataConfig(path=str(questions_file(tmp_path, model, shape)))).tasks
        assert len(tasks) == 4
        for task in tasks:
            prompt = policy.encode(task)
            assert len(prompt) == shape.prompt
            assert int((prompt.mm_token_type_ids == (2 if shape.frames else 1)).sum()) == shape.image_tokens


@pytest.mark.parametrize(("family", "grid"), [("gemma3", (2, 2)), ("qwen3", (0, 0))])
def test_prompts_of_the_generic_lane_have_exactly_their_length_too(tmp_path, family, grid):
    model, shape = build_model(tmp_path, family, "quick"), Shape(grid, 40, 4)
    policy = load_policy(ModelConfig(path=str(model)))
    tasks = load_tasks(DataConfig(path=str(questions_file(tmp_path, model, shape)))).tasks
    prompts = [policy.encode(task) for task in tasks]
    assert [len(prompt) for prompt in prompts] == [40] * 4
    assert {int((prompt.mm_token_type_ids == 1).sum()) for prompt in prompts} == {shape.image_tokens}
    assert len({prompt.text for prompt in prompts}) == 4
    assert policy.eos_ids[0] in suppressed_tokens(str(model), policy.processor.tokenizer)


def test_model_and_questions_are_built_once(tmp_path):
    shape = Shape((2, 2), 40, 4)
    first = build_model(tmp_path, "qwen2_5_vl", "quick")
    questions = questions_file(tmp_path, first, shape)
    stamps = [path.stat().st_mtime_ns for path in (first / "config.json", questions)]
    assert build_model(tmp_path, "qwen2_5_vl", "quick") == first
    assert questions_file(tmp_path, first, shape) == questions
    assert [path.stat().st_mtime_ns for path in (first / "config.json", questions)] == stamps
    assert build_model(tmp_path, "qwen3_vl", "quick") != first


def test_a_prompt_without_room_for_its_image_is_refused(tmp_path):
    model = build_model(tmp_path, "qwen2_5_vl", "quick")
    with pytest.raises(UserError, match="a prompt of 10 tokens has no room for 4 image tokens and text"):
        questions_file(tmp_path, model, Shape((2, 2), 10, 4))


def test_sizes_reach_the_model(tmp_path):
    options = MODELS["21m"] | {"layers": 1, "vocab_size": 300, "embedding_rows": 320, "dtype": "bfloat16"}
    path = build_tiny_vlm(tmp_path / "model", corpus=CORPUS, **options)
    policy = load_policy(ModelConfig(path=str(path)))
    text, vision = policy.network.config.text_config, policy.network.config.vision_config
    assert (text.hidden_size, text.intermediate_size, text.vocab_size) == (384, 1536, 320)
    assert (vision.hidden_size, vision.intermediate_size, vision.num_heads, vision.depth) == (256, 1024, 4, 3)
    assert list(vision.fullatt_block_indexes) == [2]
    weights = load_file(path / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert set(range(len(policy.processor.tokenizer), 320)) <= set(policy.banned_ids.tolist())


def test_attention_gain_scales_queries_and_keys_and_nothing_else(tmp_path):
    plain, sharp = (
        load_file(build_tiny_vlm(tmp_path / str(gain), corpus=CORPUS, attention_gain=gain) / "model.safetensors")
        for gain in (1.0, 3.0)
    )
    scaled = {name for name in plain if not torch.equal(plain[name], sharp[name])}
    assert {name.rpartition(".layers.")[2] for name in scaled if ".layers." in name} == {
        f"{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qk"
    }
    (fused,) = (name for name in scaled if ".layers." not in name)
    assert fused.endswith("attn.qkv.weight")
    queries_and_keys = 2 * len(plain[fused]) // 3
    assert torch.allclose(sharp[fused][:queries_and_keys], 3.0 * plain[fused][:queries_and_keys])
    assert torch.equal(sharp[fused][queries_and_keys:], plain[fused][queries_and_keys:])


def test_rewards_differ_and_dead_questions_get_one_value():
    texts = ["a", "b", "c", "d"]
    values = checksum_reward([], texts)
    assert len(set(values)) == 4
    assert all(0 <= value <= 1 for value in values)
    assert half_dead_reward([], texts, id=["0", "1", "2", "3"]) == [values[0], 0.5, values[2], 0.5]


def test_suppressed_tokens_are_the_ends_and_the_image_markup(tmp_path):
    model = build_model(tmp_path, "qwen2_5_vl", "quick")
    tokenizer = load_policy(ModelConfig(path=str(model))).processor.tokenizer
    found = tokenizer.convert_ids_to_tokens(suppressed_tokens(str(model), tokenizer))
    assert set(found) == {
        "<|im_end|>",
        "<|endoftext|>",
        "<|image_pad|>",
        "<|video_pad|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
    }


def test_shapes_travel_as_json():
    shape = Shape((2, 3), 40, 4, 5)
    assert shape_of({"grid": [2, 3], "prompt": 40, "completion": 4, "group": 5}) == shape
    assert shape.image_tokens == 6
    assert Shape((2, 3), 40, 4, frames=8).image_tokens == 24
