"""Prompts of processors whose chat templates leave work to them, against transformers' own `apply_chat_template`."""

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from mmrl.hub.compat import ensure_torchvision
from mmrl.vlm.data.prompt import PromptLayout, encode_history, encode_prompt, encode_turn
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.data.turn_template import TurnTemplate

ensure_torchvision()
import transformers as hf  # noqa: E402 - torchvision first

TURNS = (
    "{% for m in messages %}{{ m.role|upper }}: "
    "{% for c in m.content %}{{ '<image>\n' if c.type == 'image' else c.text }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
LAYOUT = PromptLayout(
    patch_size=14,
    max_tokens=4096,
    limit_source="",
    merge_size=1,
    tables=lambda inputs: (torch.zeros_like(inputs["input_ids"][0]), torch.arange(inputs["input_ids"].shape[1])[None]),
)


def tokenizer(template):
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=letters, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens(
        [AddedToken(token, special=True) for token in ("<s>", "</s>", "<image>", "<video>", "<unk>")]
    )
    core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))])
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        chat_template=template,
        extra_special_tokens={"image_token": "<image>", "video_token": "<video>"},
    )


def llava(template=TURNS):
    own = tokenizer(template)
    size = {"height": 56, "width": 56}
    images = hf.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size=size)
    more = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1, "chat_template": template}
    return hf.LlavaProcessor(images, own, patch_size=14, **more)


def llava_onevision():
    own = tokenizer(TURNS)
    size = {"height": 56, "width": 56}
    images = hf.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]])
    videos = hf.LlavaOnevisionVideoProcessor(size=size)
    more = {"vision_feature_select_strategy": "full", "num_image_tokens": 16, "chat_template": TURNS}
    return hf.LlavaOnevisionProcessor(images, own, videos, **more)


def task_of(*texts, images=0):
    """Turns of user and assistant, images in the first."""
    roles = ("user", "assistant")
    turns = [
        {"role": roles[place % 2], "content": [{"type": "text", "text": text}]} for place, text in enumerate(texts)
    ]
    turns[0]["content"] = [{"type": "image"}] * images + turns[0]["content"]
    noise = np.random.default_rng(0).integers(0, 255, (images, 80, 40, 3), dtype=np.uint8)
    return VlmTask("t", turns, [Image.fromarray(pixels) for pixels in noise])


def own_inputs(processor, task):
    shown = iter(task.images)
    turns = [
        {**turn, "content": [item | ({"image": next(shown)} if item["type"] == "image" else {}) for item in content]}
        for turn in task.messages
        for content in [turn["content"]]
    ]
    form = {"tokenize": True, "add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    return processor.apply_chat_template(turns, **form)


@pytest.mark.parametrize("images", [0, 1, 2])
@pytest.mark.parametrize("make", [llava, lambda: llava("<s>" + TURNS), llava_onevision])
def test_prompts_begin_and_show_images_as_in_transformers(make, images):
    processor, task = make(), task_of("What is it?", images=images)
    expected, found = own_inputs(processor, task), encode_prompt(task, processor, LAYOUT)
    assert found.input_ids.tolist() == expected["input_ids"][0].tolist()
    assert processor.tokenizer.decode(found.input_ids).startswith("<s>USER:")
    if images:
        assert torch.equal(found.media["pixel_values"], expected["pixel_values"])


def test_a_spelled_token_is_no_beginning():
    processor = llava()
    ids = encode_prompt(task_of("Is <s> a tag?"), processor, LAYOUT).input_ids.tolist()
    assert processor.tokenizer.decode(ids) == "<s>USER: Is <s> a tag?</s>ASSISTANT:"
    assert ids.count(processor.tokenizer.bos_token_id) == 1


def test_only_the_first_of_several_turns_begins_the_text():
    processor = llava()
    turns = TurnTemplate(processor, {}, [processor.tokenizer.eos_token_id], "llava")
    talk = task_of("What?", "This.", "And?")
    history = encode_history(talk, turns, processor, LAYOUT, {}, [])
    assert history.input_ids.tolist() == own_inputs(processor, talk)["input_ids"][0].tolist()
    further = encode_turn(task_of("And?"), turns, processor, LAYOUT, end=processor.tokenizer.eos_token_id)
    assert processor.tokenizer.bos_token_id not in further.input_ids
