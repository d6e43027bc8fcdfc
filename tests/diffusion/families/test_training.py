"""Every family trains by a method of each kind, with adapters and in full, and plain diffusers loads the export."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from diffusers import DiffusionPipeline

from diffusion.models.diffusion_policy import DiffusionLora, PipelineConfig, load_policy
from mmrl.hub.compat import quiet_transformers
from mmrl.rewards import RewardConfig
from tests.diffusion.edits import write_edits
from tests.diffusion.families.cases import CASES
from tests.diffusion.families.tiny import LONG, SHORT
from tests.diffusion.runs import PROMPTS, make_trainer, run_config

METHODS = ("flow_grpo", "awm", "diffusion_nft")
QUICK = {name: METHODS[number % 3] for number, name in enumerate(CASES)}
"""One method a case in the default tests, with adapters; the others are slow."""
SLOW = ("hunyuan_video15", *(name for name, case in CASES.items() if case.variant))
COMBINATIONS = [
    pytest.param(
        name,
        method,
        enabled,
        marks=() if enabled and QUICK[name] == method and name not in SLOW else pytest.mark.slow,
        id=f"{name}-{method}-{'lora' if enabled else 'full'}",
    )
    for name in CASES
    for method in METHODS
    for enabled in (True, False)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder of each case, built when first asked for."""
    return functools.cache(lambda name: CASES[name].build(tmp_path_factory.mktemp("trained") / name))


@pytest.mark.parametrize(("name", "method", "enabled"), COMBINATIONS)
def test_two_steps_and_an_export_that_plain_diffusers_loads(name, method, enabled, folders, tmp_path):
    case = CASES[name]
    config = run_config(method, tmp_path, samples_per_task=2, learning_rate=0.01)
    sizes = {"height": case.height, "width": case.width, "frames": case.frames}
    lora = DiffusionLora(enabled=enabled, rank=2, alpha=4)
    config.model = PipelineConfig(path=str(folders(name)), lora=lora, **sizes, **case.model)
    if case.edits:
        config.data.path = str(write_edits(tmp_path / "edits.jsonl", PROMPTS, (case.height, case.width)))
        config.eval_data["held_out"].path, config.rewards = config.data.path, [RewardConfig(name="kept")]
    config.sampler = dataclasses.replace(
        config.sampler, steps=3, guidance=case.scales[-1] if method == "flow_grpo" else 1.0
    )
    if hasattr(config, "timesteps"):
        config.timesteps.count = 2
        if name == "wan_two_networks" and method == "awm":
            config.timesteps.times = "discrete_with_init"  # the first time is the first network's
    trainer = make_trainer(config, tmp_path)
    policy = trainer.recipe.policy
    for _ in range(2):
        trainer.train_step()
    policy.to("cpu").save_pipeline(tmp_path / "out")
    with quiet_transformers():
        exported = DiffusionPipeline.from_pretrained(tmp_path / "out")
    text, sigma = policy.embeddings.rows([SHORT, LONG]).expanded(), torch.tensor([0.4, 0.9])
    latents = torch.randn((2, *policy.latent_shape), generator=torch.Generator().manual_seed(0))
    start = load_policy(config.model)
    for part in policy.trained:
        network = getattr(exported, part)
        assert not any("lora" in key for key, _ in network.named_parameters())
        with torch.no_grad():
            found, expected, before = (
                policy.family.model(own)(latents, sigma, text)
                for own in (network, getattr(policy, part), getattr(start, part))
            )
        scale = float(expected.abs().max())
        assert float((found - expected).abs().max()) < 1e-5 * scale
        assert float((before - expected).abs().max()) > 1e-3 * scale
