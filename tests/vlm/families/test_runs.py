"""Runs of the real recipes on models of several families, from a saved folder to plain transformers and peft."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import LlavaOnevisionVideoProcessor

from mmrl.errors import UserError
from mmrl.hub.compat import quiet_transformers
from mmrl.recipes import RECIPES
from mmrl.training.run import train
from mmrl.vlm.data.prompt import VlmPayload, encode_prompt
from mmrl.vlm.data.task import TaskError, VideoClip, VlmTask
from mmrl.vlm.engine.vlm_policy import VlmPolicy, load_policy
from mmrl.vlm.model.model_config import LoraSettings, ModelConfig
from mmrl.vlm.model.network import auto_class
from mmrl.vlm.model.processor import load_processor
from mmrl.vlm.vlm_config import VlmConfig
from tests.rounding import assert_equal_up_to_rounding
from tests.vlm.builders import draw, make_task
from tests.vlm.families.conftest import KINDS
from tests.vlm.runs import run_config, without_images

LORA = {"enabled": True, "rank": 4, "targets": ["q_proj", "v_proj"]}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder(kind: str, tiny_generic: dict[str, Path]) -> Path:
    return tiny_generic[kind]


def sizes(kind: str) -> list[tuple[int, int]]:
    return [] if kind == "qwen3" else [(56, 56)]


def run_of(kind: str, folder: Path, tmp_path: Path, **lora) -> tuple[Path, VlmConfig]:
    config = run_config(VlmConfig, tmp_path, folder, steps=1, samples_per_task=3, learning_rate=1e-2)
    if kind == "qwen3":
        without_images(Path(config.data.path))
    config.model.lora = LoraSettings(**lora) if lora else config.model.lora
    config.rewards[0].name = "tests.vlm.user_reward:code_points"
    config.rewards[0].weight = 1.0
    return train(RECIPES["vlm"], config), config


@pytest.mark.parametrize(
    ("kind", "lora"),
    [("smolvlm", LORA), ("gemma3", {}), ("qwen3", LORA)]
    + [pytest.param(*pair, marks=pytest.mark.slow) for pair in (("smolvlm", {}), ("gemma3", LORA), ("qwen3", {}))],
    indirect=["kind"],
)
def test_a_step_of_grpo_is_saved_for_plain_transformers(kind, folder, tmp_path, lora):
    run_dir, config = run_of(kind, folder, tmp_path, **lora)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert rows[0]["policy/ratio_mean"] == 1.0
    assert rows[0]["optim/grad_norm"] > 0
    saved = run_dir / "checkpoints/step-000001/model"
    policy = load_policy(ModelConfig(path=str(saved), lora=config.model.lora))
    task = make_task("t", "Sum?", sizes(kind))
    prompt = policy.encode(task)
    expected = own_logits(policy.network, prompt)
    with quiet_transformers():
        plain = auto_class(policy.network.config.model_type, "").from_pretrained(saved).eval()
    assert sum("lora_" in name for name in plain.state_dict()) == (8 if lora else 0)
    assert_equal_up_to_rounding(own_logits(plain, prompt), expected)
    before = load_policy(ModelConfig(path=str(folder)))
    assert (own_logits(before.network, prompt) - expected).abs().max() > 1e-4


def own_logits(model, prompt) -> torch.Tensor:
    types = {}
    if model.config.model_type == "gemma3":
        types = {"token_type_ids": prompt.mm_token_type_ids[None]}
    with torch.no_grad():
        return model(input_ids=prompt.input_ids[None], **types, **prompt.media).logits


def test_prompts_are_those_of_the_processor(kind, folder):
    policy = load_policy(ModelConfig(path=str(folder)))
    task = make_task("t", "What is the sum?", sizes(kind) * 2)
    prompt = policy.encode(task)
    assert int((prompt.mm_token_type_ids == 1).sum()) == 4 * len(task.images)
    assert policy.processor.tokenizer.decode(prompt.input_ids).endswith("<|im_start|>assistant\n")
    assert prompt.has_vision is bool(task.images)
    assert set(policy.banned_ids.tolist()).isdisjoint(policy.eos_ids)
    if task.images:
        assert policy.network.config.image_token_id in policy.banned_ids.tolist()


def test_thinking_is_switched_by_the_chat_template(tiny_generic, tmp_path):
    with pytest.raises(UserError, match=r"model\.thinking is false, but the chat template of .* has no switch"):
        load_policy(ModelConfig(path=str(tiny_generic["qwen3"]), thinking=False))
    for kind in ("qwen3", "smolvlm"):
        folder = Path(shutil.copytree(tiny_generic[kind], tmp_path / kind))
        file, closed = folder / "chat_template.jinja", "{% if enable_thinking is false %}<think></think>{% endif %}"
        file.write_text(file.read_text() + closed)
        task = make_task("t", "Sum?", sizes(kind))
        texts = [
            load_policy(ModelConfig(path=str(folder), thinking=on)).encode(task).text for on in (None, True, False)
        ]
        assert texts[0] == texts[1] == texts[2].removesuffix("<think></think>")
        assert texts[2] != texts[1]


def test_a_language_model_reads_no_images(tiny_generic):
    policy = load_policy(ModelConfig(path=str(tiny_generic["qwen3"])))
    with pytest.raises(TaskError, match="it has 1 images, which the model cannot read"):
        policy.encode(make_task("t", "Sum?", [(56, 56)]))


def test_points_in_pixels_need_the_size_that_the_model_sees(tiny_generic):
    policy = load_policy(ModelConfig(path=str(tiny_generic["gemma3"])))
    task = make_task("t", "Where?", [(56, 56)])
    task.image_wh = [(56, 56)]
    with pytest.raises(UserError, match="but this model's processor does not report that size"):
        policy.encode(task)


def test_options_that_fit_no_such_model(kind, folder):
    with pytest.raises(UserError, match=r"model\.min_pixels and model\.max_pixels (are areas|only apply)"):
        load_policy(ModelConfig(path=str(folder), max_pixels=5000))


def test_frames_of_a_video_are_resized_by_the_models_own_processor(tiny_generic):
    policy = load_policy(ModelConfig(path=str(tiny_generic["smolvlm"])))
    colours = [Image.new("RGB", (64, 90), (60 * number, 90, 160)) for number in range(4)]
    task = VlmTask(
        id="v",
        messages=[{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "What?"}]}],
        videos=[VideoClip(colours)],
    )
    prompt = policy.encode(task)
    assert prompt.media["pixel_values"].shape == (1, 4, 3, 56, 56)
    assert int((prompt.mm_token_type_ids == 1).sum()) == 4 * 4
    drawn = draw(policy, [task])
    expected = own_logits(policy.network, prompt)[0, -1].index_fill(0, policy.banned_ids, float("-inf")).log_softmax(-1)
    first = VlmPayload.of(drawn).response_ids[:, 0]
    assert_equal_up_to_rounding(policy(drawn).logp[:, 0], expected[first])
    for kind in ("gemma3", "qwen3"):
        with pytest.raises(TaskError, match="it has 1 videos, which the model cannot read"):
            load_policy(ModelConfig(path=str(tiny_generic[kind]))).encode(task)


def test_images_beside_videos_are_refused_where_the_processor_loses_them(tiny_generic):
    policy = load_policy(ModelConfig(path=str(tiny_generic["smolvlm"])))
    red = Image.new("RGB", (56, 56), "red")
    content = [{"type": "image"}, {"type": "video"}, {"type": "text", "text": "What?"}]
    task = VlmTask("v", [{"role": "user", "content": content}], images=[red], videos=[VideoClip([red, red])])
    with pytest.raises(TaskError, match="images and videos, which SmolVLMProcessor cannot read in one question"):
        policy.encode(task)


def test_videos_show_the_users_own_chat_template(tiny_generic, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{% for part in messages[0].content %}{{ part.text or '<video>' }}{% endfor %} Own:")
    policy = load_policy(ModelConfig(path=str(tiny_generic["smolvlm"]), chat_template=str(file)))
    clips = [VideoClip([Image.new("RGB", (64, 64))] * 2)]
    content = [{"type": "video"}, {"type": "text", "text": "What?"}]
    task = VlmTask(id="v", messages=[{"role": "user", "content": content}], videos=clips)
    assert policy.encode(task).text == "<video>What? Own:"
    policy.save_pretrained(tmp_path / "saved")
    assert load_policy(ModelConfig(path=str(tmp_path / "saved"))).encode(task).text == "<video>What? Own:"


class OneTensor:
    """The videos of LLaVA-OneVision."""

    def __init__(self, tokenizer):
        self.tokenizer, self.video_token, self.video_processor = tokenizer, "<video>", None

    def apply_chat_template(self, messages, **_):
        return "<video>" * 2

    def __call__(self, *, videos, videos_kwargs, **_):
        size = {"height": 16, "width": 16}
        return LlavaOnevisionVideoProcessor(size=size)(videos=videos, return_tensors="pt", **videos_kwargs)


def test_a_model_that_reads_videos_of_one_length_names_the_option(tiny_generic):
    layout = load_policy(ModelConfig(path=str(tiny_generic["smolvlm"]))).layout
    clips = [VideoClip([Image.new("RGB", (64, 64))] * count) for count in (2, 4)]
    content = [{"type": "video"}] * 2
    task = VlmTask(id="v", messages=[{"role": "user", "content": content}], videos=clips)
    processor = OneTensor(load_processor(str(tiny_generic["smolvlm"])).tokenizer)
    with pytest.raises(TaskError, match=r"videos of 2 and 4 frames together \(.*\); data\.video\.nframes") as found:
        encode_prompt(task, processor, layout)
    assert found.value.kind == "unusable_video"


def test_a_frozen_tower_is_encoded_once(kind, folder):
    if kind == "qwen3":
        pytest.skip("it has no tower")
    policy = load_policy(ModelConfig(path=str(folder), freeze_vision=True))
    passes = []
    tower = next(module for name, module in policy.network.named_modules() if name.endswith(("vision_model", "tower")))
    tower.register_forward_hook(lambda *_: passes.append(1))
    rollouts = draw(policy, [make_task(name, "Sum?", sizes(kind)) for name in "ab"])
    policy(rollouts).logp.sum().backward()
    assert len(passes) == 2
    assert all(weight.grad is None for weight in tower.parameters())


def checkpointed(folder: Path) -> VlmPolicy:
    return load_policy(ModelConfig(path=str(folder), gradient_checkpointing=True)).train()


def test_checkpointing_and_values(kind, folder):
    """Layers that are computed again in the backward pass use no cache, and the numbers are the same."""
    policy, other = load_policy(ModelConfig(path=str(folder)), value_head=True), checkpointed(folder)
    rollouts = draw(policy, [make_task(name, "Sum?", sizes(kind)) for name in "ab"])
    assert other.reader.shares(other) == other.reader.joins(other) == (kind != "gemma3")
    found = policy(rollouts, outputs=frozenset({"logp", "entropy", "values"}))
    assert found.values.shape == rollouts.mask.shape
    again = other(rollouts)
    assert_equal_up_to_rounding(again.logp, found.logp)
    assert_equal_up_to_rounding(found.logp.detach(), rollouts.logp_old)
