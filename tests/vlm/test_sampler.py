import contextlib
import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmrl.errors import UserError
from mmrl.vlm.engine import vlm_sampler as generation
from mmrl.vlm.engine.prefix import KeepPrefill
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.engine.vlm_sampler import PolicySampler, SamplerConfig, Samples, _truncate, choose_tokens, sample
from mmrl.vlm.model.model_config import ModelConfig
from tests.rounding import assert_equal_up_to_rounding
from tests.vlm.builders import draw, make_rollouts, make_task, ragged_tasks


def run(policy, group: int = 4, seed: int = 0, greedy: bool = False, tasks=None, **options) -> Samples:
    prompts = [policy.encode(task) for task in (tasks or ragged_tasks())]
    config = SamplerConfig(**{"max_new_tokens": 12} | options)
    return sample(policy, prompts, group, config, None if greedy else torch.Generator().manual_seed(seed))


@pytest.fixture
def chatty(folder):
    """A policy that takes every eighth token for the end of a turn, so that rows finish at different times."""
    policy = load_policy(ModelConfig(path=str(folder)))
    policy.eos_ids = tuple(range(0, 250, 8))
    return policy


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"temperature": 1.7, "top_p": 0.9, "top_k": 50}])
def test_recorded_log_probs_are_those_of_scoring(policy, options):
    rollouts = draw(policy, ragged_tasks(), max_new_tokens=24, **options)
    with torch.no_grad():
        scores = policy(rollouts, temperature=options.get("temperature", 1.0))
    assert_equal_up_to_rounding(scores.logp, rollouts.logp_old)


def test_greedy_decoding_equals_transformers_generate(policy):
    for task in ragged_tasks():
        prompt = policy.encode(task)
        inputs = {
            "input_ids": prompt.input_ids[None],
            "attention_mask": torch.ones_like(prompt.input_ids)[None],
            "mm_token_type_ids": prompt.mm_token_type_ids[None],
        }
        if prompt.has_vision:
            inputs |= prompt.media
        expected = policy.network.generate(
            **inputs, max_new_tokens=12, do_sample=False, suppress_tokens=policy.banned_ids.tolist()
        )[0, len(prompt) :]
        ids = run(policy, group=1, greedy=True, tasks=[task]).response_ids[0]
        assert ids.tolist() == expected.tolist()


def test_greedy_samples_are_equal(policy):
    samples = sample(policy, [policy.encode(ragged_tasks()[1])], 3, SamplerConfig(max_new_tokens=4), None)
    assert (samples.response_ids == samples.response_ids[0]).all()


def test_same_seed_same_responses(policy):
    one, two, other = run(policy), run(policy), run(policy, seed=1)
    assert torch.equal(one.response_ids, two.response_ids)
    assert torch.equal(one.logp, two.logp)
    assert one.texts == two.texts
    assert not torch.equal(one.response_ids, other.response_ids)


@pytest.mark.parametrize("batch_rows", [1, 3, 4, 7])
def test_responses_do_not_depend_on_batch_rows(chatty, batch_rows):
    one, two = run(chatty), run(chatty, batch_rows=batch_rows)
    assert torch.equal(one.response_ids, two.response_ids)
    assert torch.equal(one.mask, two.mask)
    assert one.finish == two.finish
    assert_equal_up_to_rounding(one.logp, two.logp)


def test_dropping_finished_rows_changes_nothing(chatty, monkeypatch):
    dropping = run(chatty, max_new_tokens=30)
    monkeypatch.setattr(generation, "COMPACT_BELOW", 0.0)
    keeping = run(chatty, max_new_tokens=30)
    assert len(set(dropping.mask.sum(1).tolist())) > 4
    assert torch.equal(dropping.response_ids, keeping.response_ids)
    assert_equal_up_to_rounding(dropping.logp, keeping.logp)


@contextlib.contextmanager
def watched(policy):
    """Patches that pass the tower and tokens that pass the embedding, call by call."""
    patches, tokens = [], []
    model = policy.network.model
    hooks = [
        model.visual.register_forward_hook(lambda module, inputs, output: patches.append(len(inputs[0]))),
        model.language_model.embed_tokens.register_forward_hook(
            lambda module, inputs, output: tokens.append(tuple(inputs[0].shape))
        ),
    ]
    yield patches, tokens
    for hook in hooks:
        hook.remove()


def test_each_prompt_and_image_is_read_once(policy):
    prompts = [policy.encode(task) for task in ragged_tasks()]
    lengths = [len(prompt) for prompt in prompts]
    with watched(policy) as (patches, tokens):
        run(policy, group=8)
    assert sum(patches) == sum(len(prompt.media["pixel_values"]) for prompt in prompts if prompt.has_vision)
    assert len(patches) == 1
    assert [shape for shape in tokens if shape[1] > 1] == [(1, sum(lengths))]


@pytest.mark.parametrize("keep", list(KeepPrefill))
def test_the_prefix_is_handed_on(folder, keep, monkeypatch):
    policy = load_policy(ModelConfig(path=str(folder)))
    prompts = [policy.encode(task) for task in ragged_tasks()]
    kept = []
    monkeypatch.setattr(policy.prefixes, "keep", lambda *args: kept.append(args))
    config = SamplerConfig(max_new_tokens=4, batch_rows=3)
    samples = sample(policy, prompts, 2, config, torch.Generator().manual_seed(0), keep=keep)
    assert torch.equal(samples.response_ids, run(policy, group=2, max_new_tokens=4, batch_rows=3).response_ids)
    assert not samples.logp.requires_grad
    if keep is KeepPrefill.NOTHING:
        assert not kept
        return
    assert [prompt for given, _ in kept for prompt in given] == prompts
    # a history is one, values come as the prompts are read: three rows are one prompt with its two samples
    assert [len(prefix) for _, prefix in kept] == ([4] if keep is KeepPrefill.GRAPH else [1, 1, 1, 1])
    assert all(tensor.requires_grad == (keep is KeepPrefill.GRAPH) for _, prefix in kept for tensor in prefix.tensors())
    if keep is KeepPrefill.GRAPH:
        [(_, prefix)] = kept
        prefix.last_state.sum().backward()
        assert policy.network.model.visual.patch_embed.proj.weight.grad.abs().max() > 0


def test_the_two_parts_are_timed(policy):
    from mmrl.runs.run_log import Stopwatch

    watch = Stopwatch(policy.device)
    with watch.running():
        run(policy, group=1, max_new_tokens=2)
    seconds = watch.take()
    assert set(seconds) == {"prefill", "decode"}
    assert min(seconds.values()) > 0


def test_ends_at_the_first_end_token(chatty):
    samples = run(chatty, group=16, max_new_tokens=20)
    assert set(samples.finish) == {"eos", "length"}
    assert samples.mask.shape[1] == 20
    for row, reason in enumerate(samples.finish):
        length = int(samples.mask[row].sum())
        ids = samples.response_ids[row].tolist()
        assert samples.mask[row].tolist() == [1.0] * length + [0.0] * (20 - length)
        assert [place for place in range(length) if ids[place] in chatty.eos_ids] == (
            [length - 1] if reason == "eos" else []
        )
        assert ids[length:] == [chatty.pad_id] * (20 - length)
        assert samples.logp[row, length:].abs().sum() == 0
        assert reason == "eos" or length == 20


def test_width_is_that_of_the_longest_response(folder):
    policy = load_policy(ModelConfig(path=str(folder)))
    prompt = policy.encode(ragged_tasks()[1])
    first = sample(policy, [prompt], 1, SamplerConfig(max_new_tokens=9), None)
    policy.eos_ids = (int(first.response_ids[0, 0]),)
    samples = sample(policy, [prompt], 2, SamplerConfig(max_new_tokens=9), None)
    assert samples.response_ids.shape == (2, 1)
    assert samples.finish == ["eos", "eos"]


def test_stop_strings(policy):
    free = run(policy, group=8, max_new_tokens=30)
    stops = sorted({text[3:5] for text in free.texts if text[3:5].isascii() and text[3:5].isalnum()})
    assert stops
    stopped = run(policy, group=8, max_new_tokens=30, stop=[*stops, "never ever"])
    assert "stop" in stopped.finish
    decode = policy.processor.tokenizer.decode
    for row, reason in enumerate(stopped.finish):
        length = int(stopped.mask[row].sum())
        ids = stopped.response_ids[row, :length]
        assert torch.equal(ids, free.response_ids[row, :length])
        assert any(stop in stopped.texts[row] for stop in stops) == (reason == "stop")
        assert not any(stop in decode(ids[:-1], skip_special_tokens=True) for stop in stops)


def test_a_stop_string_may_span_tokens(policy):
    free = run(policy, group=1, tasks=ragged_tasks()[:1], greedy=True)
    tokenizer = policy.processor.tokenizer
    pair = tokenizer.decode(free.response_ids[0, 2:4])
    stopped = run(policy, group=1, tasks=ragged_tasks()[:1], greedy=True, stop=[pair])
    assert stopped.finish == ["stop"]
    assert int(stopped.mask.sum()) <= 4


def test_banned_tokens_are_never_drawn(folder):
    """Their rows of the head are made large, so that without the ban about one token in two were one of them."""
    policy = load_policy(ModelConfig(path=str(folder)))
    tokenizer = policy.processor.tokenizer
    with torch.no_grad():
        policy.network.lm_head.weight[policy.banned_ids] *= 3.0
    samples = run(policy, group=64, max_new_tokens=16)
    assert samples.mask.sum() > 3000
    names = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"]
    banned = torch.tensor(tokenizer.convert_tokens_to_ids(names))
    assert not torch.isin(samples.response_ids, banned).any()
    free = copy.copy(policy)
    free.banned_ids = torch.zeros(0, dtype=torch.int64)
    # without the ban they would come, and the sampled text could not be scored
    config = SamplerConfig(max_new_tokens=1)
    prompts = [free.encode(task) for task in ragged_tasks()]
    unbanned = sample(free, prompts, 64, config, torch.Generator().manual_seed(0))
    assert torch.isin(unbanned.response_ids, banned).float().mean() > 0.05


def test_ids_without_a_token_are_banned(policy):
    tokenizer = policy.processor.tokenizer
    assert policy.network.config.text_config.vocab_size == len(tokenizer)
    wide = copy.deepcopy(policy.network.config)
    wide.text_config.vocab_size += 3

    class Network:
        config = wide

    from mmrl.vlm.model.processor import banned_ids

    assert set(banned_ids(Network(), tokenizer).tolist()) - set(policy.banned_ids.tolist()) == {
        len(tokenizer) + extra for extra in range(3)
    }


def test_frequencies_follow_the_probabilities(policy):
    count = 8000
    task = ragged_tasks()[:1]
    samples = run(policy, group=count, tasks=task, max_new_tokens=1, temperature=1.3, batch_rows=count)
    prompt = policy.encode(task[0])
    with torch.no_grad():
        logits = policy.network(input_ids=prompt.input_ids[None]).logits[0, -1] / 1.3
    logits[policy.banned_ids] = float("-inf")
    expected = logits.softmax(-1) * count
    observed = torch.bincount(samples.response_ids[:, 0], minlength=len(expected)).float()
    common = expected > 20
    assert common.sum() > 10
    chi_square = ((observed - expected)[common] ** 2 / expected[common]).sum()
    freedom = float(common.sum())
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5
    torch.testing.assert_close(
        samples.logp[:, 0].exp() * count, expected[samples.response_ids[:, 0]], rtol=1e-4, atol=0
    )


def test_top_k_and_top_p_keep_the_most_likely_tokens():
    probability = torch.tensor([[0.1, 0.4, 0.2, 0.25, 0.05]])
    uniforms = torch.linspace(0, 1, 1001)[:-1]

    def drawn(**options):
        logp = probability.log().expand(len(uniforms), -1)
        token, mass = choose_tokens(logp, uniforms, **options)
        counts = torch.bincount(token, minlength=5) / len(uniforms)
        return counts.tolist(), float(mass[0])

    def near(*values):
        return pytest.approx(values, abs=2e-3)

    assert drawn() == (near(0.1, 0.4, 0.2, 0.25, 0.05), pytest.approx(1.0))
    assert drawn(top_k=2) == (near(0, 0.4 / 0.65, 0, 0.25 / 0.65, 0), pytest.approx(0.65))
    assert drawn(top_k=1) == (near(0, 1, 0, 0, 0), pytest.approx(0.4))
    assert drawn(top_p=0.6) == (near(0, 0.4 / 0.65, 0, 0.25 / 0.65, 0), pytest.approx(0.65))
    assert drawn(top_p=0.7) == (near(0, 0.4 / 0.85, 0.2 / 0.85, 0.25 / 0.85, 0), pytest.approx(0.85))
    assert drawn(top_p=1e-6) == (near(0, 1, 0, 0, 0), pytest.approx(0.4))
    # within the two most likely, 0.4 alone is less than 0.7 of their mass
    assert drawn(top_k=2, top_p=0.7) == (near(0, 0.4 / 0.65, 0, 0.25 / 0.65, 0), pytest.approx(0.65))


def peaked(rows: int, size: int, seed: int) -> torch.Tensor:
    """(rows, size) log-probabilities over many orders of magnitude, one token in three impossible."""
    generator = torch.Generator().manual_seed(seed)
    logits = 6 * torch.randn(rows, size, generator=generator)
    impossible = torch.rand(rows, size, generator=generator) < 1 / 3
    return logits.masked_fill(impossible, float("-inf")).log_softmax(-1)


@pytest.mark.parametrize("size", [5, 127, 128, 129, 1000, 8192])
def test_the_search_in_blocks_is_that_of_the_whole_distribution_function(size):
    logp = peaked(400, size, seed=size)
    probability = logp.exp().double()
    uniforms = torch.rand(400, generator=torch.Generator().manual_seed(0)).double()
    uniforms[:4] = torch.tensor([0.0, 1e-12, 1.0 - 2**-24, 1.0 - 2**-53], dtype=torch.float64)
    ends = probability.cumsum(-1)
    expected = torch.searchsorted(ends, uniforms[:, None] * ends[:, -1:], right=True)[:, 0]
    token, mass = choose_tokens(logp, uniforms)
    assert torch.equal(token, expected.clamp(max=size - 1))
    torch.testing.assert_close(mass.double(), ends[:, -1], rtol=1e-6, atol=0)


class Sorted(TorchDispatchMode):
    """Counts the rows that are sorted whole."""

    def __init__(self):
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "sort" in func.name() and "search" not in func.name():
            self.rows += len(args[0])
        return func(*args, **(kwargs or {}))


def wide_rows(kind, entries=20_000, rows=6):
    logits = 4 * torch.randn(rows, entries, generator=torch.Generator().manual_seed(1))
    if kind == "flat":
        logits = logits * 0
    if kind == "nearly flat":
        logits = logits * 1e-3
    if kind == "ties":
        logits = logits.round()
    if kind == "mixed":
        logits[::2] *= 0.01
    return logits.log_softmax(-1)


@pytest.mark.parametrize("kind", ["peaked", "flat", "nearly flat", "ties", "mixed"])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999999])
def test_nucleus_of_a_wide_vocabulary_is_that_of_a_whole_sort(kind, top_p):
    logp = wide_rows(kind)
    probability = logp.exp()
    ordered, index = probability.sort(-1, descending=True)
    ends = ordered.cumsum(-1, dtype=torch.float64)
    kept = ordered.where(ends - ordered < top_p * ends[:, -1:], 0.0)
    expected = torch.zeros_like(probability).scatter(1, index, kept)
    assert torch.equal(_truncate(probability, top_p, 0), expected)


def test_only_rows_whose_nucleus_is_wide_are_sorted_whole():
    uniform = torch.full((6,), 0.4)
    for kind, count in (("peaked", 0), ("mixed", 3), ("flat", 6)):
        with Sorted() as found:
            choose_tokens(wide_rows(kind), uniform, top_p=0.9)
        assert found.rows == count
    with Sorted() as found:
        choose_tokens(wide_rows("flat"), uniform)
        choose_tokens(wide_rows("peaked"), uniform, top_p=0.9, top_k=50)
    assert found.rows == 0


@pytest.mark.parametrize("options", [{"top_k": 7}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.5}])
def test_the_nucleus_mass_is_that_of_the_tokens_that_can_be_drawn(options):
    logp = peaked(3, 300, seed=1)
    uniforms = torch.linspace(0, 1, 4001)[:-1]
    for row in logp:
        token, mass = choose_tokens(row.expand(len(uniforms), -1), uniforms, **options)
        drawable = row.exp().double().sort(descending=True)
        count = min(options.get("top_k", 300), 300)
        ends = drawable.values[:count].cumsum(0)
        before = ends - drawable.values[:count]
        kept = int((before < options.get("top_p", 1.0) * ends[-1]).sum())
        assert float(mass[0]) == pytest.approx(float(ends[kept - 1]), rel=1e-6)
        assert set(token.tolist()) <= set(drawable.indices[:kept].tolist())
        assert int(drawable.indices[0]) in token


def test_a_token_without_probability_is_never_chosen():
    logp = torch.tensor([[float("-inf"), 0.5, float("-inf"), 0.5, float("-inf")]]).log_softmax(-1)
    ends = torch.tensor([0.0, 0.5, 1.0 - 2**-24])
    token, _ = choose_tokens(logp.expand(3, -1), ends)
    assert set(token.tolist()) <= {1, 3}


def test_nucleus_mass_is_recorded(policy):
    samples = run(policy, top_k=5)
    drawn = samples.mask.bool()
    assert (samples.nucleus_mass[~drawn] == 1).all()
    assert (samples.nucleus_mass[drawn] < 1).all()
    assert (samples.logp[drawn].exp() <= samples.nucleus_mass[drawn] + 1e-6).all()
    assert (run(policy).nucleus_mass - 1).abs().max() < 1e-6


def test_stops_at_the_models_last_position(policy):
    long = make_task("long", "7 " * 240)
    prompt = policy.encode(long)
    left = 512 - len(prompt)
    assert 0 < left < 30
    samples = run(policy, group=2, tasks=[long, *ragged_tasks()[:1]], max_new_tokens=40)
    lengths = samples.mask.sum(1).tolist()
    assert max(lengths[:2]) <= left
    assert "length" in samples.finish[:2]
    assert max(lengths[2:]) > left


def test_the_mode_is_handed_back(folder):
    policy = load_policy(ModelConfig(path=str(folder)))
    for training in (True, False):
        policy.train(training)
        run(policy, group=1, max_new_tokens=2)
        assert policy.training == training
        assert policy.network.model.language_model.training == training


def test_rows_are_prompt_major(policy):
    tasks = ragged_tasks()
    prompts = [policy.encode(task) for task in tasks]
    samples = run(policy, group=3)
    swapped = make_rollouts(tasks[::-1], prompts[::-1], samples)
    with torch.no_grad():
        right = policy(make_rollouts(tasks, prompts, samples)).logp
        wrong = policy(swapped).logp
    assert_equal_up_to_rounding(right, samples.logp)
    assert (wrong - samples.logp).abs().max() > 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"top_p": 0.0}, r"top_p is 0.0; must be in \(0, 1\]"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"batch_rows": 0}, "batch_rows is 0"),
        ({"stop": [""]}, "non-empty"),
    ],
)
def test_settings_out_of_range(options, message):
    with pytest.raises(UserError, match=message):
        PolicySampler(SamplerConfig(**options))


def test_nothing_to_sample(policy):
    with pytest.raises(UserError, match="0 prompts"):
        sample(policy, [], 4, SamplerConfig(), torch.Generator())
    with pytest.raises(UserError, match="0 samples"):
        run(policy, group=0)
