"""The transformers model of a policy: finding, building, loading and saving it."""

from __future__ import annotations

import inspect
import itertools
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config import as_given
from mmrl.errors import UserError
from mmrl.files import expanded, follow_umask, read_json_object, written_by_run
from mmrl.hub.building import base_entries, base_path, check_finite, first_line, may_be_hub_id, sort_header
from mmrl.hub.compat import quiet_transformers
from mmrl.hub.packaged import PACKAGED, resolve_packaged
from mmrl.rewards.reward_loading import load_function
from mmrl.vlm.families.family import family_of
from mmrl.vlm.model.model_config import CriticSettings, FrozenModelConfig, LoraSettings, ModelConfig
from mmrl.workers import given

BASE_FILE = "base.json"
"""File next to an adapter with the relative path of its base model."""
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"


def resolve_model(path: str) -> tuple[str, Path | None]:
    """Find the base model and the adapter of a path; a packaged model is found by its name."""
    path = resolve_packaged(path)
    folder = expanded(path).absolute()  # adapters record it as the place of their base model
    if (folder / "config.json").is_file():
        return str(folder), None
    adapter_file = folder / ADAPTER_CONFIG
    if adapter_file.is_file():
        settings = read_json_object(adapter_file)
        _check_no_code(settings, adapter_file)
        base = settings.get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise UserError(f"{adapter_file} does not specify a base model")
        moved = not Path(base).is_dir() and (folder / BASE_FILE).is_file()
        return base_path({"path": base, **read_json_object(folder / BASE_FILE)}, folder) if moved else base, folder
    if folder.is_dir():
        raise UserError(f"{folder} is not a model folder: it has no config.json; it contains {_listing(folder)}")
    if not may_be_hub_id(path):
        if advice := written_by_run(path):
            raise UserError(f"model folder {path} not found{advice}")
        raise UserError(
            f"model folder {path} not found; use a folder with config.json, a hub id (owner/name) or the name of a "
            f"packaged model ({', '.join(PACKAGED)})"
        )
    return path, None


def processor_folder(base: str, adapter: Path | None) -> str:
    """Place of a model's processor: the adapter's folder, unless peft alone has written that."""
    own = adapter is not None and (adapter / "tokenizer_config.json").is_file()
    return str(adapter) if own else base


def _check_no_code(settings: Mapping[str, Any], file: Path) -> None:
    """Refuse an adapter that names modules or holds pickles; raises UserError.

    What peft does with such entries differs from release to release: some import them, some read further folders.
    """
    if settings.get("peft_type") != "LORA":
        raise UserError(f"{file} has the peft_type {settings.get('peft_type')!r}; only LORA is supported")
    mapping = settings.get("auto_mapping") or {}
    library = mapping.get("parent_library", "") if isinstance(mapping, dict) else mapping
    megatron = settings.get("megatron_core") if settings.get("megatron_config") else ""
    for key, module in {"auto_mapping": library, "megatron_core": megatron}.items():
        if module and not str(module).startswith("transformers.models."):
            raise UserError(f"{file} contains the module {module!r} in {key}; code from an adapter is never run")
    if not file.with_name(ADAPTER_FILE).is_file():
        raise UserError(
            f"{file.parent} has no {ADAPTER_FILE}; a pickled adapter_model.bin could run code and is never read"
        )


def _listing(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "") if names else "nothing"


def load_network(config: ModelConfig, base: str) -> Any:
    """Load a transformers model with its language model head."""
    if (Path(base) / ADAPTER_CONFIG).is_file():  # which transformers would read, and its pickles, without a word
        raise UserError(f"{base} contains both a model and an adapter ({ADAPTER_CONFIG}); put them in separate folders")
    if (own := given.take_model(base)) is not None:
        return _borrowed(own[0] if isinstance(own, tuple) else own, config)
    auto = auto_class(_model_type(base), base)
    try:
        with quiet_transformers():
            loaded: Any = auto.from_pretrained(
                base,
                dtype=getattr(torch, config.dtype),
                attn_implementation=config.attention,
                output_loading_info=True,
                trust_remote_code=False,
            )
    except Exception as error:  # damaged files, missing kernels and memory each raise their own kinds
        raise unloadable(f"the model in {base}", error, config.attention) from error
    network, report = loaded
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise UserError(f"the weight files in {base} lack {len(missing)} tensors, for example {missing[0]}")
    check_finite(dict(network.named_parameters()), base)
    network.generation_config = _neutral(network.generation_config)
    return network


def unloadable(base: str, error: Exception, attention: str) -> UserError:
    """The refusal of a model that transformers does not load."""
    if attention == "sdpa" and "attn_implementation" in str(error):
        return UserError(f"{base} has no sdpa attention in this version of transformers; set model.attention to eager")
    return UserError(f"{base} cannot be loaded: {first_line(error)}")


def _borrowed(network: Any, config: ModelConfig) -> Any:
    """A model that the user's program has loaded, prepared as a loaded one is."""
    network.to(getattr(torch, config.dtype))
    try:
        network.set_attn_implementation(config.attention)
    except ValueError as error:
        raise unloadable(f"the {type(network).__name__} that was passed", error, config.attention) from error
    network.generation_config = _neutral(network.generation_config)
    return network


def architecture(base: str) -> tuple[Any, Any]:
    """Class and configuration of a model, without its weights; raises UserError."""
    import transformers

    auto = auto_class(_model_type(base), base)
    try:
        config = transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)
    except Exception as error:  # JSON and configurations each raise their own kinds
        raise UserError(f"the configuration of {base} cannot be read: {first_line(error)}") from error
    found = auto._model_mapping[type(config)]
    return (found[0] if isinstance(found, tuple | list) else found), config


def auto_class(model_type: str, base: str) -> Any:
    """AutoModelForImageTextToText or, for language models, AutoModelForCausalLM."""
    import transformers
    from transformers.models.auto import modeling_auto

    if model_type in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return transformers.AutoModelForImageTextToText
    if model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return transformers.AutoModelForCausalLM
    raise UserError(
        f"{base} is of architecture {model_type!r}, which transformers supports neither in "
        "AutoModelForImageTextToText nor in AutoModelForCausalLM; a newer transformers may support it"
    )


def _neutral(generation: Any) -> Any:
    """The special tokens of a generation config, with sampling from the whole distribution, as the suite samples.

    Others, such as Qwen2.5-VL's repetition penalty of 1.05, would be saved with the model, and `generate` would then
    give other answers than evaluations do.
    """
    from transformers import GenerationConfig

    tokens = {name: getattr(generation, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return GenerationConfig(do_sample=True, temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0, **tokens)


def _model_type(base: str) -> str:
    from transformers import AutoConfig

    file = Path(base) / "config.json"
    if file.is_file():
        return str(read_json_object(file).get("model_type"))
    try:
        return str(AutoConfig.from_pretrained(base, trust_remote_code=False).model_type)
    except Exception as error:  # hub and network errors
        raise UserError(
            f"{base!r} is not a local folder, and it cannot be fetched from the Hub: {first_line(error)}"
        ) from error


BUILD_FILE = "build.json"
"""File in a model folder created by `model.build`, with the function and its options."""


def build_model_if_missing(config: FrozenModelConfig) -> None:
    """Build a missing model folder with the user's function, under a temporary name until it is complete."""
    if config.build is None:
        return
    folder = expanded(config.path)
    options = as_given(config.build_options)
    recipe = json.dumps({"build": config.build, "options": options}, sort_keys=True, default=str)
    if (folder / "config.json").is_file():
        file = folder / BUILD_FILE
        if file.is_file() and (built := file.read_text(encoding="utf-8")) != recipe:
            raise UserError(
                f"{folder} was built with {built}, but the settings are {recipe}; remove the folder or set another "
                "model.path"
            )
        return
    build = load_function(config.build, what="model.build")
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.unfinished")
    try:
        inspect.signature(build).bind(unfinished, **config.build_options)
    except TypeError as error:
        raise UserError(f"model.build_options do not match {config.build}: {error}") from error
    logging.getLogger("mmrl").info("building %s with %s", folder, config.build)
    try:
        build(unfinished, **config.build_options)
        (unfinished / BUILD_FILE).write_text(recipe, encoding="utf-8")
        follow_umask(unfinished)
        if not (folder / "config.json").is_file():  # another process may have been quicker
            folder.parent.mkdir(parents=True, exist_ok=True)
            os.replace(unfinished, folder)
    except (TypeError, ValueError, KeyError, ImportError) as error:  # options that do not fit, a missing package
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"model.build {config.build!r} with model.build_options failed: {reason}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def add_adapter(network: Any, settings: LoraSettings, adapter: Path | None, *, freeze_vision: bool = False) -> Any:
    """Add LoRA adapters to a model; with `freeze_vision`, a given adapter's tower layers stay frozen."""
    import peft

    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a property that transformers renamed
        if adapter is not None and not settings.enabled:
            # peft has frozen the model's own weights
            return peft.PeftModel.from_pretrained(network, adapter).merge_and_unload().requires_grad_(True)
        if adapter is not None:
            saved = peft.PeftConfig.from_pretrained(str(adapter))
            saved.lora_dropout = settings.dropout
            loaded = peft.PeftModel.from_pretrained(network, adapter, is_trainable=True, config=saved)
            _check_adapter(loaded, settings, adapter, freeze_vision)
            return loaded
        torch.manual_seed(settings.seed)
        lora = peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules=_lora_pattern(network, settings),
        )
        return peft.get_peft_model(network, lora)


def _check_adapter(model: Any, settings: LoraSettings, adapter: Path, freeze_vision: bool) -> None:
    """Reject settings that differ from the adapter from which training continues."""
    saved = model.active_peft_config
    network = model.base_model.model
    layers = network.get_decoder().named_modules()
    targets = sorted({name.rpartition(".")[2] for name, layer in layers if hasattr(layer, "lora_A")})
    found = {"rank": saved.r, "alpha": saved.lora_alpha, "targets": targets}
    given = {"rank": settings.rank, "alpha": settings.alpha, "targets": sorted(settings.targets)}
    seeing = {name for name, layer in vision_linears(network).items() if hasattr(layer, "lora_A")}
    if not freeze_vision and seeing != set(_vision_names(network, settings)):
        found["vision_targets"] = sorted(seeing)
        given["vision_targets"] = sorted(settings.vision_targets)
    different = [name for name in found if found[name] != given[name]]
    if different:
        said = ", ".join(f"{name} {found[name]} instead of {given[name]}" for name in different)
        wanted = " ".join(f"model.lora.{name}={found[name]}".replace("'", "").replace(" ", "") for name in different)
        raise UserError(
            f"training continues from the adapter in {adapter}, which has {said}; set {wanted}, or export the run "
            "that created it (`mmrl export`) and start a new adapter on the result"
        )


def _lora_pattern(network: Any, settings: LoraSettings) -> str:
    decoder = network.get_decoder()
    place = next(name for name, module in network.named_modules() if module is decoder).rpartition(".")[2]
    layers = [dict(layer.named_modules()) for layer in decoder.layers]
    found = {name.rpartition(".")[2] for layer in layers for name in layer}
    unknown = [name for name in settings.targets if name not in found]
    if unknown:
        known = ", ".join(name for name in LoraSettings().targets if name in found)
        raise UserError(f"model.lora.targets contains {unknown}; a decoder layer has: {known}")
    seeing = [re.escape(name) for name in _vision_names(network, settings)]
    names = "|".join(re.escape(name) for name in settings.targets)
    own = [rf".*{re.escape(place)}\.layers\..*\.({names})"] if names else []
    return "|".join([*own, *seeing])


def vision_linears(network: Any) -> dict[str, nn.Module]:
    """Linear layers outside the language model, by name."""
    seen = set(vision_parameters(network))
    return {
        name: layer
        for name, layer in network.named_modules()
        if (isinstance(layer, nn.Linear) or hasattr(layer, "lora_A")) and seen & set(layer.parameters())
    }


def _vision_names(network: Any, settings: LoraSettings) -> list[str]:
    """Layers of vision tower and merger that get an adapter."""
    found: dict[str, None] = {}
    names = vision_linears(network)
    for target in settings.vision_targets:
        own = [name for name in names if target == "all-linear" or f".{name}".endswith(f".{target}")]
        if not own:
            ends = sorted({re.sub(r"^.*\.\d+\.", "", name) for name in names})
            raise UserError(
                f"model.lora.vision_targets contains {target}, but the vision tower and merger of "
                f"{network.config.model_type} have no such linear layer; they have: {', '.join(ends) or 'none'}"
            )
        found |= dict.fromkeys(own)
    return list(found)


def vision_parameters(network: Any) -> list[nn.Parameter]:
    """All weights that compute image and video features: those outside the decoder, the embedding and the head."""
    outer = (network.get_input_embeddings(), network.get_output_embeddings())
    text = {weight for module in (network.get_decoder(), *outer) for weight in module.parameters()}
    return [weight for weight in network.parameters() if weight not in text]


def parts_of(network: Any) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Weights of the vision tower, of the merger and of the language model, with their names."""
    seen, mergers = set(vision_parameters(network)), set(family_of(network.config.model_type).mergers)
    parts: dict[str, list[tuple[str, nn.Parameter]]] = {"vision": [], "merger": [], "language": []}
    for name, weight in network.named_parameters():
        part = "language" if weight not in seen else "merger" if mergers & set(name.split(".")) else "vision"
        parts[part].append((name, weight))
    return parts


def freeze_parts(network: Any, config: ModelConfig) -> None:
    """Freeze the parts of a model selected by its settings; raises UserError if a part does not exist."""
    kind, parts = network.config.model_type, parts_of(network)
    if config.freeze_vision and not (parts["vision"] or parts["merger"]):
        raise UserError(f"model.freeze_vision is true, but {kind} has no vision tower")
    if not parts["merger"] and config.freeze_merger is not None:
        others = sorted({".".join(name.split(".")[:3]) for name, _ in parts["vision"]})
        raise UserError(
            f"model.freeze_merger is set, but the merger of {kind} is not known; besides the language model it has: "
            f"{', '.join(others[:12]) or 'nothing'}; add it to `mergers` of a family in mmrl/vlm/families"
        )
    frozen = {"vision": config.freeze_vision, "merger": config.keeps_merger, "language": config.freeze_language}
    for part, keeps in frozen.items():
        for _, weight in parts[part] if keeps else ():
            weight.requires_grad_(False)


def make_value_head(width: int, settings: CriticSettings) -> nn.Module:
    """A critic from (M, H) to (M, 1) in float32, regardless of the model's precision.

    Its last layer starts at zero: every value is 0 at first, so that the first advantages are plain returns.
    """
    sizes = [width, *settings.hidden]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        hidden = [nn.Linear(before, after) for before, after in itertools.pairwise(sizes)]
    last = nn.Linear(sizes[-1], 1)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    layers = [part for linear in hidden for part in (linear, nn.ReLU())]
    return (nn.Sequential(*layers, last) if layers else last).float()


VALUE_HEAD_FILE = "value_head.safetensors"


def save_model(model: Any, path: Path) -> None:
    """Write a transformers model, or the adapter of a peft model with the relative path of its base model."""
    path.mkdir(parents=True, exist_ok=True)
    with quiet_transformers():
        model.save_pretrained(path)
    if hasattr(model, "peft_config"):
        sort_header(path / ADAPTER_FILE)  # so that the adapter's bytes follow from its tensors
        base = str(model.active_peft_config.base_model_name_or_path)
        (path / BASE_FILE).write_text(json.dumps(base_entries(base, path), indent=2) + "\n", encoding="utf-8")


def save_value_head(head: nn.Module, path: Path) -> None:
    """Write a value head into a folder."""
    from safetensors.torch import save_file

    save_file({name: tensor.detach().cpu() for name, tensor in head.state_dict().items()}, path / VALUE_HEAD_FILE)


def load_model_weights(model: Any, path: Path) -> None:
    """Read weights that `save_model` wrote for a model of the same shape; raises UserError."""
    adapted = hasattr(model, "peft_config")
    expected = path / (ADAPTER_FILE if adapted else "config.json")
    if not expected.is_file():
        raise UserError(f"{path} is not a saved policy: it has no {expected.name}")
    try:
        state = _read_adapter(model, path) if adapted else _read_model(model, path)
    except UserError:
        raise
    except Exception as error:  # safetensors, json and transformers each raise their own kinds
        raise UserError(f"the weights in {path} cannot be read: {type(error).__name__}: {error}") from error
    check_finite(state, path)
    _copy_into(model, state, path)


def load_value_head(head: nn.Module, path: Path) -> None:
    """Read a value head from a folder; raises UserError."""
    from safetensors.torch import load_file

    file = path / VALUE_HEAD_FILE
    if not file.is_file():
        raise UserError(f"{path} has no {VALUE_HEAD_FILE}; it was saved by a policy without value head")
    try:
        state = load_file(file)
    except Exception as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    _copy_into(head, state, file)


def _read_model(network: Any, path: Path) -> dict[str, Tensor]:
    """State of a model folder, through transformers, which reads sharded files and older key names."""
    with quiet_transformers():
        saved, report = type(network).from_pretrained(
            path, dtype=network.dtype, local_files_only=True, output_loading_info=True
        )
    wrong = {key: sorted(value) for key, value in report.items() if value}
    if wrong:
        raise UserError(f"the weights in {path} do not fit this model: {wrong}")
    return saved.state_dict()


def _read_adapter(model: Any, path: Path) -> dict[str, Tensor]:
    """State of an adapter folder, by the names inside the model: `...lora_A.weight` is `...lora_A.<adapter>.weight`."""
    from safetensors.torch import load_file

    adapter = model.active_adapter
    state = {}
    for key, value in load_file(path / ADAPTER_FILE).items():
        stem, _, last = key.rpartition(".")
        state[f"{stem}.{adapter}.{last}"] = value
    own = {key for key in model.state_dict() if f".{adapter}." in key and "lora_" in key}
    if set(state) != own:
        different = sorted(set(state) ^ own)[:4]
        raise UserError(f"the adapter in {path} has other layers than this model, for example {different}")
    _check_scale(model, path)
    return state


def _check_scale(model: Any, path: Path) -> None:
    """Reject an adapter that was trained at another scale, at which its weights are another change of the model."""
    import peft

    saved, own = peft.PeftConfig.from_pretrained(str(path)), model.active_peft_config
    names = ("lora_alpha", "use_rslora", "alpha_pattern")
    different = [name for name in names if getattr(saved, name, None) != getattr(own, name, None)]
    if different:
        listed = ", ".join(f"{name} {getattr(saved, name, None)} instead of {getattr(own, name)}" for name in different)
        hint = f"; set model.lora.alpha={saved.lora_alpha}" if "lora_alpha" in different else ""
        raise UserError(f"the adapter in {path} has {listed}{hint}")


def _copy_into(module: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    own = module.state_dict()
    unknown = sorted(set(state) - set(own))
    shapes = [key for key in state if key in own and own[key].shape != state[key].shape]
    if unknown or shapes:
        raise UserError(f"the weights in {path} do not fit this model; unknown {unknown[:4]}, shapes {shapes[:4]}")
    with torch.no_grad():
        for key, value in state.items():
            own[key].copy_(value)
