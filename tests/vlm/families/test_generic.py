"""Reading prompts and responses against the models' own forward and generate, family by family."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mmrl.core.rollouts import Rollouts
from mmrl.vlm.data.prompt import Prompt, VlmPayload, check_mixture
from mmrl.vlm.data.task import TaskError, VlmTask
from mmrl.vlm.engine.prefix import KeepPrefill
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig, sample
from tests.vlm.families.record import note
from tests.vlm.families.zoo import EOS, IMAGE, VIDEO, ZOO, make_policy, make_prompt, make_video_prompt, own_inputs

LENGTHS = (5, 3, 1, 6, 4, 2)
TOLERANCE = 1e-5
"""Weights are float64, but norms and rotary angles of most families are float32."""
LINEAR_TOLERANCE = 1e-4
"""Linear attention is float32 as a whole, with running products of its gates."""


def make_prompts(policy: VlmPolicy, kind: str) -> list[Prompt]:
    """A prompt of two images, where the family sees them, and two shorter ones of one length."""
    images = 0 if ZOO[kind].media is None else 1
    return [
        make_prompt(policy, kind, count * images, text, text + count) for count, text in ((2, 13), (1, 12), (1, 12))
    ]


def make_rollouts(prompts: list[Prompt]) -> Rollouts:
    """Two responses to each prompt, of unequal lengths."""
    torch.manual_seed(1)
    responses = torch.randint(3, 400, (len(LENGTHS), max(LENGTHS)))
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).float()
    texts = [""] * len(LENGTHS)
    payload = VlmPayload(prompts, [None] * len(prompts), responses, texts, ["length"] * len(LENGTHS))  # type: ignore[list-item]
    group = torch.arange(len(LENGTHS)) // 2
    return Rollouts(group, mask, torch.zeros_like(mask), torch.zeros(len(LENGTHS)), payload)


def own_scores(policy: VlmPolicy, kind: str, rollouts: Rollouts) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies (B, T), each row through the model's own forward."""
    payload = VlmPayload.of(rollouts)
    logp, entropy = torch.zeros_like(rollouts.mask).double(), torch.zeros_like(rollouts.mask).double()
    for row, length in enumerate(LENGTHS):
        prompt, response = payload.prompts[int(rollouts.group[row])], payload.response_ids[row, :length]
        logits = policy.network(**own_inputs(kind, prompt, response)).logits[0, len(prompt) - 1 : -1]
        logits = logits.index_fill(1, policy.banned_ids, float("-inf"))
        scores = logits.log_softmax(-1)
        logp[row, :length] = scores.gather(1, response[:, None])[:, 0]
        entropy[row, :length] = -(scores.exp() * scores.where(scores > -1e9, 0.0)).sum(-1)
    return logp, entropy


def gradient(policy: VlmPolicy) -> torch.Tensor:
    found = torch.cat([(torch.zeros_like(w) if w.grad is None else w.grad).flatten() for w in policy.parameters()])
    policy.zero_grad()
    return found


def own_numbers(policy: VlmPolicy, kind: str, rollouts: Rollouts) -> tuple[torch.Tensor, ...]:
    """Random weights, the model's own scores and entropies, and the gradient of their weighted sum."""
    weights = torch.randn(2, *rollouts.mask.shape, generator=torch.Generator().manual_seed(0))
    logp, entropy = own_scores(policy, kind, rollouts)
    (logp * weights[0] + entropy * weights[1]).sum().backward()
    return weights, logp, entropy, gradient(policy)


@pytest.mark.parametrize("kind", ZOO)
def test_scores_gradients_and_tokens_are_the_models_own(kind):
    policy = make_policy(kind)
    tolerance = LINEAR_TOLERANCE if kind.startswith("qwen3_5") else TOLERANCE
    prompts = make_prompts(policy, kind)
    rollouts = make_rollouts(prompts)
    weights, logp, entropy, expected = own_numbers(policy, kind, rollouts)
    largest, relative = [], []
    for config in ({}, {"shared_prefix": False}):
        policy.reader._config = type(policy.config)(path=kind, **config)
        found = policy(rollouts, outputs=frozenset({"logp", "entropy"}))
        largest.append(float((found.logp - logp).detach().abs().max()))
        assert (found.entropy - entropy).abs().max() < tolerance
        (found.logp * weights[0] + found.entropy * weights[1]).sum().backward()
        relative.append(float((gradient(policy) - expected).norm() / expected.norm()))
    assert (logp[0] - logp[1]).abs().max() > 0.01
    policy.reader._config = policy.config
    for passes in (kept_prefix, micro_batches):
        passes(policy, rollouts, weights)
        relative.append(float((gradient(policy) - expected).norm() / expected.norm()))
    assert max(*largest, *relative) < tolerance
    check_greedy(policy, kind, prompts)
    note(kind, "scores", logp=max(largest), gradient=max(relative))


def weighted(policy: VlmPolicy, rollouts: Rollouts, weights: torch.Tensor) -> torch.Tensor:
    found = policy(rollouts, outputs=frozenset({"logp", "entropy"}))
    width = rollouts.mask.shape[1]
    return (found.logp * weights[0, :, :width] + found.entropy * weights[1, :, :width]).sum()


def kept_prefix(policy: VlmPolicy, rollouts: Rollouts, weights: torch.Tensor) -> None:
    """Gradient through the prompts that sampling read: values serve first, then the history, once."""
    prompts = VlmPayload.of(rollouts).prompts
    sample(policy, prompts, 1, SamplerConfig(max_new_tokens=1), None, keep=KeepPrefill.GRAPH)
    with read_prompts(policy) as read:
        with torch.no_grad():
            weighted(policy, rollouts, weights)
        weighted(policy, rollouts, weights).backward()
        assert not read
        weighted(policy, rollouts, weights)
        assert read == [3]


def micro_batches(policy: VlmPolicy, rollouts: Rollouts, weights: torch.Tensor) -> None:
    """Gradient of parts of one row each, which share their prompts."""
    with policy.prefixes.open() as shared, read_prompts(policy) as read:
        for row, chunk in enumerate(rollouts.micro_batches(1)):
            weighted(policy, chunk, weights[:, row : row + 1]).backward()
        shared.backward()
    assert read == [1, 1, 1]


@contextlib.contextmanager
def read_prompts(policy: VlmPolicy) -> Iterator[list[int]]:
    """Numbers of prompts in each pass over prompts."""
    read: list[int] = []
    encode = policy.encode_prefix

    def counted(prompts: list[Prompt]) -> Any:
        read.append(len(prompts))
        return encode(prompts)

    policy.encode_prefix = counted
    yield read
    del policy.encode_prefix


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "llava_onevision"])
def test_videos_are_read_as_the_model_reads_them(kind):
    """Two videos of unequal lengths."""
    policy = make_policy(kind)
    prompts = [make_video_prompt(policy, kind, frames, 9) for frames in (1, 2)]
    payload = VlmPayload(prompts, [None] * 2, torch.tensor([[7, 8, 9]] * 2), [""] * 2, ["length"] * 2)  # type: ignore[list-item]
    mask = torch.ones(2, 3)
    rollouts = Rollouts(torch.arange(2), mask, torch.zeros_like(mask), torch.zeros(2), payload)
    found = policy(rollouts).logp
    for row, prompt in enumerate(prompts):
        logits = policy.network(**own_inputs(kind, prompt, payload.response_ids[row])).logits[0, len(prompt) - 1 : -1]
        scores = logits.index_fill(1, policy.banned_ids, float("-inf")).log_softmax(-1)
        expected = scores.gather(1, payload.response_ids[row][:, None])[:, 0]
        assert (found[row] - expected).abs().max() < TOLERANCE
    prompts[1].media["pixel_values_videos"] = prompts[1].media["pixel_values_videos"] + 1
    policy.features.clear()
    assert (policy(rollouts).logp - found).abs()[1].max() > 1e-3  # the video matters


@pytest.mark.parametrize("kind", ["qwen2_vl", "glm4v"])
def test_images_beside_videos_are_refused_where_they_have_the_same_token(kind):
    token = IMAGE if kind == "glm4v" else VIDEO
    ids = torch.tensor([5, *[IMAGE] * 4, 7, *[token] * 4, 8])
    types = torch.tensor([0, *[1] * 4, 0, *[2] * 4, 0])
    grid = torch.tensor([[1, 4, 4]])
    inputs = {"input_ids": ids[None], "mm_token_type_ids": types[None], "image_grid_thw": grid, "video_grid_thw": grid}
    policy = make_policy(kind)
    found = policy.layout.tables(inputs)[0]
    assert found.tolist() == types.tolist()
    refused = pytest.raises(TaskError, match="images and videos") if kind == "glm4v" else contextlib.nullcontext()
    with refused:
        check_mixture(VlmTask("v", []), policy.processor, ids, found)


def floats(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}


def check_greedy(policy: VlmPolicy, kind: str, prompts: list[Prompt]) -> None:
    """The likeliest tokens of all prompts together are those that `generate` finds for each."""
    policy = policy.float()
    drawn = sample(policy, prompts, 1, SamplerConfig(max_new_tokens=6), None)
    for row, prompt in enumerate(prompts):
        inputs = own_inputs(kind, prompt, torch.zeros(0, dtype=torch.int64))
        expected = policy.network.generate(
            **floats(inputs), max_new_tokens=6, do_sample=False, suppress_tokens=policy.banned_ids.tolist()
        )[0, len(prompt) :]
        length = int(drawn.mask[row].sum())
        assert drawn.response_ids[row, :length].tolist() == expected[:length].tolist()
        assert length == 6 or drawn.response_ids[row, length - 1] == EOS


def test_prompts_of_similar_lengths_share_a_pass():
    policy = make_policy("glm4v")
    prompts = [make_prompt(policy, "glm4v", images=0, text=text, seed=text) for text in (20, 8, 19, 9, 20)]
    assert [part.real is not None for part in policy.encode_prefix(prompts).parts] == [True]
    policy.reader._joins = False
    assert [*policy.reader.together(prompts)] == [[1, 3], [2, 0, 4]]
    assert [part.real is not None for part in policy.encode_prefix(prompts).parts] == [True, True]
    sliding = make_policy("gemma3_text")
    assert [*sliding.reader.together(prompts)] == [[1], [3], [2], [0, 4]]
