"""Train a tiny vision-language model with your own reward function."""

import tempfile
from pathlib import Path

from mmrl import train
from mmrl.vlm.toy.digits import build_model, build_questions


def share_of_digits(prompts, completions, **columns):
    """One number per response, or None if it cannot be scored; `columns` has the other columns of the data."""
    return [sum(letter.isdigit() for letter in text) / len(text) if text else 0.0 for text in completions]


folder = Path(tempfile.mkdtemp(prefix="own-reward-"))
# In your run: a hub id or a folder, and your rows. Here a random Qwen2.5-VL and questions about digits.
build_model(str(folder / "model"))
build_questions(str(folder / "questions.jsonl"), count=16)

run = train(
    "grpo",
    model=folder / "model",
    data=folder / "questions.jsonl",
    reward={"share_of_digits": {"function": share_of_digits, "chat": False}},
    steps=20,
    tasks_per_step=4,
    samples_per_task=8,
    max_new_tokens=6,
    learning_rate=3e-3,
    output_dir=folder / "run",
)
first, last = run.metrics[0], run.metrics[-1]
print(f"fraction of digits in the first step: {first['reward/mean']:.2f}, in the last: {last['reward/mean']:.2f}")
print(f"curves and sampled responses: {run.report()}")
