"""`mmrl export` of an image run, moved bases, and adapters as equal bytes."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diffusion.models.adapters import FORMATS
from diffusion.models.diffusion_policy import DiffusionLora, PipelineConfig, load_policy
from diffusion.toy.pipelines.tiny import TinySd3Sizes, build_tiny_sd3
from mmrl.cli import main
from mmrl.config import save
from mmrl.errors import UserError
from mmrl.hub.compat import quiet_transformers
from mmrl.recipes import RECIPES
from mmrl.report.export import export_run
from mmrl.runs.checkpoint import write_manifest
from mmrl.training.run import train
from tests.diffusion.runs import PROMPTS, run_config
from tests.rounding import assert_equal_up_to_rounding

ROOT = Path(__file__).parents[3]
OPTIONS = {"num_inference_steps": 2, "guidance_scale": 1.0, "height": 32, "width": 32, "output_type": "pt"}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """A tiny pipeline whose parts are all of released classes."""
    folder = tmp_path_factory.mktemp("sd3") / "pipeline"
    return build_tiny_sd3(folder, corpus=list(PROMPTS), sizes=TinySd3Sizes(layers=1))


@pytest.mark.parametrize("averaged", [False, True])
def test_plain_diffusers_loads_the_export_and_draws_the_same(tmp_path, pipeline, averaged, capsys):
    config = run_config("flow_grpo", tmp_path, steps=1, learning_rate=0.05)
    config.model = dataclasses.replace(config.model, path=str(pipeline), max_sequence_length=8)
    config.eval_ema = dataclasses.replace(config.eval_ema, decay=0.5 * averaged)
    run = train(RECIPES["flow_grpo"], config)
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 0
    assert f"load it with: diffusers.DiffusionPipeline.from_pretrained('{tmp_path}/out')" in capsys.readouterr().out
    from diffusers import DiffusionPipeline

    weights = run / "checkpoints/step-000001" / ("eval_ema" if averaged else "model")
    policy = load_policy(dataclasses.replace(config.model, path=str(weights)))
    own = load_policy(dataclasses.replace(config.model, path=str(run)))
    same = load_policy(dataclasses.replace(config.model, path=str(run / "checkpoints/step-000001/model")))
    assert all(torch.equal(*pair) for pair in zip(own.parameters(), same.parameters(), strict=True))
    with quiet_transformers():
        exported = DiffusionPipeline.from_pretrained(tmp_path / "out")
        base = DiffusionPipeline.from_pretrained(pipeline)

    def draw(pipe):
        pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(0)
        return pipe("a red circle", generator=generator, max_sequence_length=8, **OPTIONS).images

    assert not any("lora" in name for name, _ in exported.transformer.named_parameters())
    found, expected = draw(exported), draw(policy.pipeline)
    assert_equal_up_to_rounding(found, expected)
    assert float((draw(base) - expected).abs().max()) > 1e-4  # the run has changed the model


def test_adapter_finds_its_pipeline_after_both_were_moved(tmp_path, pipeline):
    base = build_tiny_sd3(tmp_path / "old/base", corpus=list(PROMPTS), sizes=TinySd3Sizes(layers=1))
    config = PipelineConfig(path=str(base), lora=DiffusionLora(rank=2, alpha=4), max_sequence_length=8)
    load_policy(config).save_pretrained(tmp_path / "old/runs/one")
    saved = json.loads((tmp_path / "old/runs/one/base.json").read_text())
    assert saved["relative"] == "../../base"
    (tmp_path / "old").rename(tmp_path / "new")
    again = dataclasses.replace(config, path=str(tmp_path / "new/runs/one"))
    assert load_policy(again).base_path == str(tmp_path / "new/base")
    (tmp_path / "new/runs/one").rename(tmp_path / "alone")  # then the place where it lay counts
    (tmp_path / "new").rename(tmp_path / "old")
    assert load_policy(dataclasses.replace(config, path=str(tmp_path / "alone"))).base_path == str(base)


SAVE = """
import sys
from diffusion.models.diffusion_policy import LoraSettings, ModelConfig
from diffusion.models.diffusion_policy import load_policy
load_policy(ModelConfig(path=sys.argv[1], lora=LoraSettings(rank=2, alpha=4))).save_pretrained(sys.argv[2])
"""


@pytest.mark.slow
def test_equal_adapters_are_equal_bytes_whatever_process_writes_them(tmp_path, pipeline):
    for seed in ("1", "2"):
        command = [sys.executable, "-c", SAVE, str(pipeline), str(tmp_path / seed)]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=120)
    files = [{path.name: path.read_bytes() for path in (tmp_path / seed).iterdir()} for seed in ("1", "2")]
    assert files[0].keys() == files[1].keys()
    assert [name for name in files[0] if files[0][name] != files[1][name]] == []


def test_the_printed_call_and_the_card_draw_with_a_pipeline_without_t5(tmp_path, monkeypatch):
    folder = build_tiny_sd3(tmp_path / "short", corpus=list(PROMPTS), sizes=TinySd3Sizes(layers=1, t5_layers=0))
    config = run_config("flow_grpo", tmp_path)
    config.model = dataclasses.replace(config.model, path=str(folder))
    step = tmp_path / "run/checkpoints/step-000001"
    load_policy(config.model).save_pretrained(step / "model")
    (step / "state.pt").touch()
    write_manifest(step)
    call = export_run(RECIPES["flow_grpo"], config, tmp_path / "run", tmp_path / "out")
    assert call.endswith("out', text_encoder_3=None, tokenizer_3=None)")
    import diffusers

    with quiet_transformers():
        exported = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out", text_encoder_3=None, tokenizer_3=None)
    assert exported.text_encoder_3 is None
    assert json.loads((tmp_path / "out/export.json").read_text())["load"].endswith("tokenizer_3=None)")
    monkeypatch.chdir(tmp_path / "out")
    made = {}
    with quiet_transformers():
        exec(re.search(r"```python\n(.*?)\n```\n", Path("README.md").read_text(), re.DOTALL)[1], made)
    assert made["drawn"].size == (32, 32)


def checkpoint_of(config, folder):
    """The folder of a run with one checkpoint of the policy as it starts."""
    step = folder / "checkpoints/step-000001"
    load_policy(config.model).save_pretrained(step / "model")
    (step / "state.pt").touch()
    write_manifest(step)
    save(config, folder / "config.yaml")
    return folder


@pytest.mark.parametrize("form", FORMATS)
def test_the_command_exports_adapters_for_other_programs(tmp_path, pipeline, form, capsys):
    config = run_config("flow_grpo", tmp_path)
    config.model = dataclasses.replace(config.model, path=str(pipeline), max_sequence_length=8)
    run = checkpoint_of(config, tmp_path / "run")
    assert main(["export", str(run), "--output", str(tmp_path / "out"), "--lora-format", form]) == 0
    assert f"load it as shown in {tmp_path}/out/README.md" in capsys.readouterr().out
    card = (tmp_path / "out/README.md").read_text()
    own = {"diffusers": "pipeline.load_lora_weights(folder)", "kohya": "ComfyUI does, in its folder models/loras"}
    assert own.get(form, "PeftModel.from_pretrained(pipeline.transformer, folder)") in card
    assert str(tmp_path) not in card
    assert {file.suffix for file in (tmp_path / "out").iterdir()} == {".safetensors", ".json", ".md"}


def test_a_format_of_adapters_needs_adapters_of_an_image_model(tmp_path, pipeline, capsys):
    config = run_config("flow_grpo", tmp_path)
    lora = dataclasses.replace(config.model.lora, enabled=False)
    config.model = dataclasses.replace(config.model, path=str(pipeline), max_sequence_length=8, lora=lora)
    run = checkpoint_of(config, tmp_path / "run")
    assert main(["export", str(run), "--output", str(tmp_path / "out"), "--lora-format", "peft"]) == 2
    assert "--lora-format is for adapters, but this run trained whole weights; leave it out" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(
        UserError, match="--lora-format is for image and video models, not for the recipe sft; adapters"
    ):
        export_run(RECIPES["sft"], config, run, tmp_path / "out", form="peft")
