import math
import sys
from pathlib import Path

import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.rewards import REWARDS, RewardConfig, RewardSum
from mmrl.rewards.calling import FAILURE_KINDS
from mmrl.rewards.reward_loading import load_function


def test_a_term_sets_the_number_of_its_workers(closing):
    spec = f"{Path(__file__).with_name('user_functions.py')}:pid"
    terms = [RewardConfig("one", spec, workers=1), RewardConfig("two", spec, workers=2), RewardConfig("open", spec)]
    rewards = closing(RewardSum([*terms, RewardConfig("same", spec, workers=2)], workers=3))
    assert [term.workers.size for term in rewards._terms] == [1, 2, 3, 2]
    assert rewards._terms[1].workers is rewards._terms[3].workers


def constant(values):
    return lambda prompts, completions, **columns: values[: len(completions)]


def test_weighted_sum_with_unweighted_terms():
    functions = {"one": constant([1.0, 0.0]), "two": constant([0.5, -1.0])}
    rewards = RewardSum([RewardConfig("one", weight=2.0), RewardConfig("two", weight=0.5)], functions)
    result = rewards.score(["q"] * 2, ["a", "b"], {})
    assert result.total == [2.25, -0.5]
    assert result.terms == {"one": [1.0, 0.0], "two": [0.5, -1.0]}
    assert result.errors == {}


def test_none_is_left_out_and_an_empty_sum_is_not_zero():
    functions = {"one": constant([1.0, None, None]), "two": constant([None, 3.0, None])}
    result = RewardSum([RewardConfig("one"), RewardConfig("two")], functions).score(["q"] * 3, ["a"] * 3, {})
    assert result.total[:2] == [1.0, 3.0]
    assert math.isnan(result.total[2])
    assert math.isnan(result.terms["one"][1])
    assert result.errors == {"sum/not_applicable": 1}


def test_a_failed_term_fails_the_row_unless_it_is_only_logged():
    functions = {"one": constant([1.0, 1.0]), "two": constant([float("nan"), 2.0])}
    both = RewardSum([RewardConfig("one"), RewardConfig("two")], functions).score(["q"] * 2, ["a"] * 2, {})
    assert math.isnan(both.total[0])
    assert both.total[1] == 3.0
    logged = RewardSum([RewardConfig("one"), RewardConfig("two", weight=0.0)], functions)
    result = logged.score(["q"] * 2, ["a"] * 2, {})
    assert result.total == [1.0, 1.0]
    assert result.errors == {"two/nan": 1}


def test_builtin_rewards_together():
    rewards = RewardSum(
        [
            RewardConfig("format", weight=0.1),
            RewardConfig("right", "number", weight=0.9),
            RewardConfig("overlong", options={"max_tokens": 8, "buffer_tokens": 4}),
        ]
    )
    texts = ["<think>a</think><answer>7</answer>", "<answer>7</answer>", "<think>a</think><answer>8</answer>"]
    result = rewards.score(["q"] * 3, texts, {"answer": [7, 7, 7], "completion_lengths": [4, 6, 8]})
    assert result.total == pytest.approx([1.0, 0.4, -0.9])
    assert list(result.terms) == ["format", "right", "overlong"]


def test_a_row_with_a_bad_right_answer_does_not_harm_the_others():
    rewards = RewardSum([RewardConfig("choice"), RewardConfig("exact")])
    result = rewards.score(["q"] * 3, ["<answer>B</answer>"] * 3, {"answer": ["B", "dog", "B"]})
    assert result.terms["choice"][::2] == [1.0, 1.0]
    assert math.isnan(result.total[1])
    assert result.errors == {"choice/raised": 1}
    assert "'dog'" in result.examples["choice/raised"]


def test_missing_column_lists_existing_ones():
    rewards = RewardSum([RewardConfig("number")])
    with pytest.raises(UserError, match=r"'number' needs answer.*named prompts, completions, level, solution"):
        rewards.score(["q"], ["a"], {"solution": [1], "level": [2]})
    with pytest.raises(UserError, match="needs answer"):
        rewards.check_columns(["solution"])
    rewards.check_columns(["answer"])


def test_options_replace_columns():
    def named(prompts, completions, level):
        return [float(level)] * len(completions)

    rewards = RewardSum([RewardConfig("named", options={"level": 7})], {"named": named})
    assert rewards.score(["q"], ["a"], {"level": [3]}).total == [7.0]
    assert rewards.score(["q"], ["a"], {}).total == [7.0]


def test_functions_get_only_the_columns_they_name():
    def named(prompts, completions, level):
        return [float(value) for value in level]

    rewards = RewardSum([RewardConfig("named")], {"named": named})
    assert rewards.score(["q"], ["a"], {"level": [3], "answer": [1]}).total == [3.0]


def test_chat_format_of_trl():
    seen = []

    def spy(prompts, completions):
        seen.append((prompts, completions))
        return [1.0]

    RewardSum([RewardConfig("spy", chat=True)], {"spy": spy}).score(["q"], ["a"], {})
    assert seen == [([[{"role": "user", "content": "q"}]], [[{"role": "assistant", "content": "a"}]])]
    RewardSum([RewardConfig("spy", chat=False)], {"spy": spy}).score(*seen[0], {})
    assert seen[1] == (["q"], ["a"])
    RewardSum([RewardConfig("spy")], {"spy": spy}).score(*seen[0], {})
    assert seen[2] == seen[0]  # as the data has it
    turns = [[{"role": "assistant", "content": "<answer>7</answer>"}]]
    assert RewardSum([RewardConfig("number")]).score(["q"], turns, {"answer": [7]}).total == [1.0]


def test_no_rows_and_lists_of_different_length():
    rewards = RewardSum([RewardConfig("number")])
    assert rewards.score([], [], {"answer": []}).total == []
    with pytest.raises(ValueError, match="'answer': 1"):
        rewards.score(["q"] * 2, ["a"] * 2, {"answer": [1]})
    with pytest.raises(ValueError, match="no rewards"):
        RewardSum([]).score(["q"], ["a"], {})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RewardConfig("nuber"), "did you mean 'number'"),
        (RewardConfig("zzz"), "built-in rewards: format, choice, number, exact, math, overlong"),
        (RewardConfig(""), "no name"),
        (RewardConfig("number", weight=float("nan")), "weight is nan"),
        (RewardConfig("number", timeout_s=0.0), "timeout_s"),
        (RewardConfig("number", rows="all"), "rows is 'all'; allowed: auto, independent, together"),
        (RewardConfig("number", options={"absolut": 1}), "did you mean 'absolute'"),
        (RewardConfig("number", options={"prompts": 1}), "no option 'prompts'"),
        (RewardConfig("format", options={"style": "xml"}), "style is 'xml'"),
        (RewardConfig("number", options={"absolute": "much"}), "TypeError"),
        (RewardConfig("overlong", options={"max_tokens": 8}), "needs the options buffer_tokens"),
        (RewardConfig("overlong", options={"max_tokens": 8, "buffer_tokens": 9}), "buffer_tokens 9"),
        (RewardConfig("math", options={"several": "first"}), "wrong or last"),
        (RewardConfig("mine", "nowhere.module:function"), "module 'nowhere.module' not found"),
        (RewardConfig("mine", "nowhere.py:function"), "file not found"),
        (RewardConfig("mine", ":function"), "expected module:function"),
    ],
)
def test_mistakes_in_the_configuration(config, message):
    with pytest.raises(UserError, match=message):
        RewardSum([config])


def test_two_terms_need_two_names():
    with pytest.raises(UserError, match="two rewards are named 'number'"):
        RewardSum([RewardConfig("number"), RewardConfig("number")])


def test_table_of_rewards_is_complete_and_loads():
    for name, entry in REWARDS.items():
        assert callable(load_function(entry.function)), name
        assert entry.summary
        assert entry.citation
        assert "\n" not in entry.summary + entry.citation
    assert all(sentence.endswith(".") for sentence in FAILURE_KINDS.values())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "from my_helper import two\n\ndef good(prompts, completions, **_):\n    return [two()] * len(completions)\n"
        "\ndef _hidden(): pass\nnumber = 3\n"
    )
    (tmp_path / "my_helper.py").write_text("def two():\n    return 2.0\n")
    (tmp_path / "broken_rewards.py").write_text("import not_there_at_all\n")
    (tmp_path / "crashing_rewards.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    for name in ("my_rewards", "my_helper"):  # tests of documents load modules of these names too
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_loading_from_the_working_directory_or_a_file(folder):
    for spec in ("my_rewards:good", "my_rewards.py:good", f"{folder}/my_rewards.py:good"):
        assert load_function(spec)([""], ["a", "b"]) == [2.0, 2.0]
        rewards = RewardSum([RewardConfig(spec)], workers=1)
        assert rewards.score(["q"], ["a"], {}).total == [2.0]
        rewards.close()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("my_rewards:goood", "did you mean 'good'"),
        ("my_rewards.py:other", "its functions are: good, two"),
        ("my_rewards:number", "is a int, not a function"),
        ("my_reward:good", "module 'my_reward' not found"),
        ("my_reward.py:good", "my_rewards.py"),
        ("broken_rewards:f", "not_there_at_all"),
        ("crashing_rewards:f", "ZeroDivisionError"),
        ("crashing_rewards.py:f", "ZeroDivisionError"),
    ],
)
@pytest.mark.parametrize("isolate", [True, False])
def test_loading_errors_list_existing_names(folder, spec, message, isolate):
    with pytest.raises(UserError, match=message):
        RewardSum([RewardConfig("mine", spec, isolate=isolate)], workers=1)


def compute_score(reward_inputs, format_weight=0.1):
    """A batch function as EasyR1's examples write them."""
    return [
        {"overall": len(each["response"]) + format_weight * each["response_length"], "accuracy": each["ground_truth"]}
        for each in reward_inputs
    ]


def compute_one(reward_input):
    return {"overall": float(reward_input["response"] == reward_input["ground_truth"]), "format": 1.0}


@pytest.mark.parametrize("place", ["here", "worker"])
def test_functions_of_easyr1_get_and_return_dictionaries(place):
    names = {"batch": "compute_score", "one": "compute_one"}
    configs = [RewardConfig(name, f"{__file__}:{function}") for name, function in names.items()]
    for config in configs:
        config.isolate = place == "worker"
    configs[0].options = {"format_weight": 2.0}
    rewards = RewardSum(configs, workers=1)
    columns = {"answer": ["a", "c"], "completion_lengths": [3, 4], "level": [1, 2]}
    completions = ["a", [{"role": "assistant", "content": "bb"}]]
    try:
        result = rewards.score(["q"] * 2, completions, columns)
        assert result.terms == {"batch": [7.0, 10.0], "one": [1.0, 0.0]}
        with pytest.raises(UserError, match="needs answer"):
            rewards.check_columns(["level"])
    finally:
        rewards.close()
    with pytest.raises(UserError, match="has no option 'weight'"):
        RewardSum([RewardConfig("batch", f"{__file__}:compute_score", isolate=False, options={"weight": 1})])


def compute_weighted(reward_inputs, weight, *, offset=0.0, **options):
    return [{"overall": weight * len(each["response"]) + offset + options.get("extra", 0)} for each in reward_inputs]


def test_arguments_of_easyr1_functions_are_filled_by_options():
    def term(options):
        return RewardSum([RewardConfig("mine", f"{__file__}:compute_weighted", isolate=False, options=options)])

    with pytest.raises(UserError, match="'mine' has no default for weight; set it in options"):
        term({"offset": 1.0})
    result = term({"weight": 2.0, "extra": 0.5}).score(["q"], ["abc"], {"answer": ["a"], "level": [1]})
    assert result.terms == {"mine": [6.5]}


def compute_positionally(reward_inputs, /, weight=1.0):
    return [{"overall": weight * len(each["response"])} for each in reward_inputs]


def compute_with_hidden(reward_inputs, weight, /):
    return [{"overall": weight} for _ in reward_inputs]


@pytest.mark.parametrize("isolate", [True, False])
def test_functions_of_easyr1_are_called_by_position(isolate, tmp_path, closing):
    """Whatever their first argument is called, where the module says which kind they are."""
    body = "def score(data, /, weight=1.0):\n    return {}\n"
    one, each = (
        '{"overall": weight * len(data["response"])}',
        '[{"overall": weight * len(x["response"])} for x in data]',
    )
    for kind, value in {"sequential": one, "batch": each}.items():
        (tmp_path / f"{kind}.py").write_text(f"REWARD_TYPE = {kind!r}\n{body.format(value)}")
    places = [f"{__file__}:compute_positionally", *(f"{tmp_path}/{kind}.py:score" for kind in ("sequential", "batch"))]
    configs = [RewardConfig(str(number), place, isolate=isolate) for number, place in enumerate(places)]
    for config in configs:
        config.options = {"weight": 2.0}
    rewards = closing(RewardSum(configs, workers=1))
    result = rewards.score(["q"] * 2, ["abc", "d"], {"answer": ["a", "b"]})
    assert list(result.terms.values()) == [[6.0, 2.0]] * 3
    (tmp_path / "other.py").write_text(body.format("[]"))
    for place, said in {
        f"{__file__}:compute_with_hidden": "has no default for weight",
        f"{__file__}:compute_weighted": "has no default for weight",
        f"{tmp_path}/other.py:score": "does not take prompts or completions.*reward_inputs",
    }.items():
        with pytest.raises(UserError, match=said):
            RewardSum([RewardConfig("mine", place, isolate=isolate)], workers=1)


def test_a_score_without_its_sum_is_an_error_of_the_row():
    rewards = RewardSum(
        [RewardConfig("bad")], {"bad": lambda reward_inputs: [{"accuracy": 1.0} for _ in reward_inputs]}
    )
    result = rewards.score(["q"], ["a"], {"answer": ["a"]})
    assert result.errors == {"bad/raised": 1}
    assert "overall" in result.examples["bad/raised"]


def test_a_shuffled_term_pays_the_true_values_in_another_order():
    def value(prompts, completions, **columns):
        return [None if text == "0" else float(text) for text in completions]

    texts = [str(number) for number in range(16)]
    terms = [RewardConfig(name="value", shuffle=True), RewardConfig(name="half", function="value", weight=0.0)]
    scorer = RewardSum(terms, functions={"value": value})
    found, again = (scorer.score([""] * 16, texts, {}) for _ in range(2))
    assert found.terms["value"][1:] == [float(text) for text in texts[1:]]
    assert math.isnan(found.terms["value"][0])
    # a row without a value stays without one
    assert math.isnan(found.total[0])
    assert sorted(found.total[1:]) == found.terms["value"][1:] != found.total[1:] == again.total[1:]
    # other responses, another order
    assert scorer.score([""] * 16, [*texts[:-1], "15.0"], {}).total[1:] != found.total[1:]


def test_the_values_of_images_are_shuffled_by_their_pixels():
    images = [np.full((8, 8, 3), level, np.uint8) for level in range(16)]
    scorer = RewardSum(
        [RewardConfig(name="level", shuffle=True)],
        functions={"level": lambda prompts, completions, **_: [float(image.max()) for image in completions]},
    )
    total = scorer.score([""] * 16, images, {}).total
    assert sorted(total) == [float(level) for level in range(16)] != total
    # a pixel is enough for another order
    images[15][3, 3, 0] = 0
    other = scorer.score([""] * 16, images, {}).total
    assert sorted(other) == sorted(total)
    assert other != total
