"""Small policies of each kind, and inputs for them."""

import torch
from torch import nn

from robotics.policies.base.action_policy import PolicyInputs
from robotics.policies.base.encoder import EncoderConfig
from robotics.policies.flow import FlowActionPolicy, FlowPolicyConfig
from robotics.policies.gaussian import GaussianActionPolicy, GaussianPolicyConfig
from robotics.policies.module import ModuleAdapter
from robotics.policies.small import SmallVlaConfig, SmallVlaPolicy
from robotics.policies.vlm import VlmActionConfig, VlmActionPolicy

B, K, D, S = 3, 4, 2, 5
TEXTS = ("touch the red cube", "put the blue cube gently on the green plate", "touch the green cube")
ENCODER = {"image_size": (32, 32), "state_size": S, "width": 32, "heads": 2, "layers": 2, "channels": 16}
PLACES = {"octaves": 2, "condition_queries": True}


class Gaussian(nn.Module):
    """A user's module: a diagonal Gaussian over a chunk, one log-probability per control step."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.mean = nn.Linear(S, K * D)
        self.log_std = nn.Parameter(torch.full((D,), -1.0))

    def distribution(self, obs, temperature):
        mean = self.mean(obs["state"]).unflatten(1, (K, D)).float()
        return torch.distributions.Normal(mean, temperature * self.log_std.exp())

    def act(self, obs, generator, temperature=1.0, greedy=False):
        found = self.distribution(obs, temperature)
        noise = 0.0 if greedy else torch.randn(found.mean.shape, generator=generator)
        actions = found.mean + found.stddev * noise
        return actions, found.log_prob(actions).sum(-1)

    def log_probs(self, obs, actions, temperature=1.0):
        found = self.distribution(obs, temperature)
        return found.log_prob(actions).sum(-1), found.entropy().sum(-1)


def make_inputs(size=32, rows=B, seed=0) -> PolicyInputs:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (rows, size, size, 3), generator=generator, dtype=torch.uint8)
    return PolicyInputs(images, torch.randn(rows, S, generator=generator), TEXTS[:rows])


def make_small(queries="step", seed=0, **changes) -> SmallVlaPolicy:
    config = SmallVlaConfig(D, K, bins=16, queries=queries, encoder=EncoderConfig(**ENCODER), **changes)
    return SmallVlaPolicy.build(config, TEXTS, seed)


def make_gaussian(std_per="action", seed=0, **changes) -> GaussianActionPolicy:
    config = GaussianPolicyConfig(D, K, std_per=std_per, **changes, encoder=EncoderConfig(**ENCODER))
    return GaussianActionPolicy.build(config, TEXTS, seed)


def make_flow(seed=0, **changes) -> FlowActionPolicy:
    sizes = ENCODER | changes.pop("encoder", {})
    config = FlowPolicyConfig(D, K, **{"steps": 3, "hidden": 64} | changes, encoder=EncoderConfig(**sizes))
    return FlowActionPolicy.build(config, TEXTS, seed)


def make_adapter(seed=0) -> ModuleAdapter:
    return ModuleAdapter(Gaussian(), D, K, decisions=K)


def make_vlm(folder, placeholders, seed=0, lora=False, **changes) -> VlmActionPolicy:
    """A policy on the vision-language model of a folder."""
    from mmrl.vlm.model.model_config import LoraSettings, ModelConfig

    model = ModelConfig(path=str(folder), lora=LoraSettings(enabled=lora, rank=2))
    config = VlmActionConfig(D, K, bins=32, placeholders=placeholders, seed=seed, **changes)
    return VlmActionPolicy.from_model(model, config)


def draw(policy, batch=None, seed=0, **options):
    return policy.act(make_inputs() if batch is None else batch, torch.Generator().manual_seed(seed), **options)


def demonstrations(seed=0):
    actions = torch.rand(B, K, D, generator=torch.Generator().manual_seed(seed)) * 1.6 - 0.8
    return actions, torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]])
