import functools
import inspect
import io
import json
import logging
import os
import signal
import typing
from pathlib import Path

import datasets
import numpy as np
import peft
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from mmrl import Run, compare, evaluate, train
from mmrl.api.comparing import _arguments
from mmrl.api.result import evaluation_rows
from mmrl.api.rows import place
from mmrl.api.training import _filled, _inputs, _Shown
from mmrl.config import load_run
from mmrl.errors import RunStopped, UserError
from mmrl.runs.tracking import Tracker
from mmrl.vlm.model.network import processor_folder, resolve_model
from mmrl.vlm.toy.tiny import build_tiny_vlm
from mmrl.vlm.toy.tiny_generic import build_tiny_generic
from mmrl.workers import given
from mmrl.workers.loading import LoadError, find_function
from tests.programs import run_processes

ROWS = [{"prompt": f"say {number}", "answer": str(number)} for number in range(1, 9)]
SMALL = {"samples_per_task": 4, "tasks_per_step": 2, "max_new_tokens": 4, "learning_rate": 1e-2, "steps": 2}


def length(prompts, completions, **columns):
    return [float(len(text)) for text in completions]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model") / "tiny"
    build_tiny_generic(place, corpus=["say one two three four 1 2 3 4"])
    return place


def embedding(network):
    return network.get_input_embeddings().weight


def trained_weights(run):
    return load_file(sorted((run.folder / "checkpoints").glob("step-*"))[-1] / "model" / "model.safetensors")


def test_a_run_from_python_is_a_run_from_its_configuration(folder, tmp_path):
    run = train(
        "dr_grpo", model=folder, data=ROWS, eval_data=ROWS[:2], reward=length, output_dir=tmp_path / "run", **SMALL
    )
    entry, config = load_run(run.config_path)
    assert (entry.name, config.objective.preset, config.trainer.steps) == ("vlm", "dr_grpo", 2)
    assert config.rewards[0].function == f"{__name__}:length"
    assert len(run.metrics) == 2
    assert {row["step"] for row in run.evaluation} == {0, 2}
    assert {row["split"] for row in run.evaluation} == {"heldout"}
    assert len(run.samples()) == 8
    assert run.samples(1)[0]["prompt"].count("say") == 1
    with pytest.raises(UserError, match="samples of step 7 were not kept"):
        run.samples(7)
    assert run.report().is_file()
    assert "from_pretrained" in run.export(tmp_path / "exported")
    assert torch.equal(
        embedding(run.model),
        trained_weights(run)["model.embed_tokens.weight"],
    )
    assert run.processor.eos_token_id is not None
    again = Run(run.folder)
    assert again.metrics == run.metrics
    assert "<svg" in run._repr_html_()


def test_functions_of_every_kind_reach_the_workers(folder, tmp_path):
    bonus = 3.0

    class Scores:
        factor = 2.0

        def score(self, completions, answer, **columns):
            return [self.factor * len(each) for each in answer]

    def closure(prompts, completions, **columns):
        return [bonus for _ in completions]

    run = train(
        "grpo",
        model=folder,
        data=ROWS,
        reward=[
            closure,
            (lambda completions, **columns: [1.0 for _ in completions], 0.5),
            Scores().score,
            (functools.partial(length, extra=1), 0),
        ],
        output_dir=tmp_path / "run",
        **SMALL,
    )
    terms = [(term.name, term.function, term.weight, term.isolate) for term in run.config.rewards]
    assert terms == [
        ("closure", "given:closure", 1.0, None),
        ("reward", "given:reward", 0.5, None),
        ("score", "given:score", 1.0, None),
        ("partial", "given:partial", 0.0, None),
    ]
    assert run.metrics[0]["reward/mean"] == 3.0 + 0.5 + 2.0
    objects = json.loads((run.folder / "objects.json").read_text())
    assert "bonus for _ in completions" in objects["closure"]["source"]


def test_texts_are_taken_as_they_are_and_no_name_hides_a_function(folder, tmp_path):
    def model_judge(completions, note, **columns):
        return [float(text == "${note}") for text in note]

    rows = [{**row, "note": "${note}"} for row in ROWS]
    options = {"data.format_prompt": "{{ content }} ${note}"}
    call = functools.partial(train, "grpo", model=folder, data=rows, eval_data=rows[:2], options=options)
    run = call(reward=model_judge, output_dir=tmp_path / "a ${b}", **SMALL | {"steps": 1})
    assert run.metrics[0]["reward/mean"] == 1.0
    assert "${note}" in run.samples()[0]["prompt"]
    assert evaluate(run)[0]["n"] == 2


def test_a_function_that_cannot_be_sent_runs_here(folder, tmp_path, caplog):
    with (tmp_path / "file").open("w") as held:

        def writes(prompts, completions, **columns):
            held.write("called")
            return [0.0 for _ in completions]

        with caplog.at_level("INFO", logger="mmrl"):
            run = train("grpo", model=folder, data=ROWS, reward=writes, output_dir=tmp_path / "run", **SMALL)
    assert run.config.rewards[0].isolate is False
    assert "reward writes runs in the training process" in caplog.text
    assert (tmp_path / "file").read_text().startswith("called")


def test_a_run_is_continued_only_by_the_program_that_has_its_functions(folder, tmp_path, caplog):
    def score(prompts, completions, **columns):
        return [float(len(text)) for text in completions]

    call = functools.partial(train, "grpo", model=folder, data=ROWS, output_dir=tmp_path / "run")
    call(reward=score, **SMALL)
    with pytest.raises(LoadError, match="an object of the Python program that started this run"):
        find_function("given:score")
    with pytest.raises(UserError, match="resume=True"):
        call(reward=score, **SMALL)
    run = call(reward=score, resume=True, **SMALL | {"steps": 3})
    assert len(run.metrics) == 3
    assert "different code" not in caplog.text

    def score(prompts, completions, **columns):
        return [1.0 for _ in completions]

    call(reward=score, resume=True, **SMALL | {"steps": 4})
    assert "resuming with different code than before: score" in caplog.text


def test_a_loaded_model_is_trained_as_it_is_and_a_resumed_run_has_equal_bits(folder, tmp_path):
    def load():
        return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

    options = {"objective.kl.coef": 0.1}
    call = functools.partial(train, "grpo", data=ROWS, reward=length, options=options)
    network, tokenizer = load()
    network.eval()
    torch.manual_seed(5)
    expected_draw = torch.rand(1)
    torch.manual_seed(5)
    run = call(model=(network, tokenizer), output_dir=tmp_path / "whole", **SMALL | {"steps": 3})
    assert torch.equal(torch.rand(1), expected_draw), "the caller's random numbers are as before"
    assert run.model is network
    assert not network.training
    whole = trained_weights(run)
    assert torch.equal(embedding(network), whole["model.embed_tokens.weight"])
    # as from the folder, and as stopped in the middle and continued with the trained object
    from_folder = call(model=folder, output_dir=tmp_path / "folder", **SMALL | {"steps": 3})
    assert all(torch.equal(weight, trained_weights(from_folder)[name]) for name, weight in whole.items())
    other, _ = load()
    call(model=(other, tokenizer), output_dir=tmp_path / "parts", **SMALL | {"steps": 2})
    parts = call(model=(other, tokenizer), output_dir=tmp_path / "parts", resume=True, **SMALL | {"steps": 3})
    assert all(torch.equal(weight, trained_weights(parts)[name]) for name, weight in whole.items())


def test_adapters_in_a_loaded_model_can_be_saved(folder, tmp_path):
    network, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    call = functools.partial(train, "grpo", data=ROWS, reward=length, output_dir=tmp_path / "run", **SMALL)
    run = call(model=(network, tokenizer), lora=4)
    run.model.save_pretrained(tmp_path / "saved")
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "saved")
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, network.eval()(input_ids=ids).logits)
    # peft writes no tokenizer
    base, adapter = resolve_model(str(tmp_path / "saved"))
    assert processor_folder(base, adapter) == base
    for model in (run.model, (run.model, tokenizer), network):
        with pytest.raises(UserError, match="model already has adapters"):
            call(model=model, output_dir=tmp_path / "other")


def test_the_processor_of_a_run_has_its_settings(tmp_path):
    path = build_tiny_vlm(tmp_path / "model", corpus=["say 1"], hidden=24, layers=1, heads=2, kv_heads=1)
    model = AutoModelForImageTextToText.from_pretrained(path), AutoProcessor.from_pretrained(path)
    before = dict(model[1].image_processor.size)
    rows = [{"prompt": "say 1", "image": Image.new("RGB", (60, 60)), "answer": "1"}] * 2
    more = SMALL | {"steps": 1, "max_pixels": 3136, "options": {"model.min_pixels": 784}}
    run = train("grpo", model=model, data=rows, reward=length, output_dir=tmp_path / "run", **more)
    assert run.processor.image_processor.size["longest_edge"] == 3136
    assert dict(model[1].image_processor.size) == before


def test_a_frozen_model_is_not_trained(folder, tmp_path):
    network = AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False)
    model = (network, AutoTokenizer.from_pretrained(folder))
    with pytest.raises(UserError, match="every parameter of the model is frozen"):
        train("grpo", model=model, data=ROWS, reward=length, output_dir=tmp_path / "run", **SMALL)
    assert not (tmp_path / "run").exists()


def test_a_pipeline_keeps_its_precision_and_a_measurement_adds_no_adapters(tmp_path, monkeypatch):
    pytest.importorskip("diffusers")
    from diffusion.models.pipelines import load_pipeline
    from diffusion.toy.shapes.building import build_pipeline

    build_pipeline(str(tmp_path / "pipeline"))
    pipeline = load_pipeline(tmp_path / "pipeline", torch.bfloat16)
    found = []
    monkeypatch.setattr("mmrl.api.training._measured", lambda inputs, _: found.append(inputs.values["model"]))
    evaluate(pipeline, ["a red circle"], "jpeg_incompressibility", output_dir=tmp_path / "run")
    assert (found[0]["dtype"], found[0]["lora"]) == ("bfloat16", {"enabled": False})
    unknown = type("DiffusionPipeline", (), {"components": {"unet": pipeline.transformer}, "dtype": torch.bfloat16})()
    small = {"reward": "ocr", "heldout_rewards": [{"name": "jpeg_compressibility"}], "output_dir": tmp_path / "unknown"}
    with pytest.raises(UserError, match="model is a DiffusionPipeline, which is not supported; supported classes"):
        train("awm", model=unknown, data=["a red circle"], **small)
    written = []
    monkeypatch.setattr(type(pipeline), "save_pretrained", lambda *_: written.append(1))
    with pytest.raises(UserError, match="learning_rat"):
        train("awm", model=pipeline, data=["a red circle"], options={"trainer.learning_rat": 1}, **small)
    assert not written
    freed = {"free_text_encoders": True, "heldout_rewards": [{"name": "jpeg_compressibility"}]}
    with pytest.raises(UserError, match="the pipeline was passed loaded"):
        train("awm", model=pipeline, data=["a red circle"], reward="ocr", output_dir=tmp_path / "freed", **freed)
    pipeline.transformer.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"]))
    with pytest.raises(UserError, match="model already has adapters"):
        train("awm", model=pipeline, data=["a red circle"], output_dir=tmp_path / "other")


def test_given_images_are_rows_like_others(tmp_path):
    pytest.importorskip("diffusers")
    from diffusion.data.captioned_images import ImageDataConfig, load_images
    from diffusion.data.image_pairs import ImagePairConfig, load_pairs

    red, blue = (Image.new("RGB", (8, 8), name) for name in ("red", "blue"))
    for method, row in (
        ("flow_pretrain", {"prompt": "red", "image": red}),
        ("diffusion_dpo", {"prompt": "red", "chosen": red, "rejected": blue}),
    ):
        values = _inputs(method, tmp_path / method, False, None, [row], None, None, None, None, None, {}).values
        if "images" in values:
            found = load_images(ImageDataConfig(**values["images"]))[0].read()
        else:
            found = load_pairs(ImagePairConfig(**values["pairs"])).tasks[0].chosen()
        assert found.tolist() == np.asarray(red).tolist()


def test_splits_may_have_dots_and_evaluations_say_which_they_are(folder, tmp_path):
    held_out = {"math.hard": ROWS[:2]}
    inputs = _inputs("grpo", tmp_path / "run", False, folder, ROWS, held_out, length, None, 1, None, {})
    assert list(_filled(inputs).eval_data) == ["math.hard"]
    record = {"step": 2, "tag": "evaluate", "split": "heldout", "success/greedy": 0.0, "episode/return/greedy": 3.0}
    assert [(row["tag"], row["metric"], row["value"]) for row in evaluation_rows([record])] == [
        ("evaluate", "success/greedy", 0.0),
        ("evaluate", "episode/return/greedy", 3.0),
    ]


def test_a_program_and_its_model_are_as_before_after_a_run(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    for kind in (AcceleratorState, GradientState, PartialState):  # as in a program that has no Accelerator yet
        monkeypatch.setattr(kind, "_shared_state", {})
    network, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    network.train()
    first, second = network.model.layers
    first.requires_grad_(False).eval()
    second.self_attn.attention_dropout = 0.1
    own = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=3)
    weights = [weight.detach().clone() for weight in first.parameters()]
    call = functools.partial(train, "grpo", model=(network, tokenizer), data=ROWS, reward=length)
    evaluate((network, tokenizer), ROWS[:2], length, output_dir=tmp_path / "measured", max_new_tokens=3)
    call(output_dir=tmp_path / "run", options={"model.gradient_checkpointing": True}, **SMALL)
    assert all(torch.equal(*pair) for pair in zip(weights, first.parameters(), strict=True))
    assert [each.training for each in (network, first, first.mlp, second)] == [True, False, False, True]
    assert {weight.requires_grad for weight in second.parameters()} == {True}
    assert second.self_attn.attention_dropout == 0.1
    assert not network.is_gradient_checkpointing
    assert not network.get_input_embeddings()._forward_hooks
    assert (own.mixed_precision, own.gradient_accumulation_steps) == ("bf16", 3)
    assert "ONEDNN_PRIMITIVE_CACHE_CAPACITY" not in os.environ


def test_a_measured_model_generates_as_before(folder, tmp_path):
    network = AutoModelForCausalLM.from_pretrained(folder)
    network.generation_config.max_new_tokens = 7
    model = (network, AutoTokenizer.from_pretrained(folder))
    splits = {"lazy": iter(ROWS[:2])}
    assert evaluate(model, splits, length, output_dir=tmp_path / "run", max_new_tokens=3)[0]["n"] == 2
    assert network.generation_config.max_new_tokens == 7


def test_messages_are_not_shown_twice(monkeypatch, capsys):
    record = logging.makeLogRecord({"msg": "said", "levelno": logging.INFO})
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    _Shown().emit(record)
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    _Shown().emit(record)
    assert capsys.readouterr().out == "said\n"


def test_rows_reach_rewards_as_they_are(folder, tmp_path):
    seen = []

    def looks(completions, answer, extra, **columns):
        seen.extend(zip(answer, extra, strict=True))
        return [0.0 for _ in completions]

    rows = [
        {"prompt": "say one", "answer": 1, "extra": {"a": [1, 2]}},
        {"prompt": "say two", "answer": "two", "extra": {"b": None}},
    ]
    reward = {"looks": {"function": looks, "isolate": False}}
    run = train("grpo", model=folder, data=rows, reward=reward, output_dir=tmp_path / "run", **SMALL | {"steps": 1})
    assert sorted(map(str, seen[::4])) == sorted(map(str, [(1, {"a": [1, 2]}), ("two", {"b": None})]))
    assert run.config.data.path.startswith(str(run.folder / "data"))


def test_data_sets_give_their_splits_and_are_not_copied_twice(folder, tmp_path):
    made = datasets.Dataset.from_list(ROWS)
    sets = datasets.DatasetDict({"train": made, "test": datasets.Dataset.from_list(ROWS[:2])})
    call = functools.partial(train, "grpo", model=folder, reward=length, **SMALL | {"steps": 1})
    run = call(data=sets, output_dir=tmp_path / "run")
    assert list(run.config.eval_data) == ["test"]
    made.save_to_disk(tmp_path / "stored")
    stored = datasets.load_from_disk(str(tmp_path / "stored"))
    assert call(data=stored, output_dir=tmp_path / "other").config.data.path == str(tmp_path / "stored")
    for changed in (stored.select([0, 1]), stored.select(range(2)), stored.rename_column("answer", "wanted")):
        assert place(changed, tmp_path / "copies", "train").startswith(str(tmp_path / "copies"))
    with pytest.raises(UserError, match=r"data\.map"):
        place(stored.with_transform(lambda rows: rows), tmp_path / "copies", "train")
    chosen = stored.select([0, 1])
    assert call(data=chosen, output_dir=tmp_path / "third").config.data.path.startswith(str(tmp_path / "third"))


def test_images_are_stored_once_by_their_content(tmp_path):
    image = Image.new("RGB", (4, 4), "red")
    rows = [
        {"prompt": "which?", "images": [image], "score": np.float32(0.5)},
        {"prompt": "which?", "images": [np.asarray(image)], "score": torch.tensor(1)},
    ]
    path = place(rows, tmp_path, "train")
    written = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert written[0]["images"] == written[1]["images"]
    assert [row["score"] for row in written] == [0.5, 1]
    assert np.array_equal(np.asarray(Image.open(tmp_path / written[0]["images"][0])), np.asarray(image))
    assert place(rows, tmp_path, "train") == path
    with pytest.raises(UserError, match=r"train\[0\]\['f'\] is a function"):
        place([{"f": length}], tmp_path, "train")
    with pytest.raises(UserError, match=r"train\[0\] is a int"):
        place([3], tmp_path, "train")
    with pytest.raises(UserError, match=r"train\[0\]: column 'prompt' contains U\+D83D, a lone surrogate"):
        place([{"prompt": "\ud83d"}], tmp_path, "train")
    for nothing in ([], datasets.Dataset.from_dict({"prompt": []})):
        with pytest.raises(UserError, match="train has no rows"):
            place(nothing, tmp_path, "train")


def test_a_data_frame_gives_its_rows(tmp_path):
    pandas = pytest.importorskip("pandas")
    texts = Path(place(pandas.Series(["say 1", "say 2"]), tmp_path, "train")).read_text().splitlines()
    assert [json.loads(line) for line in texts] == [{"prompt": "say 1"}, {"prompt": "say 2"}]
    frame = pandas.DataFrame({"prompt": ["say 1", "say 2"], "answer": ["1", None], "score": [1.5, float("nan")]})
    written = [json.loads(line) for line in Path(place(frame, tmp_path, "train")).read_text().splitlines()]
    assert written == [
        {"prompt": "say 1", "answer": "1", "score": 1.5},
        {"prompt": "say 2", "answer": None, "score": None},
    ]


def test_nested_arrays_of_a_data_frame_become_lists(tmp_path):
    nested = np.array([np.array(["a", "b"], object), np.array(["c"], object)], object)
    rows = [{"prompt": "say 1", "answer": "1", "parts": nested, "day": np.datetime64("2026-01-02")}]
    (row,) = [json.loads(line) for line in Path(place(rows, tmp_path, "train")).read_text().splitlines()]
    assert (row["parts"], row["day"]) == ([["a", "b"], ["c"]], "2026-01-02")


def test_images_of_rows_are_those_of_their_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3) * 10
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(pixels).save("photo.png", exif=turned)
    Image.fromarray(pixels).convert("CMYK").save("print.jpg")
    rows = [{"images": [Image.open("photo.png"), Image.open("print.jpg"), "photo.png", Path("print.jpg")]}]
    written = json.loads(Path(place(rows, tmp_path / "run/data", "train")).read_text())["images"]
    upright, printed = (Image.open(tmp_path / "run/data" / path) for path in written[:2])
    assert upright.size == (2, 4)
    assert (upright.getexif().get(0x0112, 1), printed.mode) == (1, "RGB")
    # relative to the program, and not to the written rows
    assert written[2:] == [str(tmp_path / "photo.png"), str(tmp_path / "print.jpg")]
    chat = [
        {"role": "user", "content": [{"type": "image", "path": "photo.png"}, {"type": "text", "text": "photo.png"}]}
    ]
    clips = [{"path": "photo.png", "fps": 1}, {"frames": ["photo.png"]}, {"bytes": None, "path": "photo.png"}]
    nested = json.loads(Path(place([{"prompt": chat, "videos": clips}], tmp_path / "run/data", "train")).read_text())
    absolute = str(tmp_path / "photo.png")
    assert nested["videos"] == [{"path": absolute, "fps": 1}, {"frames": [absolute]}, absolute]
    assert [item.get("path", item.get("text")) for item in nested["prompt"][0]["content"]] == [absolute, "photo.png"]
    with pytest.raises(UserError, match=r"train\[0\]\['image'\] has mode F"):
        place([{"image": Image.new("F", (2, 2))}], tmp_path, "train")


def test_arrays_in_columns_of_images_are_images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pixels = np.arange(30, dtype=np.uint8).reshape(2, 5, 3)
    clear = np.concatenate([pixels, np.zeros((2, 5, 1), np.uint8)], 2)
    Image.fromarray(pixels).save("photo.png")
    bitmap = io.BytesIO()
    Image.fromarray(pixels).save(bitmap, "BMP")
    images = [pixels[..., 0], pixels[..., :1], clear, bitmap.getvalue(), {"bytes": bitmap.getvalue()}]
    rows = [{"images": images, "video": np.stack([pixels] * 2)}, {"images": np.array(["photo.png"], object)}]
    first, second = map(json.loads, Path(place(rows, tmp_path / "data", "train")).read_text().splitlines())
    made = [Image.open(tmp_path / "data" / path).convert("RGB") for path in (*first["images"], *first["video"])]
    assert [image.size for image in made] == [(5, 2)] * 7
    assert made[0].getpixel((1, 0)) == (3, 3, 3)
    assert made[2].getpixel((1, 0)) == (255, 255, 255)
    assert second["images"] == [str(tmp_path / "photo.png")]
    for wrong, words in (
        (pixels / 255, r"has type float64; expected uint8, 0 to 255; if its values are in 0 to 1, multiply by 255"),
        (pixels.transpose(2, 0, 1), r"has the shape \(3, 2, 5\); expected"),
        (Image.new("RGB", (0, 5)), "is an image of 0 x 5 pixels"),
    ):
        with pytest.raises(UserError, match=rf"train\[0\]\['image'\].*{words}"):
            place([{"image": wrong}], tmp_path, "train")


def test_a_dry_run_plans_and_leaves_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = train("grpo", model=folder, data=ROWS, reward=length, dry_run=True, **SMALL)
    assert "8 questions" in plan
    assert "peak" in plan
    assert "data: data/train-" in plan, "it names no folder that is gone"
    assert list(tmp_path.iterdir()) == []


def test_runs_without_a_folder_are_numbered(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call = functools.partial(train, "grpo", model=folder, data=ROWS, reward=length, **SMALL | {"steps": 1})
    assert [call().folder.name for _ in range(2)] == ["grpo", "grpo-2"]


def test_an_interrupted_run_goes_on(folder, tmp_path):
    calls = []

    def score(completions, **columns):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return [float(len(text)) for text in completions]

    reward = {"score": {"function": score, "isolate": False}}
    call = functools.partial(train, "grpo", model=folder, data=ROWS, reward=reward, **SMALL | {"steps": 4})
    with pytest.raises(RunStopped):
        call(output_dir=tmp_path / "run")
    stopped = call(output_dir=tmp_path / "run", resume=True)
    whole = call(output_dir=tmp_path / "whole")
    assert all(torch.equal(weight, trained_weights(whole)[name]) for name, weight in trained_weights(stopped).items())


def test_warnings_of_a_later_evaluation_are_those_of_the_run_too(folder, tmp_path, monkeypatch):
    import mmrl.training.run as runs

    evaluation_of = runs.evaluation_of

    def warned(*arguments):
        runs.LOGGER.warning("the evaluation warns")
        return evaluation_of(*arguments)

    data = {"data": ROWS, "eval_data": ROWS[:2], "reward": length}
    run = train("grpo", model=folder, output_dir=tmp_path / "run", **data, **SMALL | {"steps": 1})
    before = [row["message"] for row in run.warnings]
    monkeypatch.setattr(runs, "evaluation_of", warned)
    evaluate(run)
    after = " ".join(row["message"] for row in Run(run.folder).warnings)
    assert all(message in after for message in before)
    assert "the evaluation warns" in after


@pytest.mark.parametrize("kind", ["loaded", pytest.param("folder", marks=pytest.mark.slow)])
def test_two_processes_train_as_one(kind, folder, tmp_path):
    """A model's start that an earlier attempt left behind is not taken for this run's."""
    (tmp_path / "two/start").mkdir(parents=True)
    (tmp_path / "two/start/config.json").write_text("{")
    for name, count in (("one", 1), ("two", 2)):
        run_processes(
            [str(Path(__file__).with_name("two_processes.py")), str(folder), str(tmp_path / name), kind], count
        )
    one, two = (trained_weights(Run(tmp_path / name)) for name in ("one", "two"))
    start = load_file(folder / "model.safetensors")
    apart, moved = (
        sum(float((weight - other.get(name, weight)).norm()) ** 2 for name, weight in one.items()) ** 0.5
        for other in (two, start)
    )
    # the first steps of AdamW divide by the gradient: single weights whose gradient is rounding differ freely
    assert apart < 0.01 * moved
    rewards = [[row["reward/mean"] for row in Run(tmp_path / name).metrics] for name in ("one", "two")]
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"learning_rate": -1.0}, "learning_rate is -1.0"),
        ({"reward": {"mean": length}}, r"named 'mean', but the metric reward/mean is that of the whole sum"),
        ({"method": "grpoo"}, r"unknown method 'grpoo'; did you mean 'grpo'\?"),
        ({"method": "flow3d_eval"}, "does not train"),
        ({"method": "step_nft"}, "does not work for vision-language, text"),
        ({"lerning_rate": 1.0}, r"no option lerning_rate; did you mean 'learning_rate'\?"),
        ({"path": "elsewhere"}, r"path is ambiguous: data.path, model.path; pass one of them in options"),
        ({"reward": 3}, "reward contains a int"),
        ({"reward": None}, "rewards is empty"),
        ({"data": None}, "data"),
        ({"data": 5}, "takes rows"),
        ({"env": "CartPole-v1", "method": "vlm"}, "'vlm' has no environment"),
        ({"model": torch.nn.Linear(2, 2), "method": "vlm"}, "which 'vlm' cannot train"),
        ({"model": 3}, "model is a int"),
        ({"resume": True, "output_dir": None}, "needs output_dir"),
    ],
)
def test_wrong_arguments_are_named(folder, tmp_path, arguments, words):
    usual = {"method": "grpo", "model": folder, "data": ROWS, "reward": length, "output_dir": tmp_path / "run", **SMALL}
    with pytest.raises(UserError, match=words):
        train(**usual | arguments)
    assert not (tmp_path / "run").exists(), "rows and copies of models are not left behind"


def test_names_of_trl_mean_the_same_options(folder, tmp_path):
    settings = {"num_generations": 4, "max_completion_length": 9, "beta": 0.25, "lora": 8}
    inputs = _inputs("grpo", tmp_path / "run", False, folder, ROWS, None, length, None, 3, None, settings)
    config = _filled(inputs)
    assert (config.trainer.samples_per_task, config.sampler.max_new_tokens, config.trainer.steps) == (4, 9, 3)
    assert (config.objective.kl["coef"], config.model.lora.rank, config.model.lora.enabled) == (0.25, 8, True)


def digits(prompts, completions, **columns):
    return [float(any(letter.isdigit() for letter in text)) for text in completions]


def test_a_model_and_a_run_are_evaluated_as_in_training(folder, tmp_path):
    def score(completions, **columns):
        return digits(None, completions)

    run = train(
        "grpo",
        model=folder,
        data=ROWS,
        eval_data=ROWS,
        reward=score,
        output_dir=tmp_path / "run",
        **SMALL | {"steps": 1},
    )
    before = [row for row in run.evaluation if row["step"] == 0]
    found = evaluate(folder, ROWS, score, output_dir=tmp_path / "measured", max_new_tokens=4)
    assert {(row["metric"], row["value"], row["n"]) for row in found} == {
        (row["metric"], row["value"], row["n"]) for row in before
    }
    after = [row for row in run.evaluation if row["step"] == 1]
    again = evaluate(run)
    assert [(row["metric"], row["value"]) for row in again] == [(row["metric"], row["value"]) for row in after]
    fewer = evaluate(run, {"few": ROWS[:3]}, output_dir=tmp_path / "few")
    assert {(row["split"], row["n"]) for row in fewer} == {("few", 3)}
    several = evaluate(
        folder, {"a": ROWS[:3], "train": ROWS[:2]}, score, output_dir=tmp_path / "sets", max_new_tokens=4
    )
    assert {(row["split"], row["n"]) for row in several} == {("a", 3), ("train", 2)}
    lazily = evaluate(folder, iter(ROWS[:3]), score, output_dir=tmp_path / "lazy", max_new_tokens=4)
    assert {row["n"] for row in lazily} == {3}
    (tmp_path / "foreign").mkdir()
    text = run.config_path.read_text().replace("given:score", "elsewhere:score")
    (tmp_path / "foreign/config.yaml").write_text(text)
    with pytest.raises(UserError, match="refers to code that would run here"):
        evaluate(Run(tmp_path / "foreign"))
    reopened = Run(run.folder)
    with pytest.raises(UserError, match="an object of the Python program"):
        evaluate(reopened)
    assert evaluate(reopened, reward=score) == again
    protocol = json.loads((run.folder / "protocol.json").read_text())
    assert given.about(score)["digest"] in json.dumps(protocol)


def test_arms_are_compared_in_pairs_and_finished_runs_are_kept(folder, tmp_path):
    call = functools.partial(
        compare, {"grpo": {}, "slow": {"method": "dr_grpo", "learning_rate": 1e-6}}, margin=0.1, seeds=2, model=folder
    )
    common = {"data": ROWS, "eval_data": ROWS, "reward": digits, "output_dir": tmp_path / "runs"}
    rows = call(metric="accuracy/sampled", **common | {"data": iter(ROWS)}, **SMALL | {"steps": 1})
    assert [row["arm"] for row in rows] == ["grpo", "slow"]
    assert rows[1]["verdict"] in ("holds", "no effect within the margin", "inconclusive", "negative")
    assert rows[1]["difference"] == pytest.approx(rows[1]["mean"] - rows[0]["mean"])
    written = (tmp_path / "runs/grpo/seed-2/metrics.jsonl").read_text()
    assert call(metric="accuracy/sampled", **common, **SMALL | {"steps": 1}) == rows
    assert (tmp_path / "runs/grpo/seed-2/metrics.jsonl").read_text() == written
    for change, named in {
        "learning_rate": (1e-3, r"trainer\.learning_rate .* -> 0\.001; choose another output_dir"),
        "data": (ROWS[:3], r"data\.path"),
        "reward": (lambda completions, **_: [1.0 for _ in completions], r"rewards|contents"),
    }.items():
        with pytest.raises(UserError, match=named[1]):
            call(
                metric="accuracy/sampled", **common | {"learning_rate": 1e-5, **SMALL, "steps": 1} | {change: named[0]}
            )
    # what is measured later is not part of the run
    Tracker(tmp_path / "runs/slow/seed-1").evaluation(1, "evaluate", "heldout", {"n": 9, "accuracy/sampled": 0.99})
    assert call(metric="accuracy/sampled", **common, **SMALL | {"steps": 1}) == rows
    with pytest.raises(UserError, match=r"no accuracy/greedyy .*did you mean 'accuracy/greedy'\?"):
        call(metric="accuracy/greedyy", **common, **SMALL | {"steps": 1})
    with pytest.raises(UserError, match="margin is 0"):
        compare({"grpo": {}}, margin=0)


@pytest.mark.parametrize(
    ("arms", "changes", "message"),
    [
        ({}, {}, "arms is empty"),
        ({"grpo": {}}, {"seeds": 0}, "seeds is 0"),
        ({"grpo": {}}, {"seeds": [1, 1, 2]}, "different seeds"),
        ({"grpo": {}}, {"model": object()}, "model is an object"),
        ({"grpo": {"steps": 2}}, {"options": {"trainer": {"steps": 3}}}, r"arm grpo sets steps, .* trainer\.steps"),
    ],
)
def test_a_comparison_that_would_mislead_is_refused(arms, changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        compare(arms, margin=0.1, output_dir=tmp_path, **changes)


def test_arms_add_to_the_options_of_all_arms():
    own = {"options": {"trainer": {"max_grad_norm": 1.0}}}
    found = _arguments("dapo", own, {"options": {"trainer.micro_batch": 2}, "steps": 3})
    assert found["options"] == {"trainer.micro_batch": 2, "trainer.max_grad_norm": 1.0}
    assert (found["method"], found["steps"]) == ("dapo", 3)


def test_editors_and_type_checkers_know_what_training_returns():
    planned, trained = typing.get_overloads(train)
    assert typing.get_type_hints(planned)["return"] is str
    assert typing.get_type_hints(trained)["return"] is Run
    real, shown = (inspect.signature(function).parameters for function in (train, trained))
    assert list(real) == list(shown)
