import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmrl.config import load
from mmrl.errors import UserError
from mmrl.hub.compat import quiet_transformers
from mmrl.vlm.engine.model_loading import set_pixels
from mmrl.vlm.engine.vlm_policy import VlmPolicy, load_policy
from mmrl.vlm.model import processor as processor_module
from mmrl.vlm.model.model_config import LoraSettings, ModelConfig
from mmrl.vlm.model.network import VALUE_HEAD_FILE
from mmrl.vlm.model.processor import ImageOnlyProcessor, TextProcessor, load_processor
from mmrl.vlm.toy.tiny import build_tiny_vlm
from tests.rounding import assert_equal_up_to_rounding
from tests.vlm.builders import CORPUS, draw, make_task, ragged_tasks

VALUES = frozenset({"logp", "values"})
MERGED = 4
"""Merging an adapter rounds every weight itself, besides the sums."""


def scores(policy: VlmPolicy, rollouts) -> torch.Tensor:
    with torch.no_grad():
        return policy(rollouts).logp


def scramble(policy: VlmPolicy, scale: float = 0.05) -> None:
    """Move every trainable weight, as training would."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def lora(folder: Path, **settings) -> VlmPolicy:
    return load_policy(ModelConfig(path=str(folder), lora=LoraSettings(enabled=True, **{"rank": 4} | settings)))


def same_state(one: VlmPolicy, two: VlmPolicy) -> bool:
    left, right = one.state_dict(), two.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_weights_are_restored_bit_for_bit(folder, tmp_path, dtype):
    policy = load_policy(ModelConfig(path=str(folder), dtype=dtype), value_head=True)
    scramble(policy)
    rollouts = draw(policy, ragged_tasks())
    before = policy(rollouts, outputs=VALUES)
    policy.save_pretrained(tmp_path)
    other = load_policy(ModelConfig(path=str(folder), dtype=dtype), value_head=True)
    weight = other.network.lm_head.weight
    other.load_weights(tmp_path)
    assert same_state(policy, other)
    assert other.network.lm_head.weight is weight  # in place: an optimiser that holds it stays valid
    assert weight is other.network.model.language_model.embed_tokens.weight
    after = other(rollouts, outputs=VALUES)
    assert torch.equal(before.logp, after.logp)
    assert torch.equal(before.values, after.values)
    fresh = load_policy(ModelConfig(path=str(tmp_path), dtype=dtype), value_head=True)
    assert same_state(policy, fresh)


def test_saved_folder_is_an_ordinary_model_folder(folder, tmp_path, policy):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    own = load_policy(ModelConfig(path=str(folder)))
    scramble(own)
    own.save_pretrained(tmp_path)
    with quiet_transformers():
        model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    processor = AutoProcessor.from_pretrained(tmp_path)
    for name, value in own.network.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    task = ragged_tasks()[2]
    text = processor.apply_chat_template(task.messages, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[text], images=task.images, return_tensors="pt")
    assert torch.equal(inputs["input_ids"][0], policy.encode(task).input_ids)


def test_an_adapter_starts_as_the_base_model_and_switches_off(folder, policy):
    rollouts = draw(policy, ragged_tasks())
    base = scores(policy, rollouts)
    adapted = lora(folder)
    assert torch.equal(scores(adapted, rollouts), base)
    scramble(adapted, 0.1)
    changed = scores(adapted, rollouts)
    assert (changed - base).abs().max() > 0.01
    with adapted.disable_adapter():
        assert torch.equal(scores(adapted, rollouts), base)
    assert torch.equal(scores(adapted, rollouts), changed)


def test_an_adapter_is_sampled_with(folder, policy):
    adapted = lora(folder)
    scramble(adapted, 0.2)
    rollouts = draw(adapted, ragged_tasks())
    assert_equal_up_to_rounding(scores(adapted, rollouts), rollouts.logp_old, passes=MERGED)
    assert (scores(policy, rollouts) - rollouts.logp_old).abs().max() > 0.01


def test_only_the_adapter_is_trained_and_only_on_the_language_model(folder):
    adapted = lora(folder, targets=["q_proj", "gate_proj"])
    names = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert len(names) == 2 * 2 * 2  # layers x targets x (A, B)
    assert all("language_model.layers" in name and "lora_" in name for name in names)
    adapted(draw(adapted, ragged_tasks())).logp.sum().backward()
    trained = [name for name, parameter in adapted.named_parameters() if parameter.grad is not None]
    assert trained == names


def test_adapters_repeat_and_leave_the_global_generator_alone(folder):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one = lora(folder)
    assert torch.equal(torch.rand(1), expected)
    assert same_state(one, lora(folder))
    assert not same_state(one, lora(folder, seed=1))


def test_saved_adapters_are_restored_bit_for_bit(folder, tmp_path):
    adapted = lora(folder)
    scramble(adapted, 0.1)
    rollouts = draw(adapted, ragged_tasks())
    adapted.save_pretrained(tmp_path)
    other = lora(folder)
    other.load_weights(tmp_path)
    assert same_state(adapted, other)
    assert torch.equal(scores(other, rollouts), scores(adapted, rollouts))
    with pytest.raises(UserError, match="other layers"):
        lora(folder, targets=["q_proj"]).load_weights(tmp_path)
    with pytest.raises(UserError, match="do not fit"):
        lora(folder, rank=2).load_weights(tmp_path)
    with pytest.raises(UserError, match=r"has lora_alpha \d+ instead of 5; set model\.lora\.alpha=\d+"):
        lora(folder, alpha=5).load_weights(tmp_path)


def test_an_adapter_folder_loads_as_a_model(folder, tmp_path):
    """Its configuration names the base model, for further training, evaluation, and plain transformers."""
    from transformers import AutoModelForImageTextToText

    adapted = lora(folder)
    scramble(adapted, 0.1)
    rollouts = draw(adapted, ragged_tasks())
    expected = scores(adapted, rollouts)
    adapted.save_pretrained(tmp_path)
    trained_on = lora(tmp_path)
    assert torch.equal(scores(trained_on, rollouts), expected)
    assert any(parameter.requires_grad for parameter in trained_on.parameters())
    merged = load_policy(ModelConfig(path=str(tmp_path)))
    assert not merged.has_adapter
    assert_equal_up_to_rounding(scores(merged, rollouts), expected, passes=MERGED)
    with quiet_transformers():
        plain = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert sum("lora_" in name for name in plain.state_dict()) == 2 * 2 * 7


def test_settings_that_are_not_those_of_the_adapter_are_refused(folder, tmp_path):
    """Rank, alpha and layers lie in the adapter; the dropout is an option of each run."""
    lora(folder, targets=["q_proj", "v_proj"]).save_pretrained(tmp_path)
    message = r"has rank 4 instead of 32, targets .*set model.lora.rank=4 model.lora.targets=\[q_proj,v_proj\]"
    with pytest.raises(UserError, match=message):
        lora(tmp_path, rank=32)
    with pytest.raises(UserError, match="alpha 32 instead of 8"):
        lora(tmp_path, alpha=8, targets=["v_proj", "q_proj"])
    continued = lora(tmp_path, targets=["v_proj", "q_proj"], dropout=0.25)
    assert {layer.p for layer in continued.modules() if isinstance(layer, torch.nn.Dropout) and layer.p} == {0.25}


def test_an_adapter_without_lora_is_merged_and_all_weights_are_trained(folder, tmp_path):
    lora(folder).save_pretrained(tmp_path)
    merged = load_policy(ModelConfig(path=str(tmp_path), freeze_vision=True))
    frozen = [name for name, weight in merged.named_parameters() if not weight.requires_grad]
    assert frozen
    assert all(".visual." in name for name in frozen)


def test_an_adapter_of_the_vision_tower_is_switched_off_and_stays_frozen(folder, tmp_path):
    """Adapters of other libraries may be on any layer; a frozen tower's features are kept."""
    import peft

    config = ModelConfig(path=str(folder))
    network = load_policy(config)
    rollouts = draw(network, ragged_tasks())
    base = scores(network, rollouts)
    targets = r".*language_model\.layers\..*\.q_proj|.*visual\.blocks\..*\.qkv"
    foreign = peft.get_peft_model(network.model, peft.LoraConfig(r=4, lora_alpha=32, target_modules=targets))
    with torch.no_grad():
        for name, weight in foreign.named_parameters():
            if "lora_B" in name:
                weight += 0.1
    foreign.save_pretrained(tmp_path)
    network.processor.save_pretrained(tmp_path)
    settings = LoraSettings(enabled=True, rank=4, targets=["q_proj"])
    policy = load_policy(ModelConfig(path=str(tmp_path), lora=settings, freeze_vision=True))
    trained = [name for name, weight in policy.named_parameters() if weight.requires_grad]
    assert trained
    assert not any(".visual." in name for name in trained)
    changed = scores(policy, rollouts)
    with policy.disable_adapter():
        assert_equal_up_to_rounding(scores(policy, rollouts), base)
    assert torch.equal(scores(policy, rollouts), changed)
    assert (changed - base).abs().max() > 0.01
    assert [name for name, weight in policy.named_parameters() if weight.requires_grad] == trained


def test_a_copy_beside_an_adapter_shares_the_other_weights(folder):
    adapted = lora(folder)
    copied = dict(copy.deepcopy(adapted).named_parameters())
    for name, weight in adapted.named_parameters():
        assert (copied[name] is weight) is (".lora_" not in name), name


def test_merged_folder(folder, tmp_path):
    adapted = lora(folder)
    scramble(adapted, 0.1)
    rollouts = draw(adapted, ragged_tasks())
    expected = scores(adapted, rollouts)
    adapted.save_merged(tmp_path)
    assert torch.equal(scores(adapted, rollouts), expected)  # saving did not round the model
    merged = load_policy(ModelConfig(path=str(tmp_path)))
    assert_equal_up_to_rounding(scores(merged, rollouts), expected, passes=MERGED)
    assert not (tmp_path / "adapter_config.json").exists()


def test_weights_that_cannot_be_loaded(tiny_folders, tmp_path):
    folder = tiny_folders["qwen2_5_vl"]
    policy = load_policy(ModelConfig(path=str(folder)), value_head=True)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    with pytest.raises(UserError, match=r"no config\.json"):
        policy.load_weights(tmp_path)
    with pytest.raises(UserError, match=VALUE_HEAD_FILE):
        policy.load_weights(folder)
    small = build_tiny_vlm(tmp_path / "small", corpus=CORPUS, hidden=24)
    with pytest.raises(UserError, match="do not fit"):
        policy.load_weights(small)
    cut = tmp_path / "cut"
    policy.save_pretrained(cut)
    content = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="cannot be read"):
        policy.load_weights(cut)
    with pytest.raises(UserError, match="cannot be loaded"):
        load_policy(ModelConfig(path=str(cut)))
    with pytest.raises(UserError, match=r"no adapter_model\.safetensors"):
        lora(folder).load_weights(folder)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


def test_missing_weights_are_not_made_up(tiny_folders, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_folders["qwen2_5_vl"], tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    state = load_file(file)
    state.pop(next(name for name in state if "q_proj.weight" in name))
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lack 1 tensors, for example .*q_proj"):
        load_policy(ModelConfig(path=str(tmp_path / "model")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "model.dtype is 'float16'; .*allowed: float32, bfloat16"),
        ({"attention": "flash"}, "sdpa, eager, flash_attention_2"),
        ({"min_pixels": 0}, "model.min_pixels is 0"),
        ({"min_pixels": 5000, "max_pixels": 4000}, "above model.max_pixels=4000"),
        ({"max_pixels": 100}, "set both model.min_pixels and model.max_pixels"),
        ({"max_prompt_tokens": -1}, "model.max_prompt_tokens is -1"),
        ({"lora": LoraSettings(enabled=True, rank=0)}, "model.lora.rank is 0"),
        ({"lora": LoraSettings(enabled=True, dropout=1.0)}, "model.lora.dropout"),
        ({"lora": LoraSettings(enabled=True, targets=[])}, "targets is empty"),
        ({"lora": LoraSettings(enabled=True, targets=["q_proj", "lm_head"])}, r"\['lm_head'\].*q_proj, k_proj"),
    ],
)
def test_settings_out_of_range(tiny_folders, options, message):
    with pytest.raises(UserError, match=message):
        load_policy(ModelConfig(path=str(tiny_folders["qwen2_5_vl"]), **options))


def test_sides_of_images_are_no_areas():
    """Idefics2 calls the bounds of an image's sides as Qwen-VL calls those of its area."""
    from transformers import Idefics2ImageProcessorPil, Qwen2VLImageProcessorPil

    config = ModelConfig(path="x", min_pixels=56 * 56, max_pixels=112 * 112)
    sides = SimpleNamespace(image_processor=Idefics2ImageProcessorPil())
    with pytest.raises(UserError, match=r"this processor limits the image sides: .*980"):
        set_pixels(sides, config)
    areas = SimpleNamespace(image_processor=Qwen2VLImageProcessorPil(size={"shortest_edge": 784, "longest_edge": 3136}))
    set_pixels(areas, config)
    assert dict(areas.image_processor.size) == {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}


def test_without_torchvision_no_other_family_gets_the_processor_of_qwen(tiny_folders, tmp_path, monkeypatch):
    monkeypatch.setattr(processor_module, "ensure_torchvision", lambda: "absent")
    assert isinstance(load_processor(str(tiny_folders["qwen2_5_vl"])), ImageOnlyProcessor)
    shutil.copytree(tiny_folders["qwen2_5_vl"], tmp_path / "other")
    for file in (tmp_path / "other").glob("*processor_config.json"):
        file.write_text(file.read_text().replace("Qwen2VLImageProcessor", "SiglipImageProcessor"))
    with pytest.raises(UserError, match=r"need SiglipImageProcessor.*requires torchvision"):
        load_processor(str(tmp_path / "other"))
    shutil.copytree(tiny_folders["qwen2_5_vl"], tmp_path / "text")
    for file in (tmp_path / "text").glob("*processor_config.json"):
        file.unlink()
    assert isinstance(load_processor(str(tmp_path / "text")), TextProcessor)


def test_folders_that_are_not_models(tmp_path, tiny_folders, monkeypatch):
    def refuse(path: Path | str) -> str:
        with pytest.raises(UserError) as caught:
            load_policy(ModelConfig(path=str(path)))
        return str(caught.value)

    assert "not found" in refuse(tmp_path / "missing")
    assert "hub id" in refuse("missing")
    monkeypatch.chdir(tmp_path)
    # a run that is missing, whether runs/ is there or not
    assert "model folder runs/model not found" in refuse("runs/model")
    (tmp_path / "runs").mkdir()
    assert "model folder runs/model not found" in refuse("runs/model")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "readme.txt").write_text("hello")
    message = refuse(tmp_path / "notes")
    assert "no config.json" in message
    assert "readme.txt" in message
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "clip"}))
    assert "'clip'" in refuse(other)
    assert "AutoModelForImageTextToText nor in AutoModelForCausalLM" in refuse(other)
    (other / "config.json").write_text("{")
    assert "not valid JSON" in refuse(other)
    shutil.copytree(tiny_folders["qwen2_5_vl"], tmp_path / "mute")
    (tmp_path / "mute" / "tokenizer.json").unlink()
    assert "processor" in refuse(tmp_path / "mute")
    shutil.copytree(tiny_folders["qwen2_5_vl"], tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    assert "chat template" in refuse(tmp_path / "plain")


def test_hub_ids_are_distinguished_from_folders(monkeypatch):
    from transformers import AutoConfig

    def offline(path, trust_remote_code):
        raise OSError(f"We couldn't connect to the hub for {path}")

    monkeypatch.setattr(AutoConfig, "from_pretrained", offline)
    with pytest.raises(UserError, match=r"'some-lab/model' is not a local folder.*couldn't connect"):
        load_policy(ModelConfig(path="some-lab/model"))


def test_pixel_budget_overrides_the_processor(policy, folder):
    task = make_task("t", "Sum?", [(256, 256)])
    small = load_policy(ModelConfig(path=str(folder), min_pixels=64 * 64, max_pixels=64 * 64))
    prompt = small.encode(task)
    assert int((prompt.mm_token_type_ids == 1).sum()) == 4
    assert int((policy.encode(task).mm_token_type_ids == 1).sum()) >= 64


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels may be there")
def test_missing_attention_kernels_are_named(folder):
    with pytest.raises(UserError, match="FlashAttention"):
        load_policy(ModelConfig(path=str(folder), attention="flash_attention_2"))


def test_freezing_the_tower(folder):
    policy = load_policy(ModelConfig(path=str(folder), freeze_vision=True))
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    assert trained
    assert not any("visual" in name for name in trained)


def build_for_test(path: Path, corpus: list[str], size: int = 24) -> Path:
    return build_tiny_vlm(path, corpus=corpus, hidden=size, vision_hidden=16)


def fail_for_test(path: Path) -> None:
    path.mkdir()
    (path / "half").write_text("")
    raise UserError("out of clay")


def test_a_function_builds_the_missing_folder_once(tmp_path):
    path = tmp_path / "runs" / "model"
    build = "tests.vlm.test_models:build_for_test"
    config = ModelConfig(path=str(path), build=build, build_options={"corpus": CORPUS})
    assert load_policy(config).network.config.text_config.hidden_size == 24
    written = (path / "model.safetensors").stat().st_mtime_ns
    load_policy(config)
    assert (path / "model.safetensors").stat().st_mtime_ns == written
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["model"]
    with pytest.raises(UserError, match="was built with"):
        load_policy(ModelConfig(path=str(path), build=build, build_options={"corpus": CORPUS, "size": 48}))


def test_builders_that_fail(tmp_path):
    here = "tests.vlm.test_models"
    path = str(tmp_path / "model")
    with pytest.raises(UserError, match="build_options do not match"):
        load_policy(ModelConfig(path=path, build=f"{here}:build_for_test", build_options={"colour": "red"}))
    with pytest.raises(UserError, match="out of clay"):
        load_policy(ModelConfig(path=path, build=f"{here}:fail_for_test"))
    with pytest.raises(UserError, match="has no 'nothing_here'"):
        load_policy(ModelConfig(path=path, build=f"{here}:nothing_here"))
    assert list(tmp_path.iterdir()) == []


def test_settings_read_from_yaml(tmp_path):
    file = tmp_path / "model.yaml"
    file.write_text("path: somewhere\nlora: {enabled: true, rank: 8}\nmax_pixels: 3136\n")
    config = load(file, ModelConfig, ["lora.targets=[q_proj]", "build=my:build", "build_options.size=3"])
    assert config.lora == LoraSettings(enabled=True, rank=8, targets=["q_proj"])
    assert config.max_pixels == 3136
    assert config.build_options == {"size": 3}
    file.write_text("dtype: float32\n")
    with pytest.raises(UserError, match="'path' must be given"):
        load(file, ModelConfig)
