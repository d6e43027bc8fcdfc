"""Rows whose completion is a model's own answer: a teacher's, or those of the start that a reward accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmrl.files import write_atomically
from mmrl.hub.packaged import resolve_packaged
from mmrl.rewards.reward_loading import load_function

BATCH = 64
"""Rows answered at a time."""


def build_answered(
    path: str | Path,
    *,
    rows: str,
    model: str,
    count: int = 256,
    samples: int = 1,
    max_new_tokens: int = 40,
    accepts: str = "",
    seed: int = 0,
) -> Path:
    """Write the first rows of a file with a model's answers as their completions.

    Args:
        path: JSONL file to write; the columns of `rows` and completion.
        rows: JSONL file with the column question.
        model: folder of a language model, or the name of a packaged one.
        count: answers that are sampled; with `samples` of a row from count / samples rows.
        samples: answers of each row; 1 takes the likeliest one, more are sampled at temperature 1.
        max_new_tokens: longest answer; one that is cut is left out.
        accepts: `module:function` of a reward; answers that it gives less than 1 are left out. Empty keeps all.
        seed: of the samples.

    Returns:
        The file.

    Raises:
        ValueError: no answer is left.
    """
    wanted = [json.loads(line) for line in Path(rows).read_text(encoding="utf-8").splitlines()[: count // samples]]
    kept = []
    for row, texts in zip(wanted, _answers(wanted, model, samples, max_new_tokens, seed), strict=True):
        columns = {name: [value] * len(texts) for name, value in row.items()}
        scores = load_function(accepts)([row["question"]] * len(texts), texts, **columns) if accepts else None
        kept += [{**row, "completion": text} for i, text in enumerate(texts) if scores is None or scores[i] == 1.0]
    if not kept:
        raise ValueError(f"{accepts} accepts none of the {count} answers of {model}")
    write_atomically(Path(path), "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in kept))
    return Path(path)


def _answers(wanted: list[dict[str, Any]], model: str, samples: int, longest: int, seed: int) -> list[list[str]]:
    """Finished answers of each row."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = resolve_packaged(model)
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left", trust_remote_code=False)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False).eval()
    sampling: dict[str, Any] = {"do_sample": True, "top_k": 0, "top_p": 1.0} if samples > 1 else {"do_sample": False}
    found: list[list[str]] = []
    for start in range(0, len(wanted), max(1, BATCH // samples)):
        chats = [[{"role": "user", "content": row["question"]}] for row in wanted[start : start + BATCH // samples]]
        inputs: Any = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        output = network.generate(**inputs, max_new_tokens=longest, num_return_sequences=samples, **sampling)
        said = output[:, inputs["input_ids"].shape[1] :]
        ends = (said == tokenizer.eos_token_id).any(1).tolist()
        texts = tokenizer.batch_decode(said, skip_special_tokens=True)
        whole = list(zip(texts, ends, strict=True))
        found += [[text for text, end in whole[i : i + samples] if end] for i in range(0, len(whole), samples)]
    return found
