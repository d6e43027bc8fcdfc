"""GPG by lines of its authors' trainer: advantages, the share of questions with a gradient, and the loss."""

from types import SimpleNamespace

from tests.golden.make.peers import Clone, Made, gradient, tensors
from tests.golden.make.tokens import batch

FILE = "open-r1/src/open_r1/gpg_trainer.py"
LINES = ((541, 551), (554, 554), (614, 615), (619, 626))
"""Advantages and `inverse_alpha` in `_generate_and_score_completions`."""


def make(path: str) -> Made:
    inputs, clone = batch(), Clone(path, "AMAP-ML/GPG", "e096da8ce527a1636272469cee383ba71ec4a511")
    b = tensors(inputs)
    trainer = SimpleNamespace(num_generations=4, args=SimpleNamespace(scale_rewards=False, adjust_gd=True), beta=0.0)
    names = {"self": trainer, "rewards": b.reward, "mean_grouped_rewards": b.reward.view(-1, 4).mean(1)}
    names["n_valid_samples"] = 0
    for first, last in LINES:
        names |= vars(clone.lines(FILE, first, last, **names))
    trainer._metrics = {"train": {"inverse_alpha": [names["inverse_alpha"]]}}
    names |= {"per_token_logps": b.logp.requires_grad_(), "completion_mask": b.mask, "mode": "train"}
    for first, last in ((299, 303), (315, 316)):
        names |= vars(clone.lines(FILE, first, last, **names))
    peer = {"program": clone.name, "calls": [f"{FILE} lines 541-626, 299-316"], "relative": 1e-12}
    peer |= {"loss": names["loss"].detach(), "gradient": gradient(names["loss"], b.logp)}
    return "GPG, arXiv 2504.02546", inputs, [peer], clone
