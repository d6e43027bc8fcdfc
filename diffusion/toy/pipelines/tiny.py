"""Tiny text encoders and tokenizers of the released architectures; tokenizers are trained on a corpus of captions."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.errors import UserError
from mmrl.fields import bounded, check_config
from mmrl.files import replaced
from mmrl.hub.compat import ensure_torchvision, quiet_transformers

CLIP_START, CLIP_END = "<|startoftext|>", "<|endoftext|>"
CLIP_WORD_END = "</w>"
T5_PAD, T5_END, T5_UNKNOWN, T5_SPACE = "<pad>", "</s>", "<unk>", "▁"


def clip_text_model(
    tokenizer: Any, width: int, layers: int, heads: int, tokens: int, *, projection: int | None = None
) -> Any:
    """Build a random CLIP text encoder."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=tokens,
        projection_dim=projection or width,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = CLIPTextModel(config) if projection is None else CLIPTextModelWithProjection(config)
    _spread_embeddings(model)
    return model.eval()


def t5_text_model(tokenizer: Any, width: int, layers: int, heads: int) -> Any:
    """Build a random T5 encoder."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=width // heads,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=heads,
        feed_forward_proj="gated-gelu",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return T5EncoderModel(config).eval()


def _spread_embeddings(model: Any) -> None:
    """Draw token embeddings so large that prompts differ; at the usual 0.02 all of them look alike."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("token_embedding.weight"):
                weight.normal_(0.0, 1.0)
            elif name.endswith("position_embedding.weight"):
                weight.normal_(0.0, 0.3)


def clip_tokenizer(corpus: Sequence[str], vocab_size: int, max_tokens: int) -> Any:
    """Train a CLIP tokenizer: byte-level BPE with an end-of-word mark, start and end tokens last."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    symbols = [*alphabet, *(symbol + CLIP_WORD_END for symbol in alphabet)]
    room = vocab_size - len(symbols) - 2
    if room < 0:
        raise UserError(f"vocab_size={vocab_size} is too small: CLIP's bytes and marks are {len(symbols) + 2} tokens")
    core = CLIPTokenizer().backend_tokenizer
    words = Counter(
        word for text in corpus for word, _ in core.pre_tokenizer.pre_tokenize_str(core.normalizer.normalize_str(text))
    )
    merges = learn_merges(words, room)
    tokens = dict.fromkeys([*symbols, *map("".join, merges), CLIP_START, CLIP_END])
    pairs: Any = merges
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=pairs, model_max_length=max_tokens)


def learn_merges(words: Mapping[str, int], most: int) -> list[tuple[str, str]]:
    """Learn byte-pair merges; ties are broken by spelling, so the same words always give the same merges.

    The trainer of the tokenizers library numbers end-of-word symbols in the order of a hash table, differently in
    every process.
    """
    spelled = {word: [*word[:-1], word[-1] + CLIP_WORD_END] for word in sorted(words)}
    merges: list[tuple[str, str]] = []
    while len(merges) < most:
        pairs = Counter[tuple[str, str]]()
        for word, parts in spelled.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        spelled = {word: _joined(parts, best) for word, parts in spelled.items()}
    return merges


def _joined(parts: list[str], pair: tuple[str, str]) -> list[str]:
    joined: list[str] = []
    for part in parts:
        if joined and (joined[-1], part) == pair:
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def t5_tokenizer(corpus: Sequence[str], vocab_size: int) -> Any:
    """Count a T5 tokenizer: a unigram model of the corpus's words, and its characters for all other words."""
    from transformers import T5Tokenizer

    counts = Counter(word for text in corpus for word in re.findall(r"\S+", text))
    characters = sorted({character for word in counts for character in word} | set(map(chr, range(33, 127))))
    total = sum(counts.values()) + 1
    special = [(token, 0.0) for token in (T5_PAD, T5_END, T5_UNKNOWN)]
    # a word's own piece beats its characters, whatever its length
    single = [(character, -math.log(total) - 10.0) for character in [T5_SPACE, *characters]]
    room = max(vocab_size - len(special) - len(single), 0)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:room]
    words = [(T5_SPACE + word, math.log(count / total)) for word, count in ranked]
    return T5Tokenizer(vocab=[*special, *single, *words], extra_ids=0)


PIXELS_PER_LATENT_DOUBLING = 2


@dataclass(frozen=True)
class TinySd3Sizes:
    """Sizes of a tiny Stable Diffusion 3 pipeline; the defaults give 0.6 million parameters in the transformer."""

    layers: int = bounded(4, at_least=1)
    """Blocks of the transformer."""
    dual_layers: int = bounded(0, at_least=0)
    """First blocks with a second attention among image tokens; 13 of 24 in Stable Diffusion 3.5 medium."""
    heads: int = bounded(4, at_least=1)
    """Attention heads of the transformer and of the text encoders."""
    head_width: int = bounded(16, at_least=1)
    """Width of one head of the transformer."""
    patch: int = bounded(2, at_least=1)
    """Side length of an image token in latent pixels."""
    latent_size: int = bounded(8, at_least=1)
    """Side length in latent pixels; images have 2 ** (len(vae_widths) - 1) times as many."""
    latent_channels: int = bounded(4, at_least=1)
    """Channels of a latent."""
    vae_widths: tuple[int, ...] = bounded((8, 16, 16), at_least=4, multiple_of=4)
    """Channels of the autoencoder's levels, multiples of 4."""
    text_width: int = bounded(128, at_least=1)
    """Width of a text token in the transformer's input; each CLIP encoder is half as wide."""
    clip_layers: int = bounded(2, at_least=1)
    """Layers of the two CLIP text encoders; the embedding is the state before the last one."""
    clip_tokens: int = bounded(16, at_least=1)
    """Maximum prompt length of the CLIP encoders in tokens, including start and end."""
    pooled_width: int = bounded(64, at_least=1)
    """Width of the pooled text embedding, half of it from each CLIP encoder."""
    t5_layers: int = 1
    """Layers of the T5 encoder; with 0 the pipeline has no T5 and uses zeros instead of its tokens."""
    vocab_size: int = bounded(1000, at_least=1)
    """Maximum vocabulary size of each tokenizer, including the 512 byte symbols of CLIP."""

    @property
    def width(self) -> int:
        """Width of the transformer."""
        return self.heads * self.head_width

    def validate(self) -> None:
        """Check that the sizes fit together; raises UserError."""
        if not self.vae_widths:
            raise UserError("vae_widths is (); must contain a multiple of 4 for each level")
        if self.text_width % (2 * self.heads) or self.pooled_width % 2:
            raise UserError(
                f"text_width={self.text_width} must be a multiple of 2*heads={2 * self.heads}, "
                f"pooled_width={self.pooled_width} of 2"
            )
        if self.latent_size % self.patch:
            raise UserError(f"latent_size={self.latent_size} must be a multiple of patch={self.patch}")
        if self.dual_layers > self.layers:
            raise UserError(f"dual_layers={self.dual_layers} must be between 0 and layers={self.layers}")


def build_tiny_sd3(
    path: Path | str,
    *,
    corpus: Sequence[str],
    sizes: TinySd3Sizes | None = None,
    shift: float = 3.0,
    seed: int = 0,
    autoencoder: Any = None,
) -> Path:
    """Build a small random Stable Diffusion 3 pipeline with its own tokenizers and save it as a pipeline folder.

        folder = build_tiny_sd3("tiny-sd3", corpus=["a red circle", "a blue square"], sizes=TinySd3Sizes(layers=1))
        pipeline = StableDiffusion3Pipeline.from_pretrained(folder)
        image = pipeline("a red circle", num_inference_steps=4, height=32, width=32, max_sequence_length=8).images[0]

    Args:
        path: folder to write; created with its parents.
        corpus: captions that the tokenizers learn their words from.
        sizes: sizes; None is `TinySd3Sizes()`.
        shift: timestep shift of the scheduler; 3 is that of the released models.
        seed: seed of the random weights; the global generator is left alone.
        autoencoder: one that is ready, such as a `PatchAutoencoder`; None is a random AutoencoderKL.

    Returns:
        The folder, which `StableDiffusion3Pipeline.from_pretrained` loads; without a T5 encoder it needs
        `text_encoder_3=None, tokenizer_3=None`, as a released folder without one does.

    Raises:
        UserError: sizes that do not fit together.
    """
    sizes = sizes or TinySd3Sizes()
    check_config(sizes)
    return write_pipeline(Path(path), lambda: _assemble(sizes, corpus, shift, autoencoder), seed)


def build_from_images(
    path: str, *, images: str, patch: int = 2, channels: int = 12, shift: float = 1.5, seed: int = 0, **sizes: Any
) -> Path:
    """Write a tiny Stable Diffusion 3 pipeline with a random transformer, for square captioned images.

    Args:
        path: folder to write.
        images: captioned images, as `images.path` of a run; their words are those of the tokenizers.
        patch: pixels on a side of a latent pixel, a power of 2.
        channels: latent channels; 3 patch^2 lose nothing.
        shift: timestep shift of the scheduler; small images need less than the 3 of the released models.
        seed: seed of the weights.
        sizes: further fields of `TinySd3Sizes`.

    Raises:
        UserError: the images differ in size, are not square, or do not fit the patches.
    """
    from diffusion.data.captioned_images import ImageDataConfig, load_images
    from diffusion.toy.pipelines.patches import PatchAutoencoder

    data = load_images(ImageDataConfig(path=images))
    pixels = [image.read() for image in data[:FITTED_IMAGES]]
    found = sorted({image.shape[:-1] for image in pixels})
    (side, *_), step = found[0], patch * sizes.get("patch", TinySd3Sizes.patch)
    if found != [(side, side)] or side % step:
        raise UserError(f"{images} has images of {found}; all must be squares whose side is a multiple of {step}")
    return build_tiny_sd3(
        path,
        corpus=[image.caption for image in data],
        sizes=TinySd3Sizes(
            latent_size=side // patch, latent_channels=channels, **({"t5_layers": 0, "vocab_size": 2000} | sizes)
        ),
        shift=shift,
        seed=seed,
        autoencoder=PatchAutoencoder.fit(np.stack(pixels), patch, channels),
    )


FITTED_IMAGES = 1000
"""Images that an autoencoder is fitted to."""


def write_pipeline(path: Path, assemble: Callable[[], Any], seed: int) -> Path:
    """Make a pipeline with random weights and save it, without using the global generator."""
    import torch

    ensure_torchvision()
    from diffusion.models.pipelines import quiet_diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = assemble()
    with replaced(path) as draft, quiet_transformers(), quiet_diffusers():
        pipeline.save_pretrained(draft)
    return path


def _assemble(sizes: TinySd3Sizes, corpus: Sequence[str], shift: float, autoencoder: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    tokenizer = clip_tokenizer(corpus, sizes.vocab_size, sizes.clip_tokens)
    projection = sizes.pooled_width // 2
    encoders = [
        clip_text_model(
            tokenizer, sizes.text_width // 2, sizes.clip_layers, sizes.heads, sizes.clip_tokens, projection=projection
        )
        for _ in range(2)
    ]
    long_tokenizer, long_encoder = None, None
    if sizes.t5_layers:
        long_tokenizer = t5_tokenizer(corpus, sizes.vocab_size)
        long_encoder = t5_text_model(long_tokenizer, sizes.text_width, sizes.t5_layers, sizes.heads)
    return StableDiffusion3Pipeline(
        transformer=_transformer(sizes),
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=shift),
        vae=autoencoder or random_autoencoder(sizes.latent_channels, sizes.latent_size, sizes.vae_widths),
        text_encoder=encoders[0],
        tokenizer=tokenizer,
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizer,
        text_encoder_3=long_encoder,
        tokenizer_3=long_tokenizer,
    )


def _transformer(sizes: TinySd3Sizes) -> Any:
    from diffusers import SD3Transformer2DModel

    transformer: Any = SD3Transformer2DModel(
        sample_size=sizes.latent_size,
        patch_size=sizes.patch,
        in_channels=sizes.latent_channels,
        out_channels=sizes.latent_channels,
        num_layers=sizes.layers,
        attention_head_dim=sizes.head_width,
        num_attention_heads=sizes.heads,
        joint_attention_dim=sizes.text_width,
        caption_projection_dim=sizes.width,
        pooled_projection_dim=sizes.pooled_width,
        pos_embed_max_size=sizes.latent_size // sizes.patch,
        qk_norm="rms_norm",
        dual_attention_layers=tuple(range(sizes.dual_layers)),
    )
    return transformer.eval()


def random_autoencoder(latent_channels: int, latent_size: int, widths: Sequence[int]) -> Any:
    """Build a random AutoencoderKL with a level for each width."""
    from diffusers import AutoencoderKL

    levels = len(widths)
    autoencoder: Any = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=tuple(widths),
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=4,
        sample_size=latent_size * PIXELS_PER_LATENT_DOUBLING ** (levels - 1),
        scaling_factor=1.0,
        shift_factor=0.0,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    return autoencoder.eval()
