"""Golden numbers that verl, TRL, SkyRL or transformers compute, one row a file: citation, inputs and calls."""

import copy
import pkgutil
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.golden.make import pairs
from tests.golden.make.icepop import rollout_logps
from tests.golden.make.pairs import OWN, PAIRS
from tests.golden.make.peers import Made, gradient, numbers, package, tensors
from tests.golden.make.tokens import COUNT_EPS, SkyRl, Trl, Verl, batch, ensure_torchvision, far, near

Inputs = dict[str, Any]
Peer = dict[str, Any]
Call = Callable[[Inputs], list[Peer]]

COUNT_EPS_FLOAT32 = COUNT_EPS | {"relative": 3e-8}
LOSS_AND_LIKELIHOOD = (["sigmoid", "sft"], [1.0, 0.005])
WIDE_BAND = {"share": 0.36, "cov_low": 0.1, "cov_high": 5.0, "low": 0.2, "high": 0.2}
"""Covariances of Clip-Cov that are left out as a whole, without one to spare."""
VESPO = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
ESTIMATORS = {"k1": "k1", "k2": "k2", "k3": "k3", "k1p": "k1+", "k3p": "k3+"}
JENSEN_SHANNON = {"betas": [0.0, 0.1, 0.5, 1.0], "temperature": 0.9}


def verl(
    loss: str,
    average: str,
    *bounds: float,
    estimator: str = "grpo",
    kl: tuple[float, str] | None = None,
    kl_in_reward: float = 0.0,
    estimate: dict[str, Any] | None = None,
    answer: Peer | None = None,
    **options: Any,
) -> Call:
    """An advantage estimator and a policy loss of verl.

    Args:
        loss: kind of `compute_policy_loss`.
        average: aggregation of the loss.
        bounds: lower and upper bound of the ratio.
        estimator: kind of `compute_outcome_advantage`.
        kl: coefficient and estimator of a divergence that the loss adds.
        kl_in_reward: coefficient of the divergence that rewards subtract.
        estimate: options of the estimator.
        answer: further entries of the answer.
        options: of `Verl.policy_loss`.
    """

    def call(inputs: Inputs) -> list[Peer]:
        peer = Verl(inputs)
        advantage = peer.advantage(f"compute_{estimator}_outcome_advantage", kl_in_reward, **estimate or {})
        total = peer.policy_loss(loss, advantage, average, *bounds, **options)
        if kl:
            total = total + kl[0] * peer.kl_loss(kl[1], average)
        return [peer.answer(advantage, total, **answer or {})]

    return call


def trl(loss: str, *, scaled: bool = True, answer: Peer | None = None, kind: str = "", **options: Any) -> Call:
    """The loss of TRL's GRPO trainer, or of `kind`, on verl's advantages."""

    def call(inputs: Inputs) -> list[Peer]:
        advantage = grpo_advantage(Verl(inputs), scaled)[:, 0]
        chosen = {"kind": pkgutil.resolve_name(kind)} if kind else {}
        return [Trl(inputs).grpo(advantage, loss, **chosen, **options) | (answer or {})]

    return call


def on(change: Callable[[Inputs], Inputs], *calls: Call) -> Call:
    """Calls on a batch of which some inputs are others."""

    def call(inputs: Inputs) -> list[Peer]:
        changed = change(inputs)
        return [{"inputs": changed} | peer for one in calls for peer in one(inputs | changed)]

    return call


def dpo(kind: str, beta: float = 0.1, smoothing: float = 0.0) -> Call:
    """A loss of TRL's DPO trainer."""
    return lambda inputs: [pairs.trl(inputs, [kind], [1.0], beta, smoothing) | {"options": {}}]


def without_reference(trainer: str, **settings: Any) -> Call:
    """The loss of a TRL trainer without a reference model."""

    def call(inputs: Inputs) -> list[Peer]:
        kind = pkgutil.resolve_name(f"trl.experimental.{trainer}")
        return [pairs.trl_without_reference(inputs, kind, **settings) | {"options": {}}]

    return call


def grpo_advantage(peer: Verl, scaled: bool = True) -> Tensor:
    return peer.advantage("compute_grpo_outcome_advantage", norm_adv_by_std_in_grpo=scaled)


def pass_at_k_rewards() -> Inputs:
    """If two rows of a question are best, none has a lead."""
    inputs = batch()
    inputs["reward"][10] = 0.9
    return inputs


def remax_inputs() -> Inputs:
    return batch() | {"extras": {"greedy_reward": [0.2] * 4 + [0.5] * 4 + [1.0] * 4}}


def remax(inputs: Inputs) -> list[Peer]:
    peer = Verl(inputs)
    given = {"token_level_rewards": peer.token_rewards(), "response_mask": peer.b.mask}
    greedy = peer.b.mask.new_tensor(inputs["extras"]["greedy_reward"])
    advantage = peer._call("compute_remax_outcome_advantage", reward_baselines=greedy, **given)[0] * peer.b.mask
    return [peer.answer(advantage, peer.policy_loss("gpg", advantage, "seq-mean-token-sum"))]


def rloo(inputs: Inputs) -> list[Peer]:
    """verl's divergence and advantages, TRL's loss on the ratio of a whole answer."""
    peer = Verl(inputs)
    advantage = peer.advantage("compute_rloo_outcome_advantage", kl_ratio=0.05)
    return [peer.only(advantage), Trl(inputs).rloo(advantage[:, 0])]


def ppo(inputs: Inputs, duals: tuple[float, ...] = (3.0,)) -> list[Peer]:
    """GAE, dual clip and the clipped loss of the critic."""
    found = []
    for dual in duals:
        peer = Verl(inputs)
        advantage, returns = peer.gae(1.0, 0.95, kl_ratio=0.05)
        policy = peer.policy_loss("vanilla", advantage, "token-mean", 0.2, 0.2, dual=dual)
        value = peer.value_loss(returns, 0.2)
        more = {"returns": returns, "gradient_values": gradient(0.1 * value, peer.b.values_new)}
        more |= {} if dual == 3.0 else changed(clip={"dual": dual})
        found.append(peer.answer(advantage, policy + 0.1 * value.detach(), **more, **COUNT_EPS))
    return found


def one_covariance(wanted: float) -> Callable[[Inputs], Inputs]:
    """The one decision with a covariance in the band of Clip-Cov gets another one there.

    A covariance is the advantage less its mean, times the log-probability less its mean.
    """

    def change(inputs: Inputs) -> Inputs:
        b, advantage = tensors(inputs), grpo_advantage(Verl(inputs))
        trained = b.mask > 0
        lead, number = advantage - advantage[trained].mean(), trained.sum()
        covariance = torch.where(trained, lead * (b.logp - b.logp[trained].mean()), 0.0)
        row, place = divmod(int(covariance.argmax()), trained.shape[1])
        others = (b.logp[trained].sum() - b.logp[row, place]) / number
        new = copy.deepcopy(inputs["logp"])
        new[row][place] = round(float((wanted / lead[row, place] + others) / (1 - 1 / number)), 4)
        return {"logp": new}

    return change


def clip_cov(
    inputs: Inputs,
    share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    low: float = 1.0,
    high: float = 1.0,
) -> list[Peer]:
    """A band whose covariances are all left out: a draw of some would depend on chance."""
    peer, given = Verl(inputs), {key: value for key, value in locals().items() if key != "inputs"}
    advantage = grpo_advantage(peer)
    mode = {"clip_cov_ratio": share, "clip_cov_lb": cov_low, "clip_cov_ub": cov_high}
    losses = [peer.policy_loss("clip_cov", advantage, "token-mean", low, high, mode=mode) for _ in range(5)]
    assert all(loss == losses[0] for loss in losses), "which decisions are left out must not depend on the draw"
    return [peer.answer(advantage, losses[0]) | (changed(clip=given) if given["share"] != 2e-4 else {})]


def baseline_inputs() -> Inputs:
    """Tool output between the tokens of two rows."""
    inputs: Inputs = batch() | {"extras": {"collision": numbers(12, 12, 6, low=0.2, high=1.0)}}
    for row in (0, 9):
        inputs["mask"][row][2] = 0.0
    return inputs


def optimal_token_baseline(inputs: Inputs) -> list[Peer]:
    peer = Verl(inputs)
    options = {"old_log_probs": peer.b.logp_old, "sum_pi_squared": tensors(inputs["extras"]).collision}
    advantage = peer.advantage("compute_multi_turn_optimal_token_baseline_advantage", **options)
    exact = {"relative": 1e-7, "because": "it adds 1e-8 to the sum of the norms"}
    return [peer.answer(advantage, peer.policy_loss("vanilla", advantage, "token-mean")) | exact]


def tool_output_inputs() -> Inputs:
    """The second and the third of more than three tokens are tool output."""
    inputs = batch() | {"gamma": 0.9}
    inputs["mask"] = [
        [0.0 if place in (1, 2) and sum(row) > 3 else value for place, value in enumerate(row)]
        for row in inputs["mask"]
    ]
    return inputs


def tool_output(inputs: Inputs) -> list[Peer]:
    peer = Verl(inputs)
    config = SimpleNamespace(gamma=inputs["gamma"])
    return [peer.only(peer.advantage("compute_reinforce_plus_plus_outcome_advantage", config=config)) | COUNT_EPS]


def dppo(kind: str, *limits: float) -> Call:
    """verl's loss, and SkyRL's gradient, whose loss is -A r; with the row's bound, the first, and with a tighter one.

    On the far batch, where verl limits a ratio, only the row's bound.
    """

    def one(inputs: Inputs, bound: float) -> list[Peer]:
        changes = changed(clip={"low": bound, "high": bound}) if bound != limits[0] else {}
        peer, sky = Verl(inputs), SkyRl(inputs)
        advantage = grpo_advantage(peer)
        loss = peer.policy_loss(f"dppo_{kind}", advantage, "token-mean", bound, bound, dual=20.0)
        config = SimpleNamespace(dppo_type=f"binary_{kind}", delta_low=bound, delta_high=bound)
        other = sky.answer("dppo_policy_loss", loss=sky.loss("dppo_policy_loss", advantage, "token_mean", dppo=config))
        del other["loss"]
        return [peer.answer(advantage, loss) | changes, other | changes]

    def call(inputs: Inputs) -> list[Peer]:
        there = far(inputs)
        beyond = {"inputs": there} | one(inputs | there, limits[0])[0]
        return [*(peer for bound in limits for peer in one(inputs, bound)), beyond]

    return call


def maxrl(inputs: Inputs) -> list[Peer]:
    sky = SkyRl(inputs)
    advantage = sky.advantage("compute_maxrl_advantage")
    bounds = {"policy_loss_type": "regular", "eps_clip_low": 0.2, "eps_clip_high": 0.2}
    loss = sky.loss("ppo_policy_loss", advantage, "token_mean", **bounds)
    return [sky.answer("compute_maxrl_advantage", advantage=advantage), sky.answer("ppo_policy_loss", loss=loss)]


def skyrl_sapo(inputs: Inputs) -> list[Peer]:
    sky, taus = SkyRl(inputs), SimpleNamespace(tau_pos=1.0, tau_neg=1.05)
    loss = sky.loss("sapo_policy_loss", grpo_advantage(Verl(inputs)), "sequence_mean", sapo=taus)
    return [sky.answer("sapo_policy_loss", loss=loss)]


def kl_estimators_inputs() -> Inputs:
    """The last three reach the limits of k3: on its exponent and on its value."""
    return {
        "logp": [-0.2, -1.4, -3.0, -2.5, -0.7, -9.0, -30.0, -0.1],
        "logp_ref": [-0.2, -0.9, -3.1, -0.4, -2.9, -5.0, -1.0, -30.0],
    }


def kl_estimators(inputs: Inputs) -> list[Peer]:
    from verl.trainer.ppo.core_algos import kl_penalty

    b = tensors(inputs)
    logp = b.logp.requires_grad_()
    found = {name: kl_penalty(logp, b.logp_ref, kind) for name, kind in ESTIMATORS.items()}
    answer = {name: {"value": kl.detach(), "gradient": gradient(kl.sum(), logp)} for name, kl in found.items()}
    return [
        {"program": package("verl"), "calls": ["verl.trainer.ppo.core_algos.kl_penalty"], "relative": 1e-14} | answer
    ]


def gkd_inputs() -> Inputs:
    logits = {
        "logits": numbers(1, 2, 4, 7, low=-4.0, high=4.0),
        "logits_teacher": numbers(2, 2, 4, 7, low=-4.0, high=4.0),
    }
    return logits | {"labels": [[3, 1, -100, -100], [0, 2, 6, 5]]} | JENSEN_SHANNON


def gkd(inputs: Inputs) -> list[Peer]:
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    b = tensors(inputs)
    b.logits.requires_grad_()
    answer = {"program": package("trl"), "calls": ["GKDTrainer.generalized_jsd_loss"], "relative": 1e-13}
    for beta in inputs["betas"]:
        loss = GKDTrainer.generalized_jsd_loss(b.logits, b.logits_teacher, b.labels, beta, b.temperature)
        answer[f"beta {beta:g}"] = {"loss": loss.detach(), "gradient": gradient(loss, b.logits)}
    return [answer]


def sft_inputs() -> Inputs:
    labels = [[-100, 3, 0, 6, 1, 2], [-100, -100, 5, 5, -100, -100], [-100, 1, 4, -100, -100, -100]]
    return {"logits": numbers(1, 3, 6, 7, low=-4, high=4), "labels": labels}


def sft(inputs: Inputs) -> list[Peer]:
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits = torch.tensor(inputs["logits"], dtype=torch.float32, requires_grad=True)
    loss = ForCausalLMLoss(logits, torch.tensor(inputs["labels"]), vocab_size=7)
    peer = {"program": package("transformers"), "calls": ["transformers.loss.loss_utils.ForCausalLMLoss"]}
    peer |= {"relative": 1e-6, "because": "it computes in float32"}
    return [peer | {"loss": loss.detach(), "gradient": gradient(loss, logits)}]


def exo(inputs: Inputs) -> list[Peer]:
    torch.set_default_dtype(torch.float64)  # TRL makes the smoothing a tensor
    try:
        return dpo("exo_pair", smoothing=0.001)(inputs)
    finally:
        torch.set_default_dtype(torch.float32)


def rpo(inputs: Inputs) -> list[Peer]:
    """DPO plus the likelihood of the preferred answers, averaged over a batch's tokens or over answers."""
    whole = pairs.trl(inputs, *LOSS_AND_LIKELIHOOD, beta=0.01, smoothing=0.0)
    # a batch of one pair averages over that answer's tokens
    alone = [pairs.trl(pair, *LOSS_AND_LIKELIHOOD, beta=0.01, smoothing=0.0) for pair in pairs.single_pairs(inputs)]
    sides = [torch.stack([pair["gradient"][side] for pair in alone]) for side in (0, 1)]
    answers = {"loss": torch.stack([pair["loss"] for pair in alone]).mean(), "gradient": torch.cat(sides) / len(alone)}
    return [whole | {"options": {"average": "decisions"}}, whole | answers | {"options": {"average": "answers"}}]


def kto_inputs() -> Inputs:
    other = {"logp_other": numbers(24, 2 * PAIRS, low=-9.0, high=-1.0)}
    return pairs.pairs() | other | {"ref_other": numbers(25, 2 * PAIRS, low=-12.0, high=-4.0)}


def kto(inputs: Inputs) -> list[Peer]:
    """Pairs, and answers of which more are desirable than not."""
    paired, unpaired = [True] * PAIRS + [False] * PAIRS, [True, True, False, True, True, False, False, True]
    changed = {"beta": 0.3, "desirable": 1.5, "undesirable": 0.5}
    first = pairs.trl_unpaired(inputs, paired, 0.1, 1.0, 1.0) | {"options": {}}
    return [first, pairs.trl_unpaired(inputs, unpaired, *changed.values()) | {"options": changed}]


def own_pairs() -> Inputs:
    """Half of the preferred answers are the policy's."""
    return pairs.pairs() | {"own": OWN}


def nash_md(inputs: Inputs) -> list[Peer]:
    from trl.experimental.nash_md import NashMDTrainer

    b = tensors(inputs)
    logp = b.logp.requires_grad_()
    own = b.own[:PAIRS, None] > 0
    policy, reference = (torch.where(own, *(x * b.mask).chunk(2)) for x in (logp, b.logp_ref))
    chosen, rejected = b.score.chunk(2)
    ahead = torch.where(own[:, 0], chosen - rejected, rejected - chosen)
    loss, _, _ = NashMDTrainer._compute_losses(SimpleNamespace(beta=0.1), policy, reference, torch.sigmoid(ahead))
    calls = ["trl.experimental.nash_md.NashMDTrainer._compute_losses"]
    peer = {"program": package("trl"), "calls": calls, "relative": 1e-12, "options": {}}
    return [peer | {"loss": loss.detach(), "gradient": gradient(loss, logp)}]


def xpo(inputs: Inputs) -> list[Peer]:
    from trl.experimental.xpo import XPOTrainer

    peers = []
    for beta, alpha in ((0.1, 1e-5), (0.3, 0.02)):
        b = tensors(inputs)
        logp = b.logp.requires_grad_()
        own = b.own[:PAIRS, None] > 0
        policy, reference = ((x * b.mask).chunk(2) for x in (logp, b.logp_ref))
        given = [torch.where(own, *policy), torch.where(own, *policy[::-1])]
        given += [torch.where(own, *reference[::-1]), torch.where(own, *reference)]
        trainer = SimpleNamespace(args=SimpleNamespace(loss_type="sigmoid"), beta=beta, alpha=alpha)
        loss, _, _ = XPOTrainer._compute_losses(trainer, *given, own[:, 0])
        peer = {"program": package("trl"), "calls": ["trl.experimental.xpo.XPOTrainer._compute_losses"]}
        peer |= {"relative": 1e-12, "loss": loss.detach(), "gradient": gradient(loss, logp)}
        peers.append(peer | {"options": {} if beta == 0.1 else {"beta": beta, "alpha": alpha}})
    return peers


def all_unlikely(inputs: Inputs) -> Inputs:
    """Rows of six tokens that have all become less likely by more than the limit of a row's log-ratio."""
    fallen = numbers(13, 12, 6, low=-3.9, high=-3.5)
    new = [
        [round(a + b, 3) for a, b in zip(*rows, strict=True)] for rows in zip(inputs["logp_old"], fallen, strict=True)
    ]
    return {"mask": [[1.0] * 6] * 12, "logp": new}


def rollout_inputs() -> Inputs:
    return batch() | {"logp_rollout": rollout_logps(batch()["logp_old"])}


def drifted(inputs: Inputs) -> Inputs:
    """A row worse than its group is a little further from the sampler's policy than the limit of 0.5."""
    far_row = [round(value + 0.52, 3) for value in inputs["logp"][1]]
    return {"logp_rollout": [far_row if row == 1 else own for row, own in enumerate(inputs["logp_rollout"])]}


def entropy_inputs() -> Inputs:
    return batch() | {"entropy_old": numbers(11, 12, 6, low=0.0, high=2.0)}


def changed(**blocks: Any) -> Peer:
    """The entry of a call that computes the row with other constants."""
    return {"changes": blocks}


def made(name: str) -> Made:
    """Citation, inputs and peers of a row."""
    ensure_torchvision()
    citation, make_inputs, *calls = TABLE[name]
    inputs = make_inputs()
    return citation, inputs, [peer for call in calls for peer in call(inputs)]


TABLE: dict[str, tuple[str, Callable[[], Inputs], *tuple[Call, ...]]] = {
    # tokens
    "grpo": (
        "GRPO, arXiv 2402.03300",
        batch,
        verl("vanilla", "seq-mean-token-mean", 0.2, 0.2, kl=(0.04, "k3"), answer=COUNT_EPS),
        trl("grpo", beta=0.04),
        on(far, trl("grpo", beta=0.04)),
    ),
    "dr_grpo": (
        "Dr. GRPO, arXiv 2503.20783",
        batch,
        verl(
            "vanilla",
            "seq-mean-token-sum-norm",
            0.2,
            0.2,
            estimate={"norm_adv_by_std_in_grpo": False},
            loss_scale_factor=3000,
        ),
        trl("dr_grpo", scaled=False, length=3000),
    ),
    "dapo": ("DAPO, arXiv 2503.14476", batch, verl("vanilla", "token-mean", 0.2, 0.28), trl("dapo", high=0.28)),
    "cispo": (
        "CISPO, arXiv 2506.13585",
        batch,
        verl("cispo", "token-mean", 1.0, 4.0),
        trl("cispo", high=5.0),
        on(far, verl("cispo", "token-mean", 1.0, 4.0)),
        verl("cispo", "token-mean", 0.2, 0.3, answer=changed(clip={"low": 0.2, "high": 0.3})),
    ),
    "gspo": (
        "GSPO, arXiv 2507.18071",
        near,
        verl("gspo", "seq-mean-token-mean", 3e-4, 4e-4, answer=COUNT_EPS),
        trl("grpo", low=3e-4, high=4e-4, level="sequence"),
    ),
    "luspo": ("LUSPO, arXiv 2602.05261", near, trl("luspo", low=3e-4, high=4e-4, level="sequence")),
    "gmpo": (
        "GMPO, arXiv 2507.20673",
        batch,
        verl("geo_mean", "unused", 0.4, 0.4, answer=COUNT_EPS_FLOAT32),
        trl("grpo", low=0.4, high=0.4, kind="trl.experimental.gmpo.GMPOTrainer"),
    ),
    "sapo": (
        "SAPO, arXiv 2511.20347",
        batch,
        verl("sapo", "seq-mean-token-mean", answer=COUNT_EPS_FLOAT32),
        trl(
            "sapo",
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            answer={"relative": 2e-7, "because": "its temperatures are float32"},
        ),
        skyrl_sapo,
    ),
    "vespo": (
        "VESPO, arXiv 2602.10693",
        batch,
        *(trl("vespo", **VESPO), on(all_unlikely, trl("vespo", **VESPO))),
    ),
    "off_policy_mask": (
        "DeepSeek-V3.2, arXiv 2512.02556",
        rollout_inputs,
        trl("grpo", scaled=False, threshold=0.5),
        trl("grpo", scaled=False, threshold=0.05, answer=changed(gate={"limit": 0.05})),
        on(drifted, trl("grpo", scaled=False, threshold=0.5)),
    ),
    "high_entropy_tokens": (
        "Beyond the 80/20 Rule, arXiv 2506.01939",
        entropy_inputs,
        trl("dapo", high=0.28, top_entropy=0.2),
        trl("dapo", high=0.05, top_entropy=0.45, answer=changed(clip={"high": 0.05}, weight={"share": 0.45})),
        on(far, trl("dapo", high=0.28, top_entropy=0.2)),
    ),
    "kl_cov": (
        "KL-Cov, arXiv 2505.22617",
        batch,
        verl("kl_cov", "token-mean", mode={"kl_cov_ratio": 2e-4, "ppo_kl_coef": 1.0}),
        verl(
            "kl_cov",
            "token-mean",
            mode={"kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0},
            answer=changed(clip={"share": 0.2}),
        ),
    ),
    "clip_cov": (
        "Clip-Cov, arXiv 2505.22617",
        batch,
        clip_cov,
        lambda inputs: clip_cov(inputs, **WIDE_BAND),
        *(on(one_covariance(wanted), clip_cov) for wanted in (1.05, 4.8)),
    ),
    "dppo_kl": ("DPPO, arXiv 2602.04879", batch, dppo("kl", 0.05, 0.02)),
    "dppo_tv": ("DPPO, arXiv 2602.04879", batch, dppo("tv", 0.2, 0.1)),
    "dro": ("DRO, arXiv 2405.19107", batch, verl("dro", "token-mean", mode={"dro_beta": 0.05})),
    "opo": ("OPO, arXiv 2505.23585", batch, verl("gpg", "token-mean", estimator="opo")),
    "pass_at_k": (
        "Pass@k policy optimisation, arXiv 2503.19595",
        pass_at_k_rewards,
        verl("vanilla", "token-mean", estimator="grpo_passk", estimate={"config": {}}),
    ),
    "reinforce_pp": (
        "REINFORCE++, arXiv 2501.03262",
        batch,
        verl(
            "vanilla",
            "token-mean",
            0.2,
            0.2,
            estimator="reinforce_plus_plus",
            kl_in_reward=0.001,
            estimate={"config": SimpleNamespace(gamma=1.0)},
            answer=COUNT_EPS,
        ),
    ),
    "reinforce_pp_baseline": (
        "REINFORCE++-baseline, arXiv 2501.03262",
        batch,
        verl(
            "vanilla",
            "token-mean",
            0.2,
            0.2,
            estimator="reinforce_plus_plus_baseline",
            kl=(0.001, "k2"),
            answer=COUNT_EPS,
        ),
    ),
    "tool_output": ("REINFORCE++, arXiv 2501.03262", tool_output_inputs, tool_output),
    "remax": ("ReMax, arXiv 2310.10505", remax_inputs, remax),
    "rloo": ("RLOO, arXiv 2402.14740", batch, rloo),
    "ppo": ("PPO, arXiv 1707.06347", batch, partial(ppo, duals=(3.0, 1.1)), on(far, ppo)),
    "optimal_token_baseline": ("OTB, arXiv 2602.07078", baseline_inputs, optimal_token_baseline),
    "maxrl": ("MaxRL, arXiv 2602.02710", batch, maxrl),
    "kl_estimators": ("Schulman, Approximating KL divergence (2020)", kl_estimators_inputs, kl_estimators),
    "gkd": ("GKD, arXiv 2306.13649, eq. 1", gkd_inputs, gkd),
    "sft": ("maximum likelihood of the answers' tokens", sft_inputs, sft),
    # pairs
    "anchored_down": ("APO-down, arXiv 2408.06266", pairs.pairs, dpo("apo_down")),
    "anchored_zero": ("APO-zero, arXiv 2408.06266", pairs.pairs, dpo("apo_zero")),
    "bco": ("BCO, arXiv 2404.04656", pairs.pairs, dpo("bco_pair")),
    "discopop": ("DiscoPOP, arXiv 2406.08414", pairs.pairs, dpo("discopop")),
    "exo": ("EXO, arXiv 2402.00856", pairs.pairs, exo),
    "ipo": ("IPO, arXiv 2310.12036", pairs.pairs, dpo("ipo")),
    "length_normalised_dpo": (
        "length-normalised DPO, arXiv 2411.15124",
        pairs.pairs,
        dpo("sigmoid_norm", beta=5.0),
    ),
    "nca": ("NCA, arXiv 2402.05369", pairs.pairs, dpo("nca_pair")),
    "robust_dpo": ("robust DPO, arXiv 2403.00409", pairs.pairs, dpo("robust", smoothing=0.1)),
    "slic": ("SLiC-HF, arXiv 2305.10425", pairs.pairs, dpo("hinge")),
    "cpo": (
        "CPO, arXiv 2401.08417",
        pairs.pairs,
        without_reference("cpo.CPOTrainer", loss_type="sigmoid", beta=0.1, cpo_alpha=1.0),
    ),
    "simpo": (
        "SimPO, arXiv 2405.14734",
        pairs.pairs,
        without_reference("cpo.CPOTrainer", loss_type="simpo", beta=2.0, simpo_gamma=1.0, cpo_alpha=0.0),
    ),
    "orpo": ("ORPO, arXiv 2403.07691", pairs.pairs, without_reference("orpo.ORPOTrainer", beta=0.1)),
    "rpo": ("RPO, arXiv 2405.16436", pairs.pairs, rpo),
    "kto": ("KTO, arXiv 2402.01306", kto_inputs, kto),
    "nash_md": ("Nash-MD, arXiv 2312.00886", own_pairs, nash_md),
    "xpo": ("XPO, arXiv 2405.21046", own_pairs, xpo),
}
"""Citation, inputs and calls of each golden file that installed packages make."""
