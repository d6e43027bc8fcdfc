"""A step of GRPO on every family, in full and with LoRA, and its checkpoint in plain transformers and peft."""

import json
import os
from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor

from mmrl.hub.compat import quiet_transformers
from mmrl.recipes import RECIPES
from mmrl.training.run import train
from mmrl.vlm.data.prompt import Prompt
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine import vlm_policy as policies
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.model.model_config import LoraSettings, ModelConfig
from mmrl.vlm.model.network import auto_class
from mmrl.vlm.vlm_config import VlmConfig
from tests.rounding import assert_equal_up_to_rounding
from tests.vlm.families.record import CHECKS, NEW, digest, note, read_record
from tests.vlm.families.zoo import ZOO, Processor, make_model, make_prompt, own_inputs
from tests.vlm.runs import run_config, without_images


@pytest.mark.skipif(NEW in os.environ, reason="a new record is in the making")
def test_the_record_is_of_the_families_and_their_configurations():
    families = read_record()["families"]
    assert set(families) == set(ZOO)
    for kind, found in families.items():
        assert (found["name"], found["configuration"]) == (ZOO[kind].released, digest(kind))
        assert {check: set(found[check]) for check in CHECKS} == CHECKS
        assert set(found) == {"name", "configuration", *CHECKS}


class MadeUp(Processor):
    """Prompts come from the zoo, so that the processor has nothing to process."""

    image_processor = None
    chat_template = "{}"

    def save_pretrained(self, path: Path) -> None:
        pass


class MadeUpWithImages(MadeUp):
    image_token = "<image>"


@pytest.fixture
def zoo_prompts(monkeypatch):
    """Let policies of saved models of the zoo read its prompts; returns the logits of each model that is saved."""
    saved = []
    save = VlmPolicy.save_pretrained

    def encode(self: VlmPolicy, task: VlmTask) -> Prompt:
        return make_prompt(self, self.network.config.model_type, len(task.images), text=12, seed=int(task.id[1:]))

    def save_pretrained(self: VlmPolicy, path: Path) -> None:
        save(self, path)
        if Path(path).name == "model":  # not the frozen reference, which is saved too
            saved.append(own_logits(self.network, make_own_prompt(self)))

    monkeypatch.setattr(VlmPolicy, "encode", encode)
    monkeypatch.setattr(VlmPolicy, "save_pretrained", save_pretrained)
    return saved


def make_own_prompt(policy: VlmPolicy) -> Prompt:
    kind = policy.network.config.model_type
    return make_prompt(policy, kind, int(ZOO[kind].media is not None), text=12, seed=0)


def own_logits(network: torch.nn.Module, prompt: Prompt) -> Tensor:
    """Logits (L, V) of the model's own forward for a prompt and a response."""
    was_training = network.training
    with torch.no_grad():
        inputs = own_inputs(network.config.model_type, prompt, torch.arange(3, 9))
        found = network.eval()(**inputs).logits[0]
    network.train(was_training)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ZOO)
def test_a_step_of_grpo_is_saved_for_plain_transformers_and_peft(kind, enabled, zoo_prompts, tmp_path, monkeypatch):
    folder, sees = tmp_path / "model", ZOO[kind].media is not None
    make_model(kind).float().save_pretrained(folder)
    monkeypatch.setattr(policies, "load_processor", lambda path: (MadeUpWithImages if sees else MadeUp)())
    config = run_config(VlmConfig, tmp_path, folder, steps=1, samples_per_task=3, learning_rate=1e-2)
    if not sees:
        without_images(Path(config.data.path))
    lora = LoraSettings(enabled=enabled, rank=4, targets=["q_proj", "v_proj"])
    config.model = ModelConfig(path=str(folder), attention=ZOO[kind].attention, lora=lora)
    config.rewards[0].name, config.rewards[0].weight = "tests.vlm.user_reward:code_points", 1.0
    run_dir = train(RECIPES["vlm"], config)
    (step,) = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert step["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert step["optim/grad_norm"] > 0
    saved, options = run_dir / "checkpoints/step-000001/model", {"attn_implementation": ZOO[kind].attention}
    auto = auto_class(kind, "")
    with quiet_transformers():
        found = {"transformers" if enabled else "logits": auto.from_pretrained(saved, **options)}
        start = auto.from_pretrained(folder, **options)
        prompt = make_own_prompt(VlmPolicy(start, Processor(), ModelConfig(path=kind)))
        before = own_logits(start, prompt)
        if enabled:
            found["peft"] = peft.PeftModel.from_pretrained(start, saved).base_model.model
    (expected,) = zoo_prompts
    logits = {name: own_logits(model, prompt) for name, model in found.items()}
    for values in logits.values():
        assert_equal_up_to_rounding(values, expected)
    assert (before - expected).abs().max() > 1e-3
    note(kind, "lora" if enabled else "full", **{k: float((v - expected).abs().max()) for k, v in logits.items()})
