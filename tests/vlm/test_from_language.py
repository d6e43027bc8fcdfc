"""A SmolVLM around a language model: text alone stays its own, the tower learns words, the decoder stays frozen."""

import math
import random
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from mmrl.errors import UserError
from mmrl.files import read_yaml
from mmrl.runs.records import read_jsonl
from mmrl.training.run import finish_run, last_model
from mmrl.vlm.data.dataset import DataConfig, load_tasks
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.model.model_config import ModelConfig
from mmrl.vlm.toy import from_language, sight_demo
from mmrl.vlm.toy.from_language import CURVE, WordReader, build_model, draw_batch, perplexity
from mmrl.vlm.toy.pictures import GENERAL, GROUPS, NOTHING, QUESTIONS, build_questions
from mmrl.vlm.toy.tiny_generic import build_tiny_generic

CONFIG = Path(__file__).parents[2] / "configs/vlm/pictures_sft.yaml"
SMALL = {"width": 32, "depth": 1, "heads": 2}
CORPUS = [*(text for texts in QUESTIONS.values() for text in texts), *(f"{asked} {said}" for asked, said, _ in GENERAL)]
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count the rings."}],
]


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    words = [f" {word}" for group in GROUPS.values() for word in group]
    folder = tmp_path_factory.mktemp("language") / "llama"
    return build_tiny_generic(folder, family="llama", corpus=CORPUS, tokens=words)


@pytest.fixture(scope="module")
def sees(language, tmp_path_factory):
    """A model that has learned words for a few steps."""
    folder = tmp_path_factory.mktemp("sees") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(from_language, "LOG_EVERY", 30)
        return build_model(folder, language=str(language), words_steps=60, words_batch=16, words_rate=3e-3, **SMALL)


def test_an_interrupted_stage_goes_on_to_the_same_weights(language, tmp_path, monkeypatch):
    options = {"language": str(language), "words_steps": 6, "words_batch": 4, **SMALL}
    monkeypatch.setattr(from_language, "LOG_EVERY", 2)
    whole = build_model(tmp_path / "whole", **options)
    left, draw = iter(range(5)), draw_batch
    with monkeypatch.context() as broken:
        broken.setattr(from_language, "draw_batch", lambda *given: next(left) + 1 and draw(*given))
        with pytest.raises(StopIteration):  # in the fifth step: the held-out pictures are the first batch
            build_model(tmp_path / "cut", **options)
    assert not (tmp_path / "cut").exists()
    again = build_model(tmp_path / "cut", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "whole"]
    assert [row["step"] for row in read_jsonl(again / CURVE)] == [2, 4, 6]
    first, second = (AutoModelForImageTextToText.from_pretrained(folder).state_dict() for folder in (whole, again))
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


@torch.no_grad()
def test_text_alone_is_the_language_models(language, sees):
    tokenizers = AutoTokenizer.from_pretrained(language), AutoProcessor.from_pretrained(sees).tokenizer
    models = AutoModelForCausalLM.from_pretrained(language), AutoModelForImageTextToText.from_pretrained(sees)
    known = len(tokenizers[0])
    for chat in CHATS:
        prompts = [
            one.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
            for one in tokenizers
        ]
        assert torch.equal(prompts[0]["input_ids"], prompts[1]["input_ids"])
        old, new = (model(**prompt).logits[0] for model, prompt in zip(models, prompts, strict=True))
        torch.testing.assert_close(new[:, :known].log_softmax(-1), old.log_softmax(-1), rtol=1e-5, atol=1e-5)
        # a new token's logit is the mean logit, so that all of them are rare among many tokens
        torch.testing.assert_close(new[:, known:], old.mean(-1, keepdim=True).expand(-1, 4), rtol=1e-4, atol=1e-4)
    lost = math.log1p(4 / known)
    assert 0 <= math.log(perplexity(str(sees)) / perplexity(str(language))) <= lost


def test_the_default_system_message_stands_before_text_alone(language, tmp_path):
    plain = AutoTokenizer.from_pretrained(language)
    plain.chat_template = (
        "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
        "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    folder = tmp_path / "kind"
    AutoModelForCausalLM.from_pretrained(language).save_pretrained(folder)
    plain.save_pretrained(folder)
    built = build_model(tmp_path / "model", language=str(folder), words_steps=0, **SMALL)
    made = AutoProcessor.from_pretrained(built).tokenizer
    for chat in CHATS:
        assert made.apply_chat_template(chat, tokenize=False) == plain.apply_chat_template(chat, tokenize=False)
    seen = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}]
    assert made.apply_chat_template(seen, tokenize=False) == "<|im_start|>user\n<image>Hi<|im_end|>\n"


def test_the_tower_learns_the_decoders_words(sees):
    rows = read_jsonl(sees / CURVE)
    assert [row["step"] for row in rows] == [30, 60]
    assert rows[1]["fresh_loss"] < 0.85 * rows[0]["fresh_loss"]
    assert {*GROUPS} <= rows[0].keys()


def test_tokens_that_are_the_words_are_read_as_these_words(sees):
    model = AutoModelForImageTextToText.from_pretrained(sees)
    reader = WordReader(model.get_input_embeddings().weight, AutoProcessor.from_pretrained(sees).tokenizer)
    _, cells = draw_batch(random.Random(0), 64)
    starts = [sum(map(len, [*GROUPS.values()][:number])) for number in range(len(GROUPS))]
    for number, group in enumerate(GROUPS):
        shown = cells[:, number] != NOTHING
        tokens = reader.words[starts[number] + cells[:, number].clamp(min=0)] * shown[..., None]
        assert reader(tokens, cells)[1][group] == 1.0


def run_sft(sees, folder, *overrides):
    """A run of the configuration on few questions."""
    splits = read_yaml(CONFIG)["eval_data"]
    few = [f"eval_data.{name}.build_options.count=4" for name in splits]
    few += [f"eval_data.{name}.path={folder}/data/{name}.jsonl" for name in splits]
    given = ["model.build=null", "model.build_options={}", "trainer.steps=2", "trainer.tasks_per_step=4"]
    given += ["data.build_options.count=8", f"data.path={folder}/data/sft.jsonl", f"model.path={sees}"]
    return finish_run(CONFIG, folder / "run", [*given, *few, *overrides])


def test_the_decoder_is_frozen_with_its_tied_embeddings(sees, tmp_path):
    run = run_sft(sees, tmp_path)
    before, after = (AutoModelForImageTextToText.from_pretrained(path) for path in (sees, last_model(run)))
    assert after.lm_head.weight.data_ptr() == after.get_input_embeddings().weight.data_ptr()
    moved = {name for name, weight in before.named_parameters() if not torch.equal(weight, after.get_parameter(name))}
    language = {name for name, _ in before.named_parameters() if name.startswith(("model.text_model.", "lm_head."))}
    assert moved
    assert not moved & language
    state = torch.load(last_model(run).with_name("state.pt"), weights_only=False)
    moments = state["updater"]["optimizer"]["state"]
    assert len(moments) == len([name for name, _ in before.named_parameters() if name not in language])
    assert perplexity(str(last_model(run))) == perplexity(str(sees))


@pytest.mark.slow
def test_the_demo_prints_accuracy_by_kind_and_perplexity(language, tmp_path, monkeypatch):
    small = read_yaml(CONFIG)
    config = tmp_path / "small.yaml"
    small["model"]["build_options"] = {"language": str(language), "words_steps": 1, "words_batch": 8, **SMALL}
    small["data"]["build_options"]["count"] = 8
    small["trainer"] |= {"steps": 1, "tasks_per_step": 4}
    for split in small["eval_data"].values():
        split["build_options"]["count"] = 14
    config.write_text(yaml.safe_dump(small))
    monkeypatch.setattr(sight_demo, "CONFIG", config)
    lines = sight_demo.run(tmp_path / "demo")
    text = "\n".join(lines)
    for expected in ("fresh", "heldout", "digit", "ignores the image", "unrelated questions", "perplexity on a page"):
        assert expected in text
    assert Path(lines[-1].removeprefix("report: ")).is_file()


def test_language_models_that_cannot_be_the_decoder_are_refused(language, language_model, tmp_path):
    for given, message in (
        (tmp_path / "none", "model folder .* not found"),
        (language_model, "is a qwen3; the decoder"),
    ):
        with pytest.raises(UserError, match=message):
            build_model(tmp_path / "model", language=str(given), words_steps=0)
    other = AutoTokenizer.from_pretrained(language)
    other.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    folder = tmp_path / "other"
    AutoModelForCausalLM.from_pretrained(language).save_pretrained(folder)
    other.save_pretrained(folder)
    with pytest.raises(UserError, match="is not ChatML"):
        build_model(tmp_path / "model", language=str(folder), words_steps=0)


def test_the_policy_reads_pictures(sees, tmp_path):
    policy = load_policy(ModelConfig(path=str(sees)))
    tasks = load_tasks(DataConfig(path=str(build_questions(tmp_path / "q.jsonl", count=2)))).tasks
    prompts = [policy.encode(task) for task in tasks]
    image = policy.network.config.image_token_id
    assert [int((prompt.input_ids == image).sum()) for prompt in prompts] == [16, 16]
    with torch.no_grad():
        states = policy.last_states(prompts)
        alone = policy.network(input_ids=prompts[0].input_ids[None], **prompts[0].media, output_hidden_states=True)
    torch.testing.assert_close(policy.head.logits(states[:1]), alone.logits[:, -1], rtol=1e-4, atol=1e-4)
