"""Train from Python: the program that tests run in one and in two processes."""

import sys
from pathlib import Path

import datasets
from transformers import AutoModelForCausalLM, AutoTokenizer

from mmrl import train

MODEL, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])
ROWS = [{"prompt": f"say {number}", "answer": str(number)} for number in range(1, 9)]


def score(completions, answer, **columns):
    return [float(text.count(right)) - len(text) / 10 for text, right in zip(completions, answer, strict=True)]


loaded = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
run = train(
    "grpo",
    model=loaded if sys.argv[3] == "loaded" else MODEL,
    data=datasets.Dataset.from_list(ROWS) if sys.argv[3] == "loaded" else ROWS,
    eval_data=ROWS[:2],
    reward=lambda completions, answer, **columns: score(completions, answer),
    output_dir=FOLDER,
    tasks_per_step=2,
    samples_per_task=4,
    max_new_tokens=4,
    learning_rate=1e-2,
    steps=2,
    beta=0.1,
)
assert len(run.metrics) == 2
