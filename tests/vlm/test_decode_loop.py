"""Decoding: bit for bit as one token after another, two host syncs in 32 tokens, and a step that repeats as a graph."""

import logging

import pytest
import torch

from mmrl.vlm.engine import attention, prefix, vlm_sampler
from mmrl.vlm.engine.capabilities import replaying_problem
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.engine.vlm_sampler import EOS, STOP, SamplerConfig, kept_rows, sample
from mmrl.vlm.model.model_config import ModelConfig
from tests.devices.label import labelled_gpu
from tests.devices.recording import CaptureError, recordings
from tests.rounding import assert_equal_up_to_rounding
from tests.vlm.builders import ragged_tasks
from tests.vlm.families.zoo import ZOO, make_policy

TOKENS = 20


@pytest.fixture
def chatty(tiny_folders):
    """A policy that takes every 16th token for the end of a turn, so that rows finish at different times."""
    policy = load_policy(ModelConfig(path=str(tiny_folders["qwen2_5_vl"])))
    policy.eos_ids = tuple(range(0, 250, 16))
    return policy


@pytest.fixture
def plain(language_model):
    """A language model, whose positions the suite does not build along three axes."""
    policy = load_policy(ModelConfig(path=str(language_model)))
    policy.eos_ids = ()
    return policy


def one_by_one(state, decoder, rows, budget, states):
    """The loop that asks after each token which rows are still running."""
    config, running, device = state.config, torch.ones_like(rows, dtype=torch.bool), rows.device
    for step in range(config.max_new_tokens):
        token = state.choose(rows, step, decoder.next_logp(states, config.temperature), running)
        at_eos = state.is_eos[token] & running
        state.reason[rows] = torch.where(at_eos, EOS, state.reason[rows])
        at_stop = torch.zeros_like(at_eos)
        if config.stop:
            reach = max(len(text.encode()) for text in config.stop)
            texts = state.policy.turns.decode(state.ids[max(step + 1 - reach, 0) : step + 1, rows].t().tolist())
            found = [any(stop in text for stop in config.stop) for text in texts]
            at_stop = torch.tensor(found, device=device) & running & ~at_eos
            state.reason[rows] = torch.where(at_stop, STOP, state.reason[rows])
        running = running & ~(at_eos | at_stop) & (step + 1 < budget)
        left = int(running.sum())
        if left == 0 or step + 1 == config.max_new_tokens:
            return
        if left < 0.75 * len(running):
            index = torch.nonzero(running).flatten()
            decoder.keep(index)
            rows, token, budget, running = rows[index], token[index], budget[index], running[index]
        states = decoder.advance(state.inputs(rows, step, token))


def draw(policy, greedy=False, group=3, limits=None, **options):
    prompts = [policy.encode(task) for task in ragged_tasks()[: 4 if policy.reads_media else 1]]
    config = SamplerConfig(**{"max_new_tokens": TOKENS} | options)
    draws = None if greedy else torch.Generator().manual_seed(3)
    return sample(policy, prompts, group, config, draws, limits=limits)


def stops_of(samples):
    """Pairs of letters that some responses contain."""
    pairs = [
        text[place : place + 2] for text in samples.texts for place in (5, 13) if text[place : place + 2].isalpha()
    ]
    assert len(pairs) > 2
    return pairs[:3]


def assert_same_bits(one, two):
    assert (one.finish, one.texts) == (two.finish, two.texts)
    for name in ("response_ids", "mask", "logp", "nucleus_mass"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name


def assert_same_tokens(one, two):
    assert (one.finish, one.texts) == (two.finish, two.texts)
    assert torch.equal(one.response_ids, two.response_ids)
    assert torch.equal(one.mask, two.mask)
    assert_equal_up_to_rounding(one.logp, two.logp)
    assert_equal_up_to_rounding(one.nucleus_mass, two.nucleus_mass)


CASES = {
    "sampled": {},
    "greedy": {"greedy": True},
    "truncated": {"temperature": 1.7, "top_p": 0.9, "top_k": 50},
    "limits": {"limits": [20, 3, 12, 1]},
    "several batches": {"batch_rows": 6},
}


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_cpu_decodes_bit_for_bit_as_one_token_after_another(chatty, case, stops, joins, monkeypatch):
    chatty.reader._joins = joins
    options = CASES[case] | ({"stop": stops_of(draw(chatty))} if stops else {})
    found = draw(chatty, **options)
    monkeypatch.setattr(vlm_sampler, "decode", one_by_one)
    assert_same_bits(found, draw(chatty, **options))
    if case != "greedy":
        assert len(set(found.mask.sum(1).tolist())) > 3
        assert ("stop" in found.finish) == stops


def syncs_of(policy, **options):
    """Host syncs of decoding on the labelled GPU, and the samples."""
    with labelled_gpu() as syncs:
        policy.to("cuda")
        policy.reader.joins(policy)
        syncs.clear()
        found = draw(policy, **options)
        counted = dict(syncs)
        tensors = {name: getattr(found, name).cpu() for name in ("response_ids", "mask", "logp", "nucleus_mass")}
    for name, tensor in tensors.items():
        setattr(found, name, tensor)
    return counted, found


@pytest.mark.parametrize("stops", [False, True])
def test_a_gpu_waits_at_most_twice_in_32_tokens(chatty, stops, monkeypatch):
    chatty.eos_ids = ()
    options = {"stop": [*stops_of(draw(chatty))[:1], "never"]} if stops else {}
    monkeypatch.setattr(vlm_sampler, "kept_rows", lambda *_: None)  # dropping rows changes the rounding
    expected = draw(chatty, max_new_tokens=40, **options)
    short, _ = syncs_of(chatty, max_new_tokens=8, **options)
    chatty.to("cpu")
    counted, found = syncs_of(chatty, max_new_tokens=40, **options)
    assert sum(counted.values()) - sum(short.values()) <= 2, counted
    assert_same_bits(found, expected)
    assert ("stop" in found.finish) == stops


def test_a_language_model_is_not_asked_for_several_texts_in_a_row(plain):
    """transformers builds a mask at each token that is given none, and reads whether positions start again."""
    counted, _ = syncs_of(plain)
    assert sum(counted.values()) <= 8, counted


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_replayed_steps_give_the_same_samples(chatty, case, joins, monkeypatch):
    """Memory that grows, and rows that are dropped, between recordings."""
    chatty.reader._joins = joins
    options = CASES[case] | {"stop": stops_of(draw(chatty))[:1]}
    expected = draw(chatty, group=4, **options)
    monkeypatch.setattr(attention, "FIXED_ROOM", 8)
    monkeypatch.setattr(prefix, "FIXED_ROOM", 8)
    # as on a GPU, but sooner: asked every fifth token, and at most half of the rows are dropped
    monkeypatch.setattr(vlm_sampler, "kept_rows", lambda alive, every: kept_rows(alive, 5))
    monkeypatch.setattr(vlm_sampler, "FEW_ROWS", 2)
    with recordings() as calls:
        assert_same_tokens(draw(chatty, group=4, **options), expected)
    assert calls.call_count > 2


def test_a_graph_is_captured_once_where_nothing_moves(plain):
    with recordings() as calls:
        draw(plain)
    assert calls.call_count == 1


@pytest.mark.parametrize("kind", ZOO)
def test_every_family_repeats_its_step_or_says_why_not(kind):
    """Sliding windows and linear attention too."""
    policy = make_policy(kind)
    for joins in {policy.reader.joins(policy), False}:
        policy.reader._joins, policy.reader._replays = joins, None
        with recordings() as calls:
            assert replaying_problem(policy, policy.reader) is None
        assert calls.call_count == 1
        experts = kind in ("qwen3_moe", "qwen3_vl_moe", "gpt_oss", "gemma4")
        assert policy.reader._replays is not False or experts


def test_what_python_counts_is_found(chatty, monkeypatch):
    """A step that moves on in Python alone would be repeated at the same place."""
    real = attention.TokenRows.begin_step

    def in_python(rows):
        column = int(rows._column)
        real(rows)
        rows._column = torch.full((1,), column + 1)

    monkeypatch.setattr(attention.TokenRows, "begin_step", in_python)
    chatty.reader._replays = None
    with recordings():
        problem = replaying_problem(chatty, chatty.reader)
    assert chatty.reader._replays is False or problem


def test_without_graphs_the_log_says_so_once(chatty, caplog):
    def refuse(function, owner):
        raise CaptureError("operation not permitted when stream is capturing")

    expected = draw(chatty)
    caplog.set_level(logging.INFO, "mmrl")
    with recordings(refuse):
        for _ in range(2):
            assert_same_tokens(draw(chatty, batch_rows=8), expected)
    lines = [line for line in caplog.messages if "CUDA graph" in line]
    assert lines == [
        "tokens are decoded without a CUDA graph: CaptureError: operation not permitted when stream is capturing"
    ]


@pytest.mark.parametrize(
    ("running", "expected"),
    [
        ([1] * 40, None),
        ([1] * 21 + [0] * 19, None),
        ([0] * 20 + [1] * 20, list(range(20, 40))),
        ([1] + [0] * 38 + [1], [*range(15), 39]),
        ([0] * 15 + [1], None),
    ],
)
def test_a_gpu_halves_the_batch_and_fills_it_with_rows_that_have_ended(running, expected):
    index = kept_rows(torch.tensor(running, dtype=torch.bool), 32)
    assert (None if index is None else index.tolist()) == expected
