"""Inputs of the methods whose decisions are tokens, and the programs that compute their numbers."""

import copy
import math
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmrl.hub.compat import ensure_torchvision
from tests.golden.make.peers import Wheel, gradient, numbers, package, tensors

# A CPU build of torch beside torchvision's CUDA wheel would keep verl and TRL from being imported.
ensure_torchvision()

NEVER = 1e9
"""A bound of the dual clip that nothing reaches."""
FLOAT_RATIOS = ("ppo_policy_loss", "dppo_policy_loss", "compute_policy_loss_cispo")
"""Functions of SkyRL that use its `safe_exp_delta`."""
COUNT_EPS = {"relative": 1e-8, "because": "it adds 1e-8 to the number of tokens that a mean is taken over"}


def batch() -> dict[str, Any]:
    """Three questions of four answers: unequal lengths, one question whose answers earn the same reward."""
    lengths = [6, 4, 1, 5, 3, 6, 2, 4, 5, 6, 3, 2]
    old = numbers(1, 12, 6, low=-3.0, high=-0.3)
    move = numbers(2, 12, 6, low=-0.5, high=0.5)
    new = [[round(a + b, 3) for a, b in zip(*rows, strict=True)] for rows in zip(old, move, strict=True)]
    # One ratio beyond the dual clip where the advantage is negative, one beyond the bound of CISPO.
    old[1][1], new[1][1], old[3][2], new[3][2] = -2.5, -1.1, -2.6, -0.8
    return {
        "group": [0] * 4 + [1] * 4 + [2] * 4,
        "reward": [1.0, 0.0, 0.1, 0.7, 0.5, 0.5, 0.5, 0.5, 0.0, 1.0, 1.0, 0.25],
        "mask": [[1.0] * n + [0.0] * (6 - n) for n in lengths],
        "logp_old": old,
        "logp": new,
        "logp_ref": numbers(3, 12, 6, low=-3.0, high=-0.3),
        "values": numbers(4, 12, 6, low=-0.5, high=1.0),
        "values_new": numbers(5, 12, 6, low=-0.5, high=1.0),
    }


def near() -> dict[str, Any]:
    """The batch with log-probabilities so near that the bounds of GSPO hold most rows, whose gradient then counts."""
    inputs = batch()
    pairs = [zip(*rows, strict=True) for rows in zip(inputs["logp_old"], inputs["logp"], strict=True)]
    return inputs | {"logp": [[round(a + 0.002 * (b - a), 6) for a, b in row] for row in pairs]}


FAR = {0: 3.219, 1: 2.485, 2: -2.996}
"""Log-ratios of the first tokens of a row in the far batch: ratios of 25, 12 and 0.05."""
NEAR_BOUNDS = {(0, 3): (0.4, 0.61), (9, 3): (0.4, 0.56), (8, 3): (0.6, 0.39), (8, 4): (0.6, 0.44)}
"""Probabilities before and after the update that have a divergence a little beyond the bounds of DPPO."""


def far(inputs: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities that go beyond the limits of ratios, losses and divergences."""
    old, new, ref = (copy.deepcopy(inputs[key]) for key in ("logp_old", "logp", "logp_ref"))
    for row in range(len(old)):
        for place, move in FAR.items():
            old[row][place] = -1.0 if move < 0 else -4.0
            new[row][place] = round(old[row][place] + move, 3)
        for place in (1, 4):
            ref[row][place] = round(new[row][place] + 3.0, 3)  # k3 is 16 there, more than 10
    for (row, place), pair in NEAR_BOUNDS.items():
        old[row][place], new[row][place] = (round(math.log(p), 6) for p in pair)
    return {"logp_old": old, "logp": new, "logp_ref": ref}


def far_reference(inputs: dict[str, Any]) -> dict[str, Any]:
    """A reference that finds a token of most rows so much likelier that k3 is 16 there, more than its limit of 10."""
    ref = copy.deepcopy(inputs["logp_ref"])
    for row, new in zip(ref, inputs["logp"], strict=True):
        row[1] = round(new[1] + 3.0, 3)
    return {"logp_ref": ref}


class Verl:
    """verl's core_algos on a batch, float64."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        from verl.trainer.ppo import core_algos
        from verl.workers.config import ActorConfig

        self.algos, self.config = core_algos, ActorConfig
        self.b = tensors(inputs)
        self.b.logp.requires_grad_()
        self.b.values_new.requires_grad_()
        self.index = np.array(inputs["group"])
        self.calls: list[str] = []

    def token_rewards(self, kl_ratio: float = 0.0) -> Tensor:
        """The reward at the last trained token, minus the divergence from the reference."""
        rewards = torch.zeros_like(self.b.mask)
        last = (self.b.mask * torch.arange(1, rewards.shape[1] + 1)).argmax(1)
        rewards[torch.arange(len(last)), last] = self.b.reward
        if kl_ratio:
            shaped = self._call("compute_rewards", rewards, self.b.logp_old, self.b.logp_ref, kl_ratio)
            rewards = shaped * self.b.mask
        return rewards

    def advantage(self, name: str, kl_ratio: float = 0.0, **options: Any) -> Tensor:
        given = {"token_level_rewards": self.token_rewards(kl_ratio), "response_mask": self.b.mask}
        if "reinforce_plus_plus_outcome" not in name:
            options["index"] = self.index
        return self._call(name, **given, **options)[0] * self.b.mask

    def gae(self, gamma: float, lam: float, kl_ratio: float) -> tuple[Tensor, Tensor]:
        rewards = self.token_rewards(kl_ratio)
        found = self._call("compute_gae_advantage_return", rewards, self.b.values, self.b.mask, gamma, lam)
        return found[0] * self.b.mask, found[1] * self.b.mask

    def policy_loss(
        self,
        name: str,
        advantage: Tensor,
        average: str,
        low: float = 0.2,
        high: float = 0.2,
        dual: float = NEVER,
        mode: dict[str, float] | None = None,
        **more: Any,
    ) -> Tensor:
        """`mode` holds options of `policy_loss` in the configuration."""
        config = self.config(strategy="fsdp", rollout_n=4, use_dynamic_bsz=True, clip_ratio_c=dual)
        for key, value in (mode or {}).items():
            object.__setattr__(config.policy_loss, key, value)
        # verl reads the bounds from the configuration, and the constant length from what a worker adds to it
        object.__setattr__(config, "clip_ratio_low", low)
        object.__setattr__(config, "clip_ratio_high", high)
        object.__setattr__(config, "global_batch_info", more)
        b = self.b
        return self._call(f"compute_policy_loss_{name}", b.logp_old, b.logp, advantage, b.mask, average, config)[0]

    def kl_loss(self, kind: str, average: str) -> Tensor:
        divergence = self._call("kl_penalty", self.b.logp, self.b.logp_ref, kind)
        return self._call("agg_loss", divergence, self.b.mask, average)

    def value_loss(self, returns: Tensor, clip: float) -> Tensor:
        b = self.b
        return self._call("compute_value_loss", b.values_new, returns, b.values, b.mask, clip)[0]

    def answer(self, advantage: Tensor, loss: Tensor, **more: Any) -> dict[str, Any]:
        """The recorded entry of this peer."""
        numbers = {"loss": loss.detach(), "gradient": gradient(loss, self.b.logp)}
        return self.only(advantage) | numbers | more

    def only(self, advantage: Tensor) -> dict[str, Any]:
        """The recorded entry of an estimator without a loss."""
        calls = [f"verl.trainer.ppo.core_algos.{name}" for name in self.calls]
        return {"program": package("verl"), "calls": calls, "relative": 1e-12, "advantage": advantage}

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        if name not in self.calls:
            self.calls.append(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(self.algos, name)(*args, **options)


class Trl:
    """The losses of TRL's trainers on a batch, float64; a trainer without a model gets the log-probabilities."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.b = tensors(inputs)
        self.b.logp.requires_grad_()

    def grpo(
        self,
        advantage: Tensor,
        loss_type: str,
        low: float = 0.2,
        high: float = 0.2,
        beta: float = 0.0,
        level: str = "token",
        length: int = 0,
        corrected: bool = False,
        mismatch: Tensor | None = None,
        threshold: float | None = None,
        top_entropy: float = 1.0,
        kind: Any = None,
        **args: float,
    ) -> dict[str, Any]:
        """`_compute_loss` of GRPOTrainer or of a trainer derived from it, for one advantage a row.

        `mismatch` are weights between sampler and trainer, `threshold` is that of the off-policy mask, `top_entropy` is
        the share of decisions with the highest "entropy_old" that are trained, and `args` are further options.
        """
        from trl import GRPOTrainer

        kind = kind or GRPOTrainer
        trainer = self._trainer(kind, low, high)
        trainer.beta, trainer.loss_type, trainer.importance_sampling_level = beta, loss_type, level
        trainer.max_completion_length, trainer.top_entropy_quantile = length, top_entropy
        trainer.off_policy_mask_threshold, trainer._entropy_bonus_enabled = threshold, False
        trainer.args = SimpleNamespace(delta=None, use_bias_correction_kl=corrected, **args)
        trainer.vllm_importance_sampling_correction = trainer.use_vllm = mismatch is not None
        given = {"old_per_token_logps": self.b.logp_old, "ref_per_token_logps": self.b.logp_ref}
        given["num_items_in_batch"] = self.b.mask.sum()
        given |= {} if mismatch is None else {"importance_sampling_ratio": mismatch}
        if threshold is not None:
            given["sampling_per_token_logps"] = self.b.logp_rollout
        return self._answer(trainer, advantage, given, f"trl.{kind.__name__}._compute_loss")

    def rloo(self, advantage: Tensor) -> dict[str, Any]:
        """`RLOOTrainer._compute_loss`, for one advantage a row."""
        from trl import RLOOTrainer

        trainer = self._trainer(RLOOTrainer, 0.2, 0.2)
        given = {"old_logps": (self.b.logp_old * self.b.mask).sum(1)}
        return self._answer(trainer, advantage, given, "trl.RLOOTrainer._compute_loss")

    def _trainer(self, kind: type, low: float, high: float) -> Any:
        trainer = kind.__new__(kind)
        trainer.epsilon_low, trainer.epsilon_high, trainer.aux_loss_enabled = low, high, False
        trainer.model = SimpleNamespace(training=False)
        trainer.accelerator = SimpleNamespace(
            num_processes=1,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            pad_across_processes=lambda x, **_: x,
            sync_gradients=True,
        )
        trainer._metrics = {"eval": defaultdict(list)}
        entropies = getattr(self.b, "entropy_old", torch.zeros_like(self.b.logp))
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (self.b.logp, entropies, None)
        return trainer

    def _answer(self, trainer: Any, advantage: Tensor, given: dict[str, Tensor], call: str) -> dict[str, Any]:
        ids, mask = torch.zeros_like(self.b.mask).long(), self.b.mask
        given |= {"prompt_ids": ids[:, :1], "prompt_mask": mask[:, :1], "completion_ids": ids, "completion_mask": mask}
        loss = trainer._compute_loss(trainer.model, given | {"advantages": advantage})
        numbers = {"loss": loss.detach(), "gradient": gradient(loss, self.b.logp)}
        return {"program": package("trl"), "calls": [call], "relative": 1e-12} | numbers


class SkyRl:
    """SkyRL's losses and advantages on a batch, float64; its advantages carry the average, its losses are sums."""

    FILE = "skyrl/backends/skyrl_train/utils/ppo_utils.py"

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.b, self.wheel = tensors(inputs), Wheel("skyrl")
        self.b.logp.requires_grad_()
        self.index = np.array(inputs["group"])

    def advantage(self, name: str, **options: Any) -> Tensor:
        rewards = torch.zeros_like(self.b.mask)
        last = (self.b.mask * torch.arange(1, rewards.shape[1] + 1)).argmax(1)
        rewards[torch.arange(len(last)), last] = self.b.reward
        whiten = {"masked_mean": self._tool("masked_mean")}
        whiten["masked_var"] = self.wheel.function(self.FILE, "masked_var", **whiten)
        whiten["masked_whiten"] = self.wheel.function(self.FILE, "masked_whiten", **whiten)
        function = self.wheel.function(self.FILE, name, defaultdict=defaultdict, **whiten)
        kept = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # it makes new tensors of group means
        try:
            return function(token_level_rewards=rewards, response_mask=self.b.mask, index=self.index, **options)[0]
        finally:
            torch.set_default_dtype(kept)

    def loss(self, name: str, advantage: Tensor, average: str, **options: Any) -> Tensor:
        used = {key: self._tool(key) for key in ("masked_mean", "safe_exp_delta")}
        used["reduce_loss"] = self.wheel.function(self.FILE, "reduce_loss")
        # a correction between sampler and trainer, which is off
        used["apply_off_policy_correction"] = lambda loss, _, __, mask, ___: (loss, mask, {})
        scale = self.wheel.function(self.FILE, "apply_loss_reduction_to_advantages_minibatch")
        b, config = self.b, SimpleNamespace(off_policy_correction=None, loss_reduction=average, **options)
        scaled = scale(advantage, b.mask, average, len(b.mask), b.mask.shape[1])
        found: Tensor = self.wheel.function(self.FILE, name, **used)(b.logp, b.logp_old, scaled, config, b.mask)[0]
        return found

    def _tool(self, name: str) -> Any:
        return self.wheel.function("skyrl/backends/skyrl_train/utils/torch_utils.py", name)

    def answer(self, call: str, **numbers: Any) -> dict[str, Any]:
        """The recorded entry of this peer; a loss gets its gradient."""
        if "loss" in numbers:
            loss = numbers["loss"]
            numbers |= {"loss": loss.detach(), "gradient": gradient(loss, self.b.logp)}
        where = self.FILE.removesuffix(".py").replace("/", ".")
        exact = {"relative": 5e-7, "because": "its ratios are float32"} if call in FLOAT_RATIOS else {"relative": 1e-12}
        return {"program": self.wheel.name, "calls": [f"{where}.{call}"]} | exact | numbers
