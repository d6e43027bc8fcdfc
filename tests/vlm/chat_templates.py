"""Chat templates of released models with tiny tokenizers that have their special tokens and their ends of answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.utils.chat_template_utils import render_jinja_template

from mmrl.vlm.data.turn_template import TurnTemplate
from mmrl.vlm.model.processor import TextProcessor

TEMPLATES = Path(__file__).with_name("templates")
QWEN = (["<|im_end|>", "<|endoftext|>", "<|im_start|>"], ["<|im_end|>", "<|endoftext|>"])
DEEPSEEK = ["<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
LLAMA = ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
GEMMA4 = ["<eos>", "<turn|>", "<|tool_response>"]
HARMONY = ["<|return|>", "<|endoftext|>", "<|call|>"]
PHI = ["<|endoftext|>", "<|assistant|>", "<|end|>"]
MARKS = {
    "cohere2": (["<|END_OF_TURN_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"], ["<|END_OF_TURN_TOKEN|>"]),
    "deepseek_r1_distill": (DEEPSEEK, DEEPSEEK[:1]),
    "gemma3": (["<eos>", "<start_of_turn>", "<end_of_turn>"], ["<eos>", "<end_of_turn>"]),
    "gemma4": ([*GEMMA4, "<|turn>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"], GEMMA4),
    "glm4moe": (
        ["<|endoftext|>", "<|user|>", "<|observation|>", "<|assistant|>", "[gMASK]", "<sop>"],
        ["<|endoftext|>", "<|user|>", "<|observation|>"],
    ),
    "gptoss": ([*HARMONY, "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"], HARMONY),
    "lfm2": (["<|im_end|>", "<|im_start|>", "<|tool_call_start|>", "<|tool_call_end|>"], ["<|im_end|>"]),
    "llama3_1": ([*LLAMA, "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"], LLAMA),
    "muse_glimmer": (["<|eot|>", "<|eom|>", "<|start|>", "<|message|>"], ["<|eot|>"]),
    "phi3_5": ([*PHI, "<|user|>"], PHI),
    "smolvlm": (["<end_of_utterance>"], ["<end_of_utterance>"]),
}
"""Special tokens of each template's family, and the ends of answers in the order of its generation_config.json."""
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
SEE_IMAGES = ("smolvlm", "qwen2_5_vl")
"""Templates that read lists of parts."""


class Seeing:
    """The calls of an image processor that a turn takes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.chat_template = tokenizer, tokenizer.chat_template

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(messages, **options)


def source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def marks(name: str) -> tuple[list[str], list[str]]:
    return next((row for key, row in MARKS.items() if name.startswith(key)), QWEN)


def tokenizer_of(name: str) -> Any:
    return byte_tokenizer(source(name), marks(name)[0])


def byte_tokenizer(template: str, special: Sequence[str]) -> Any:
    """A tokenizer of bytes with special tokens, the first of which ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={sign: number for number, sign in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=special[0], pad_token=special[0], chat_template=template
    )


def turns_of(name: str, **variables: Any) -> TurnTemplate:
    tokenizer = tokenizer_of(name)
    processor = Seeing(tokenizer) if name in SEE_IMAGES else TextProcessor(tokenizer)
    return TurnTemplate(processor, variables, tokenizer.convert_tokens_to_ids(marks(name)[1]), name)


def rendered(name: str, messages: Any, *, asks: bool = False, **options: Any) -> str:
    """A chat as transformers renders it."""
    if name in SEE_IMAGES:
        messages = [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in messages]
    eos = marks(name)[0][0]
    chats, _ = render_jinja_template(
        [messages], chat_template=source(name), add_generation_prompt=asks, bos_token="", eos_token=eos, **options
    )
    return chats[0]
