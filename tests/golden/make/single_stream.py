"""SPO by its recipe: two earlier steps of its tracker, advantages, weights of prompts; the loss by a fork of verl."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch

from tests.golden.make.forks import CORE, COUNT_EPS, fork_loss
from tests.golden.make.peers import Clone, Made, tensors
from tests.golden.make.tokens import batch, far

GITHUB = "github.com/"
FILE = "spo/spo_ray_trainer.py"
PLACES = {"weigh": (381, 389), "estimate": (530, 547), "whiten": (551, 551), "forget": (253, 253), "move": (664, 672)}


class Doubles:
    """torch, in whose functions float means float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def make(*paths: str) -> Made:
    clone = Clone(paths[0], "verl-project/verl-recipe", "48ea0a797fa29867ea0ad92aff7d284eec7d4be3")
    fork = Clone(paths[1], "RTkenny/RiskPO", "65ec40c935f5726aa2d80160d9056b1236d5551e")
    before = [[1, 0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 1], [1, 0, 0, 0, 1, 0, 0, 1, 1, 1, 0, 0]]
    rows = list(range(12))
    inputs = batch() | {"group": rows, "reward": [1.0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 1, 0]}
    inputs |= {"before": [[float(r) for r in step] for step in before], "extras": {"task": rows}}
    b = tensors(inputs)
    spo = SimpleNamespace(enable=True, rho=SimpleNamespace(type="constant", value=0.875))
    config = SimpleNamespace(config=SimpleNamespace(trainer=SimpleNamespace(spo=spo)))
    scope = {
        "self": config,
        "torch": Doubles(),
        "prompt2alpha": dict.fromkeys(rows, 0.5),
        "prompt2beta": dict.fromkeys(rows, 0.5),
        "prompt2sampled_number": defaultdict(int),
        "full_prompts": rows,
        "micro_prompts": rows,
    }
    for reward in (*b.before, b.reward):
        scope["reward_tensor"] = reward[:, None]
        for place in PLACES.values():
            scope |= vars(clone.lines(FILE, *place, **scope))
    advantage = scope["advantages"][:, None] * b.mask
    calls = [f"{FILE}:{first}-{last}" for first, last in PLACES.values()]
    program = {
        "program": f"{clone.name}; loss: {fork.name.removeprefix(GITHUB)}",
        "calls": [*calls, f"{CORE}:compute_policy_loss"],
    }
    answer = {"advantage": advantage, "weights": list(scope["prompt2weight"].values())}
    answer |= fork_loss(fork, inputs, advantage, "token-mean", 0.2, 0.28, 10.0)
    beyond = far(inputs)
    second = {"inputs": beyond} | fork_loss(fork, inputs | beyond, advantage, "token-mean", 0.2, 0.28, 10.0)
    return "SPO, arXiv 2509.13232", inputs, [program | COUNT_EPS | one for one in (answer, second)], clone, fork
