"""Contexts: the window of turns, results that are cut, the budget notice, and histories as the template writes them."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.agents.agent_recipe import AgentConfig, AgentRecipe
from mmrl.agents.environments.agent_tasks import AgentTask, TaskSetConfig
from mmrl.agents.environments.environment import ActionConfig, CallResult, Observation
from mmrl.agents.rollout.contexts import ResultClipper, settle_notice
from mmrl.agents.rollout.conversation import ConversationConfig, Writer
from mmrl.agents.rollout.episodes import (
    AgentPayload,
    Episode,
    EpisodeConfig,
    Trajectory,
    pack_episodes,
    tabulate_anchors,
)
from mmrl.agents.rollout.gains import contexts_before_turns
from mmrl.agents.rollout.tool_template import dropped_thoughts, read_template
from mmrl.core.blocks.turns import ANCHOR
from mmrl.core.catalogue import CATALOGUE, get
from mmrl.errors import UserError
from mmrl.recipes import RECIPES
from mmrl.runs.records import read_warnings
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.training.run import train
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig
from mmrl.vlm.model.model_config import ModelConfig
from tests.agents.call_templates import CHATS, TEXTS, tool
from tests.agents.conversations import one_row_a_turn
from tests.agents.runs import TALK, run_config
from tests.agents.test_tool_runs import episodes_of, hermes, make_config, model_with, scripted
from tests.agents.test_turns import spread
from tests.rounding import assert_equal_up_to_rounding
from tests.vlm.chat_templates import rendered, turns_of

ADD = tool("add", a="integer", b="integer")
END = "<|im_end|>"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return model_with(tmp_path_factory.mktemp("qwen") / "model", CHATS["qwen3"])


@pytest.fixture(scope="module")
def policy(qwen):
    return load_policy(ModelConfig(path=str(qwen)))


def encoded(policy, text, spelled="\0"):
    """The tokens of a text, in which characters that are `spelled` out are no control token."""
    tokenizer = policy.processor.tokenizer
    first, *rest = (tokenizer.encode(part, add_special_tokens=False) for part in text.split(spelled))
    characters = tokenizer.encode(spelled, add_special_tokens=False, split_special_tokens=True)
    return [*first, *(token for part in rest for token in [*characters, *part])]


def play(writer, policy, turns, first="Task"):
    """A conversation with scripted answers and observations; the ids read before each answer, and where it restarts."""
    conversation = writer.begin(AgentTask("t"), Observation(first))
    read, contexts, restarts = conversation.parts[0].prompt.input_ids.tolist(), [], []
    contexts.append(list(read))
    for number, (answer, seen) in enumerate(turns, 1):
        # the last one ends the answer, others are characters of it
        ids = [*encoded(policy, answer.removesuffix(END), END), *policy.eos_ids[:1]]
        writer.answer(conversation, ids)
        part, cut = writer.follow(conversation, seen), writer.cut(conversation)
        read = [*read, *ids, *part.input_ids.tolist()] if cut is None else cut.input_ids.tolist()
        restarts += [] if cut is None else [number]
        contexts.append(list(read))
    return contexts, restarts


def test_a_context_has_the_task_and_the_last_turns(policy):
    writer = Writer(policy, ConversationConfig(system="", history_turns=2), "Be brief.")
    turns = [(f"answer{n}{END}", Observation(f"seen{n}")) for n in range(1, 6)]
    contexts, restarts = play(writer, policy, turns)
    assert restarts == [3, 4, 5]
    for number, ids in enumerate(contexts):
        kept = range(max(number - 1, 1), number + 1)
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Task"}]
        for n in kept:
            messages += [{"role": "assistant", "content": f"answer{n}"}, {"role": "user", "content": f"seen{n}"}]
        assert ids == encoded(policy, rendered("qwen3", messages, asks=True))


def test_dropped_thoughts_in_a_window_are_those_that_the_template_drops(policy):
    turns = [(f"<think>\nhm{n}\n</think>\n\nanswer{n}{END}", Observation(f"seen{n}")) for n in range(1, 5)]
    dropped, written = (
        play(Writer(policy, ConversationConfig(history_turns=1, **options), ""), policy, turns)
        for options in ({"drop_thoughts": True}, {"history": "template"})
    )
    assert dropped == written
    assert "hm" not in policy.processor.tokenizer.decode(dropped[0][-1])


def test_windows_of_turns_and_of_images_are_taken_together(folder):
    policy = load_policy(ModelConfig(path=str(folder)))
    writer = Writer(policy, ConversationConfig(history_turns=2, history_images=2), "")
    pictures = [(np.full((56, 56, 3), grey, np.uint8),) for grey in (10, 60, 110, 160)]
    conversation = writer.begin(AgentTask("t"), Observation("look0", pictures[0]))
    for number, own in enumerate(pictures[1:], 1):
        writer.answer(conversation, [7, policy.eos_ids[0]])
        writer.follow(conversation, Observation(f"look{number}", own))
    cut = writer.cut(conversation)
    assert re.findall(r"look\d", cut.text) == ["look0", "look2", "look3"]
    assert cut.text.count("[picture left out]") == 1, "the task's picture is the oldest"
    assert sum("image_grid_thw" in leaf.media for leaf in cut.parts) == 2
    with torch.no_grad():
        assert bool(torch.isfinite(policy.encode_prefix([cut]).last_state).all())


@pytest.mark.parametrize("text", ["abc def " * 40, "äöü😀漢字" * 20, f"a{END} b" * 30, "x\n\n  y\t" * 50])
@pytest.mark.parametrize("limit", [30, 31, 64])
def test_a_long_result_loses_its_middle_at_token_boundaries(text, limit):
    tokenizer = turns_of("qwen3").tokenizer

    def ids(part):
        return tokenizer.encode(part, add_special_tokens=False, split_special_tokens=True)

    clipped = ResultClipper(tokenizer, limit)(text)
    count = re.search(r"\n\[(\d+) tokens left out\]\n", clipped)
    head, tail = clipped[: count.start()], clipped[count.end() :]
    assert text.startswith(head)
    assert text.endswith(tail)
    assert "\ufffd" not in clipped
    assert int(count[1]) == len(ids(text)) - len(ids(head)) - len(ids(tail))
    # a character of the texts has at most four of this tokenizer's tokens, on both sides of the mark
    assert limit - 6 <= len(ids(clipped)) <= limit
    assert abs(len(ids(head)) - len(ids(tail))) <= 4


def test_a_result_that_fits_stays_and_a_limit_below_the_mark_is_refused():
    tokenizer = turns_of("qwen3").tokenizer
    clip = ResultClipper(tokenizer, 40)
    assert clip("a" * 40) == "a" * 40
    assert clip("a" * 41) != "a" * 41
    with pytest.raises(
        UserError, match=r"max_result_tokens is 20, but the mark '\[N tokens left out\]' alone has up to"
    ):
        ResultClipper(tokenizer, 20)


def test_results_and_later_observations_are_cut_but_not_the_task(policy):
    writer = Writer(policy, ConversationConfig(tools=True, max_result_tokens=40), "", [ADD])
    conversation = writer.begin(AgentTask("t"), Observation("long " * 100))
    assert "left out" not in conversation.parts[0].prompt.text
    writer.answer(conversation, encoded(policy, f"{hermes('add', a=1, b=1)}{END}"))
    results = (CallResult("add", "short", 0), CallResult("add", "word " * 100, 0))
    shown = writer.follow(conversation, Observation("short\nword", results=results)).text
    assert re.findall(r"<tool_response>\nshort\n</tool_response>", shown)
    assert shown.count("tokens left out]") == 1
    writer.answer(conversation, encoded(policy, f"say{END}"))
    assert "tokens left out]" in writer.follow(conversation, Observation("word " * 100)).text
    found = writer.transcript(conversation, ["call", "say"], None)
    assert "left out" not in json.dumps([found.prompt, found.completion]), "reward functions read everything"


NOTICE = re.compile(r"\[(\d+) turns?, (\d+) tokens? (?:are )?left\]")


@pytest.mark.parametrize(
    "options", [{}, {"history_turns": 1}, {"history": "template"}, {"history": "template", "history_turns": 1}]
)
def test_the_budget_notice_is_exact(policy, options):
    writer = Writer(policy, ConversationConfig(system="", budget_notice=True, **options), "", max_turns=6)
    turns = [(f"<think>\nhm{n}\n</think>\n\nanswer{n}{END}", Observation(f"seen{n}")) for n in range(1, 5)]
    contexts, _ = play(writer, policy, turns)
    assert not NOTICE.search(policy.processor.tokenizer.decode(contexts[0])), "the task stays as it is"
    for number, ids in enumerate(contexts[1:], 1):
        found = NOTICE.findall(policy.processor.tokenizer.decode(ids))
        assert found[-1] == (str(6 - number), str(policy.positions - len(ids)))


def test_a_notice_whose_number_changes_its_own_length_is_exact():
    def tokens(text):
        return len(text.split()) + sum(map(str.isdigit, text))

    for room in range(100, 1300):
        notice = settle_notice(1, room, lambda text, room=room: room - tokens(text))
        assert notice.startswith("[1 turn, ")
        assert int(NOTICE.fullmatch(notice)[2]) == room - tokens(notice)


def test_the_notice_stands_in_the_last_result_and_keeps_anchors(policy, qwen, tmp_path, monkeypatch, closing):
    script = (f"{hermes('add', a=2, b=1)}\n{hermes('add', a=1, b=1)}{END}", "eos"), (f"5{END}", "eos")
    anchors = []
    for notice in (False, True):
        scripted(monkeypatch, *script)
        conversation = ConversationConfig(system="", tools=True, budget_notice=notice)
        recipe = closing(AgentRecipe(make_config(tmp_path, qwen, conversation=conversation)))
        episode = episodes_of(recipe)[0]
        text = episode.trajectory.inserts[0].prompt.text
        assert bool(re.search(r"<tool_response>\n2\n\[3 turns, \d+ tokens left\]\n</tool_response>", text)) is notice
        anchors.append(episode.anchors)
    assert anchors[0] == anchors[1]


def qwen_messages(turns, count):
    """The conversation before answer `count`, as a client of a server that parses answers sends it."""
    messages = [{"role": "user", "content": "Task"}]
    for said, seen in turns[:count]:
        messages += [said, *seen]
    return messages


def thinking(thought, content="", calls=()):
    called = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    further = {"tool_calls": called} if calls else {}
    return {"role": "assistant", "content": content, "reasoning_content": thought, **further}


def test_row_ids_are_the_templates_for_user_turns_with_thoughts(policy):
    turns = [
        (f"<think>\nhm{n}\n</think>\n\nanswer{n}{END}", Observation(f"seen{n} <|im_end|>" if n == 2 else f"seen{n}"))
        for n in range(1, 4)
    ]
    contexts, restarts = play(Writer(policy, ConversationConfig(history="template"), ""), policy, turns)
    assert restarts == [1, 2, 3], "a user message drops the thought before it"
    given = [(thinking(f"hm{n}", f"answer{n}"), [{"role": "user", "content": f"seen{n}"}]) for n in range(1, 4)]
    for number, ids in enumerate(contexts):
        text = rendered("qwen3", qwen_messages(given, number), asks=True)
        if number < 2:
            assert ids == encoded(policy, text)
        # the control token in an observation is spelled out
        assert policy.processor.tokenizer.decode(ids).replace(" <|im_end|>", "") == text
        assert ids.count(policy.eos_ids[0]) == text.count(END)
    kept, none = play(Writer(policy, ConversationConfig(), ""), policy, turns)
    assert none == []
    assert policy.processor.tokenizer.decode(kept[3]).count("<think>") == 3


def test_row_ids_are_the_templates_for_tool_turns(policy):
    facts = read_template(policy.turns, [ADD])
    writer = Writer(policy, ConversationConfig(tools=True, history="template"), "", [ADD], "hermes", template=facts)

    def result(*texts):
        return Observation("\n".join(texts), results=tuple(CallResult("add", text, 0) for text in texts))

    two = f"{hermes('add', a=1, b=1)}\n{hermes('add', a='<|im_end|>', b=2)}"
    turns = [
        (f"<think>\nso\n</think>\n\nWell.\n{hermes('add', a=1, b='é')}{END}", result("2")),
        (f"<think>\nmore\n</think>\n\n{two}{END}", result("3", "4")),
        (f"<think>\nas I like\n</think>\n\n{hermes('add', a=7).replace(': 7', ':7')}{END}", result("9")),
        (f"<think>\ndone\n</think>\n\nIt is 9.{END}", Observation("And now?")),
    ]
    contexts, restarts = play(writer, policy, turns)
    answers = [
        thinking("so", "Well.", [("add", {"a": 1, "b": "é"})]),
        thinking("more", "", [("add", {"a": 1, "b": 1}), ("add", {"a": "<|im_end|>", "b": 2})]),
        thinking("as I like", "", [("add", {"a": 7})]),
        thinking("done", "It is 9."),
    ]
    seen = [["2"], ["3", "4"], ["9"], []]
    given = [
        (said, [{"role": "tool", "name": "add", "content": text} for text in texts])
        for said, texts in zip(answers, seen, strict=True)
    ]
    given[-1][1].append({"role": "user", "content": "And now?"})
    for number, ids in enumerate(contexts):
        text = rendered("qwen3", qwen_messages(given, number), asks=True, tools=[ADD])
        assert policy.processor.tokenizer.decode(ids) == text
        assert ids.count(policy.eos_ids[0]) == text.count(END) - text.count('"<|im_end|>"'), "no token of an argument"
    # \\u00e9 becomes é, the third call had its own spacing, and the message drops thoughts
    assert restarts == [1, 3, 4]


def test_what_the_template_would_not_change_extends_the_row(policy):
    turns = [(f"answer{n}{END}", Observation(f"seen{n}")) for n in range(1, 4)]
    rows = [
        play(Writer(policy, ConversationConfig(history=history), ""), policy, turns)
        for history in ("append", "template")
    ]
    assert rows[0] == rows[1]
    assert rows[1][1] == []


OTHERS = ("qwen3_8", "glm4moe", "lfm2_2_5_v2", "llama3_1", "gptoss", "gemma4", "gemma4_v5", "deepseek")


@pytest.mark.parametrize("name", OTHERS)
def test_other_templates_render_calls_and_thoughts_again(name, tmp_path_factory, caplog):
    chat = CHATS[name]
    policy = load_policy(ModelConfig(path=str(model_with(tmp_path_factory.mktemp(name) / "model", chat))))
    facts = read_template(policy.turns, [ADD])
    config = ConversationConfig(tools=True, history="template")
    writer = Writer(policy, config, "", [ADD], facts.format, template=facts)
    arguments = {"a": 2, "b": 1}
    written = json.dumps(arguments) if name in TEXTS else arguments
    call = {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": written}}
    first, second = {"role": "user", "content": "Task"}, {"role": "assistant", "content": "", "tool_calls": [call]}
    body = policy.turns.write_calls([call], [ADD])[1]
    stops = [place + len(stop) for stop in policy.turns.stops if (place := body.find(stop)) >= 0]
    conversation = writer.begin(AgentTask("t"), Observation("Task"))
    ids = policy.processor.tokenizer.encode(body[: min(stops, default=None)], add_special_tokens=False)
    writer.answer(conversation, ids if ids[-1] in policy.eos_ids else [*ids, policy.eos_ids[0]])
    part = writer.follow(conversation, Observation("3", results=(CallResult("add", "3", 0, "call00000"),)))
    whole = writer.cut(conversation)
    read = [*conversation.parts[0].prompt.input_ids.tolist(), *conversation.parts[1].prompt.input_ids.tolist()]
    read = [*read, *part.input_ids.tolist()] if whole is None else whole.input_ids.tolist()
    result = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "3"}
    expected = policy.processor.apply_chat_template(
        [first, second, result], tools=[ADD], tokenize=False, add_generation_prompt=True
    )
    assert policy.processor.tokenizer.decode(read) == expected
    assert "rejects a conversation" not in caplog.text


def test_a_conversation_that_the_template_rejects_keeps_its_tokens(policy, caplog):
    template = policy.turns
    writer = Writer(policy, ConversationConfig(history="template"), "")
    turns = [(f"answer{n}{END}", Observation(f"seen{n}")) for n in range(1, 4)]
    expected = play(Writer(policy, ConversationConfig(), ""), policy, turns)
    tokenizer = policy.processor.tokenizer
    written = tokenizer.chat_template
    tokenizer.chat_template = "{%- if messages | length > 3 %}{{ raise_exception('too many') }}{%- endif %}" + written
    try:
        assert play(writer, policy, turns) == expected
    finally:
        tokenizer.chat_template = written
    assert template is policy.turns
    (told,) = [record.getMessage() for record in caplog.records if "rejects a conversation" in record.getMessage()]
    assert told.endswith("as with conversation.history: append: too many")
    # an episode without too many messages is written as before
    thinks = [(f"<think>\nhm\n</think>\n\n{answer}", seen) for answer, seen in turns[:1]]
    assert play(writer, policy, thinks)[1] == [1]


def test_a_rewritten_conversation_shares_its_images(folder):
    seeing = load_policy(ModelConfig(path=str(folder)))
    for owner in {id(one): one for one in (seeing.processor, seeing.processor.tokenizer)}.values():
        if owner.chat_template is not None:
            owner.chat_template = owner.chat_template.replace(
                "parts(turn.content)",
                "(parts(turn.content) if loop.last else parts(turn.content).split('</think>')[-1])",
            )
    writer = Writer(seeing, ConversationConfig(history="template", history_images=3), "Look.")
    pictures = [np.full((56, 56 + 28 * (grey % 2), 3), grey, np.uint8) for grey in (10, 61, 110, 161)]
    conversation = writer.begin(AgentTask("t"), Observation("look0", (pictures[0],)))
    found, messages = [], [{"role": "system", "content": [{"type": "text", "text": "Look."}]}]
    for number, picture in enumerate(pictures):
        shown = [{"type": "image"}, {"type": "text", "text": f"look{number}"}]
        messages.append({"role": "user", "content": shown})
        if number:
            writer.answer(conversation, [*encoded(seeing, f"<think>hm{number}</think>go"), seeing.eos_ids[0]])
            writer.follow(conversation, Observation(f"look{number}", (picture,)))
            found.append(writer.cut(conversation))
        messages.append({"role": "assistant", "content": [{"type": "text", "text": "go"}]})
    *messages, _ = messages
    whole = seeing.encode(VlmTask("t", messages[:-2], [Image.fromarray(one) for one in pictures[:3]]))
    assert torch.equal(found[1].input_ids, whole.input_ids)
    assert torch.equal(found[1].position_ids, whole.position_ids)
    assert found[1].next_position == whole.next_position
    with torch.no_grad():
        own, expected = (seeing.encode_prefix([prompt]).last_state for prompt in (found[1], whole))
    assert_equal_up_to_rounding(own, expected)
    seen = [{id(leaf) for leaf in prompt.parts if "image_grid_thw" in leaf.media} for prompt in found]
    assert [len(own) for own in seen] == [2, 3, 3]
    assert seen[0] < seen[1], "each image is one object in all contexts"
    assert len(seen[1] & seen[2]) == 2
    assert found[2].text.count("[picture left out]") == 1


def rows_of(policy, restarts):
    """Three turns in each of four rows, all in one context, or each turn in its own."""
    between, episodes = encode_text_prompt(policy, "seen"), []
    for row in range(4):
        steps = Trajectory()
        for turn in range(3):
            if turn:
                steps.restart(between) if restarts else steps.add_given(between)
            steps.add_turn([7 + turn] * (1 + (row + turn) % 3), [-1.0] * (1 + (row + turn) % 3))
        rewards = [0.1 * row, 0.5, float(row % 2)]
        anchors = [1, 2 + row % 2, 3]
        episode = Episode(AgentTask(f"t{row // 2}"), between, steps, rewards, anchors=anchors, ending="terminated")
        episodes.append(episode)
    rollouts = pack_episodes(episodes, [0, 0, 1, 1], policy)
    # by turn and token, so that both layouts have the same
    place = rollouts.mask.cumsum(1)
    values = torch.where(rollouts.mask > 0, torch.sin(place + torch.arange(4.0)[:, None]), 0.0)
    extras = rollouts.extras | {ANCHOR: tabulate_anchors(episodes, rollouts.turn), "bootstrap_value": torch.zeros(4)}
    reward = torch.tensor([episode.total for episode in episodes])
    return rollouts.replace(reward=reward, values=values, logp_ref=rollouts.logp_old - 0.1, extras=extras)


def encode_text_prompt(policy, text):
    return policy.encode(VlmTask("t", [{"role": "user", "content": [{"type": "text", "text": text}]}]))


KNOWN = {"samples", "values", "turns", "anchors", "logp_ref"}
OBJECTIVES = [name for name, row in CATALOGUE.items() if row.needs <= KNOWN and row.advantage.kind != "tree"]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_advantages_reach_every_context_as_they_reach_one(policy, name):
    one, many = (get(name).compute_advantages(rows_of(policy, restarts)) for restarts in (False, True))
    assert [len(own) for own in AgentPayload.of(many).contexts] == [2] * 4
    for row in range(4):
        own, expected = (found.advantage[row][found.mask[row] > 0] for found in (many, one))
        assert_equal_up_to_rounding(own, expected)  # whitening sums over tables of other widths
        # a row's scalar reaches all of its turns
        turns = many.turn[row][many.mask[row] > 0]
        assert bool((own != 0).any()) or bool((expected == 0).all())
        assert sorted(set(turns.tolist())) == [0, 1, 2]
    assert bool((many.advantage[many.mask == 0] == 0).all())


def test_returns_that_end_at_observations_need_one_context():
    reset = ObjectiveConfig(preset="reinforce_pp", advantage={"mask_carry": "reset"})
    for options in ({"history_turns": 2}, {"history": "template"}, {"drop_thoughts": True}, {"history_images": 1}):
        config = AgentConfig(conversation=ConversationConfig(**options), objective=reset)
        with pytest.raises(ValueError, match=rf"once conversation\.{next(iter(options))} begins a context again"):
            config.check_objective()
    AgentConfig(objective=reset).check_objective()
    both = AgentConfig(conversation=ConversationConfig(history="template", drop_thoughts=True))
    with pytest.raises(ValueError, match="the chat template decides which thoughts stay"):
        both.check_parts(1e-6)


MODES = {
    "window": {"history_turns": 1},
    "template": {"history": "template"},
    "window of a template": {"history": "template", "history_turns": 1},
    "cuts and notices": {"max_result_tokens": 30, "budget_notice": True},
}


def talk_config(folder, model, options, **parts):
    parts = {
        "recipe": "agent",
        "conversation": ConversationConfig(system="", **options),
        "actions": ActionConfig(format="text", on_parse_error="noop"),
        "episode": EpisodeConfig(max_turns=4),
        "sampler": SamplerConfig(max_new_tokens=4, stop=[*"aeiou"]),
        "eval_data": {"heldout": TaskSetConfig(seeds=1, first_seed=100)},
        **parts,
    }
    steps = {"samples_per_task": 2}
    return run_config(AgentConfig, folder, model, TALK, {"pictures": False, "turns": 4}, 2, steps, **parts)


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_restart_score_as_they_were_sampled(tmp_path, qwen, mode, closing):
    recipe = closing(AgentRecipe(talk_config(tmp_path, qwen, MODES[mode])))
    rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
    payload, outputs = AgentPayload.of(rollouts), frozenset({"logp"})
    assert any(payload.contexts) is (mode != "cuts and notices")
    with torch.no_grad():
        old = recipe.scores(recipe.policy, rollouts, outputs).logp
    assert_equal_up_to_rounding(old, rollouts.logp_old)
    new = recipe.scores(recipe.policy, rollouts, outputs).logp
    assert torch.equal(new, old), "the ratio of the first update is 1"
    turns, places = one_row_a_turn(rollouts)
    with torch.no_grad():
        alone = recipe.scores(recipe.policy, turns, outputs).logp
    assert_equal_up_to_rounding(spread(alone, places, old.shape), old)
    for episode in payload.episodes:
        contexts = [context.input_ids for context in contexts_before_turns(episode)]
        assert len(contexts) == episode.trajectory.turns
        if "window" in mode:
            assert all(context.tolist().count(recipe.policy.eos_ids[0]) <= 3 for context in contexts[1:])


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=[pytest.mark.slow] * (" " not in mode)) for mode in MODES])
def test_a_run_in_every_mode(tmp_path, qwen, mode):
    config = talk_config(tmp_path, qwen, MODES[mode])
    run_dir = train(RECIPES["agent"], config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["policy/ratio_mean"] == 1.0
        assert row["optim/grad_norm"] > 0
    told = [text for text in read_warnings(run_dir) if "drops the thoughts of earlier responses" in text]
    assert len(told) == ("template" not in mode)
    (held,) = [json.loads(line) for line in (run_dir / "evaluations.jsonl").open()][-1:]
    assert held["episode/no_result/greedy"] == 0
    told = AgentRecipe.export(config, run_dir / "checkpoints" / "step-000002", tmp_path / "model").limits[-1]
    expected = ", ".join(f"conversation.{name}: {value}" for name, value in sorted(MODES[mode].items(), reverse=True))
    assert told == f"It was trained on contexts with {expected}; give it the same."


@pytest.mark.parametrize(
    ("name", "user", "tools"),
    [
        ("qwen3", ["user messages"], ["user messages"]),
        ("qwen3_8", [], []),
        ("llama3_1", [], []),
        ("gptoss", ["user messages"], ["user messages"]),
        ("glm4moe", ["user messages"], ["user messages"]),
        ("deepseek_r1_distill", ["user messages"], None),
        ("qwen2_5_vl", [], None),
    ],
)
def test_templates_that_drop_thoughts_are_known(name, user, tools):
    turns = turns_of(name)
    assert dropped_thoughts(turns) == user
    if tools is not None:
        assert dropped_thoughts(turns, [ADD]) == tools
    assert dropped_thoughts(turns_of("qwen3", enable_thinking=False)) == [], "the prompt closes the thought"


def test_a_run_with_tools_says_at_its_start_that_thoughts_are_dropped(tmp_path, qwen, closing, caplog):
    for options, told in (({}, 1), ({"history": "template"}, 0), ({"drop_thoughts": True}, 0)):
        caplog.clear()
        conversation = ConversationConfig(system="", tools=True, **options)
        closing(AgentRecipe(make_config(tmp_path, qwen, conversation=conversation)))
        found = [text for text in caplog.messages if "drops the thoughts of earlier responses before user" in text]
        assert len(found) == told
