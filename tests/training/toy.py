"""A tabular policy and its recipe: the loop without any model, in milliseconds."""

import dataclasses
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmrl.core.catalogue import get
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.payload import Payload, per_group, per_row
from mmrl.core.rollouts import Rollouts
from mmrl.runs.records import SampleRecord
from mmrl.training.evaluation import Measure, evaluate_tasks
from mmrl.training.recipe import Recipe
from mmrl.training.settings import RunConfig

WORDS, LENGTH = 4, 3


@dataclass
class ToyConfig(RunConfig):
    preset: str = "grpo"
    filter: dict[str, Any] = field(default_factory=dict)
    fail_reward_every: int = 0
    poison_step: int = -1
    extra: dict[str, int] = field(default_factory=dict)


@dataclass
class Actions(Payload):
    tasks: list[int] = per_group()
    ids: torch.Tensor = per_row()


class ToyPolicy(nn.Module):
    """logits[task, position, word] plus a shared bias, so that tasks interact."""

    def __init__(self, tasks: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(tasks, LENGTH, WORDS))
        self.shared = nn.Parameter(torch.zeros(WORDS))

    def bias(self):
        return self.shared

    def forward(self, rollouts, *, view="original", temperature=1.0, outputs=frozenset({"logp"})):
        payload = rollouts.payload
        rows = torch.tensor(payload.tasks)[rollouts.group]
        logp = torch.log_softmax((self.table[rows] + self.bias()) / temperature, -1)
        picked = logp.gather(-1, payload.ids[..., None])[..., 0]
        entropy = -(logp.exp() * logp).sum(-1) if "entropy" in outputs else None
        return PolicyOutputs(picked, entropy, None)

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), folder / "weights.pt")

    def load_weights(self, folder: Path) -> None:
        self.load_state_dict(torch.load(folder / "weights.pt"))


class Guesses(Measure):
    """Share of right words, the likeliest ones."""

    batch_size = 2

    def __init__(self, policy) -> None:
        self.policy = policy

    def run(self, batch, start):
        tasks = torch.tensor([trial.task for trial in batch], device=self.policy.table.device)
        right = (self.policy.table[tasks] + self.policy.shared).argmax(-1) == (tasks % WORDS)[:, None]
        return [
            {"index": trial.index, "repeat": 0, "right": own.tolist()} for trial, own in zip(batch, right, strict=True)
        ]

    def metrics(self, rows, tasks):
        return {"accuracy/greedy": float(torch.tensor([row["right"] for row in rows]).float().mean())}

    def record(self, row):
        return SampleRecord(id=str(row["index"]), prompt="p", response="r")


class ToyRecipe(Recipe):
    """The right word of task t at every position is t modulo WORDS; reward is the share of right words."""

    config: ToyConfig
    own_loss = "toy"  # every group has a gradient

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.objective = get(config.preset).override({"filter": config.filter})
        self.train_tasks = list(range(6))
        self.eval_tasks = {"all": list(range(6))}
        self.policy = ToyPolicy(6)
        self.seen_tasks: list[list[int]] = []

    def rollout(self, policy, tasks, streams, step):
        self.seen_tasks.append(list(tasks))
        size = self.config.trainer.samples_per_task
        probs = torch.softmax(policy.table[torch.tensor(tasks)] + policy.shared, -1).repeat_interleave(size, 0)
        below = probs.cumsum(-1) < streams.uniform(len(tasks), size, LENGTH)[..., None]
        ids = below.sum(-1).clamp(max=WORDS - 1)
        logp = torch.log(probs.gather(-1, ids[..., None])[..., 0]).detach()
        return Rollouts(
            group=torch.arange(len(tasks)).repeat_interleave(size),
            mask=torch.ones_like(logp),
            logp_old=logp,
            reward=torch.full((len(ids),), float("nan")),
            payload=Actions(list(tasks), ids),
        )

    def score(self, rollouts, step):
        right = torch.tensor(rollouts.payload.tasks)[rollouts.group] % WORDS
        reward = (rollouts.payload.ids == right[:, None]).float().mean(1)
        if self.config.fail_reward_every:
            reward[:: self.config.fail_reward_every] = float("nan")
        return rollouts.replace(reward=reward, reward_terms={"right": reward})

    def scores(self, policy, rollouts, outputs):
        return policy(rollouts, outputs=outputs)

    def loss(self, policy, minibatch, denominators, step):
        output = super().loss(policy, minibatch, denominators, step)
        if len(self.seen_tasks) - 1 == self.config.poison_step:
            output = dataclasses.replace(output, loss=output.loss * float("nan"))
        return output

    def measures(self, policy, split, step):
        return [Guesses(policy)]

    def evaluate(self, policy, split, accelerator, step, elsewhere=None):
        return evaluate_tasks(self.measures(policy, split, step), self.eval_tasks[split], 0, accelerator, elsewhere)

    def records(self, rollouts, limit):
        return [SampleRecord(id="0", prompt="p", response="r") for _ in range(min(limit, 2))]


def main() -> None:
    """Run `toy.py CONFIG [overrides] [--resume]` in a separate process."""
    from mmrl.config import load_run
    from mmrl.training.run import train

    entry, config = load_run(sys.argv[1], [word for word in sys.argv[2:] if "=" in word])
    train(entry, config, resume="--resume" in sys.argv)


if __name__ == "__main__":
    main()
