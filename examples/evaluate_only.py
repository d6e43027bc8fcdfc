"""Measure a vision-language model on held-out questions, without any training."""

import tempfile
from pathlib import Path

from mmrl.recipes import find_recipe
from mmrl.rewards import RewardConfig
from mmrl.training.run import evaluate
from mmrl.vlm import DataConfig, ModelConfig, SamplerConfig, VlmConfig

folder = Path(tempfile.mkdtemp(prefix="evaluate-only-"))
config = VlmConfig(
    recipe="vlm",
    output_dir=str(folder / "evaluation"),
    # In your run: a hub id or a folder. Here an untrained random Qwen2.5-VL is built.
    model=ModelConfig(path=str(folder / "model"), build="mmrl.vlm.toy.digits:build_model"),
    eval_data={
        "held_out": DataConfig(
            path=str(folder / "questions.jsonl"),
            build="mmrl.vlm.toy.digits:build_questions",
            build_options={"count": 12, "split": "test"},
        )
    },
    rewards=[RewardConfig(name="format", weight=0.1), RewardConfig(name="exact", weight=0.9)],
    sampler=SamplerConfig(max_new_tokens=12),
)
config.data = config.eval_data["held_out"]  # the recipe also loads training questions
config.evaluation.samples = 2  # besides the greedy answer; 0: greedy only
config.validate()

for name, value in evaluate(find_recipe("vlm"), config).items():
    if "kind=" not in name:  # the numbers of each kind of question
        print(f"{name}: {value:.3f}")
print(f"answers: {config.output_dir}/report.html")
# Evaluate a trained run with `mmrl evaluate runs/NAME` or evaluate(recipe, config, run_dir=Path(...)).
