"""Your own training loop with only `mmrl.core`: plain torch, without the suite's trainer, configuration or models."""

from dataclasses import dataclass

import torch
from torch.distributions import Categorical

from mmrl.core import CATALOGUE, Payload, PolicyOutputs, Rollouts, per_decision, per_row

LENGTH, SYMBOLS, TASKS, SAMPLES = 4, 8, 8, 8
objective = CATALOGUE["dapo"]  # `mmrl list objectives` shows the others


@dataclass
class Rows(Payload):
    """Data of this loop, split into chunks together with the rollouts."""

    given: torch.Tensor = per_row()
    written: torch.Tensor = per_decision()


torch.manual_seed(0)
torch.set_num_threads(1)  # more threads only slow tensors of this size down
# Reads a row of symbols and writes one symbol for each.
policy = torch.nn.Sequential(torch.nn.Embedding(SYMBOLS, 32), torch.nn.Tanh(), torch.nn.Linear(32, SYMBOLS))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
for step in range(100):
    # A group is the samples of one task: here a row of symbols, for each of which the policy must write its successor.
    given = torch.randint(SYMBOLS, (TASKS, LENGTH)).repeat_interleave(SAMPLES, 0)
    with torch.no_grad():
        choices = Categorical(logits=policy(given))
        written = choices.sample()
    rollouts = Rollouts(
        group=torch.arange(TASKS).repeat_interleave(SAMPLES),
        mask=torch.ones(TASKS * SAMPLES, LENGTH),  # 0 for padding, and for tokens that the policy did not choose
        logp_old=choices.log_prob(written),
        reward=(written == (given + 1) % SYMBOLS).float().mean(1),
        payload=Rows(given, written),
    )
    rollouts = objective.compute_advantages(rollouts)
    denominators = objective.denominators(rollouts)  # over the whole step, so that chunks add up to the same loss
    optimizer.zero_grad()
    for chunk in rollouts.micro_batches(32):
        logp = Categorical(logits=policy(chunk.payload.given)).log_prob(chunk.payload.written)
        objective.loss(PolicyOutputs(logp), chunk, denominators).loss.backward()
    optimizer.step()
    if step % 20 == 0 or step == 99:
        print(f"step {step}: {rollouts.reward.mean():.2f} of the symbols are correct")
