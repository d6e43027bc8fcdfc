"""Which functions of which package compute a row of the catalogue, and where they follow another convention.

A peer's answer has some of "advantage", "loss" and "gradient", how exact its numbers are ("relative"), and the
"changes" of the row that it computes. Most come from `tests/golden/make`, run again.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from mmrl.core import all_objectives, all_preferences
from tests.golden.make import pairs
from tests.golden.make.__main__ import made
from tests.golden.make.peers import Wheel, gradient
from tests.golden.make.tokens import SkyRl, Trl, Verl, batch, near
from tests.golden.numbers import PAPERS, load
from tests.golden.test_tokens import METHODS

Answer = dict[str, Any]
GONE = ("nash_md", "xpo")
"""Rows whose golden numbers come from trl 0.29.1, which later versions have no trainer for."""
PLAIN = {"kl": {"kind": "none"}}
"""A row without its divergence, which SkyRL and OpenRLHF compute apart from the policy loss."""


def made_by_packages() -> list[str]:
    """Names of the golden files that the installed packages make."""
    names = (name for name in (*METHODS, *all_preferences()) if name in PAPERS and name not in GONE)
    return [name for name in names if len(load(name).command.split()) == 4]


def recomputed() -> Iterator[tuple[str, Answer, Answer]]:
    """Yield row, inputs and answer of all golden files that installed packages make."""
    for name in made_by_packages():
        _, inputs, peers = made(name)
        by_programs = (peer for peer in peers if peer["program"] != "hand computation")
        yield from ((name, inputs | peer.get("inputs", {}), peer) for peer in by_programs)


def further() -> Iterator[tuple[str, Answer, Answer]]:
    """Yield the same for rows that a package computes besides."""
    for (row, _), make in FURTHER.items():
        inputs = near() if row in ("gspo", "luspo") else batch()
        yield row, inputs, make(inputs, Verl(inputs))


def grpo_advantage(verl: Verl, **options: Any) -> Tensor:
    return verl.advantage("compute_grpo_outcome_advantage", **options)


def skyrl(function: str, average: str, estimator: str = "compute_grpo_outcome_advantage", **options: Any) -> Any:
    """A policy loss of SkyRL on its own advantages."""
    scaled = {key: options.pop(key) for key in ("grpo_norm_by_std",) if key in options}

    def make(inputs: Answer, _: Verl) -> Answer:
        sky = SkyRl(inputs)
        advantage = sky.advantage(estimator, **scaled)
        loss = sky.loss(function, advantage, average, **options)
        return sky.answer(function, advantage=advantage, loss=loss) | {"changes": PLAIN}

    return make


def skyrl_advantage(function: str, **options: Any) -> Any:
    """An estimator of SkyRL."""
    return lambda inputs, _: (
        SkyRl(inputs).answer(function, advantage=SkyRl(inputs).advantage(function, **options)) | {"changes": PLAIN}
    )


def openrlhf(token_mean: bool, rollout: bool = False, **options: Any) -> Any:
    """The policy loss of OpenRLHF, of which the constructor takes the options."""

    def make(inputs: Answer, verl: Verl) -> Answer:
        wheel, file = Wheel("openrlhf"), "openrlhf/models/loss.py"
        mean = wheel.function("openrlhf/models/utils.py", "masked_mean")
        average = wheel.function(file, "aggregate_loss", masked_mean=mean)
        rule = wheel.function(file, "PolicyLoss", nn=nn, masked_mean=mean, aggregate_loss=average)
        b, advantage = verl.b, grpo_advantage(verl)
        loss = rule(token_level_loss=token_mean, **options)(b.logp, b.logp_old, advantage, b.mask)[0]
        numbers = {"loss": loss.detach(), "gradient": gradient(loss, b.logp), "changes": PLAIN}
        return {"program": wheel.name, "calls": ["PolicyLoss.forward"], "relative": 3e-8} | numbers

    return make


def verl_gpg(inputs: Answer, verl: Verl) -> Answer:
    advantage = verl.advantage("compute_gpg_outcome_advantage")
    return verl.answer(advantage, verl.policy_loss("gpg", advantage, "token-mean"))


CLIPS = {"policy_loss_type": "regular", "eps_clip_low": 0.2, "eps_clip_high": 0.2}
COV = {"clip_cov": SimpleNamespace(clip_ratio=2e-4, clip_cov_lb=1.0, clip_cov_ub=5.0)}
FURTHER: dict[tuple[str, str], Callable[[Answer, Verl], Answer]] = {
    ("grpo", "skyrl"): skyrl("ppo_policy_loss", "sequence_mean", **CLIPS),
    ("dr_grpo", "skyrl"): skyrl("ppo_policy_loss", "seq_mean_token_sum_norm", grpo_norm_by_std=False, **CLIPS),
    ("dapo", "skyrl"): skyrl("ppo_policy_loss", "token_mean", **CLIPS | {"eps_clip_high": 0.28}),
    ("gspo", "skyrl"): skyrl("gspo_policy_loss", "sequence_mean", eps_clip_low=3e-4, eps_clip_high=4e-4),
    ("cispo", "skyrl"): skyrl(
        "compute_policy_loss_cispo",
        "token_mean",
        cispo=SimpleNamespace(cispo_eps_clip_low=1.0, cispo_eps_clip_high=4.0),
    ),
    ("rloo", "skyrl"): skyrl_advantage("compute_rloo_outcome_advantage"),
    ("reinforce_pp", "skyrl"): skyrl_advantage("compute_reinforce_plus_plus_outcome_advantage", gamma=1.0),
    ("kl_cov", "skyrl"): skyrl(
        "compute_policy_loss_kl_cov", "token_mean", kl_cov=SimpleNamespace(kl_cov_frac=2e-4, ppo_kl_coef=1.0)
    ),
    ("clip_cov", "skyrl"): skyrl(
        "compute_policy_loss_clip_cov", "token_mean", eps_clip_low=1.0, eps_clip_high=1.0, **COV
    ),
    ("grpo", "openrlhf"): openrlhf(token_mean=False),
    ("dapo", "openrlhf"): openrlhf(token_mean=True, clip_eps_high=0.28),
    ("gspo", "openrlhf"): openrlhf(token_mean=False, clip_eps_low=3e-4, clip_eps_high=4e-4, policy_loss_type="gspo"),
    ("gpg", "verl"): verl_gpg,
    ("bnpo", "trl"): lambda inputs, verl: Trl(inputs).grpo(grpo_advantage(verl)[:, 0], "bnpo"),
}
"""Rows and packages that no golden file has."""

CONVENTIONS = {
    ("dr_grpo", "skyrl"): "divides by the longest row of the minibatch; set aggregation.length to it",
    ("kl_cov", "skyrl"): "the penalty is a sum over decisions, not divided by their number as the rest is",
    ("clip_cov", "skyrl"): "the covariance is that of advantages already divided by the number of decisions",
    ("gpg", "verl"): "scales by the rows whose reward is not 0, the authors by the groups with different rewards",
    ("bnpo", "trl"): "the name of a token mean over a micro-batch, not of Beta normalisation",
}
"""Rows that a package computes otherwise on purpose, and how."""


def answers() -> Iterator[tuple[str, Answer, Answer]]:
    """Yield row, inputs and answer of every package for every row that it has."""
    given = pairs.pairs()
    dpo = pairs.trl(given, ["sigmoid"], [1.0], beta=0.1, smoothing=0.0) | {"options": {"beta": 0.1}}
    for name, inputs, peer in (*recomputed(), *further(), ("dpo", given, dpo)):
        assert name in all_objectives() | all_preferences(), name
        yield name, inputs, peer
