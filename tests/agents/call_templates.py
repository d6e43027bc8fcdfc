"""Chat templates with tools in every format: those of released models, and short ones where only a format was known."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.vlm.data.turn_template import TurnTemplate
from mmrl.vlm.model.processor import TextProcessor
from tests.vlm.chat_templates import byte_tokenizer, marks, source


@dataclass(frozen=True)
class ToolChat:
    """A chat template that writes tools."""

    format: str
    template: str
    special: Sequence[str]
    """Its special tokens; the first one ends a text."""
    stops: Sequence[str]

    def turns(self) -> TurnTemplate:
        """The template with a tokenizer of bytes."""
        tokenizer = byte_tokenizer(self.template, self.special)
        return TurnTemplate(
            TextProcessor(tokenizer), {}, tokenizer.convert_tokens_to_ids(list(self.stops)), self.format
        )


def _frame(user: str, assistant: str, end: str, calls: str, result: str) -> str:
    """A template: what opens a turn, what ends it, the calls `m.tool_calls` and a result `m.content`."""
    said = f"{assistant}{{{{ m.content or '' }}}}{{%- if m.tool_calls %}}{calls}{{%- endif %}}{end}"
    parts = (
        f"{{%- if tools %}}{user}{{{{ tools | tojson }}}}{end}{{%- endif %}}{{%- for m in messages %}}",
        f"{{%- if m.role == 'tool' %}}{result}{{%- elif m.role == 'assistant' %}}{said}",
        f"{{%- else %}}{user}{{{{ m.content }}}}{end}{{%- endif %}}{{%- endfor %}}",
        f"{{%- if add_generation_prompt %}}{assistant}{{%- endif %}}",
    )
    return "".join(parts)


def _each(call: str, between: str = "") -> str:
    comma = f"{{%- if not loop.last %}}{between}{{%- endif %}}" if between else ""
    return f"{{%- for c in m.tool_calls %}}{{%- set f = c.function %}}{call}{comma}{{%- endfor %}}"


DEEPSEEK = ["<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
DEEPSEEK += [f"<｜tool▁{word}｜>" for word in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")]
DEEPSEEK_RESULT = "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
KIMI = ["<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"]
KIMI += [f"<|tool_call{word}|>" for word in ("s_section_begin", "s_section_end", "_begin", "_end", "_argument_begin")]
JSON_CALL = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
NINE = "{%- if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{%- endif %}"
SHORT: dict[str, ToolChat] = {
    chat.format: chat
    for chat in (
        ToolChat(
            "deepseek",
            _frame(
                "<｜User｜>",
                "<｜Assistant｜>",
                "<｜end▁of▁sentence｜>",
                # a sum of texts, as in DeepSeek V3.1, which refuses arguments that are no text
                "<｜tool▁calls▁begin｜>"
                + _each("<｜tool▁call▁begin｜>{{ f.name + '<｜tool▁sep｜>' + f.arguments }}<｜tool▁call▁end｜>")
                + "<｜tool▁calls▁end｜>",
                DEEPSEEK_RESULT,
            ),
            DEEPSEEK,
            DEEPSEEK[:1],
        ),
        ToolChat(
            "deepseek_v3",
            _frame(
                "<｜User｜>",
                "<｜Assistant｜>",
                "<｜end▁of▁sentence｜>",
                "<｜tool▁calls▁begin｜>"
                + _each(
                    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```"
                    "<｜tool▁call▁end｜>",
                    "\n",
                )
                + "<｜tool▁calls▁end｜>",
                DEEPSEEK_RESULT,
            ),
            DEEPSEEK,
            DEEPSEEK[:1],
        ),
        ToolChat(
            "kimi",
            _frame(
                "<|im_user|>user<|im_middle|>",
                "<|im_assistant|>assistant<|im_middle|>",
                "<|im_end|>",
                "<|tool_calls_section_begin|>"
                + _each(
                    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}"
                    "<|tool_call_end|>"
                )
                + "<|tool_calls_section_end|>",
                "<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n{{ m.content }}<|im_end|>",
            ),
            KIMI,
            KIMI[:1],
        ),
        ToolChat(
            "minimax",
            _frame(
                "]~b]user\n",
                "]~b]ai\n",
                "[e~[\n",
                "<minimax:tool_call>\n"
                + _each(
                    '<invoke name="{{ f.name }}">\n{%- for key, value in f.arguments | items %}\n'
                    '<parameter name="{{ key }}">'
                    "{{ value if value is string else value | tojson }}</parameter>{%- endfor %}\n</invoke>\n"
                )
                + "</minimax:tool_call>",
                "]~b]tool\n<response>{{ m.content }}</response>[e~[\n",
            ),
            ["[e~[", "]~b]"],
            ["[e~["],
        ),
        ToolChat(
            "mistral",
            _frame(
                "[INST]",
                "",
                "</s>",
                _each(f"{NINE}[TOOL_CALLS]{{{{ f.name }}}}[ARGS]{{{{ f.arguments | tojson }}}}"),
                "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]",
            ).replace("{{ m.content }}</s>", "{{ m.content }}[/INST]"),
            ["</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
            ["</s>"],
        ),
        ToolChat(
            "mistral_list",
            _frame(
                "[INST]",
                "",
                "</s>",
                "[TOOL_CALLS][" + _each(NINE + JSON_CALL[:-1] + ', "id": "{{ c.id }}"}', ", ") + "]",
                '[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]',
            ).replace("{{ m.content }}</s>", "{{ m.content }}[/INST]"),
            ["</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
            ["</s>"],
        ),
        ToolChat(
            "pythonic",
            _frame(
                "<|header_start|>user<|header_end|>\n\n",
                "<|header_start|>assistant<|header_end|>\n\n",
                "<|eot|>",
                # every value between quotes, as vLLM's template for Llama 4 writes it
                "["
                + _each(
                    "{{ f.name }}({%- for key in f.arguments %}{{ key }}=\"{{ '%s' | format(f.arguments[key]) }}\""
                    "{%- if not loop.last %}, {% endif %}{%- endfor %})",
                    ", ",
                )
                + "]",
                "<|header_start|>ipython<|header_end|>\n\n{{ m.content | tojson }}<|eot|>",
            ),
            ["<|eot|>", "<|header_start|>", "<|header_end|>"],
            ["<|eot|>"],
        ),
        ToolChat(
            "phi",
            _frame(
                "<|user|>",
                "<|assistant|>",
                "<|end|>",
                f"functools[{_each(JSON_CALL, ', ')}]",
                "<|tool_response|>{{ m.content | tojson }}<|end|>",
            ),
            ["<|end|>", "<|user|>", "<|assistant|>", "<|tool_response|>"],
            ["<|end|>"],
        ),
        ToolChat(
            "phi_tags",
            _frame(
                "<|user|>",
                "<|assistant|>",
                "<|end|>",
                _each("<|tool_call|>{{ f | tojson }}<|/tool_call|>"),
                "<|tool_response|>{{ m.content | tojson }}<|end|>",
            ),
            ["<|end|>", "<|user|>", "<|assistant|>", "<|tool_call|>", "<|/tool_call|>", "<|tool_response|>"],
            ["<|end|>"],
        ),
    )
}
"""Templates by format, of models whose own files are not in `tests/vlm/templates`."""
TEXTS = ("deepseek",)
"""Templates that take arguments as JSON text only."""
RELEASED = {
    "qwen3": "hermes",
    "qwen3_5_think": "qwen_xml",
    "qwen3_8": "qwen_xml",
    "nemotron_3_nano": "qwen_xml",
    "llama3_1": "llama_json",
    "lfm2_2_5_v2": "lfm",
    "glm4moe": "glm",
    "gptoss": "harmony",
    "gemma4": "gemma4",
    "gemma4_v5": "gemma4",
    "muse_glimmer": "muse",
}
"""Templates of released models and their formats."""
CHATS: dict[str, ToolChat] = SHORT | {
    name: ToolChat(format, source(name), *marks(name)) for name, format in RELEASED.items()
}


def tool(name: str = "add", **properties: str) -> dict[str, Any]:
    """A tool with arguments of the given types."""
    described = {key: {"type": kind, "description": key} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": described, "required": []}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}
