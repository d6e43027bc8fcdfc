import filecmp
import json

import pytest
import torch
from safetensors.torch import load_file

from mmrl.errors import UserError
from mmrl.hub.compat import quiet_transformers
from mmrl.vlm.toy.tiny import build_tiny_vlm, train_tokenizer
from mmrl.vlm.toy.tiny_generic import build_tiny
from tests.vlm.builders import CORPUS, noise_image


def load(path):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    with quiet_transformers():
        return AutoModelForImageTextToText.from_pretrained(path), AutoProcessor.from_pretrained(path)


def logits(model, processor):
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is the sum?"}]}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[text], images=[noise_image(70, 90, 0)], return_tensors="pt")
    with torch.no_grad():
        return model.eval()(**inputs).logits


def test_same_seed_same_files_other_seed_other_weights(tmp_path, family):
    first, again, other = (
        build_tiny_vlm(tmp_path / name, family=family, corpus=CORPUS, seed=seed)
        for name, seed in (("first", 0), ("again", 0), ("other", 1))
    )
    names = sorted(file.name for file in first.iterdir())
    assert filecmp.cmpfiles(first, again, names, shallow=False)[0] == names
    one, two = load_file(first / "model.safetensors"), load_file(other / "model.safetensors")
    assert not any(torch.equal(one[key], two[key]) for key in one if one[key].std() > 0)


def test_building_leaves_the_global_generator_alone(tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    build_tiny_vlm(tmp_path / "model", corpus=CORPUS)
    assert torch.equal(torch.rand(2), expected)


def test_loads_with_auto_classes_and_keeps_its_logits_when_saved_again(tmp_path, folder, family):
    model, processor = load(folder)
    assert model.config.model_type == family
    before = logits(model, processor)
    assert before.std() > 0.1
    with quiet_transformers():
        model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    assert torch.equal(logits(*load(tmp_path)), before)


def test_head_is_tied_and_rotary_sections_fill_the_head(folder):
    model, _ = load(folder)
    text = model.config.text_config
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    head = text.hidden_size // text.num_attention_heads
    assert 2 * sum(text.rope_parameters["mrope_section"]) == head
    assert min(text.rope_parameters["mrope_section"]) > 0


def test_demo_size(tmp_path):
    """The size that the suite's demo is designed around: under 200 k parameters."""
    model, _ = load(build_tiny_vlm(tmp_path, corpus=CORPUS))
    assert 150_000 < sum(parameter.numel() for parameter in model.parameters()) < 200_000


def test_chat_markup(folder):
    _, processor = load(folder)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Sum?"}, {"type": "video"}]},
    ]
    assert processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Sum?"
        "<|vision_start|><|video_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tokenizer_keeps_text_digits_roles_and_answer_tags(folder):
    tokenizer = load(folder)[1].tokenizer
    text = "<think>12 é 图\n</think><answer>345</answer>"
    ids = tokenizer(text)["input_ids"]
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert [token for token in tokens if token.isdigit()] == list("12345")
    assert {"<think>", "</think>", "<answer>", "</answer>"} <= set(tokens)
    for role in ("system", "user", "assistant"):
        assert len(tokenizer(role)["input_ids"]) == 1
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.padding_side == "left"


def test_tokenizer_learns_the_corpus():
    text = "elephants elephants elephants"
    assert len(train_tokenizer(["giraffes"], 400)(text)["input_ids"]) > len(text) / 2
    assert len(train_tokenizer([text], 400)(text)["input_ids"]) <= 3


def test_pixel_budget_sets_the_number_of_image_tokens(tmp_path):
    _, processor = load(build_tiny_vlm(tmp_path, corpus=CORPUS, min_pixels=56 * 56, max_pixels=56 * 56))
    grid = processor.image_processor(images=[noise_image(200, 200, 0)], return_tensors="pt")["image_grid_thw"]
    assert grid.tolist() == [[1, 4, 4]]


def test_end_tokens_are_saved(folder):
    settings = json.loads((folder / "generation_config.json").read_text())
    tokenizer = load(folder)[1].tokenizer
    assert settings["eos_token_id"] == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert settings["top_k"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "llava"}, "qwen2_5_vl, qwen3_vl"),
        ({"hidden": 50}, "hidden=50"),
        ({"heads": 16}, "at least 6 per head"),
        ({"kv_heads": 3}, "kv_heads=3"),
        ({"vision_hidden": 40}, "vision_hidden=40"),
        ({"layers": 0}, "at least 1"),
        ({"vocab_size": 260}, "vocab_size=260"),
    ],
)
def test_sizes_that_do_not_fit(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        build_tiny_vlm(tmp_path / "model", corpus=CORPUS, **options)


@pytest.mark.parametrize(
    ("family", "table"),
    [
        ("qwen3_vl", "model.visual.pos_embed.weight"),
        ("smolvlm", "model.vision_model.embeddings.position_embedding.weight"),
        ("gemma3", "vision_tower.embeddings.position_embedding.weight"),
    ],
)
def test_smooth_positions_look_the_more_alike_the_nearer_they_are(tmp_path, family, table):
    def weights(name, **options):
        path = build_tiny(tmp_path / name, family=family, corpus=["a"], max_pixels=112 * 112, **options)
        return load_file(path / "model.safetensors")[table]

    noise, waves = weights("noise"), weights("waves", smooth_positions=True)
    torch.testing.assert_close(waves.square().mean(), noise.square().mean(), rtol=0.1, atol=0)
    alike = torch.nn.functional.cosine_similarity(waves[0], waves.view(8, 8, -1)[:, 0], dim=-1)
    assert alike[1] > 0.8
    assert alike[1] > alike[2] > alike[4]
    other = torch.nn.functional.cosine_similarity(waves[0], waves.view(8, 8, -1)[0], dim=-1)
    torch.testing.assert_close(other, alike)
    torch.testing.assert_close(weights("loud", position_gain=15.0), 15 * noise)


def test_smolvlm_sees_all_images_as_squares_of_one_size(tmp_path):
    sizes = {"max_pixels": 112 * 112, "min_pixels": 3136, "vision_hidden": 16, "vision_depth": 1}
    folder = build_tiny(tmp_path / "smolvlm", family="smolvlm", corpus=CORPUS, **sizes)
    model, processor = load(folder)
    assert processor.image_seq_len == 16
    assert model.model.vision_model.embeddings.position_embedding.weight.shape == (64, 16)
    assert logits(model, processor).isfinite().all()


def test_sizes_of_generic_models_that_fit_no_image_are_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"max_pixels=10000 is not the area of a square whose side is a multiple of 28.*try 12544"
    ):
        build_tiny(tmp_path, family="smolvlm", corpus=CORPUS, max_pixels=10000)
    with pytest.raises(UserError, match=r"unknown model family 'smol'; available: qwen2_5_vl, .*gemma3"):
        build_tiny(tmp_path, family="smol", corpus=CORPUS)
    with pytest.raises(UserError, match="min_pixels=12544 exceeds the 3136 pixels of every image"):
        build_tiny(tmp_path, family="smolvlm", corpus=CORPUS, min_pixels=12544, max_pixels=3136)
    with pytest.raises(UserError, match=r"smolvlm have no option attention_gain; they have: .*position_gain.*vision_h"):
        build_tiny(tmp_path, family="smolvlm", corpus=CORPUS, attention_gain=2.0)
    with pytest.raises(UserError, match="qwen2_5_vl has none; remove them"):
        build_tiny(tmp_path, family="qwen2_5_vl", corpus=CORPUS, position_gain=2.0)
