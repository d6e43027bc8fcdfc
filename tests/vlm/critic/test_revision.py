import json

import pytest

from mmrl.errors import UserError
from mmrl.recipes import RECIPES
from mmrl.rewards import RewardConfig
from mmrl.training.run import train
from mmrl.vlm.critic import revision
from mmrl.vlm.critic.revision import Revision, RevisionConfig, change_shares, revise
from mmrl.vlm.engine.vlm_sampler import SamplerConfig
from mmrl.vlm.model.model_config import ModelConfig
from tests.vlm.builders import make_task
from tests.vlm.pairs import pair_config

MODEL = "qwen2_5_vl"
SAMPLER = SamplerConfig(max_new_tokens=4)
CONFIG = RevisionConfig(critique_template="{{ question }} {{ answer }}?", revision_template="Wrong: {{ critique }}.")


@pytest.fixture
def tasks():
    return [make_task("one", "Sum?", [(64, 64)]), make_task("none", "Look.")]


@pytest.fixture
def reasoner(monkeypatch):
    """Answers every revision with "better", and records its inputs."""
    asked = []

    def say(policy, prompts, count, config, draws):
        asked.extend(prompt.text for prompt in prompts)
        return type("Said", (), {"texts": ["better"] * len(prompts)})

    monkeypatch.setattr(revision, "sample", say)
    return asked


def by_answer(table):
    return lambda tasks, answers: [table[text] for text in answers]


def test_the_critique_is_the_next_turn_and_satisfaction_ends_the_rounds(policies, tasks, reasoner):
    critic = by_answer({"7": "<think>7 is a 1</think>number 1", "8": "none", "better": "none"})
    config = RevisionConfig(revision_template="Wrong: {{ critique }}. {{ question }}", rounds=3)
    found = revise(policies[MODEL], tasks, ["7", "8"], critic, config, SAMPLER)
    assert found == [Revision(["7", "better"], ["<think>7 is a 1</think>number 1", "none"]), Revision(["8"], ["none"])]
    assert [one.criticised for one in found] == [True, False]
    (asked,) = reasoner
    parts = ("<|image_pad|>", "Sum?", "assistant\n7", "user\nWrong: number 1. Sum?", "assistant\n")
    places = [asked.find(part, 1 if number == 4 else 0) for number, part in enumerate(parts)]
    assert -1 not in places
    assert places[:4] == sorted(places[:4])
    assert asked.count("<|image_pad|>") == 1, "the question is repeated without its image"


def test_later_rounds_see_the_whole_conversation(policies, tasks, reasoner):
    found = revise(
        policies[MODEL], tasks[1:], ["7"], lambda t, a: ["number 1"] * len(a), RevisionConfig(rounds=2), SAMPLER
    )
    assert found == [Revision(["7", "better", "better"], ["number 1", "number 1"])]
    assert reasoner[1].startswith(reasoner[0])
    assert reasoner[1].count("Reflection on the former answer: number 1\nLook.") == 2


def test_an_empty_critique_revises_only_where_asked(policies, tasks, reasoner):
    silent = lambda tasks, answers: [""] * len(answers)  # noqa: E731
    assert [one.answers for one in revise(policies[MODEL], tasks, ["7", "8"], silent, CONFIG, SAMPLER)] == [
        ["7"],
        ["8"],
    ]
    always = revise(policies[MODEL], tasks, ["7", "8"], silent, CONFIG, SAMPLER, always=True)
    assert [one.answers for one in always] == [["7", "better"], ["8", "better"]]


def test_an_answer_that_no_longer_fits_is_kept(policies, tasks):
    long = "word " * 600
    (found,) = revise(policies[MODEL], tasks[1:], [long], lambda t, a: ["number 1"], CONFIG, SAMPLER)
    assert found.answers == [long, long]


def test_shares_by_hand():
    blamed, praised = Revision(["a", "b"], ["number 1"]), Revision(["a"], ["none"])
    changes = [
        (0.0, 1.0, blamed),
        (0.0, 0.0, blamed),
        (0.0, 0.0, praised),
        (1.0, 0.0, blamed),
        (1.0, 1.0, praised),
        (float("nan"), 1.0, blamed),
    ]
    assert change_shares(changes) == pytest.approx(
        {"revision/found": 2 / 3, "revision/fixed": 1 / 3, "revision/false_alarms": 0.5, "revision/broken": 0.5}
    )
    assert set(change_shares(changes[3:5])) == {"revision/false_alarms", "revision/broken"}


def revision_run(tmp_path, folders, reasoner):
    config = pair_config(tmp_path, folders[MODEL])
    config.evaluation.rewards = [RewardConfig(name="exact", options={"require_block": False})]
    config.evaluation.revision = RevisionConfig(
        reasoner=None if reasoner is None else ModelConfig(path=str(reasoner)),
        critique_template=CONFIG.critique_template,
        revision_template=CONFIG.revision_template,
    )
    return config


@pytest.mark.slow
def test_a_preference_run_measures_revisions_of_a_frozen_reasoner(tmp_path, tiny_folders):
    found = []
    for name, reasoner in (("own", None), ("frozen", tiny_folders[MODEL])):
        run_dir = train(RECIPES["preference"], revision_run(tmp_path / name, tiny_folders, reasoner))
        found.append([json.loads(line) for line in (run_dir / "evaluations.jsonl").open()])
    names = ("unrevised", "revised", "revised_empty", "revised_shuffled")
    for rows in found:
        assert all(0 <= row[f"accuracy/{name}"] <= 1 for row in rows for name in names)
        assert all("accuracy/rewards" in row for row in rows), "pairs are measured too"
    own, frozen = found
    same = ("accuracy/unrevised", "accuracy/revised")
    assert [own[0][name] for name in same] == [frozen[0][name] for name in same], "at the start both are the same model"
    assert frozen[0]["accuracy/unrevised"] == frozen[1]["accuracy/unrevised"], "the reasoner is not trained"


def test_a_missing_reasoner_is_an_error(tmp_path, tiny_folders):
    config = revision_run(tmp_path, tiny_folders, tmp_path / "nowhere")
    with pytest.raises(UserError, match="nowhere"):
        train(RECIPES["preference"], config)


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("critique_template", "{{ question }}", r"revision.critique_template never uses \{\{ answer \}\}"),
        ("revision_template", "{{ question }}", r"revision.revision_template never uses \{\{ critique \}\}"),
        ("revision_template", "{{ critique }} {{ answer }}", "it may only use {{ critique }}, {{ question }}"),
    ],
)
def test_wordings_that_lose_a_part_are_refused(key, text, message):
    with pytest.raises(UserError, match=message):
        RevisionConfig(**{key: text}).validate()
