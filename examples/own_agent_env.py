"""Train a tiny vision-language model as an agent in your own environment."""

import json
import tempfile
from pathlib import Path

from mmrl.agents import ActionConfig, AgentConfig, EnvironmentConfig, EpisodeConfig, TaskSetConfig
from mmrl.recipes import find_recipe
from mmrl.runs.tracking import TrackingConfig
from mmrl.training.run import train
from mmrl.training.settings import TrainerConfig
from mmrl.vlm import ModelConfig, SamplerConfig


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


# Environments run in worker processes that import this file, so training must be guarded by this line.
if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp(prefix="own-agent-env-"))
    config = AgentConfig(
        recipe="agent",
        output_dir=str(folder / "run"),
        model=ModelConfig(path=str(folder / "model"), build="mmrl.vlm.toy.digits:build_model"),
        environment=EnvironmentConfig(factory=f"{__file__}:Guess", workers=2),
        data=TaskSetConfig(seeds=5),
        actions=ActionConfig(format="text"),  # the whole answer is the action
        episode=EpisodeConfig(max_turns=2),
        sampler=SamplerConfig(max_new_tokens=4),
        trainer=TrainerConfig(steps=15, tasks_per_step=4, samples_per_task=8, learning_rate=1e-2),
        tracking=TrackingConfig(tensorboard=False),
    )
    config.validate()
    run = train(find_recipe("agent"), config)

    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    print(f"mean reward in the first step: {steps[0]['reward/mean']:.2f}, in the last: {steps[-1]['reward/mean']:.2f}")
