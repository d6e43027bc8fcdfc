"""Train for two steps, then load the results with only transformers, peft and diffusers."""

import tempfile
from pathlib import Path

import torch

from diffusion import PipelineConfig, load_policy
from diffusion.toy.shapes.building import build_pipeline
from mmrl.recipes import find_recipe
from mmrl.report.export import export_run
from mmrl.rewards import RewardConfig
from mmrl.training.run import train
from mmrl.training.settings import TrainerConfig
from mmrl.vlm import DataConfig, LoraSettings, ModelConfig, SamplerConfig, VlmConfig

folder = Path(tempfile.mkdtemp(prefix="load-result-"))
config = VlmConfig(
    recipe="vlm",
    output_dir=str(folder / "run"),
    model=ModelConfig(
        path=str(folder / "base"), build="mmrl.vlm.toy.digits:build_model", lora=LoraSettings(enabled=True)
    ),
    data=DataConfig(
        path=str(folder / "questions.jsonl"), build="mmrl.vlm.toy.digits:build_questions", build_options={"count": 8}
    ),
    rewards=[RewardConfig(name="reads", function="mmrl.vlm.toy.digits:reads_digits", isolate=False)],
    sampler=SamplerConfig(max_new_tokens=8),
    trainer=TrainerConfig(steps=2, tasks_per_step=2, samples_per_task=4, learning_rate=1e-3),
)
config.validate()
run = train(find_recipe("vlm"), config)
export_run(find_recipe("vlm"), config, run, folder / "whole")  # like `mmrl export`: LoRA merged into the weights
build_pipeline(folder / "pipeline", t5_layers=1)
load_policy(PipelineConfig(path=str(folder / "pipeline"), max_sequence_length=1)).save_pipeline(folder / "images")

# The rest does not use the suite, except for the autoencoder of its tiny pipelines.
from diffusers import DiffusionPipeline
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoProcessor

whole = AutoModelForImageTextToText.from_pretrained(folder / "whole").eval()
processor = AutoProcessor.from_pretrained(folder / "whole")
base = AutoModelForImageTextToText.from_pretrained(folder / "base")
adapted = PeftModel.from_pretrained(base, run / "checkpoints/step-000002/model").eval()
question = [{"role": "user", "content": [{"type": "text", "text": "Which number is shown?"}]}]
inputs = processor(text=[processor.apply_chat_template(question, add_generation_prompt=True)], return_tensors="pt")
with torch.no_grad():
    difference = (whole(**inputs).logits - adapted(**inputs).logits).abs().max()
    tokens = whole.generate(**inputs, max_new_tokens=8, do_sample=False)
print(f"response of the exported model: {processor.batch_decode(tokens[:, inputs['input_ids'].shape[1] :])[0]!r}")
print(f"maximum logit difference between the exported model and base model plus adapter: {difference:.1e}")

pipeline = DiffusionPipeline.from_pretrained(folder / "images")
image = pipeline("a red circle", num_inference_steps=4, guidance_scale=1.0, output_type="np").images[0]
print(f"the pipeline generates {image.shape[0]} x {image.shape[1]} pixels")
