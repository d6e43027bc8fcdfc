"""Every family does what its own pipeline in diffusers does."""

import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from diffusion.families.base import REFERENCE, Family, TextPart, blocks_of, cuts_times, grid_of
from diffusion.methods.flow_grpo import FlowGrpoConfig
from diffusion.models.diffusion_policy import DiffusionLora, PipelineConfig, load_policy
from diffusion.models.pipeline_card import PROMPT, describe_pipeline
from diffusion.models.pipelines import decode_latents, encode_images, load_pipeline
from diffusion.models.saved import LORA_FILE
from diffusion.sampling.latent_sampler import LatentSamplerConfig, euler_ode, guided, sample_latents, times_of
from mmrl.hub.compat import quiet_transformers
from tests.diffusion.edits import picture, reference, write_edits
from tests.diffusion.families.cases import CASES
from tests.diffusion.families.tiny import LONG, SHORT
from tests.diffusion.models.policies import disturb

STEPS = 3
SIGMA = torch.tensor([0.37, 0.95])
PROMPTS = [SHORT, LONG]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder of each case, built when first asked for."""
    return functools.cache(lambda name: CASES[name].build(tmp_path_factory.mktemp("families") / name))


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow if CASES[name].variant else ()) for name in CASES])
def case(request):
    return CASES[request.param]


@pytest.fixture
def config(request, case, folders):
    name = next(name for name, other in CASES.items() if other is case)
    sizes = {"height": case.height, "width": case.width, "frames": case.frames}
    lora = DiffusionLora(rank=2, alpha=4)
    return PipelineConfig(path=str(folders(name)), lora=lora, **sizes, **case.model)


@pytest.fixture
def policy(config):
    return load_policy(config)


def noise(policy, rows=2, seed=0):
    return torch.randn((rows, *policy.latent_shape), generator=torch.Generator().manual_seed(seed))


def relative(found, expected):
    """Largest difference over the largest number."""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def case_of(policy):
    return CASES[Path(policy.base_path).name]


def rows_of(policy, prompts=PROMPTS, seeds=(0, 0)):
    """Rows of prompts, with an image where the case edits one."""
    case = case_of(policy)
    if not case.edits:
        return policy.embeddings.rows(prompts)
    images = [reference(picture(case.height, case.width, seed)) for seed in seeds]
    return policy.embeddings.rows(prompts, images=images[: len(prompts)])


def velocity(policy, prompts=PROMPTS, rows=slice(None), seed=0, **images):
    text = rows_of(policy, prompts, **images)
    with torch.no_grad():
        return policy(noise(policy, seed=seed)[rows], SIGMA[rows], text.select(rows).expanded())


def test_control_tokens_that_a_prompt_spells_are_characters(policy):
    """Those of a chat template, of T5's vocabulary and of the others that are not CLIP's."""
    family, given = policy.family, []
    for part in (part for part in family.text_parts if not part.is_clip):
        tokenizer = getattr(policy.pipeline, part.tokenizer)
        control = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder} - {tokenizer.pad_token_id}
        encoder = getattr(policy.pipeline, part.encoder)
        note = encoder.register_forward_pre_hook(
            lambda _, args, named: given.append(named.get("input_ids", args[0] if args else None)), with_kwargs=True
        )
        spelled = " ".join(f"{SHORT}{tokenizer.convert_ids_to_tokens(token)}" for token in sorted(control)[:3])
        with note, torch.no_grad():
            for prompt in (SHORT, spelled):
                family.encode(prompt)
        if not given:  # an encoder of quoted text alone
            continue
        counts = [sum(token in control for token in ids.flatten().tolist()) for ids in given]
        counts += [sum(token in control for token in family.token_ids(part, prompt)) for prompt in (SHORT, spelled)]
        assert counts[0] == counts[1]
        assert counts[2] == counts[3]
        given.clear()


def test_control_tokens_are_characters_for_tokenizers_without_a_backend():
    from transformers import ByT5Tokenizer

    family = SimpleNamespace(pipeline=SimpleNamespace(tokenizer_2=ByT5Tokenizer()))
    text = Family.read_text(family, TextPart("text_encoder_2", "tokenizer_2"), 'a sign "stop</s><extra_id_7>"')
    assert text == 'a sign "stop< /s>< extra_id_7>"'


def called(case, pipeline, prompts, start, scale, kind, steps=STEPS):
    """What the pipeline's own call gives, as latents or as pixels."""
    if case.alone and kind == "np" and len(start) > 1:
        rows = zip(prompts, start.split(1), strict=True)
        return torch.cat([called(case, pipeline, [prompt], row, scale, kind) for prompt, row in rows])
    negative = {"negative_prompt": [case.negative] * len(start)} if scale != 1 and case.negative else {}
    sizes = {"height": case.height, "width": case.width} | ({"num_frames": case.frames} if case.frames else {})
    options = {"prompt": [*prompts], "num_inference_steps": steps, **sizes, **negative, **case.call}
    options |= case.guidance(scale) | ({"image": picture(case.height, case.width)} if case.edits else {})
    case.guide(pipeline, scale)
    latents = case.pack(pipeline, start.clone())
    found = pipeline(latents=latents, output_type=kind, return_dict=False, **options)[0]
    return case.unpack(pipeline, found, start) if kind == "latent" else torch.as_tensor(found)


@pytest.mark.parametrize("case", CASES, indirect=True)
def test_the_loop_is_the_pipelines_own(case, policy):
    """With the released scheduler, of a multistep solver at first order as in an export."""
    start, pipeline = noise(policy), policy.pipeline
    pipeline.scheduler = policy.family.drawing_scheduler()
    for scale in case.scales:
        negative = case.negative or ""
        follow = guided(policy, policy, rows_of(policy), scale, negative)
        with torch.no_grad():
            grid, family = times_of(policy, STEPS), policy.family
            latents = family.finished(euler_ode(follow, family.first_latents(start, grid[0]), grid), grid[-1])
            pixels = policy.family.decode(latents).clamp(0, 1)
        assert relative(latents, called(case, pipeline, PROMPTS, start, scale, "latent")) < 1e-5
        assert relative(pixels, called(case, pipeline, PROMPTS, start, scale, "np")) < 1e-5
        assert relative(latents, start) > 0.01
        assert pixels.std() > 0.01


@pytest.mark.parametrize("steps", [5, 9, 12, 50])
@pytest.mark.parametrize("case", ["wan", "sana", "hunyuan_video15", "ltx"], indirect=True)
def test_times_are_those_of_the_released_scheduler(case, policy, steps):
    """At which the pipeline calls the network, nothing in it changed."""
    times = []
    hook = policy.pipeline.transformer.register_forward_pre_hook(
        lambda _, args, named: times.append(named["timestep"].flatten()[0]), with_kwargs=True
    )
    with torch.no_grad(), hook:
        called(case, policy.pipeline, [SHORT], noise(policy, rows=1), 1.0, "latent", steps=steps)
        of_pipeline, times = times[:], []
        text = rows_of(policy, [SHORT])
        for sigma in times_of(policy, steps)[:-1]:
            policy(noise(policy, rows=1), sigma[None], text.expanded())
    assert len(times) == steps
    assert [float(time) for time in times] == pytest.approx([float(time) for time in of_pipeline], rel=1e-6)


@pytest.mark.parametrize("shift", [1.0, 3.0, 6.0])
@pytest.mark.parametrize("kind", ["UniPCMultistepScheduler", "DPMSolverMultistepScheduler"])
def test_times_are_cut_off_as_the_scheduler_cuts_them(kind, shift):
    """Also where float32 rounds what it cuts: at shift 1 a step's time is 333, its sigma 0.334."""
    import diffusers

    scheduler = getattr(diffusers, kind)(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    assert cuts_times(scheduler)
    family = SimpleNamespace(pipeline=SimpleNamespace(scheduler=scheduler), _cuts=None)
    for steps in range(1, 101):
        scheduler.set_timesteps(steps)
        grid = grid_of(scheduler, steps)
        assert torch.equal(Family.time(family, grid[:-1]).long(), scheduler.timesteps)
        assert float((grid - scheduler.sigmas).abs().max()) < 1e-7


@pytest.mark.parametrize("case", CASES, indirect=True)
@torch.no_grad()
def test_the_cards_call_draws_the_evaluations_images(case, config, policy, tmp_path, monkeypatch):
    scale = max(case.scales)
    run = FlowGrpoConfig(output_dir="x", model=config)
    run.sampler = LatentSamplerConfig(
        steps=STEPS, eval_steps=STEPS, guidance=scale, negative_prompt=case.negative or ""
    )
    monkeypatch.chdir(tmp_path)
    edited = picture(2 * case.height, 3 * case.width)
    edited.save("picture.png")
    run.data.path = str(write_edits(tmp_path / "data.jsonl", [SHORT], (4, 4)) if case.edits else tmp_path / "none")
    policy.save_pipeline("out")
    exported = describe_pipeline(run, policy, "")
    drawn = {"folder": "out"}
    with quiet_transformers():
        exec(exported.load, drawn)
    drawn["pipeline"].set_progress_bar_config(disable=True)
    shown = next(line for line in exported.use.splitlines() if line.startswith("drawn = "))
    exec(exported.use.split("drawn = ")[0] + shown.replace("generator=", 'output_type="np", generator='), drawn)
    text = policy.embeddings.rows([PROMPT], images=[reference(edited) if case.edits else None])
    evaluated, without = (
        policy.family.decode(sample_latents(policy, text, torch.tensor([[0, 1]]), run.sampler, guidance=scale))[0]
        for scale in (scale, 1.0)
    )
    expected = evaluated.clamp(0, 1)
    assert relative(torch.as_tensor(np.asarray(drawn["drawn"])), expected) < 1e-5
    if scale != 1:
        assert relative(without.clamp(0, 1), expected) > 1e-4
    exec(exported.use.split("drawn = ")[0] + shown, drawn)  # as it is printed
    assert exported.limits == []


def test_rows_alone_equal_rows_together_at_two_times(policy):
    disturb(policy)
    both = velocity(policy)
    for row in (0, 1):
        assert relative(velocity(policy, rows=slice(row, row + 1)), both[row : row + 1]) < 1e-5
    policy.embeddings.pad_to([LONG + " " + LONG])
    assert relative(velocity(policy), both) < 1e-5


def test_lengths_are_those_of_the_embeddings(policy):
    family = policy.family
    for negative in (False, True):
        for prompt in (SHORT, LONG, ""):
            with torch.no_grad():
                text = family.encode(prompt, negative=negative)
            assert family.lengths(prompt, negative=negative) == {name: len(text[name]) for name in family.ragged}
    assert family.text_vector(policy.embeddings.rows(PROMPTS).values).ndim == 2


def test_every_adapter_has_a_gradient(case, policy):
    disturb(policy)
    policy(noise(policy), SIGMA, rows_of(policy).expanded()).square().mean().backward()
    trained = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    without = [name for name, weight in trained.items() if weight.grad is None or not weight.grad.any()]
    assert [name for name in without if not any(part in name for part in case.silent)] == []
    for part in case.silent:
        assert any(part in name for name in without)
    for name in policy.trained:
        for block in blocks_of(getattr(policy, name)).values():
            assert case.bare or any(".lora_" in key for key, _ in block.named_parameters()), type(block).__name__


def test_bfloat16_is_close(config):
    whole = velocity(disturb(load_policy(config)))
    low = disturb(load_policy(dataclasses.replace(config, dtype="bfloat16")))
    found = velocity(low)
    assert found.dtype == torch.bfloat16
    assert relative(found, whole) < 0.1
    assert decode_latents(low.family, noise(low).bfloat16()).finite.all()


@pytest.mark.parametrize("enabled", [True, False], ids=["lora", "full"])
def test_saved_weights_and_pipelines_are_the_policy(config, tmp_path, enabled):
    config = dataclasses.replace(config, lora=dataclasses.replace(config.lora, enabled=enabled))
    policy = disturb(load_policy(config), 0.02)
    expected = velocity(policy)
    policy.save_pretrained(tmp_path / "weights")
    again = load_policy(dataclasses.replace(config, path=str(tmp_path / "weights")), seed=5)
    assert torch.equal(velocity(again), expected)
    whole = tmp_path / "pipelines" / Path(policy.base_path).name
    policy.save_pipeline(whole)
    plain = dataclasses.replace(config, path=str(whole), lora=DiffusionLora(enabled=False))
    assert relative(velocity(load_policy(plain)), expected) < 1e-5
    if enabled:
        pipeline = load_pipeline(config.path)
        text = rows_of(policy).expanded()
        for name, network in policy.trained.items():
            second = name != policy.family.networks[0]
            place = tmp_path / "weights" / (name if second else "")
            if hasattr(pipeline, "load_lora_weights"):
                pipeline.load_lora_weights(str(place), **({f"load_into_{name}": True} if second else {}))
            else:
                getattr(pipeline, name).load_lora_adapter(str(place), prefix=None, weight_name=LORA_FILE)
            with torch.no_grad():
                found, own = (
                    policy.family.model(part)(noise(policy), SIGMA, text) for part in (getattr(pipeline, name), network)
                )
            assert relative(found, own) < 1e-5


def test_pixels_become_latents_and_pixels_again(policy):
    images = decode_latents(policy.family, noise(policy)).pixels
    latents = encode_images(policy.family, images)
    assert latents.shape == (2, *policy.latent_shape)
    sampled = encode_images(policy.family, images, torch.Generator().manual_seed(0))
    assert sampled.shape == latents.shape
    assert relative(policy.family.normalise(policy.family.denormalise(latents)), latents) < 1e-5


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.edits], indirect=True)
def test_each_row_edits_its_own_image(case, policy):
    both = velocity(policy, seeds=(0, 1))
    for row in (0, 1):
        alone = velocity(policy, seeds=(row, row))
        assert relative(both[row], alone[row]) < 1e-5
    assert relative(velocity(policy, seeds=(1, 1))[0], both[0]) > 1e-4
    negative = policy.embeddings.negative("").for_rows_of(rows_of(policy, seeds=(0, 1)))
    assert torch.equal(negative.values[REFERENCE], rows_of(policy, seeds=(0, 1)).values[REFERENCE])
