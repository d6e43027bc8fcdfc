"""Tiny runs of robot_sac on the line, and episodes of made-up numbers."""

import numpy as np
import torch

from mmrl.runs.tracking import TrackingConfig
from mmrl.training.processes import make_accelerator, seed_everything
from mmrl.training.settings import BaseTrainerConfig, CheckpointConfig
from mmrl.training.trainer import Trainer
from robotics.episodes.payload import EpisodeSetConfig
from robotics.interventions.overseers import OverseerConfig
from robotics.interventions.rlif import RobotRlifConfig, RobotRlifRecipe
from robotics.offpolicy.presets import RobotDsrlConfig, RobotResidualConfig, RobotRlpdConfig
from robotics.offpolicy.prior import PriorConfig
from robotics.offpolicy.sac import RobotSacConfig, RobotSacRecipe
from robotics.offpolicy.sac_learner import QSettings, SacSettings
from robotics.offpolicy.transitions import Experience, TransitionForm
from robotics.policies.base.encoder import EncoderConfig
from robotics.policies.flow import FlowActionPolicy, FlowPolicyConfig
from robotics.policies.gaussian import GaussianActionPolicy, GaussianPolicyConfig
from robotics.policies.policy_loading import ActionPolicyConfig
from robotics.sim.opening import SimConfig
from tests.robotics.interventions.scripted import LINE

FORM = TransitionForm(state=3, full=4, chunk=2, action=2)
TINY = {"width": 32, "layers": 1}
TEXTS = ("go right", "go left")


def episode(length, seed=0, form=FORM, terminated=False, last=None):
    """An episode of random numbers, whose last chunk executes `last` control steps."""
    rng = np.random.default_rng(seed)
    steps = np.full(length, form.chunk, np.int32)
    steps[-1] = last or form.chunk
    executed = np.arange(form.chunk) < steps[:, None]
    return Experience(
        states=rng.normal(size=(length + 1, form.state)).astype(np.float32),
        full=rng.normal(size=(length + 1, form.full)).astype(np.float32),
        actions=rng.uniform(-1, 1, (length, form.chunk, form.action)).astype(np.float32),
        rewards=(rng.normal(size=(length, form.chunk)) * executed).astype(np.float32),
        steps=steps,
        task=seed % 2,
        instruction=("go right", "go left")[seed % 2],
        terminated=terminated,
        success=terminated,
    )


def sac_config(folder, kind=RobotSacConfig, **changes):
    settings = {
        "recipe": "robot_sac" if kind is RobotSacConfig else "robot_rlpd",
        "output_dir": str(folder),
        "sim": SimConfig(kind="tests.robotics.line_sim:open_line", image_size=0),
        "model": ActionPolicyConfig(kind="squashed", chunk=1, options={"encoder": {**TINY, "image_size": None}}),
        "data": EpisodeSetConfig(tasks=["right"], layouts=20),
        "sac": SacSettings(critics=QSettings(width=16)),
        "batch": 16,
        "warmup_steps": 12,
        "trainer": BaseTrainerConfig(steps=4, tasks_per_step=2, learning_rate=1e-2, max_grad_norm=0.0, threads=1),
        "checkpoint": CheckpointConfig(keep=0),
        "tracking": TrackingConfig(quiet=True, tensorboard=False),
    }
    potential = changes.pop("potential", 1.0)
    config = kind(**(settings | changes))
    config.reward.potential = potential
    config.validate()
    return config


def make_base(folder, kind="gaussian", image_size=None, chunk=2, drift=0.0):
    """A saved policy of the line, which moves by `drift` whatever it sees if that is not 0."""
    encoder = EncoderConfig(image_size=image_size, state_size=2, width=32, heads=2, layers=1, channels=16)
    if kind == "flow":
        policy = FlowActionPolicy.build(FlowPolicyConfig(1, chunk, steps=2, hidden=32, encoder=encoder), TEXTS)
    else:
        policy = GaussianActionPolicy.build(GaussianPolicyConfig(1, chunk, encoder=encoder), TEXTS)
        if drift:
            torch.nn.init.zeros_(policy.mean.weight)
            torch.nn.init.constant_(policy.mean.bias, drift)
    policy.save_pretrained(folder)
    return folder


def improving_config(folder, base, kind="residual", **changes):
    cls, recipe = {
        "residual": (RobotResidualConfig, "robot_residual"),
        "steered": (RobotDsrlConfig, "robot_dsrl"),
    }[kind]
    options = {"base": str(base), "encoder": TINY} | changes.pop("options", {})
    sac = cls().sac
    sac.actor_after, sac.critics.width = 3, 16
    model = ActionPolicyConfig(kind=kind, options=options)
    return sac_config(folder, cls, **{"recipe": recipe, "model": model, "sac": sac, "utd": 2.0} | changes)


def rlpd_config(folder, kind=RobotRlpdConfig, **changes):
    """A tiny run of robot_rlpd; `prior` is required."""
    critics = QSettings(count=3, subset=2, layer_norm=True, width=16, layers=1)
    settings = {"sac": SacSettings(actor_every=None, actor_values="mean", critics=critics), "utd": 1.0}
    return sac_config(folder, kind, **(settings | changes))


def rlif_config(folder, prior, **changes):
    """A tiny run of robot_rlif on the line, whose overseer acts half of the time."""
    settings = {
        "recipe": "robot_rlif",
        "sim": SimConfig(kind=LINE, image_size=0),
        "prior": PriorConfig(path=str(prior)),
        "overseer": OverseerConfig(kind="random", rate=0.5, flip=0.0, duration=2),
        "warmup_steps": 8,
        "potential": None,
    }
    return rlpd_config(folder, RobotRlifConfig, **(settings | changes))


def trainer_of(config, folder, steps=4):
    config.trainer.steps = steps
    seed_everything(config.seed)
    recipe = RobotRlifRecipe if isinstance(config, RobotRlifConfig) else RobotSacRecipe
    return Trainer(recipe(config), config, folder, make_accelerator(), None)


def weights_of(trainer):
    """All learned numbers: policy, critics, targets, temperature and moments."""
    state = trainer.updater.state_dict()["learner"]
    found = {f"actor {name}": part for name, part in trainer.policy.state_dict().items()}
    for name in ("critics", "targets"):
        found |= {f"{name} {key}": part for key, part in state[name].items()}
    for name, one in state["optimizers"].items():
        found |= {f"{name} {n} {key}": part for n, own in one["state"].items() for key, part in own.items()}
    return found | {"log_alpha": state["log_alpha"]}
