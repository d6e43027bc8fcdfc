"""The temporal agent against a literal form of the published module, in float64."""

import math

import pytest
import torch

from mmrl.errors import UserError
from mmrl.vlm.tspo.agent import TemporalAgent, positional_encoding


def published_window(total, window):
    """`create_window_mask` of the public code, loop by loop."""
    mask = torch.zeros(total, total)
    for j in range(total):
        for k in range(window):
            mask[j, min(max(j - window // 2 + k, 0), total - 1)] = 1.0
    return mask


def published_scores(agent, frames, text):
    """Scores (T,) as the public module computes them from (T, D) and (D,): every T * T weight, then a mask."""
    total, width = frames.shape
    encoding = torch.zeros(total, width, dtype=frames.dtype)
    for t in range(total):
        for k in range(width // 2):
            angle = t / total * 10000 ** (-2 * k / width)
            encoding[t, 2 * k], encoding[t, 2 * k + 1] = math.sin(angle), math.cos(angle)
    x = frames + encoding
    head = width // agent.heads
    split = [layer(x).view(total, agent.heads, head).transpose(0, 1) for layer in (agent.query, agent.key, agent.value)]
    scores = split[0] @ split[1].transpose(1, 2) / head**0.5
    weights = scores.masked_fill(published_window(total, agent.window) == 0, -1e6).softmax(-1)
    context = (weights @ split[2]).transpose(0, 1).reshape(total, width)
    events = agent.mlp(context) + frames
    cosine = (events @ text) / (events.norm(dim=1) * text.norm() + 1e-6)
    return cosine + torch.nn.CosineSimilarity(dim=-1)(text[None], frames)


@pytest.mark.parametrize(("total", "window"), [(1, 12), (2, 3), (7, 1), (9, 2), (20, 5), (30, 12), (5, 40)])
def test_scores_are_those_of_the_published_module(total, window):
    torch.manual_seed(total)
    agent = TemporalAgent(16, heads=4, window=window).double()
    frames, text = torch.randn(total, 16).double() * 3, torch.randn(16).double()
    with torch.no_grad():
        torch.testing.assert_close(
            agent(frames[None], text[None])[0], published_scores(agent, frames, text), rtol=1e-10, atol=1e-10
        )


def test_a_padded_batch_gives_each_video_the_scores_that_it_has_alone():
    torch.manual_seed(0)
    agent = TemporalAgent(8, heads=2, window=6).double()
    videos = [torch.randn(total, 8).double() for total in (3, 11, 7)]
    text = torch.randn(3, 8).double()
    lengths = torch.tensor([3, 11, 7])
    padded = torch.nn.utils.rnn.pad_sequence(videos, batch_first=True, padding_value=5.0)
    together = agent(padded, text, lengths)
    for row, video in enumerate(videos):
        alone = agent(video[None], text[row : row + 1])[0]
        torch.testing.assert_close(together[row, : len(video)], alone, rtol=1e-10, atol=1e-10)


def test_a_frame_sees_its_window_and_nothing_else():
    torch.manual_seed(1)
    agent = TemporalAgent(8, heads=2, window=6).double()
    frames = torch.randn(1, 20, 8).double()
    changed = frames.clone()
    changed[0, 10] += 1.0
    text = torch.randn(1, 8).double()
    moved = (agent(frames, text) - agent(changed, text))[0].abs() > 1e-12
    # 3 frames back and 2 ahead: frame 10 is inside the windows of frames 8 to 13
    assert torch.nonzero(moved).flatten().tolist() == list(range(8, 14))


def test_encodings_follow_the_position_in_the_video():
    encoding = positional_encoding(4, 6, torch.float64)
    angles = [[t / 4 * 10000 ** (-2 * k / 6) for k in range(3)] for t in range(4)]
    expected = [[value for angle in row for value in (math.sin(angle), math.cos(angle))] for row in angles]
    torch.testing.assert_close(encoding, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(positional_encoding(8, 6, torch.float64)[::2], encoding)  # the same half way through


def test_the_number_of_weights_is_the_published_one_without_the_layer_that_nothing_calls():
    count = sum(weight.numel() for weight in TemporalAgent(768).parameters())
    assert count == 5 * (768**2 + 768)


def test_the_gradient_goes_into_the_weights_and_not_into_the_features():
    agent = TemporalAgent(8, heads=2, window=4)
    frames, text = torch.randn(1, 5, 8, requires_grad=True), torch.randn(1, 8, requires_grad=True)
    agent(frames, text).sum().backward()
    assert frames.grad is None
    assert text.grad is None
    assert all(weight.grad is not None for weight in agent.parameters())


@pytest.mark.parametrize("sizes", [(7, 1, 3), (8, 3, 3), (8, 2, 0)])
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(UserError, match="cannot be built"):
        TemporalAgent(*sizes)
