"""DGPO, CRD and the modes of DiffusionNFT's advantages by the code of Flow-Factory and verl-omni."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.golden.make.peers import Clone, Made, doubles, gradient, numbers, tensors

COMMITS = ("a0b2bc5a2b4fbf9125429b3fb70c0c5d7631047c", "a1139bafffb5b9711f0a6b6edff8ecaa60bfff30")
DGPO, CRD = (f"src/flow_factory/trainers/{name}.py" for name in ("dgpo", "crd"))
NFT = "verl_omni/trainer/diffusion/diffusion_algos.py"
MODES = ("continuous", "positive_only", "negative_only", "one_only", "binary")
SCHEDULES = {"3": "0-0.25-0.005-0.999", "2": "75-0.0-0.0075-0.999"}
CLIP, BETA = 0.05, {"dgpo": 10.0, "crd": 0.5}
TEMPERATURES = (None, 0.3)


def make(*paths: str) -> Made:
    names = ("X-GenGroup/Flow-Factory", "verl-project/verl-omni")
    factory, omni = (Clone(*given) for given in zip(paths, names, COMMITS, strict=True))
    shape = (6, 2, 4, 4)  # two prompts of three images
    small = (0.1 * torch.tensor(numbers(93, *shape, low=-2, high=2), dtype=torch.float64)).tolist()
    inputs: dict[str, Any] = {
        "group": [0, 0, 0, 1, 1, 1],
        "target": numbers(90, *shape, low=-2, high=2),
        "velocity": numbers(91, *shape, low=-2, high=2),
        "velocity_ref": numbers(92, *shape, low=-2, high=2),
        "moved": small,
        "advantage": [2.1, -1.3, -0.8, 5.0, -4.6, 0.4],
        "steps": list(range(0, 400, 19)),
        "clip": CLIP,
        "beta": BETA,
    }
    with doubles():
        b = tensors(inputs)
        found = {"dgpo": dgpo(factory, b, b.velocity_ref), "dgpo_moving": dgpo(factory, b, b.velocity + b.moved)}
        for name, kind in (("crd", "mse"), ("crd_bce", "bce")):
            found[name] = {str(t): crd(factory, b, t, kind) for t in TEMPERATURES}
        found["kl"] = weighed_distance(factory, b)
    decay = factory.function(CRD, "compute_decay", _DECAY_PRESETS={})
    decays = {kind: [decay(step, text) for step in inputs["steps"]] for kind, text in SCHEDULES.items()}
    convert = omni.function(NFT, "DiffusionNFTLoss", DiffusionLossFn=object)._advantage_to_reward_prob
    modes = {mode: convert(b.advantage, adv_clip_max=5.0, adv_mode=mode) for mode in MODES}
    peers = [
        {
            "program": factory.name,
            "calls": [f"{DGPO}:DGPOTrainer", f"{CRD}:754-807", f"{CRD}:811-820", f"{CRD}:compute_decay"],
        }
        | {"relative": 1e-12, "decay": decays}
        | found,
        {"program": omni.name, "calls": [f"{NFT}:DiffusionNFTLoss"], "relative": 1e-12, "weights": modes},
    ]
    return "DGPO, arXiv 2510.08425; CRD, arXiv 2603.14128", inputs, peers, factory, omni


def dgpo(clone: Clone, b: Any, reference: Tensor) -> dict[str, Tensor]:
    """The loss of both groups; those of a group share a micro-batch."""
    names = ("DGPOGroupInfo", "_PreppedBatch", "_NoisedInputs", "_VelocityPredictions")
    others = {"BaseTrainer": object, "contextmanager": lambda x: x, **dict.fromkeys(names)}
    trainer = clone.function(DGPO, "DGPOTrainer", **others)
    settings = SimpleNamespace(clip_range=(-CLIP, CLIP), group_size=3)
    own = SimpleNamespace(clip_dsm=True, clip_kl=False, training_args=settings, dpo_beta=BETA["dgpo"])
    own.accelerator = SimpleNamespace(num_processes=1)
    for name in ("_compute_per_sample_preference", "_reduce_group_sums"):
        setattr(own, name, getattr(trainer, name).__get__(own))
    velocity = b.velocity.clone().requires_grad_()
    error = trainer._compute_dsm_loss(own, b.target, velocity)
    stopped, error = trainer._maybe_clip_dsm(
        own, error, b.velocity + b.moved, b.target, b.advantage, {"clip_ratio": []}
    )
    info = {"local_group_indices": b.group, "num_groups": 2}
    loss = trainer._compute_group_dgpo_loss(own, reference, b.target, b.advantage, info, error)
    return {"loss": loss.detach(), "gradient": gradient(loss, velocity), "stopped": stopped.long()}


def crd(clone: Clone, b: Any, temperature: float | None, kind: str) -> dict[str, Tensor]:
    """The mean of the losses of the two groups, each of which is what the code takes for the whole micro-batch."""
    trainer = clone.function(CRD, "CRDTrainer", BaseTrainer=object, contextmanager=lambda x: x, F=functional)
    settings = SimpleNamespace(adv_clip_range=(-5.0, 5.0))
    own = SimpleNamespace(adaptive_logp=True, training_args=settings, crd_loss_type=kind, crd_beta=BETA["crd"])
    own.weight_temp = -1.0 if temperature is None else temperature
    own.accelerator = SimpleNamespace(gather=lambda x: x, device="cpu")
    own._compute_crd_loss = trainer._compute_crd_loss.__get__(own)
    velocity, losses = b.velocity.clone().requires_grad_(), []
    for rows in (slice(0, 3), slice(3, 6)):
        found = clone.lines(
            CRD,
            754,
            807,
            self=own,
            forward_pred=velocity[rows],
            old_v_pred=(b.velocity + b.moved)[rows],
            v_target=b.target[rows],
            batch={"advantage": b.advantage[rows]},
        )
        losses.append(found.policy_loss)
    loss = torch.stack(losses).mean()
    return {"loss": loss.detach(), "gradient": gradient(loss, velocity)}


def weighed_distance(clone: Clone, b: Any) -> Tensor:
    """The distance to the reference with the weight that grows with the reward."""
    own = SimpleNamespace(reward_adaptive_kl=True, kl_beta=0.1)
    reward = (b.advantage.clamp(-5.0, 5.0) / 5.0 / 2.0 + 0.5).clamp(0, 1)
    given = {"forward_pred": b.velocity, "ref_pred": b.velocity_ref, "adv_cur_rank": reward}
    return clone.lines(CRD, 811, 820, self=own, **given).kl_loss
