"""Language models: text with text between, and one line for whatever needs a picture."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.recipes import RECIPES
from mmrl.training.run import train
from mmrl.vlm.data.prompt import Insert, VlmPayload
from mmrl.vlm.data.task import VideoOptions
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.methods.papo import PapoConfig
from mmrl.vlm.methods.reg_grpo import RegGrpoConfig
from mmrl.vlm.model.model_config import ModelConfig
from mmrl.vlm.toy.countdown import build_problems
from mmrl.vlm.vlm_config import VlmConfig
from tests.vlm.builders import make_task
from tests.vlm.runs import run_config


def text_config(kind: type, folder: Path, model: Path, **trainer):
    config = run_config(kind, folder, model, **trainer)
    path = str(build_problems(folder / "text.jsonl", count=6))
    config.data.path = config.eval_data["heldout"].path = path
    return config


def test_text_between_answers_is_read_behind_one_prompt(language_model):
    """Several turns without pictures share their prompt's cache, and score as rows that are read alone."""
    policy = load_policy(ModelConfig(path=str(language_model))).double()
    prompts = [policy.encode(make_task(name, text)) for name, text in (("a", "Make 3 from 1 2."), ("b", "Make 12."))]
    turn = policy.encode_turn(make_task("next", "Make 7 from 3 4."))
    said = torch.tensor([5, 6, 7])
    ids = torch.cat([said, turn.input_ids, said.flip(0)]).expand(4, -1)
    mask = torch.ones(ids.shape)
    mask[:, 3 : 3 + len(turn)] = 0
    mask[1, -2:] = mask[2, 3:] = 0
    payload = VlmPayload(
        prompts,
        [make_task(name, "Make 3.") for name in "ab"],
        ids,
        [""] * 4,
        ["eos"] * 4,
        inserts=[(Insert(3, turn),)] * 4,
    )
    rollouts = Rollouts(torch.arange(4) // 2, mask, torch.zeros_like(mask), torch.zeros(4), payload)
    scores, passes = [], []
    policy.network.base_model.register_forward_hook(
        lambda module, given, kwargs, found: passes.append(kwargs["use_cache"]), with_kwargs=True
    )
    for shared in (True, False):
        policy.reader._config = dataclasses.replace(policy.config, shared_prefix=shared)
        policy.zero_grad()
        found = policy(rollouts).logp
        found.sum().backward()
        gradient = torch.cat([weight.grad.flatten() for weight in policy.parameters()])
        scores.append((found.detach(), gradient))
    assert len(passes) == 2 + 1  # prompts and responses, then whole rows
    assert (scores[0][0] - scores[1][0]).abs().max() < 1e-5  # norms and rotary angles are float32
    assert (scores[0][1] - scores[1][1]).norm() < 1e-5 * scores[1][1].norm()


def test_the_models_own_dropout_is_off_and_stays_in_its_configuration(language_model, tmp_path):
    shutil.copytree(language_model, tmp_path / "dropping")
    config = json.loads((tmp_path / "dropping/config.json").read_text()) | {"attention_dropout": 0.5}
    (tmp_path / "dropping/config.json").write_text(json.dumps(config))
    policy = load_policy(ModelConfig(path=str(tmp_path / "dropping")))
    prompt = policy.encode(make_task("a", "Make 3 from 1 2."))
    ids, mask = torch.tensor([[5, 6, 7]] * 2), torch.ones(2, 3)
    payload = VlmPayload([prompt], [make_task("a", "Make 3.")], ids, [""] * 2, ["eos"] * 2)
    rollouts = Rollouts(torch.zeros(2, dtype=torch.long), mask, torch.zeros_like(mask), torch.zeros(2), payload)
    sampled, trained = (policy.train(mode)(rollouts).logp for mode in (False, True))
    assert torch.equal(sampled, trained)
    # the answers share their prompt again
    assert policy.shares_prefix
    policy.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["attention_dropout"] == 0.5


def test_methods_on_pictures_say_why_they_do_not_apply(language_model, tmp_path):
    for kind, recipe, message in (
        (PapoConfig, "papo", "no question has an image or a video, so PAPO has nothing to mask; use recipe: vlm"),
        (RegGrpoConfig, "reg_grpo", r"nothing to add noise to; set augmentation\.noise_scale=0"),
    ):
        with pytest.raises(UserError, match=message):
            train(RECIPES[recipe], text_config(kind, tmp_path / recipe, language_model))


def test_pictures_and_their_options_are_refused(language_model, tmp_path):
    config = run_config(VlmConfig, tmp_path / "seen", language_model)
    with pytest.raises(UserError, match=r"data: q0 has an image or a video, but .* \(qwen3\) is a language model"):
        train(RECIPES["vlm"], config)
    config = text_config(VlmConfig, tmp_path / "video", language_model)
    config.data.video = VideoOptions(fps=1.0)
    with pytest.raises(UserError, match=r"data\.video is set, but .* only reads text"):
        train(RECIPES["vlm"], config)
    for option, message in (
        ({"max_pixels": 5000}, "only apply to models that read images"),
        ({"freeze_vision": True}, "qwen3 has no vision tower"),
    ):
        with pytest.raises(UserError, match=message):
            load_policy(ModelConfig(path=str(language_model), **option))


def test_hints_need_no_picture(language_model, tmp_path):
    config = text_config(RegGrpoConfig, tmp_path, language_model, epochs=1)
    config.augmentation.noise_scale = 0.0
    rows = [json.loads(line) for line in (train(RECIPES["reg_grpo"], config) / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
