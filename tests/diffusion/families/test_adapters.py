"""Adapter files of every family, as diffusers, peft and ComfyUI read them."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from diffusion.methods.flow_grpo import FlowGrpoConfig
from diffusion.models.adapters import save_formatted
from diffusion.models.diffusion_policy import DiffusionLora, PipelineConfig, load_policy
from diffusion.models.pipeline_card import PROMPT, describe_pipeline
from diffusion.models.pipelines import load_pipeline
from diffusion.models.saved import EXACT_FILE, LORA_FILE, adapter_of
from diffusion.sampling.latent_sampler import LatentSamplerConfig, sample_latents
from mmrl.errors import UserError
from mmrl.hub.compat import quiet_transformers
from tests.diffusion.families.cases import CASES
from tests.diffusion.families.test_conformance import disturb, noise, relative, rows_of
from tests.diffusion.families.test_conformance import folders as folders  # a fixture

SIGMA = torch.tensor([0.37, 0.95])
NAMES = [name for name, case in CASES.items() if not case.variant]
QUICK = ("sd3", "flux", "klein", "wan_two_networks", "stable_diffusion_xl", "hunyuan_video15", "sana")
"""Cases of the default tests."""
FEED_FORWARD = {"wan": ["ffn.net.0.proj", "ffn.net.2"], "wan_two_networks": ["ffn.net.0.proj", "ffn.net.2"]}
"""Layers that diffusers expects in a file of kohya-ss's format besides those of attention."""


@pytest.fixture
def policy(request, folders):
    name, alpha = request.param
    case = CASES[name]
    sizes = {"height": case.height, "width": case.width, "frames": case.frames}
    lora = DiffusionLora(rank=2, alpha=alpha)
    made = load_policy(PipelineConfig(path=str(folders(name)), lora=lora, **sizes, **case.model))
    if name in FEED_FORWARD:
        lora = dataclasses.replace(lora, targets=[*made.family.lora_targets, *FEED_FORWARD[name]])
        made = load_policy(dataclasses.replace(made.config, lora=lora))
    return disturb(made, 0.3)


def with_alpha(*alphas, names=NAMES):
    rows = [
        pytest.param((name, alpha), id=f"{name}-{alpha}", marks=() if name in QUICK else pytest.mark.slow)
        for alpha in alphas
        for name in names
    ]
    return pytest.mark.parametrize("policy", rows, indirect=True)


def velocities(policy, pipeline):
    """Of each trained network."""
    text, family = rows_of(policy).expanded(), policy.family
    with torch.no_grad():
        return [family.velocity(getattr(pipeline, name), noise(policy), SIGMA, text) for name in policy.trained]


def assert_same_effect(policy, pipeline):
    base = velocities(policy, load_pipeline(policy.base_path))
    for found, expected, start in zip(velocities(policy, pipeline), velocities(policy, policy), base, strict=True):
        assert relative(expected, start) > 1e-3
        assert float((found - expected).abs().max() / (expected - start).abs().max()) < 1e-4


def run_of(policy, **sampler):
    run = FlowGrpoConfig(output_dir="x", model=policy.config, sampler=LatentSamplerConfig(**sampler))
    run.data.path = "none"
    return run


def loaded(policy, form, folder, **sampler):
    """The start pipeline with the adapters, by the lines of the card."""
    run = run_of(policy, **sampler)
    lines = describe_pipeline(run, policy, "", form).load
    names = {"folder": str(folder)}
    with quiet_transformers():
        exec(re.sub(r'from_pretrained\("[^"]*"', f"from_pretrained({policy.base_path!r}", lines), names)
    return names["pipeline"]


@with_alpha(4)
@pytest.mark.parametrize("form", ["diffusers", "peft"])
def test_the_cards_lines_load_the_adapters(policy, form, tmp_path):
    save_formatted(policy, tmp_path, form)
    assert_same_effect(policy, loaded(policy, form, tmp_path))


@with_alpha(4, 3)
def test_readers_that_know_no_header_get_the_same_strength(policy, tmp_path):
    """As ComfyUI and diffusers before 0.34; a checkpoint has the same file."""
    policy.save_pretrained(tmp_path)
    files = [*tmp_path.rglob(LORA_FILE)]
    for file in files:
        save_file(load_file(file), file, metadata={"format": "pt"})
    assert len(files) == len(policy.trained)
    pipeline = load_pipeline(policy.base_path)
    for name in policy.trained:
        place = tmp_path / ("" if name == policy.family.networks[0] else name)
        options = {"prefix": None} if policy.family.networks[0] == "transformer" and not keyed(place) else {}
        getattr(pipeline, name).load_lora_adapter(
            str(place), weight_name=LORA_FILE, **({"prefix": keyed(place)} | options)
        )
    assert_same_effect(policy, pipeline)


def keyed(place):
    """What all names in a file begin with."""
    firsts = {key.partition(".")[0] for key in load_file(place / LORA_FILE)}
    return firsts.pop() if firsts <= {"transformer"} or firsts <= {"unet"} else None


@with_alpha(4, 3, names=["sd3", "wan_two_networks", "hunyuan_video15"])
def test_a_checkpoint_is_read_back_bit_for_bit(policy, tmp_path):
    """Whether or not its scale can be divided out without rounding."""
    policy.save_pretrained(tmp_path)
    assert (tmp_path / EXACT_FILE).is_file() == (policy.config.lora.alpha == 3)
    again = load_policy(dataclasses.replace(policy.config, path=str(tmp_path)), seed=5)
    own = dict(policy.named_parameters())
    assert all(torch.equal(weight, own[name]) for name, weight in again.named_parameters())


READ_BY_DIFFUSERS = ["flux", "qwen_image", "klein", "z_image", "kontext"]
READ_BY_DIFFUSERS += ["stable_diffusion", "stable_diffusion_xl"]


@with_alpha(3, names=READ_BY_DIFFUSERS)
def test_diffusers_converts_kohya_files(policy, tmp_path):
    save_formatted(policy, tmp_path, "kohya")
    assert_same_effect(policy, loaded(policy, "kohya", tmp_path))


@with_alpha(3, names=["wan", "wan_two_networks"])
def test_diffusers_converts_kohya_files_of_wan_with_feed_forward_layers(policy, tmp_path):
    save_formatted(policy, tmp_path, "kohya")
    pipeline = load_pipeline(policy.base_path)
    for name in policy.trained:
        second = name == "transformer_2"
        pipeline.load_lora_weights(str(tmp_path / ("transformer_2" if second else "")), load_into_transformer_2=second)
    assert_same_effect(policy, pipeline)


@with_alpha(4, names=["sd3", "wan_two_networks", "ltx"])
def test_the_card_says_what_diffusers_does_not_read(policy):
    exported = describe_pipeline(run_of(policy), policy, "", "kohya")
    assert "# diffusers does not read these files; ComfyUI does" in exported.load
    assert "load_lora_weights" not in exported.load
    assert exported.use == ""


COMFY = {
    "sd3": "lora_transformer_{}",
    "flux": "lora_transformer_{}",
    "kontext": "lora_transformer_{}",
    "qwen_image": "lora_unet_{}",
    "z_image": "{}",
    "wan": "lora_unet_{}",
    "wan_two_networks": "lora_unet_{}",
    "klein": "lora_unet_{}",
    "ltx": "lora_unet_{}",
    "stable_diffusion": "lora_unet_{}",
    "stable_diffusion_xl": "lora_unet_{}",
}
"""Keys of ComfyUI's `model_lora_keys_unet` (comfy/lora.py), with dots as underscores but in the bare one."""
ORIGINAL = {
    "wan": (
        *(("attn1.to_q", "self_attn.q"), ("attn1.to_k", "self_attn.k"), ("attn1.to_v", "self_attn.v")),
        *(("attn1.to_out.0", "self_attn.o"), ("attn2.to_q", "cross_attn.q"), ("attn2.to_k", "cross_attn.k")),
        *(("attn2.to_v", "cross_attn.v"), ("attn2.to_out.0", "cross_attn.o")),
        *(("ffn.net.0.proj", "ffn.0"), ("ffn.net.2", "ffn.2")),
    )
}
"""Layers of Wan as its authors name them (Wan-Video/Wan2.1 wan/modules/model.py), which ComfyUI keeps."""


@with_alpha(3, names=[name for name in COMFY if name != "klein"])
def test_comfyui_finds_each_layer_in_a_kohya_file(policy, tmp_path):
    name = next(name for name in COMFY if policy.base_path.endswith(f"/{name}"))
    save_formatted(policy, tmp_path, "kohya")
    state = load_file(tmp_path / LORA_FILE)
    weights, settings = adapter_of(policy.trained[policy.family.networks[0]])
    for key in [key for key in weights if ".lora_A." in key]:
        stem = key.removesuffix(".lora_A.weight")
        native = stem
        for ours, theirs in ORIGINAL.get(name.removesuffix("_two_networks"), ()):
            native = re.sub(rf"\.{re.escape(ours)}$", f".{theirs}", native)
        known = COMFY[name].format(native if COMFY[name] == "{}" else native.replace(".", "_"))
        down, up, alpha = (state.pop(f"{known}.{part}") for part in ("lora_down.weight", "lora_up.weight", "alpha"))
        added = settings["lora_alpha"] / settings["r"] * weights[f"{stem}.lora_B.weight"] @ weights[key]
        assert relative(alpha / len(down) * up @ down, added) < 1e-6
    assert state == {}


@with_alpha(3, names=["klein"])
def test_layers_that_are_one_in_the_original_are_one_in_the_file(policy, tmp_path):
    save_formatted(policy, tmp_path, "kohya")
    state = load_file(tmp_path / LORA_FILE)
    weights, settings = adapter_of(policy.transformer)
    block = "transformer_blocks.0.attn"
    down, up, alpha = (
        state[f"lora_unet_double_blocks_0_img_attn_qkv.{part}"]
        for part in ("lora_down.weight", "lora_up.weight", "alpha")
    )
    parts = [weights[f"{block}.to_{x}.lora_B.weight"] @ weights[f"{block}.to_{x}.lora_A.weight"] for x in "qkv"]
    assert relative(alpha / len(down) * up @ down, settings["lora_alpha"] / settings["r"] * torch.cat(parts)) < 1e-6
    assert len(state) == 3 * (4 + 2 * 2)  # both streams' qkv and output, and two layers of two single blocks


@with_alpha(4, names=["klein"])
def test_a_layer_without_an_adapter_is_zero_in_a_fused_one(policy, folders, tmp_path):
    lora = DiffusionLora(rank=2, alpha=3, targets=["attn.to_k", "attn.add_q_proj"])
    few = disturb(load_policy(dataclasses.replace(policy.config, lora=lora)), 0.3)
    save_formatted(few, tmp_path, "kohya")
    assert_same_effect(few, loaded(few, "kohya", tmp_path))


@with_alpha(4, names=["sana"])
def test_a_format_that_no_program_reads_is_refused(policy, tmp_path):
    with pytest.raises(UserError, match="no program reads SanaPipeline adapters in kohya-ss format; use"):
        save_formatted(policy, tmp_path, "kohya")


@with_alpha(4, names=["sd3", "klein", "wan_two_networks", "hunyuan_video15", "stable_diffusion_xl"])
@torch.no_grad()
def test_the_call_of_a_card_of_peft_draws(policy, tmp_path):
    """Though the networks are wrapped, and with the scheduler of evaluations."""
    save_formatted(policy, tmp_path, "peft")
    sampler = {"steps": 2, "eval_steps": 2, "guidance": 3.0}
    pipeline = loaded(policy, "peft", tmp_path, **sampler)
    pipeline.set_progress_bar_config(disable=True)
    names = {"pipeline": pipeline, "torch": torch}
    use = describe_pipeline(run_of(policy, **sampler), policy, "", "peft").use.splitlines()[0]
    exec(use.replace("generator=", 'output_type="np", generator='), names)
    text = policy.embeddings.rows([PROMPT])
    latents = sample_latents(policy, text, torch.tensor([[0, 1]]), LatentSamplerConfig(**sampler))
    expected = policy.family.decode(latents)[0].clamp(0, 1)
    assert relative(torch.as_tensor(np.asarray(names["drawn"])), expected) < 1e-5


@with_alpha(4, names=["sd3"])
def test_the_scale_of_an_adapter_file_is_that_of_its_header(policy, tmp_path):
    policy.save_pretrained(tmp_path)
    (file,) = tmp_path.rglob(LORA_FILE)
    layers, again = load_file(file), load_policy(policy.config, seed=5)

    def read(**header):
        whole = {f"transformer.{key}": value for key, value in header.items()}
        save_file(layers, file, metadata={"format": "pt", "lora_adapter_metadata": json.dumps(whole)})
        again.load_weights(tmp_path)
        return next(weight.detach().clone() for name, weight in again.named_parameters() if ".lora_B." in name)

    plain = read(r=2, lora_alpha=2)
    assert torch.allclose(read(r=2, lora_alpha=6), 3 * plain)
    assert torch.allclose(read(r=2, lora_alpha=2, use_rslora=True), 2**0.5 * plain), "alpha / sqrt(rank)"
    with pytest.raises(UserError, match=r"some layers a lora_alpha of their own, such as to_q"):
        read(r=2, lora_alpha=2, alpha_pattern={"to_q": 8})
