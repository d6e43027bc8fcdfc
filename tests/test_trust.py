"""Reading files and messages cannot run code."""

import ast
import contextlib
import functools
import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from diffusion.models.pipelines import load_pipeline
from mmrl.errors import UserError
from mmrl.hub.tables import read_rows
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.model.model_config import ModelConfig
from mmrl.vlm.model.network import load_network
from mmrl.vlm.model.processor import load_processor
from robotics.policies.base.action_policy import open_policy

PROJECT = Path(__file__).resolve().parents[1]
PICKLES = {"mmrl/training/ray_rollers.py", "mmrl/training/rollout_worker.py", "mmrl/workers/given.py"}
"""Ray itself unpickles whatever its cluster sends; docs/scale.md says so. A worker unpickles functions and classes of
the user's own program, which its parent sends through their pipe; nothing of it is on a disk, nothing comes back so."""
FILES = [path for room in ("mmrl", "diffusion", "robotics") for path in (PROJECT / room).rglob("*.py")]


@functools.cache
def calls_and_imports(path):
    """Dotted names of a file's calls, with the keyword arguments that are literals; and roots of the imported modules.

    Only texts stay in memory: the trees of all files would slow every later collection of garbage down.
    """
    calls, roots = [], set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            literal = {key.arg: key.value.value for key in node.keywords if isinstance(key.value, ast.Constant)}
            calls.append((ast.unparse(node.func), literal))
        elif isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add((node.module or "").partition(".")[0])
    return calls, roots


def calls(path):
    return calls_and_imports(path)[0]


@pytest.mark.parametrize("room", ["mmrl", "diffusion", "robotics"])
def test_tensors_and_arrays_are_loaded_without_pickles(room):
    for path in (PROJECT / room).rglob("*.py"):
        for name, options in calls(path):
            if name == "torch.load":
                assert options.get("weights_only") is True, path
            if name in ("np.load", "numpy.load"):
                assert not options.get("allow_pickle"), path


def test_nothing_is_unpickled_or_executed():
    assert len(FILES) > 100
    forbidden = {"eval", "exec", "compile", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}
    for path in FILES:
        found, roots = calls_and_imports(path)
        assert not forbidden & {name for name, _ in found}, path
        if path.relative_to(PROJECT).as_posix() not in PICKLES:
            assert not {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing", "joblib"} & roots, path
        assert not any(options.get("shell") or options.get("trust_remote_code") for _, options in found), path


def test_numpy_refuses_pickled_arrays(tmp_path):
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        np.load(tmp_path / "objects.npy")


def test_automatic_classes_never_ask_whether_to_run_code():
    """Without the option transformers asks on a terminal, and a "y" meant for something else runs the folder's code."""
    found = [
        (path, options)
        for path in FILES
        for name, options in calls(path)
        if "Auto" in name and name.endswith(".from_pretrained")
    ]
    assert len(found) >= 8
    for path, options in found:
        assert options.get("trust_remote_code") is False, path


CODE = "import pathlib\npathlib.Path({marker!r}).touch()\nclass Evil:\n    from_pretrained = classmethod(print)\n"
AUTO = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForImageTextToText", "AutoProcessor"), "evilmod.Evil")
AUTO |= {"AutoTokenizer": ["evilmod.Evil", "evilmod.Evil"], "AutoImageProcessor": "evilmod.Evil"}


class Touch:
    """A pickle of it makes a file when it is read."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (Path(self.marker),)


def pipeline_folder(folder, part, module):
    parts = {name: ["diffusers", "SD3Transformer2DModel"] for name in ("transformer", "vae")}
    parts["scheduler"] = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    index = {"_class_name": "StableDiffusion3Pipeline", **parts, "transformer": part}
    (folder / "model_index.json").write_text(json.dumps(index))
    for name in parts:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": AUTO}))
    code = (folder / "evilmod.py").read_text()
    for name in ("evilmod", module):
        (folder / "transformer" / f"{name}.py").write_text(code)
    return lambda: load_pipeline(folder)


def model_folder(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "auto_map": AUTO}))
    return lambda: load_network(ModelConfig(path=str(folder)), str(folder))


def processor_folder(folder):
    names = ("processor_config", "preprocessor_config", "tokenizer_config", "config")
    for name in names:
        entries = {"auto_map": AUTO, "processor_class": "Evil", "tokenizer_class": "Evil", "model_type": "evil"}
        (folder / f"{name}.json").write_text(json.dumps(entries))
    return lambda: load_processor(str(folder))


def data_folder(folder):
    (folder / f"{folder.name}.py").write_text((folder / "evilmod.py").read_text())
    (folder / "data.jsonl").write_text('{"prompt": "a"}\n')
    return lambda: [*read_rows(str(folder), "train", None)]


def adapter_folder(folder, weights="adapter_model.safetensors", **entries):
    settings = {"base_model_name_or_path": "own/er", "peft_type": "LORA", "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings | entries))
    (folder / weights).write_bytes(pickle.dumps(Touch(str(folder.parent / "it-ran"))))
    return lambda: load_policy(ModelConfig(path=str(folder)))


def model_with_adapter(folder):
    adapter_folder(folder, megatron_core="evilmod", megatron_config={"a": 1})
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    return lambda: load_policy(ModelConfig(path=str(folder)))


def policy_folder(folder):
    (folder / "policy.json").write_text(json.dumps({"kind": "evilmod:Evil"}))
    return lambda: open_policy(folder)


HOSTILE = {
    "pipeline, module of its own": lambda folder: pipeline_folder(folder, ["evilmod", "Evil"], "evilmod"),
    "pipeline, file named as the library": lambda folder: pipeline_folder(folder, ["diffusers", "Evil"], "diffusers"),
    "pipeline, automatic class": lambda folder: pipeline_folder(folder, ["transformers", "AutoModel"], "evilmod"),
    "pipeline, standard library": lambda folder: pipeline_folder(folder, ["os", "system"], "os"),
    "transformers": model_folder,
    "processor": processor_folder,
    "adapter, auto_mapping": lambda folder: adapter_folder(
        folder, auto_mapping={"base_model_class": "Evil", "parent_library": "evilmod"}
    ),
    "adapter, megatron_core": lambda folder: adapter_folder(
        folder, megatron_core="evilmod", megatron_config={"hidden_size": 8}
    ),
    "adapter, peft_type": lambda folder: adapter_folder(folder, peft_type="XLORA", adapters={"0": "evilmod"}),
    "adapter, adapter_model.bin": lambda folder: adapter_folder(folder, "adapter_model.bin"),
    "model, adapter_config.json": model_with_adapter,
    "data set": data_folder,
    "policy": policy_folder,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_code_in_a_folder_does_not_run(kind, tmp_path, monkeypatch):
    folder, marker = tmp_path / "hostile", tmp_path / "it-ran"
    folder.mkdir()
    (folder / "evilmod.py").write_text(CODE.format(marker=str(marker)))
    monkeypatch.syspath_prepend(str(folder))  # as for a program that is started in it
    load = HOSTILE[kind](folder)
    if kind == "data set":
        with contextlib.suppress(UserError):
            load()
    else:
        with pytest.raises(UserError) as refused:
            load()
        assert "never run" in str(refused.value) or not kind.startswith("pipeline")
        if kind.startswith(("adapter", "model, ")):
            assert kind.partition(", ")[2] in str(refused.value)
    assert not marker.exists()
