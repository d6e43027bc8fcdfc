"""`mmrl export` of a vision-language run, moved chains of runs, and adapters as equal bytes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image

from mmrl.cli import main
from mmrl.errors import UserError
from mmrl.hub.compat import quiet_transformers
from mmrl.recipes import RECIPES
from mmrl.training.run import evaluate, train
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.methods.sft import SftConfig
from mmrl.vlm.model.model_config import LoraSettings, ModelConfig
from tests.rounding import assert_equal_up_to_rounding
from tests.vlm.runs import run_config

ROOT = Path(__file__).parents[2]


def trained(folder, model, **lora):
    config = run_config(SftConfig, folder, model, steps=1, samples_per_task=1, learning_rate=1e-2)
    config.recipe = "sft"
    config.model.lora = LoraSettings(**lora) if lora else config.model.lora
    return train(RECIPES["sft"], config), config


def logits(model, processor):
    turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is 3 plus 4?"}]}
    text = processor.apply_chat_template([turn], add_generation_prompt=True)
    inputs = processor(text=[text], images=[Image.new("RGB", (56, 56), (9, 90, 160))], return_tensors="pt")
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("lora", [{}, {"enabled": True, "rank": 4, "alpha": 64}])
def test_plain_transformers_loads_the_export_and_computes_the_same(tmp_path, tiny_folders, lora, capsys):
    run, _ = trained(tmp_path, tiny_folders["qwen2_5_vl"], **lora)
    assert main(["export", str(run)]) == 0
    shown = capsys.readouterr().out
    assert f"load it with: transformers.AutoModelForImageTextToText.from_pretrained('{run}/export')" in shown
    shutil.rmtree(run / "checkpoints/step-000001/model")  # the export needs nothing else
    about = json.loads((run / "export/export.json").read_text())
    assert (about["recipe"], about["step"]) == ("sft", 1)
    from transformers import AutoModelForImageTextToText, AutoProcessor

    with quiet_transformers():
        plain = AutoModelForImageTextToText.from_pretrained(run / "export")
    assert not any("lora" in name for name in plain.state_dict())
    with pytest.raises(UserError, match="is damaged"):
        load_policy(ModelConfig(path=str(run / "checkpoints/step-000001/model")))
    again, _ = trained(tmp_path / "again", tiny_folders["qwen2_5_vl"], **lora)
    settings = LoraSettings(**lora) if lora else LoraSettings()
    policy = load_policy(ModelConfig(path=str(again), lora=settings))
    assert policy.config.path == str(again / "checkpoints/step-000001/model")
    base = load_policy(ModelConfig(path=str(tiny_folders["qwen2_5_vl"])))
    processor = AutoProcessor.from_pretrained(run / "export")
    found, expected = logits(plain, processor), logits(policy.model, processor)
    assert_equal_up_to_rounding(found, expected)
    assert float((logits(base.model, processor) - expected).abs().max()) > 1e-3  # the run has changed the model


def test_the_snippet_of_the_card_asks_as_in_training(tmp_path, tiny_folders, capsys):
    config = run_config(SftConfig, tmp_path, tiny_folders["qwen2_5_vl"], steps=1, samples_per_task=1)
    config.recipe = "sft"
    config.data.system_prompt, config.data.format_prompt = 'Say "no".', "{{ content }}\n```\nIn one word."
    run = train(RECIPES["sft"], config)
    assert main(["export", str(run), "--to-hub", "someone/digits"]) == 0
    assert f"upload it with: hf upload someone/digits {run}/export" in capsys.readouterr().out
    card = ModelCard.load(run / "export/README.md")
    assert str(tmp_path) not in card.text + (run / "export/export.json").read_text()
    data = json.loads((run / "result.json").read_text())["data"]
    assert f"{data['tasks']} tasks, digest `{data['digest']}`" in card.text
    snippet = re.search(r"(```+)python\n(.*?)\n\1\n", card.text, re.DOTALL)[2]
    made = {}
    with quiet_transformers():
        exec(snippet.replace("someone/digits", str(run / "export")), made)
    content = [{"type": "image"}, {"type": "text", "text": "What do you see?\n```\nIn one word."}]
    turns = [
        {"role": "system", "content": [{"type": "text", "text": 'Say "no".'}]},
        {"role": "user", "content": content},
    ]
    policy = load_policy(ModelConfig(path=str(run)))
    expected = policy.encode(VlmTask("0", turns, [made["image"]]))
    assert made["inputs"]["input_ids"][0].tolist() == expected.input_ids.tolist()


def test_the_exported_model_generates_as_the_suite_samples(tmp_path, tiny_folders):
    """The base model's habits of sampling are not those of evaluations."""
    base = tmp_path / "base"
    shutil.copytree(tiny_folders["qwen2_5_vl"], base)
    file = base / "generation_config.json"
    habits = {"repetition_penalty": 1.05, "temperature": 1e-6, "top_k": 1, "no_repeat_ngram_size": 2}
    file.write_text(json.dumps(json.loads(file.read_text()) | habits))
    for lora in ({}, {"enabled": True, "rank": 4}):
        run, _ = trained(tmp_path / f"run{len(lora)}", base, **lora)
        assert main(["export", str(run)]) == 0
        made = json.loads((run / "export/generation_config.json").read_text())
        assert made["eos_token_id"] == json.loads(file.read_text())["eos_token_id"]
        neutral = {"repetition_penalty": 1.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        assert {name: made.get(name, value) for name, value in neutral.items()} == neutral
        assert not made.get("no_repeat_ngram_size")
        assert made["suppress_tokens"] == load_policy(ModelConfig(path=str(base))).banned_ids.tolist()


def test_an_evaluation_says_that_every_answer_was_cut(tmp_path, tiny_folders, caplog):
    config = run_config(SftConfig, tmp_path, tiny_folders["qwen2_5_vl"], steps=1)
    config.evaluation.sampler.max_new_tokens = 1
    train(RECIPES["sft"], config)
    said = [text for text in caplog.messages if "responses hit the limit of 1 tokens" in text]
    assert len(said) == 1


def test_export_is_refused_where_something_is_wrong(tmp_path, tiny_folders, capsys):
    run, _ = trained(tmp_path, tiny_folders["qwen2_5_vl"])

    def refused(*words):
        assert main(["export", str(run), *words]) == 2
        return capsys.readouterr().err

    assert "has no checkpoint of step 7; available: 1" in refused("--step", "7")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("")
    assert "exists; choose another --output" in refused("--output", str(tmp_path / "full"))
    weights = run / "checkpoints/step-000001/model/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 16
    weights.write_bytes(data)
    assert "model/model.safetensors has changed" in refused()
    assert not list(run.glob("*export*"))
    assert main(["export", str(tmp_path)]) == 2


def test_flipped_bit_in_a_checkpoint_is_noticed_by_the_run_that_starts_from_it(tmp_path, tiny_folders):
    run, _ = trained(tmp_path, tiny_folders["qwen2_5_vl"])
    model = run / "checkpoints/step-000001/model"
    load_policy(ModelConfig(path=str(model)))
    data = bytearray((model / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (model / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError, match=r"model/model\.safetensors has changed"):
        load_policy(ModelConfig(path=str(model)))


def test_chain_of_runs_that_was_moved_still_works(tmp_path, tiny_folders):
    old = tmp_path / "old"
    first, _ = trained(old / "first", tiny_folders["qwen2_5_vl"])
    start = first / "checkpoints/step-000001/model"
    second, config = trained(old / "second", start, enabled=True, rank=4, alpha=8)
    adapter = second / "checkpoints/step-000001/model"
    expected = {name: value.clone() for name, value in load_policy(ModelConfig(path=str(adapter))).state_dict().items()}
    old.rename(tmp_path / "new")
    moved = tmp_path / "new" / adapter.relative_to(old)
    found = load_policy(ModelConfig(path=str(moved))).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    config.data.path = config.eval_data["heldout"].path = str(tmp_path / "new/second/data/questions.jsonl")
    config.output_dir = str(moved.parents[2])
    assert evaluate(RECIPES["sft"], config, moved.parents[2])["heldout/n"] > 0


SAVE = """
import sys
from mmrl.vlm.model.model_config import LoraSettings, ModelConfig
from mmrl.vlm.engine.vlm_policy import load_policy
load_policy(ModelConfig(path=sys.argv[1], lora=LoraSettings(enabled=True, rank=2))).save_pretrained(sys.argv[2])
"""


@pytest.mark.slow
def test_equal_adapters_are_equal_bytes_whatever_process_writes_them(tmp_path, tiny_folders):
    for seed in ("1", "2"):
        command = [sys.executable, "-c", SAVE, str(tiny_folders["qwen2_5_vl"]), str(tmp_path / seed)]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=120)
    files = [{path.name: path.read_bytes() for path in (tmp_path / seed).iterdir()} for seed in ("1", "2")]
    assert files[0].keys() == files[1].keys()
    assert [name for name in files[0] if files[0][name] != files[1][name]] == []
