"""Train a tiny vision-language model as an agent in your own environment."""

import tempfile
from pathlib import Path

from mmrl import train
from mmrl.vlm.toy.digits import build_model


class Guess:
    """Say something with the requested vowel; an environment has three methods and no base class."""

    def reset(self, task, seed):
        self.letter, self.turns = "aeiou"[seed % 5], 0
        return f"Say a word with the letter {self.letter}."  # or {"text": ..., "image": an array (H, W, 3) uint8}

    def step(self, action):
        self.turns += 1
        found = self.letter in action.arguments["text"]
        return "Not yet.", float(found), found or self.turns == 2  # observation, reward, whether the episode has ended

    def close(self):
        pass


folder = Path(tempfile.mkdtemp(prefix="own-agent-env-"))
build_model(str(folder / "model"))

run = train(
    "grpo",
    model=folder / "model",
    env=Guess,
    data=5,  # seeds
    steps=15,
    tasks_per_step=4,
    samples_per_task=8,
    max_new_tokens=8,
    stop=list("aeiou"),  # a random model never ends its answers by itself, and what is cut off is not executed
    max_turns=2,
    learning_rate=1e-2,
    output_dir=folder / "run",
    options={"actions.format": "text"},  # the whole answer is the action
)
first, last = run.metrics[0], run.metrics[-1]
print(f"mean reward in the first step: {first['reward/mean']:.2f}, in the last: {last['reward/mean']:.2f}")
