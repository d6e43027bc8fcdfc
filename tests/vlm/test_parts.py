"""Vision tower, merger and language model: each trained or kept by its own switch, with adapters by name."""

import pytest
import torch

from mmrl.errors import UserError
from mmrl.fields import check_config
from mmrl.vlm.engine.model_loading import prepare
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.model.model_config import LoraSettings, ModelConfig
from mmrl.vlm.model.network import parts_of, vision_linears
from tests.vlm.builders import make_task
from tests.vlm.families.zoo import ZOO, make_model

SEEING = sorted(kind for kind, row in ZOO.items() if row.media is not None)
SWITCHES = [
    ({}, {"vision", "merger", "language"}),
    ({"freeze_vision": True}, {"language"}),
    ({"freeze_vision": True, "freeze_merger": False}, {"merger", "language"}),
    ({"freeze_merger": True}, {"vision", "language"}),
    ({"freeze_language": True}, {"vision", "merger"}),
    ({"freeze_vision": True, "freeze_merger": False, "freeze_language": True}, {"merger"}),
]


@pytest.mark.parametrize("kind", SEEING)
def test_each_part_of_each_family_has_its_switch(kind):
    for switches, trained in SWITCHES:
        model = prepare(make_model(kind), ModelConfig(path=kind, **switches), None)
        parts = parts_of(model)
        assert all(parts.values()), f"{kind} has all three parts"
        assert sum(map(len, parts.values())) == len([*model.parameters()])
        found = {part for part, weights in parts.items() if all(weight.requires_grad for _, weight in weights)}
        partly = {part for part, weights in parts.items() if any(weight.requires_grad for _, weight in weights)}
        assert found == partly == trained, switches


@pytest.mark.parametrize("kind", SEEING)
def test_adapters_of_tower_and_merger_by_name(kind):
    names = sorted(vision_linears(make_model(kind)))
    settings = LoraSettings(enabled=True, rank=2, vision_targets=["all-linear"], targets=[])
    model = prepare(make_model(kind), ModelConfig(path=kind, lora=settings), None)
    adapted = sorted({name.partition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name})
    assert adapted == [f"base_model.model.{name}" for name in names]


def test_only_the_wanted_part_gets_a_gradient_and_the_merger_learns(folder):
    path, prompts = str(folder), [make_task("one", "Sum?", [(64, 96)])]
    for switches, trained in SWITCHES[1:]:
        policy = load_policy(ModelConfig(path=path, **switches)).train()
        policy.last_states([policy.encode(task) for task in prompts]).square().sum().backward()
        own = {
            part: {weight.grad is not None and bool(weight.grad.any()) for _, weight in weights}
            for part, weights in parts_of(policy.network).items()
        }
        assert {part for part, found in own.items() if True in found} == trained


def test_adapters_of_the_merger_learn_are_saved_and_go_on(folder, tmp_path):
    settings = LoraSettings(enabled=True, rank=2, targets=["q_proj"], vision_targets=["qkv", "merger.mlp.0"])
    if "qwen3" in str(folder):
        settings.vision_targets = ["qkv", "merger.linear_fc1"]
    policy = load_policy(ModelConfig(path=str(folder), lora=settings)).train()
    prompt = policy.encode(make_task("one", "Sum?", [(64, 96)]))
    optimizer = torch.optim.SGD([weight for weight in policy.parameters() if weight.requires_grad], 0.1)
    before = policy.last_states([prompt]).detach()
    for _ in range(2):
        policy.last_states([prompt]).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    names = [name for name, weight in policy.network.named_parameters() if "lora_B" in name and weight.any()]
    assert any("merger" in name for name in names)
    assert any(".qkv." in name for name in names)
    policy.eval().save_pretrained(tmp_path / "adapter")
    policy.save_merged(tmp_path / "merged")
    with torch.no_grad():
        wanted = policy.last_states([prompt])
        assert not torch.allclose(before, wanted)
        with policy.disable_adapter():
            torch.testing.assert_close(policy.last_states([prompt]), before)
        for path, lora in (("adapter", settings), ("merged", LoraSettings())):
            again = load_policy(ModelConfig(path=str(tmp_path / path), lora=lora))
            found = again.last_states([again.encode(make_task("one", "Sum?", [(64, 96)]))])
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    other = LoraSettings(enabled=True, rank=2, targets=["q_proj"])
    with pytest.raises(UserError, match=r"which has vision_targets \['model\.visual"):
        load_policy(ModelConfig(path=str(tmp_path / "adapter"), lora=other))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"freeze_vision": True, "freeze_language": True}, "leave nothing to train; model.freeze_merger=false trains"),
        ({"freeze_merger": True, "lora": LoraSettings(enabled=True)}, "have no effect; remove them"),
        ({"lora": LoraSettings(vision_targets=["qkv"])}, "it has no effect while model.lora.enabled is False"),
        (
            {"freeze_vision": True, "lora": LoraSettings(enabled=True, vision_targets=["qkv"])},
            "trains adapters in the vision tower or the merger, but model.freeze_vision",
        ),
        ({"lora": LoraSettings(enabled=True, targets=[])}, "model.lora.targets is empty"),
    ],
)
def test_switches_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        check_config(ModelConfig(path="x", **changes), "model")


def test_names_and_parts_that_a_model_has_not_are_named(folder, language_model):
    lora = LoraSettings(enabled=True, vision_targets=["merger.mlp.9"])
    with pytest.raises(
        UserError, match=r"vision_targets contains merger\.mlp\.9, but .* have no such linear layer; they"
    ):
        load_policy(ModelConfig(path=str(folder), lora=lora))
    with pytest.raises(UserError, match="the merger of qwen3 is not known"):
        load_policy(ModelConfig(path=str(language_model), freeze_merger=True))
