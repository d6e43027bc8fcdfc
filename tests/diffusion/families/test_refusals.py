"""What a family cannot do is refused or said, with what is allowed."""

import json
import logging
import shutil
from types import SimpleNamespace

import pytest
import torch

from diffusion.families.flux import FluxFamily
from diffusion.families.sd3 import ATTENTION, Sd3Family
from diffusion.families.table import FAMILIES, family_of
from diffusion.matching.times import TimestepConfig
from diffusion.matching.velocity import FlowMatching
from diffusion.models.diffusion_policy import DiffusionLora, PipelineConfig, load_policy
from diffusion.models.pipelines import load_pipeline
from diffusion.sampling.few_steps import warn_of_few_steps
from diffusion.sampling.latent_sampler import LatentSamplerConfig, check_sampler
from diffusion.sampling.trajectories import StepConfig, Trajectories
from mmrl.cli.listings import rows_of
from mmrl.errors import UserError
from tests.diffusion.families.cases import CASES


class Renamed(Sd3Family):
    """Stable Diffusion 3 with one target, as a user may write it."""

    lora_targets = ("to_q",)


class Lacking(Sd3Family):
    """A family whose list has a layer that the network has not."""

    lora_targets = ("to_q", "to_qkv_mlp_proj")


@pytest.fixture(scope="module")
def klein(tmp_path_factory):
    return CASES["klein_distilled"].build(tmp_path_factory.mktemp("refused") / "klein")


def config_of(folder, **options):
    return PipelineConfig(**{"path": str(folder), "lora": DiffusionLora(rank=2), "max_sequence_length": 12} | options)


def test_the_list_is_that_of_the_files():
    assert [row.name for row in rows_of("families")] == list(FAMILIES)
    assert all(row.summary and row.source for row in rows_of("families"))
    assert FAMILIES["FluxPipeline"] is FluxFamily


def test_a_family_of_the_users_takes_the_place_of_the_suites(folder):
    policy = load_policy(config_of(folder, family=f"{__name__}:Renamed"))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name, w in policy.named_parameters() if w.requires_grad} == {
        "to_q"
    }
    with pytest.raises(UserError, match="is not a subclass of"):
        load_policy(config_of(folder, family=f"{__name__}:config_of"))
    with pytest.raises(UserError, match=r"is for FluxPipeline, but .* is a StableDiffusion3Pipeline"):
        load_policy(config_of(folder, family="diffusion.families.flux:FluxFamily"))


def test_blocks_with_adapters_are_counted(folder, caplog):
    with caplog.at_level(logging.INFO, "mmrl"):
        load_policy(config_of(folder))
        load_policy(config_of(folder, lora=DiffusionLora(rank=2, targets=["transformer_blocks.1.attn.to_q"])))
    assert [r.getMessage() for r in caplog.records if "adapters" in r.getMessage()] == [
        "adapters in 2 of 2 blocks",
        "adapters in 1 of 2 blocks",
    ]
    assert len(ATTENTION) == 8


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"frames": 5}, "frames=5, but StableDiffusion3Pipeline generates images"),
        ({"height": 20}, "height=20 must be a positive multiple of 8 pixels; the nearest are 16 and 24"),
        ({"width": 4}, "width=4 must be a positive multiple of 8 pixels; the smallest is 8"),
        ({"family_options": {"shift": 3}}, "shift"),
        ({"family_options": {"max_sequence_length": 3}}, "set model.max_sequence_length instead"),
        ({"networks": ["unet"]}, r"model.networks contains unknown networks \['unet'\]; .* has transformer"),
        (
            {"family": f"{__name__}:Lacking"},
            r"contains unknown layers \['to_qkv_mlp_proj'\]; a block of the network has: .*attn.to_q",
        ),
    ],
)
def test_options_that_do_not_fit_are_named(folder, options, culprit):
    with pytest.raises(UserError, match=culprit):
        load_policy(config_of(folder, **options))


def test_options_that_a_family_does_not_read_are_named(folder, tmp_path):
    for build in ("stable_diffusion", "stable_diffusion_xl"):
        path = CASES[build].build(tmp_path / build)
        with pytest.raises(UserError, match=r"max_sequence_length is 12, but StableDiffusion.*only has CLIP encoders"):
            load_policy(config_of(path))
    wan = PipelineConfig(path=str(CASES["wan"].build(tmp_path / "wan")), family_options={"guidance_2": 3.0})
    with pytest.raises(UserError, match="guidance_2 is 3, but this pipeline has no second network"):
        load_policy(wan)
    with pytest.raises(UserError, match=r"sampler\.kept_frames is 0, but StableDiffusion3Pipeline generates images"):
        check_sampler(load_policy(config_of(folder)), LatentSamplerConfig(kept_frames=0))
    with pytest.raises(UserError, match="embedding_cache is 'x', but embeddings are only written with"):
        load_policy(config_of(folder, embedding_cache="x"))


def test_other_schedulers_are_refused_with_those_that_fit(folder, tmp_path):
    copied = shutil.copytree(folder, tmp_path / "copied")
    index = json.loads((copied / "model_index.json").read_text())
    (copied / "model_index.json").write_text(json.dumps(index | {"scheduler": ["diffusers", "DDIMScheduler"]}))
    with pytest.raises(UserError, match="DDIMScheduler; StableDiffusion3Pipeline needs FlowMatchEulerDiscrete"):
        load_pipeline(copied)


DISTILLED = {
    "klein_distilled": "its model_index.json sets is_distilled",
    "flux": "its transformer has no guidance input, like FLUX.1 schnell",
    "turbo": "its scheduler uses trailing steps, like SD-Turbo and SDXL-Turbo",
    "z-image-turbo": "it is called z-image-turbo",
}


@pytest.mark.parametrize("name", DISTILLED)
def test_settings_that_do_not_suit_a_model_of_few_steps_warn(name, tmp_path, caplog):
    case = CASES[{"turbo": "stable_diffusion_xl", "z-image-turbo": "z_image"}.get(name, name)]
    path = case.build(tmp_path / name.replace("turbo", "model" if name == "turbo" else "turbo"))
    if name == "turbo":
        file = path / "scheduler/scheduler_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"timestep_spacing": "trailing"}))
    policy = load_policy(config_of(path, **{"max_sequence_length": None} | case.model))
    warn_of_few_steps(policy, LatentSamplerConfig(steps=4, eval_steps=4, guidance=1.0))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    warn_of_few_steps(policy, LatentSamplerConfig(guidance=4.0, eval_guidance=3.0, steps=20), matched=True)
    assert caplog.text.count(DISTILLED[name]) == 5
    for said in (
        "guidance is 4.0",
        "eval_guidance is 3.0",
        "steps is 20",
        "eval_steps is 40",
        "lose its ability to draw",
    ):
        assert said in caplog.text


def test_a_network_that_takes_the_guidance_scale_as_an_input_is_refused():
    pipeline = SimpleNamespace(unet=SimpleNamespace(config={"time_cond_proj_dim": 256}))
    with pytest.raises(UserError, match="the UNet takes the guidance scale as an input"):
        FAMILIES["StableDiffusionPipeline"](pipeline)


def test_a_call_whose_steps_are_not_those_of_evaluations_is_said():
    from diffusers import DDIMScheduler

    for spacing, uneven in (("leading", ()), ("trailing", (28, 30)), ("linspace", (10, 28, 30, 40))):
        pipeline = SimpleNamespace(unet=None, scheduler=DDIMScheduler(timestep_spacing=spacing, steps_offset=1))
        family = FAMILIES["StableDiffusionPipeline"](pipeline)
        for steps in (10, 28, 30, 40):
            lacks = family.call_lacks(5.0, "", steps)
            assert bool(lacks) == (steps in uneven)
            assert not lacks or f"{steps} steps of DDIM in diffusers are {1000 // steps} training steps long" in lacks


def test_a_trained_step_between_equal_times_is_refused():
    from diffusers import DDIMScheduler

    scheduler = DDIMScheduler(timestep_spacing="linspace", set_alpha_to_one=False)
    family = FAMILIES["StableDiffusionPipeline"](SimpleNamespace(unet=None, scheduler=scheduler))
    policy = SimpleNamespace(family=family, latent_shape=(4, 8, 8), dtype=torch.float32)
    # the published fraction leaves the last step out
    Trajectories(policy, LatentSamplerConfig(steps=10), StepConfig())
    with pytest.raises(UserError, match=r"the time 0\.\d+ twice .* step 10 of 10 has no noise .* smaller sampler\.fr"):
        Trajectories(policy, LatentSamplerConfig(steps=10, fraction=1.0), StepConfig())


def test_times_of_stable_diffusion_are_those_of_its_scheduler_in_full(tmp_path, caplog):
    import diffusers

    for name, spelled in (("EulerDiscreteScheduler", {}), ("PNDMScheduler", {"skip_prk_steps": True})):
        (tmp_path / "scheduler_config.json").write_text(json.dumps({"_class_name": name, **spelled}))
        scheduler = getattr(diffusers, name).from_pretrained(tmp_path)
        drawn = FAMILIES["StableDiffusionPipeline"](SimpleNamespace(unet=None, scheduler=scheduler)).drawing_scheduler()
        shared = drawn.config.keys() & scheduler.config.keys() - {"_class_name", "_use_default_values"}
        assert {key: drawn.config[key] for key in shared} == {key: scheduler.config[key] for key in shared}
    assert not caplog.records
    scheduler = diffusers.EulerDiscreteScheduler(use_karras_sigmas=True)
    FAMILIES["StableDiffusionPipeline"](SimpleNamespace(unet=None, scheduler=scheduler)).sigma_grid(10, (4, 8, 8))
    assert "EulerDiscreteScheduler has use_karras_sigmas" in caplog.text


def test_models_of_many_steps_are_not_taken_for_distilled_ones(folder, caplog):
    warn_of_few_steps(load_policy(config_of(folder)), LatentSamplerConfig(guidance=4.0, steps=50), matched=True)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_reading_a_family_draws_nothing_from_the_global_generator(folder):
    pipeline = load_pipeline(folder)
    before = torch.get_rng_state()
    family = family_of(pipeline)
    family.latent_shape()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_network_that_no_time_reaches_is_named(tmp_path, caplog):
    policy = load_policy(
        PipelineConfig(path=str(CASES["wan_two_networks"].build(tmp_path / "wan")), max_sequence_length=32)
    )
    late = LatentSamplerConfig(steps=10, window=2, window_low=6, window_high=9, guidance=1.0)
    Trajectories(policy, late, StepConfig())
    assert (
        "sampler.window: none of the training times, 0.43 to 0.667, reaches transformer, so its weights" in caplog.text
    )
    caplog.clear()
    FlowMatching(policy, LatentSamplerConfig(steps=4), TimestepConfig(times="discrete", count=1, fraction=0.9))
    assert not caplog.text
    policy.trained_networks = ("transformer",)
    with pytest.raises(UserError, match=r"0\.667, reaches transformer, and model\.networks contains no other network"):
        Trajectories(policy, late, StepConfig())
