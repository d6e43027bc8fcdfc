"""A chain of runs to a model in other programs: SFT, PAPO with LoRA under FSDP2, killed, resumed, exported."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mmrl.vlm.data.dataset import DataConfig, load_tasks
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig, sample
from mmrl.vlm.model.model_config import ModelConfig
from tests.rounding import assert_equal_up_to_rounding
from tests.vlm.builders import make_rollouts

ROOT = Path(__file__).parents[2]
STEPS, TOKENS = 4, 12
ANSWER = """
import json, sys
from pathlib import Path

import torch
from peft import PeftModel
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.models.smolvlm import processing_smolvlm

processing_smolvlm.num2words = processing_smolvlm.num2words or str  # for videos, which are not asked about
merged, adapter, base, data, out = map(Path, sys.argv[1:6])
models = {
    "merged": AutoModelForImageTextToText.from_pretrained(merged),
    "adapter": AutoModelForImageTextToText.from_pretrained(adapter),
    "peft": PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), adapter),
}
processor = AutoProcessor.from_pretrained(merged)
found = {name: [] for name in models}
for line in data.open():
    row = json.loads(line)
    text = row["problem"].removeprefix("<image>")
    turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}
    text = processor.apply_chat_template([turn], add_generation_prompt=True)
    images = [Image.open(data.parent / row["images"][0])]
    inputs = processor(text=[text], images=images, return_tensors="pt")
    for name, model in models.items():
        options = {"max_new_tokens": int(sys.argv[6]), "do_sample": False, "return_dict_in_generate": True}
        with torch.no_grad():
            answer = model.eval().generate(**inputs, **options, output_scores=True)
        tokens = answer.sequences[0, inputs["input_ids"].shape[1] :]
        logp = torch.stack(answer.scores, 1).float().log_softmax(-1)[0].gather(1, tokens[:, None])[:, 0]
        found[name].append({"prompt": inputs["input_ids"][0], "tokens": tokens, "logp": logp})
torch.save(found, out)
"""


def mmrl(*words: str) -> subprocess.Popen[bytes]:
    """A command, in a group of processes of its own."""
    return subprocess.Popen([sys.executable, "-m", "mmrl.cli", *words], cwd=ROOT, start_new_session=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_what_a_chain_of_runs_exports_answers_in_plain_transformers_as_in_the_suite(family, tmp_path):
    data = {split: f"{tmp_path}/data/{split}.jsonl" for split in ("sft", "rl", "heldout", "no_hint")}
    sizes = "hidden: 64, layers: 2, vision_hidden: 64, vision_depth: 1, min_pixels: 3136, max_pixels: 3136"
    common = [
        *(f"eval_data.{split}.path={data[split]}" for split in ("heldout", "no_hint")),
        *(f"eval_data.{split}.build_options.count=6" for split in ("heldout", "no_hint")),
        *("data.build_options.count=24", "evaluation.at_start=false", "tracking.quiet=true", "trainer.threads=1"),
        *("checkpoint.every=1", "checkpoint.keep=0"),
    ]
    start = ["configs/vlm/digits_sft.yaml", *common, f"output_dir={tmp_path}/sft", f"model.path={tmp_path}/model"]
    start += [
        f"model.build_options={{family: {family}, {sizes}}}",
        f"data.path={data['sft']}",
        "trainer.steps=3",
        "trainer.tasks_per_step=8",
    ]
    assert mmrl("train", *start, "trainer.warmup_steps=0").wait(240) == 0

    run = tmp_path / "papo"
    papo = ["train", "configs/vlm/digits_lora.yaml", *common, f"output_dir={run}", f"model.path={tmp_path}/sft"]
    papo += [f"data.path={data['rl']}", f"trainer.steps={STEPS}", "trainer.tasks_per_step=4", "trainer.warmup_steps=0"]
    papo += ["trainer.samples_per_task=3", "trainer.learning_rate=1e-2"]
    killed = mmrl(*papo, "trainer.sharding=fsdp2", "--processes", "2")
    while not (run / "checkpoints/step-000002").exists():
        assert killed.poll() is None
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    assert killed.wait(60) == -signal.SIGKILL
    assert not (run / f"checkpoints/step-{STEPS:06d}").exists()
    assert mmrl(*papo, "--resume").wait(240) == 0
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["processes"], result["steps"]) == ("done", 1, STEPS)
    assert mmrl("export", str(run), "--step", str(STEPS)).wait(120) == 0

    adapter, base = (
        next(tmp_path.glob(f"{name}/checkpoints/step-*{step}/model")) for name, step in (("papo", STEPS), ("sft", 3))
    )
    plain = [
        sys.executable,
        "-c",
        ANSWER,
        run / "export",
        adapter,
        base,
        data["heldout"],
        tmp_path / "plain.pt",
        TOKENS,
    ]
    subprocess.run(list(map(str, plain)), cwd=tmp_path, check=True, timeout=240)
    found = torch.load(tmp_path / "plain.pt")

    policy = load_policy(ModelConfig(path=str(adapter)))
    tasks = load_tasks(DataConfig(path=data["heldout"])).tasks
    prompts = [policy.encode(task) for task in tasks]
    samples = sample(policy, prompts, 1, SamplerConfig(max_new_tokens=TOKENS), None)
    rollouts = make_rollouts(tasks, prompts, samples)
    with torch.no_grad():
        scored = policy(rollouts).logp
        before = load_policy(ModelConfig(path=str(base)))(rollouts).logp
    assert float((before - scored).abs().max()) > 0.01
    for answers in found.values():
        for number, answer in enumerate(answers):
            length = int(samples.mask[number].sum())
            assert torch.equal(answer["prompt"], torch.as_tensor(prompts[number].input_ids))
            assert torch.equal(answer["tokens"], samples.response_ids[number, :length])
            for logp in (samples.logp, scored):
                assert_equal_up_to_rounding(logp[number, :length], answer["logp"])
