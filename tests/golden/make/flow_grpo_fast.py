"""Flow-GRPO-Fast by its code: advantages of an epoch, and the loss of the few trained steps."""

from types import SimpleNamespace
from typing import Any

import torch

from tests.golden.make.images import STEPS, mean_of_steps, outlier, update
from tests.golden.make.peers import Clone, Made, gradient, tensors

COMMIT = "3d02fd9d65957d45bc7d0b240ad347a9d334fcb9"
TRAINER, TRACKER = "scripts/train_sd3_fast.py", "flow_grpo/stat_tracking.py"
CONFIG = {"adv_clip_max": 5, "clip_range": 1e-5, "beta": 0}
"""Constants of config/base.py and of geneval_sd3_fast_nocfg in config/grpo.py, which trains three steps."""


def make(path: str) -> Made:
    clone = Clone(path, "yifan123/flow_grpo", COMMIT)
    inputs, beyond = update(2e-5), outlier(2e-5)
    calls = [f"{TRACKER}:PerPromptStatTracker", f"{TRAINER}:886-904"]
    peer = {"program": clone.name, "calls": calls, "relative": 1e-12}
    peers = [peer | loss(clone, inputs), peer | {"inputs": beyond} | loss(clone, beyond)]
    return "Flow-GRPO-Fast, arXiv 2505.05470", inputs, peers, clone


def loss(clone: Clone, inputs: dict[str, Any]) -> dict[str, Any]:
    b = tensors(inputs)
    b.logp.requires_grad_()
    tracker = clone.function(TRACKER, "PerPromptStatTracker")(global_std=True)
    advantage = torch.from_numpy(tracker.update(inputs["prompts"], inputs["reward"]))
    sample = {"advantages": advantage[:, None].expand(-1, STEPS), "log_probs": b.logp_old}
    names = {"config": SimpleNamespace(train=SimpleNamespace(**CONFIG)), "sample": sample}
    steps = [clone.lines(TRAINER, 886, 904, **names, j=j, log_prob=b.logp[:, j]).loss for j in range(STEPS)]
    total = mean_of_steps(steps)
    return {"advantage": advantage, "loss": total.detach(), "gradient": gradient(total, b.logp)}
