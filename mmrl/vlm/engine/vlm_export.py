"""Model folders for transformers, and the Python code that prompts such a model in its training format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mmrl.runs.export import Exported
from mmrl.vlm.data.messages import read_template
from mmrl.vlm.engine.vlm_policy import VlmPolicy, load_policy
from mmrl.vlm.model.network import auto_class

UNMASKED = "Responses are sampled by unmasking, as in `mmrl evaluate`; transformers' `generate` does not do this."


def export_model(config: Any, checkpoint: Path, output: Path, policy_class: Any = VlmPolicy) -> Exported:
    """Write a standard model folder with tokenizer and processor, adapters merged into the weights."""
    model = replace(config.model, path=str(checkpoint / "model"), build=None)
    policy = load_policy(model, policy_class=policy_class)
    policy.save_merged(output)
    auto = auto_class(policy.network.config.model_type, str(output)).__name__
    looks = auto == "AutoModelForImageTextToText"
    reader = "AutoProcessor" if looks else "AutoTokenizer"
    load = [
        f"from transformers import {auto}, {reader}",
        "",
        f"model = {auto}.from_pretrained(folder)",
        f"processor = {reader}.from_pretrained(folder)",
    ]
    return Exported(
        call=f"transformers.{auto}.from_pretrained",
        load="\n".join([*(["from PIL import Image"] if looks else []), *load]),
        use="\n".join(_asking(config, policy, looks=looks)) if policy_class is VlmPolicy else "",
        library="transformers",
        task="image-text-to-text" if looks else "text-generation",
        facts={"decoding": _decoding(config)},
        limits=() if policy_class is VlmPolicy else (UNMASKED,),
    )


def _sampler(config: Any) -> Any:
    return getattr(config, "sampler", None) or getattr(config.evaluation, "sampler", None)


def _decoding(config: Any) -> str:
    evaluation, sampler = config.evaluation, _sampler(config)
    sampled = f"sampled uses temperature {evaluation.temperature:g}" if evaluation.samples else ""
    longest = f"responses have at most {sampler.max_new_tokens} tokens" if sampler else ""
    said = ", ".join(
        filter(None, ["greedy takes the most likely token" if evaluation.greedy else "", sampled, longest])
    )
    return f"{said[0].upper()}{said[1:]}."


def _asking(config: Any, policy: VlmPolicy, *, looks: bool) -> list[str]:
    """Lines of Python that ask a question, with or without an image, and print the greedy answer."""
    data, sampler = getattr(config, "data", None), _sampler(config)
    system, template = (getattr(data, name, None) for name in ("system_prompt", "format_prompt"))
    switches = {name: value for name, value in policy.layout.template.items() if name != "chat_template"}
    variables = "".join(f", {name}={value!r}" for name, value in switches.items())
    text = 'template.render(content="What do you see?")' if template else '"What do you see?"'
    if not looks:
        text = text.replace("What do you see?", "What is 3 plus 4?")
    turns = [f'    {{"role": "system", "content": {_content(repr(system), looks)}}},'] if system else []
    image = '{"type": "image", "image": image}, ' if looks else ""
    stop = list(getattr(sampler, "stop", ()) or ())
    tokenizer = "processor.tokenizer" if looks else "processor"
    end = f", stop_strings={stop!r}, tokenizer={tokenizer}" if stop else ""
    return [
        "",
        *(["from jinja2 import Template", "", f"template = Template({read_template(template)!r})"] if template else []),
        *(['image = Image.new("RGB", (224, 224), "white")  # your image'] if looks else []),
        "messages = [",
        *turns,
        f'    {{"role": "user", "content": {_content(text, looks, image)}}},',
        "]",
        "inputs = processor.apply_chat_template(",
        f'    messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"{variables}',
        ")",
        f"tokens = model.generate(**inputs, max_new_tokens={getattr(sampler, 'max_new_tokens', 64)}, "
        f"do_sample=False{end})",
        'print(processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)[0])',
    ]


def _content(text: str, looks: bool, image: str = "") -> str:
    return f'[{image}{{"type": "text", "text": {text}}}]' if looks else text
