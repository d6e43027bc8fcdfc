"""The objective of SPO-chain by its public code: cuts, advantages of segments, mask, whitening, loss."""

import sys
from types import SimpleNamespace

import numpy as np
import torch

from tests.golden.make.peers import Clone, Made, gradient, numbers, tensors
from tests.golden.make.tokens import batch, far_reference

EPISODES = "src/treetune/episode_generators/math_episode_generator_with_mc_advantages.py"
CHAIN = "MathEpisodeGeneratorWithMCAdvantages"
TOOLS, TRAINER = "src/treetune/trainers/utils.py", "src/treetune/trainers/ppo_trainer.py"
CERTAIN = ((0, 0), (0, 3), (1, 2), (4, 1), (5, 5), (8, 1), (9, 0), (9, 1), (11, 1))


def make(path: str) -> Made:
    clone = Clone(path, "AIFrameResearch/SPO", "b9fc6a263dec54e28137fd488a9b9c0e0d026025")
    inputs = batch()
    for row, place in CERTAIN:
        inputs["logp_old"][row][place] = -0.05  # more certain than 0.9
    inputs["cut_value"] = numbers(6, 12, 6, low=0.0)
    b = tensors(inputs)
    trained, lengths = b.mask.bool(), b.mask.sum(1).long().tolist()
    advantage, cuts = torch.zeros_like(b.mask), list[list[int]]()
    for row, length in enumerate(lengths):
        probability, found = b.logp_old[row, :length].exp(), SimpleNamespace(cutpoint_interval=2)
        cuts.append(clone.lines(EPISODES, 927, 929, response_probs=probability.numpy(), self=found).cutpoints.tolist())
        advantage[row, :length] = of_segments(clone, probability, cuts[-1], b.cut_value[row], b.reward[row])
    with_mean = {"masked_mean": clone.function(TOOLS, "masked_mean")}
    with_var = with_mean | {"masked_var": clone.function(TOOLS, "masked_var", **with_mean)}
    # it imports deepspeed for the sums over several processes
    sys.modules["deepspeed"] = SimpleNamespace(comm=SimpleNamespace(is_initialized=lambda: False))
    whiten = clone.function(TOOLS, "masked_whiten", **with_var)
    white = whiten(advantage, trained, logprobs=b.logp_old, distributed=True, unbiased_variance=True)
    loss = actor_loss(clone, with_mean, b.logp.requires_grad_(), trained, b, white)
    kept = (trained & (b.logp_old.exp() < 0.9)).double()
    chain = {"program": clone.name, "relative": 5e-8, "because": "its n / (n - 1) is float32"}
    chain["calls"] = [f"{EPISODES}:927-929", f"{EPISODES}:{CHAIN}._compute_token_advantages"]
    chain["calls"] += [f"{TOOLS}:masked_whiten", f"{TRAINER}:PPOTrainer._compute_actor_loss"]
    chain |= {"advantage": white * kept, "loss": loss.detach(), "gradient": gradient(loss, b.logp)}
    inputs["mask"] = kept.tolist()
    before, after = values_around(cuts, b.cut_value.tolist(), inputs["reward"], lengths)
    inputs |= {"extras": {"value_before": before, "value_after": after}}
    inputs["parts"] = {"lengths": lengths, "cuts": cuts, "advantage": advantage.tolist()}
    changed = far_reference(inputs)
    own = tensors(inputs | changed)
    loss = actor_loss(clone, with_mean, own.logp.requires_grad_(), trained, own, white)
    other = {"inputs": changed} | chain | {"loss": loss.detach(), "gradient": gradient(loss, own.logp)}
    return "SPO-chain, arXiv 2505.23564", inputs, [chain, other], clone


def of_segments(clone, probability, cuts, values, reward):
    """Advantages of one answer's tokens, before whitening."""
    estimate = clone.function(EPISODES, CHAIN, MathEpisodeGenerator=object)
    unused = ("query_text", "response_text", "offsets", "query_token_ids")
    found = dict.fromkeys(unused) | {"response_token_ids": [0] * len(probability), "score": reward.item()}
    values = values[: len(cuts)].tolist()
    found |= {"cutpoints": cuts, "cutpoints_values": values, "cutpoints_values_std": values}
    found["response_prob"] = probability
    return torch.tensor(estimate._compute_token_advantages(None, found)[1], dtype=torch.float64)


def actor_loss(clone, names, logp, trained, b, advantage):
    """Loss of the policy with the divergence from the reference."""
    names = names | {"monitor_tensor_anomalies": lambda *_: {}}
    trainer = clone.function(TRAINER, "PPOTrainer", DeepSpeedPolicyTrainer=object, **names)
    own = trainer.__new__(trainer)
    divergence = {"kl_penalty_loss_type": "control_variate", "kl_penalty_loss_clip_min": 0}
    divergence |= {"kl_penalty_loss_clip_max": 1e9, "forward_kl_penalty_coef": 0.0}
    own.ppo_hparams = SimpleNamespace(use_prob_mask=True, cliprange=0.2, ratio_threshold=1e9, **divergence)
    own.kl_ctl, own.report_entropy = SimpleNamespace(value=1e-4), False
    own._forward_pass_actor = lambda *_, **__: {"all_logps": logp, "all_tokens_logps": logp[..., None]}
    return own._compute_actor_loss(None, {}, trained, b.logp_old, b.logp_ref, advantage)[0]


def values_around(cuts, values, rewards, lengths):
    """Values of the two ends of each token's segment, by the text of the paper."""
    before, after = np.zeros((2, len(cuts), 6))
    for row, length in enumerate(lengths):
        known = {0: None} | {cut + 1: values[row][number] for number, cut in enumerate(cuts[row])}
        for token in range(length):
            last = max(place for place in known if place <= token)
            later = [place for place in known if place > token]
            after[row, token] = known[min(later)] if later else rewards[row]
            before[row, token] = after[row, token] if known[last] is None else known[last]
    return before.tolist(), after.tolist()
