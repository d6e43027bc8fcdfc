"""A SmolVLM around a pretrained language model, with a small vision tower and connector trained from scratch.

Two stages. **Words** (here, without the decoder): each image token is classified by its dot product with the language
model's own embeddings of the words that say what is there. **Answers** (`mmrl sft` with `model.freeze_language`): the
answers to questions, through the frozen decoder. Text alone stays the language model's.
"""

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mmrl.errors import UserError
from mmrl.files import replaced, write_atomically
from mmrl.hub.compat import ensure_number_words, ensure_torchvision, quiet_transformers
from mmrl.training.processes import avoid_refused_instructions
from mmrl.vlm.model.model_config import ModelConfig
from mmrl.vlm.model.network import load_network, resolve_model
from mmrl.vlm.model.processor import eos_ids, load_processor
from mmrl.vlm.toy.pictures import GRID, GROUPS, NOTHING, SIDE_PX, draw_scene
from mmrl.vlm.toy.tiny import MERGE, shape_positions
from mmrl.vlm.toy.tiny_generic import FAMILIES

LOGGER = logging.getLogger("mmrl")
SPECIAL = FAMILIES["smolvlm"].tokens
CURVE = "words.jsonl"
"""File in a built folder that logs stage W."""
LOG_EVERY = 100
PAGE_TOKENS = 600
POSITION_SIZE = 0.35
"""Root mean square of the position embeddings, about the same as a patch's."""


def build_model(
    path: str | Path,
    *,
    language: str,
    width: int = 192,
    depth: int = 4,
    heads: int = 3,
    words_steps: int = 2500,
    words_batch: int = 64,
    words_rate: float = 1e-3,
    seed: int = 0,
) -> Path:
    """Build a SmolVLM whose decoder is a language model, and train its tower to produce the decoder's words.

    Args:
        path: folder to write.
        language: `model.path` of a language model of the Llama architecture with a ChatML template, such as SmolLM2.
        width: width of the tower; a multiple of 4 and of its heads.
        depth: its blocks.
        heads: its heads.
        words_steps: steps of stage W; 0 leaves tower and connector as they are drawn.
        words_batch: pictures of a step, all new.
        words_rate: largest learning rate of AdamW.
        seed: of weights and pictures.

    Returns:
        The folder, which loads with AutoModelForImageTextToText and AutoProcessor; `words.jsonl` in it has the loss of
        stage W, the fraction of correct words and the CPU seconds. The next call continues an interrupted one.

    Raises:
        UserError: there is no such language model, or it has another architecture or template.
    """
    ensure_torchvision()
    ensure_number_words()
    source, adapter = resolve_model(language)
    if adapter is not None:
        raise UserError(f"language={language} is an adapter; merge it first with `mmrl export`")
    tokenizer = _with_image_tokens(source)
    model = _around(source, tokenizer, {"width": width, "depth": depth, "heads": heads}, seed)
    with replaced(Path(path)) as draft, quiet_transformers():
        draft.mkdir(parents=True, exist_ok=True)
        saved = Path(path).with_name(f".{Path(path).name}.words.pt")
        if words_steps:
            learn_words(model, tokenizer, words_steps, words_batch, words_rate, seed, draft / CURVE, saved)
        model.save_pretrained(draft)
        FAMILIES["smolvlm"].processor(tokenizer, SIDE_PX, GRID**2).save_pretrained(draft)  # type: ignore[misc]
    saved.unlink(missing_ok=True)
    return Path(path)


def _with_image_tokens(language: str) -> Any:
    """The language model's tokenizer with image tokens and a template that takes images."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(language, extra_special_tokens=SPECIAL, trust_remote_code=False)
    own, turn = tokenizer.chat_template, [{"role": "user", "content": "Hi"}]
    system = str(tokenizer.apply_chat_template(turn, tokenize=False)).partition("<|im_start|>user")[0]
    chats = [
        turn,
        [*turn, {"role": "assistant", "content": "Hello"}],
        [{"role": "system", "content": "Be brief."}, *turn],
    ]
    rendered = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    tokenizer.chat_template = TEMPLATE.replace("SYSTEM", repr(system))
    again = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    if own is None or rendered != again:
        raise UserError(
            f"the chat template of {language} is not ChatML; a SmolVLM can only be built around models like SmolLM2"
        )
    return tokenizer


TEMPLATE = """\
{%- set ns = namespace(sees=false) -%}
{%- for turn in messages if turn.content is not string -%}{%- for part in turn.content if part.type == 'image' -%}
{%- set ns.sees = true -%}
{%- endfor -%}{%- endfor -%}
{%- if messages[0].role != 'system' and not ns.sees -%}{{ SYSTEM }}{%- endif -%}
{%- for turn in messages -%}
{{ '<|im_start|>' + turn.role + '\\n' }}
{%- if turn.content is string -%}{{ turn.content }}{%- else -%}
{%- for part in turn.content -%}{{ '<image>' if part.type == 'image' else part.text }}{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""ChatML; the language model's default system message is only added to chats without an image, to save tokens."""


def _around(language: str, tokenizer: Any, tower: dict[str, int], seed: int) -> Any:
    """The SmolVLM with the language model's weights.

    The new tokens' embeddings are the mean of all others. Their logits are then the mean logit, and together they take
    at most 4 / vocabulary of the probability (Jensen), so text is generated as before.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

    source = AutoModelForCausalLM.from_pretrained(language, dtype=torch.float32, trust_remote_code=False)
    if source.config.model_type != "llama":
        raise UserError(f"{language} is a {source.config.model_type}; the decoder of a SmolVLM must be a llama")
    text = source.config.to_dict() | {"vocab_size": max(len(tokenizer), source.config.vocab_size)}
    for name in ("architectures", "_name_or_path", "transformers_version", "dtype"):
        text.pop(name, None)
    vision = {"model_type": "smolvlm_vision", "hidden_size": tower["width"], "intermediate_size": 4 * tower["width"],
              "num_hidden_layers": tower["depth"], "num_attention_heads": tower["heads"], "image_size": SIDE_PX,
              "patch_size": SIDE_PX // GRID // MERGE}  # fmt: skip
    config = AutoConfig.for_model("smolvlm", text_config=text, vision_config=vision, scale_factor=MERGE,
                                  image_token_id=tokenizer.image_token_id,
                                  tie_word_embeddings=source.config.tie_word_embeddings)  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # the fused CPU attention takes twice as long for its backward in bfloat16
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
        shape_tower(model)
    own = {f"model.text_model.{name.removeprefix('model.')}": weight for name, weight in source.state_dict().items()}
    if "model.text_model.lm_head.weight" in own:
        own["lm_head.weight"] = own.pop("model.text_model.lm_head.weight")
    state = model.state_dict()
    for name, weight in own.items():
        more = len(state[name]) - len(weight)
        state[name].copy_(torch.cat([weight, weight.mean(0, keepdim=True).expand(more, -1)]) if more else weight)
    ends = list(eos_ids(source, tokenizer))
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    return model


@torch.no_grad()
def shape_tower(model: Any) -> None:
    """Initialise the weights of a tower so that it learns from scratch within minutes.

    transformers draws all weights with a deviation of 0.02. Positions are then a tenth of the patches, and a tower this
    narrow sees a bag of patches: colours, but neither shapes nor digits. Here positions are waves as large as the
    patches, and weights keep the variance.
    """
    tower, vision = model.base_model.vision_model, model.config.vision_config
    shape_positions(tower, 1.0, smooth=True)
    positions = tower.embeddings.position_embedding.weight
    positions.mul_(POSITION_SIZE / positions.square().mean().sqrt())
    nn.init.normal_(tower.embeddings.patch_embedding.weight, std=(3 * vision.patch_size**2) ** -0.5)
    for name, weight in tower.encoder.named_parameters():
        if weight.ndim == 2:
            gain = (2 * vision.num_hidden_layers) ** -0.5 if name.endswith(("out_proj.weight", "fc2.weight")) else 1.0
            nn.init.normal_(weight, std=gain * weight.shape[1] ** -0.5)


class WordReader(nn.Module):
    """Scores image tokens by their dot products with a language model's embeddings of words.

    Args:
        embeddings: (V, H) of the language model.
        tokenizer: its tokenizer.
    """

    words: Tensor

    def __init__(self, embeddings: Tensor, tokenizer: Any) -> None:
        super().__init__()
        embeddings = embeddings.detach().float()
        center = embeddings.mean(0)
        self.size = float(embeddings.norm(dim=-1).median())
        """Typical norm of an embedding."""
        made = [
            embeddings[tokenizer(word if group == "digit" else f" {word}", add_special_tokens=False).input_ids].mean(0)
            for group, words in GROUPS.items()
            for word in words
        ]
        self.register_buffer("words", torch.stack(made) - center)
        self.scale = nn.Parameter(torch.full((len(GROUPS),), 8.0 / self.size**2))
        self.nothing = nn.Parameter(torch.zeros(len(GROUPS)))

    def forward(self, tokens: Tensor, cells: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Loss, and by group the fraction of correct words among cells that show one.

        Args:
            tokens: (N, 16, H) image tokens.
            cells: (N, groups, 16) int64, index of the word that each cell shows in a group, NOTHING without one.
        """
        scores = (tokens @ self.words.T).split([len(words) for words in GROUPS.values()], -1)
        losses, right = list[Tensor](), dict[str, float]()
        for number, (group, products) in enumerate(zip(GROUPS, scores, strict=True)):
            words = products.shape[-1]
            wanted = torch.where(cells[:, number] == NOTHING, words, cells[:, number]).flatten()
            nothing = self.nothing[number].expand(len(wanted), 1)
            logits = torch.cat([self.scale[number] * products.flatten(0, 1), nothing], -1)
            loss, shown = functional.cross_entropy(logits, wanted, reduction="none"), wanted < words
            # a small batch may have no picture that shows a word of a group
            losses += [0.5 * loss[~shown].mean()] * bool((~shown).any()) + [loss[shown].mean()] * bool(shown.any())
            right[group] = float((logits.argmax(-1) == wanted)[shown].float().mean())
        too_large = (tokens.norm(dim=-1) / self.size - 1.5).relu().square().mean()
        return torch.stack(losses).sum() / len(GROUPS) + 0.1 * too_large, right


def draw_batch(rng: random.Random, count: int, split: str = "train") -> tuple[Tensor, Tensor]:
    """New pictures (count, 3, 64, 64) in [-1, 1], and what their cells show (count, groups, 16)."""
    scenes = [draw_scene(rng, split) for _ in range(count)]
    pixels = torch.from_numpy(np.stack([np.asarray(scene.image) for scene in scenes])).permute(0, 3, 1, 2)
    cells = torch.tensor([[scene.cells[group] for group in GROUPS] for scene in scenes])
    return pixels.float() / 127.5 - 1, cells


def look(model: Any, pixels: Tensor) -> Tensor:
    """Image tokens (N, 16, H) of pictures (N, 3, 64, 64)."""
    body = model.base_model
    with torch.autocast("cpu", torch.bfloat16):
        return body.connector(body.vision_model(pixel_values=pixels).last_hidden_state).float()


def learn_words(
    model: Any, tokenizer: Any, steps: int, batch: int, rate: float, seed: int, curve: Path, saved: Path
) -> None:
    """Stage W: train tower and connector without the decoder; `saved` stores its state until it ends."""
    avoid_refused_instructions()
    body = model.base_model
    reader, rng = WordReader(model.get_input_embeddings().weight, tokenizer), random.Random(seed)
    seeing = nn.ModuleList([body.vision_model, body.connector, reader])
    towers = [*body.vision_model.parameters(), *body.connector.parameters()]
    groups: list[dict[str, Any]] = [{"params": towers}, {"params": list(reader.parameters()), "lr": 3 * rate}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98))
    plan = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50) * 0.5 * (1.02 + math.cos(math.pi * step / steps))
    )
    held = draw_batch(random.Random(seed + 1), 4 * batch, "fresh")
    parts, about = (seeing, optimizer, plan), [steps, batch, rate, seed]
    first, rows, rng_state = _read_state(saved, parts, about)
    rng.setstate(rng_state or rng.getstate())
    began = time.process_time() - (rows[-1]["cpu_s"] if rows else 0.0)
    for step in range(first + 1, steps + 1):
        pixels, cells = draw_batch(rng, batch)
        loss, _ = reader(look(model, pixels), cells)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(towers, 1.0)
        optimizer.step()
        plan.step()
        if step % LOG_EVERY == 0 or step == steps:
            with torch.no_grad():
                held_loss, right = reader(look(model, held[0]), held[1])
            row = {"loss": loss.item(), "fresh_loss": held_loss.item(), "cpu_s": time.process_time() - began} | right
            rows.append({"step": step} | {name: round(value, 4) for name, value in row.items()})
            LOGGER.info("words: %s", rows[-1])
            states = [part.state_dict() for part in parts]
            with replaced(saved) as draft:
                torch.save({"about": about, "rows": rows, "rng": rng.getstate(), "states": states}, draft)
    write_atomically(curve, "".join(f"{json.dumps(row)}\n" for row in rows))


def _read_state(saved: Path, parts: Sequence[Any], about: list[Any]) -> tuple[int, list[dict[str, Any]], Any]:
    """Load the state of an interrupted stage W of the same settings; its step, its curve and its random numbers."""
    if not saved.is_file() or (state := torch.load(saved, weights_only=True))["about"] != about:
        return 0, [], None
    for part, own in zip(parts, state["states"], strict=True):
        part.load_state_dict(own)
    LOGGER.info("words: continuing after step %d", state["rows"][-1]["step"])
    return state["rows"][-1]["step"], state["rows"], state["rng"]


@torch.no_grad()
def perplexity(path: str) -> float:
    """Perplexity of a model on a fixed page of English: scikit-learn's description of its digits.

    Args:
        path: `model.path` of a language model, or of one that sees.
    """
    from sklearn.datasets import load_digits

    folder, _ = resolve_model(path)
    network = load_network(ModelConfig(path=folder), folder)
    ids = load_processor(folder).tokenizer(load_digits().DESCR, return_tensors="pt").input_ids[:, :PAGE_TOKENS]
    logits = network(input_ids=ids, use_cache=False).logits[0, :-1]
    return math.exp(functional.cross_entropy(logits.float(), ids[0, 1:]))
