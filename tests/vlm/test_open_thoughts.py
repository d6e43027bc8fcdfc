"""Chat templates that end the prompt with `<think>`: rewards, actions and points read the answer as begun there."""

import pytest
import torch

from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.environments.environment import Observation, parse_answer
from mmrl.agents.rollout.conversation import ConversationConfig, Writer
from mmrl.agents.rollout.turns import TurnSampler
from mmrl.gui.benchmarks.prompts import begin_answer
from mmrl.gui.grounding import answers
from mmrl.gui.grounding.rewards import point_reward
from mmrl.rewards import RewardConfig, RewardSum, TrainerState
from mmrl.rewards.answers import exact_reward, final_part, format_reward
from mmrl.vlm.data.prompt import join_prompts
from mmrl.vlm.data.task import VlmTask, score_texts, with_start
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig, sample
from mmrl.vlm.methods.augmentation import augment_task
from mmrl.vlm.model.model_config import ModelConfig
from tests.vlm.builders import make_task

OPENED = "<think>\n"


@pytest.fixture(scope="module")
def plain(tiny_folders):
    return load_policy(ModelConfig(path=str(tiny_folders["qwen3_vl"])))


@pytest.fixture(scope="module")
def thinker(tiny_folders):
    """A policy whose template opens a thought, as Qwen3-VL-Thinking's does."""
    policy = load_policy(ModelConfig(path=str(tiny_folders["qwen3_vl"])))
    for owner in {id(one): one for one in (policy.processor, policy.processor.tokenizer)}.values():
        if owner.chat_template is not None:
            assert "assistant\\n'" in owner.chat_template
            owner.chat_template = owner.chat_template.replace("assistant\\n'", "assistant\\n<think>\\n'")
    return policy


def test_sampled_answers_begin_with_the_thought_that_the_prompt_opened(thinker):
    prompts = [thinker.encode(make_task(str(n), "Sum?", [(64, 64)])) for n in range(2)]
    assert [prompt.answer_start for prompt in prompts] == [OPENED] * 2
    drawn = sample(thinker, prompts, 2, SamplerConfig(max_new_tokens=4), torch.Generator())
    bare = thinker.processor.tokenizer.batch_decode(drawn.response_ids, skip_special_tokens=True)
    assert drawn.texts == [OPENED + text for text in bare]
    rows = torch.arange(2)
    for reread in (True, False):
        turns = TurnSampler(thinker, SamplerConfig(max_new_tokens=3), 2, reread=reread)
        turns.begin(rows, prompts, rows)
        for _ in range(2):
            assert all(text.startswith(OPENED) for text in turns.sample(rows, None).texts)
            part = thinker.encode_turn(make_task("more", "And now?"), answered=False)
            turns.extend(rows, [part, part])


def test_rewards_actions_and_points_agree_where_a_thought_is_open():
    action, point = '{"action": "up"}', '[{"point_2d": [20, 30]}]'
    columns = {"space": "abs_original", "original_wh": [100, 100], "model_wh": [100, 100], "bbox": [10, 20, 30, 40]}
    for text, done in (("go {}</think>\n{}", True), ("go {} or {}", False), ("a</think> {} <think> {}", False)):
        said = [OPENED + text.format(what, what) for what in (action, point, "<answer>4</answer>")]
        assert (parse_answer(said[0], "json").error is None) is done
        assert answers.parse_answer(said[1], "robust").ok is done
        for parser in ("robust", "reference"):
            scores = [
                point_reward(["q"], [said[1]], grounding=[columns | {"no_think": no_think}], parser=parser)
                for no_think in (False, True)
            ]
            assert scores == [[2.0 if done else -1.0]] * 2, "AEPO's answer with a thought, asked for or not"
        assert exact_reward(["q"], [said[2]], answer=["4"]) == [float(done)]
        assert (final_part(said[2]) is not None) is done
    assert format_reward(["q"], [f"{OPENED}so</think><answer>4</answer>"]) == [1.0]


def test_given_answers_continue_the_thought_or_close_it(thinker):
    prompt, tokenizer = thinker.encode(make_task("one", "Sum?")), thinker.processor.tokenizer

    def written(text):
        ids = thinker.encode_answer(prompt, text)
        assert ids[-1] == tokenizer.eos_token_id
        return tokenizer.decode(ids[:-1])

    assert written("<think>\nso</think>4") == "so</think>4"
    assert written("so</think>4") == "so</think>4"
    assert written("4") == "\n</think>\n\n4", "as such templates write an answer without a thought"
    begun = begin_answer(prompt, "[", thinker.turns)
    assert (begun.text, begun.answer_start) == (f"{prompt.text}\n</think>\n\n[", "")
    assert tokenizer.decode(begun.input_ids) == tokenizer.decode(prompt.input_ids) + "\n</think>\n\n["
    hinted = thinker.encode(augment_task(make_task("two", "Sum?"), given_start="<think>two and"))
    assert hinted.text.endswith("assistant\n<think>\ntwo and")
    assert hinted.text.count("<think>") == 1


def test_a_given_start_and_the_prompts_thought_open_one_block(thinker, plain):
    for start, answer, whole in (
        ("<think>", "<think>so", "<think>so"),
        ("<think>", f"{OPENED}so", f"{OPENED}so"),
        ("Step 1. <think>", "<think>so", "Step 1. <think>so"),
        ("<think>two and", "so", "<think>two andso"),
        ("[", "1]", "[1]"),
        ("", "<think>so", "<think>so"),
    ):
        assert with_start(start, answer) == whole
    seen = []

    def length(prompts, completions, **columns):
        seen.extend(completions)
        return [0.0] * len(completions)

    rewards = RewardSum([RewardConfig("length")], functions={"length": length})
    for policy in (thinker, plain):
        task = augment_task(make_task("one", "Sum?"), given_start="<think>")
        prompt = policy.encode(task)
        texts = sample(policy, [prompt], 1, SamplerConfig(max_new_tokens=2), torch.Generator()).texts
        score_texts(rewards, TrainerState(), [task], texts, [[1, 2]])
    assert [text.count("<think>") for text in seen] == [1, 1]


def test_a_question_stored_as_text_reaches_rewards_without_the_markup_of_the_template():
    seen = []

    def asked(prompts, completions, **columns):
        seen.extend(prompts)
        return [0.0] * len(completions)

    rewards = RewardSum([RewardConfig("asked")], functions={"asked": asked})
    task = make_task("one", "Sum?", [(64, 64)])
    score_texts(rewards, TrainerState(), [task], ["3"], [[1]])
    assert seen == ["<image>Sum?"]


def test_images_for_rewards_are_opened_once_a_question():
    class Counted(VlmTask):
        def load_images(self):
            opened.append(self.id)
            return super().load_images()

    def looks(prompts, completions, images, **columns):
        return [float(len(own)) for own in images]

    opened = []
    one, two = (Counted(**vars(make_task(name, "Sum?", [(64, 64)]))) for name in ("one", "two"))
    rewards = RewardSum([RewardConfig("looks")], functions={"looks": looks})
    result = score_texts(rewards, TrainerState(), [one, one, two, two], ["a"] * 4, [[1]] * 4)
    assert result.total == [1.0] * 4
    assert opened == ["one", "two"]


def test_thoughts_of_earlier_answers_leave_the_history(thinker):
    tokenizer, eos = thinker.processor.tokenizer, thinker.processor.tokenizer.eos_token
    look = Observation("look", (torch.zeros(56, 56, 3, dtype=torch.uint8).numpy(),))

    def play(drop, said):
        writer = Writer(thinker, ConversationConfig(system="", drop_thoughts=drop), "Walk.")
        conversation = writer.begin(AgentTask("one"), look)
        whole = conversation.parts[0].prompt
        for text in said:
            ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
            ids.append(tokenizer.eos_token_id)
            writer.answer(conversation, ids)
            part, cut = writer.follow(conversation, look), writer.cut(conversation)
            given = join_prompts([whole, *[conversation.parts[-2].prompt, part]])
            assert (cut is None) is not drop
            whole = given if cut is None else cut
        return whole

    kept, dropped = (play(drop, ["left?</think>\n\nleft", "so</think>up"]) for drop in (False, True))
    assert tokenizer.decode(kept.input_ids).count("<think>\n") == 3
    text = tokenizer.decode(dropped.input_ids)
    assert text.count("<think>") == 1
    assert text.endswith("assistant\n<think>\n")
    assert f"assistant\nleft{eos}" in text
    assert f"assistant\nup{eos}" in text
    assert dropped.position_ids.shape == (3, len(dropped))
    said = f"say {eos} or <|image_pad|> now"
    spelled, bare = (play(True, [f"so</think>{words}"]).input_ids.tolist() for words in (said, "say it"))
    assert f"assistant\n{said}{eos}" in tokenizer.decode(spelled)
    for token in map(tokenizer.convert_tokens_to_ids, (eos, "<|image_pad|>")):
        assert spelled.count(token) == bare.count(token), "an answer's characters are no control token"
    start = tokenizer.encode("so</think>\n\ntap ", add_special_tokens=False, split_special_tokens=True)
    mark = tokenizer.convert_tokens_to_ids("<|im_start|>")
    writer = Writer(thinker, ConversationConfig(system="", drop_thoughts=True), "Walk.")
    conversation = writer.begin(AgentTask("one"), look)
    writer.answer(conversation, [*start, mark, *tokenizer.encode("here"), tokenizer.eos_token_id])
    spoken = conversation.parts[-1].spoken.input_ids.tolist()
    assert spoken.count(mark) == 1, "a control token that was sampled is no text"
    assert tokenizer.decode(spoken) == f"tap <|im_start|>here{eos}"
    with torch.no_grad():  # the images' features are those of the whole parts
        assert bool(torch.isfinite(thinker.encode_prefix([dropped]).last_state).all())


def test_nothing_stays_of_an_answer_that_was_cut_in_its_thought(thinker):
    tokenizer = thinker.processor.tokenizer
    writer = Writer(thinker, ConversationConfig(system="", drop_thoughts=True), "Walk.")
    conversation = writer.begin(AgentTask("one"), Observation("look"))
    writer.answer(conversation, tokenizer.encode("left?", add_special_tokens=False))
    writer.follow(conversation, Observation("again"))
    text = tokenizer.decode(writer.cut(conversation).input_ids)
    assert "left" not in text
    assert f"assistant\n{tokenizer.eos_token}" in text
