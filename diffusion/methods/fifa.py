"""FiFA: selects the image pairs that are worth fine-tuning on (Yang et al., arXiv 2410.10166).

The subset S of K pairs is to have large preference margins m, good captions q and varied captions:

    max_S  mean_S m + alpha mean_S q + gamma H(S),

approximated by the K pairs of the highest importance m_i + alpha q_i + gamma log(1 + d_i), where m = |r(x_w) - r(x_l)|
under a reward model, q is a quality score of the caption, and d_i the distance of its embedding to the k-th nearest
other caption (the term of a nearest-neighbour estimate of the entropy).

Differences from the paper, which has no public code: alpha, gamma, k and the normalisation are not stated in what could
be read of it; here each term is standardised over the pairs (`normalise: zscore`) and both weights default to 0.5. The
1 in the logarithm keeps duplicate captions finite. `margin: signed` also drops pairs whose labels the reward
model reverses, which |.| keeps.

As a filter of a run: `filter: {kind: fifa, keep: 200}`. Alone: `select_pairs`, or

    python -m diffusion.methods.fifa pairs.npz kept.npz --keep 200 --pipeline runs/shapes/pipeline
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffusion.data.image_pairs import NUMBERS, ImagePair, ImagePairConfig, load_pairs, write_pairs
from mmrl.errors import UserError
from mmrl.fields import bounded, check_config, choice, rare
from mmrl.rewards.reward_loading import load_function

CHUNK = 1024
"""Rows of the distance table in memory at a time."""


@dataclass
class PairFilterConfig:
    """Which pairs to train on."""

    kind: str = choice("none", ("none", "fifa", "random"))
    """none: all pairs; fifa: the most important ones; random: the same number drawn at random, for comparison."""
    keep: int | None = bounded(None, at_least=1)
    """Number of pairs to keep; required for fifa and random."""
    alpha: float = bounded(0.5, at_least=0)
    """Weight of caption quality; 0 = ignored."""
    gamma: float = bounded(0.5, at_least=0)
    """Weight of caption diversity; 0 = ignored."""
    margin: str = rare(choice("absolute", ("absolute", "signed")))
    """absolute: absolute difference of the two scores; signed: score of the preferred image minus score of the rejected
    one."""
    neighbours: int = rare(bounded(5, at_least=1))
    """k: the diversity of a caption is its distance to the k-th nearest other caption."""
    normalise: str = rare(choice("zscore", ("zscore", "none")))
    """zscore: subtract the mean of each term and divide by its standard deviation; none: unchanged."""
    reward: str | None = rare(None)
    """Image reward that scores both images, without options: a name (`mmrl list rewards`) or `file.py:function`.
    Default: the columns score_chosen and score_rejected."""
    quality: str | None = rare(None)
    """`module:function` that scores captions, f(list of texts) -> list of numbers. Default: the column
    text_quality."""
    seed: int = 0
    """Seed of the random selection."""

    def validate(self) -> None:
        """Check that the fields fit together; raises ValueError."""
        if (self.kind == "none") != (self.keep is None):
            raise ValueError(f"filter.kind is '{self.kind}' and filter.keep is {self.keep}; set both or neither")


@dataclass(frozen=True)
class Selection:
    """The kept pairs, the most important first."""

    pairs: list[ImagePair]
    importance: Tensor
    """(K,) float64."""
    terms: dict[str, Tensor]
    """margin, quality and diversity (K,) before normalisation, if used."""


def select_pairs(
    pairs: Sequence[ImagePair],
    config: PairFilterConfig,
    embed: Callable[[Sequence[str]], Tensor],
) -> Selection:
    """Keep the most important of N pairs; fifa needs their scores.

    `embed` gives embeddings (U, D) of U captions and is called for the diversity only.
    """
    keep = len(pairs) if config.keep is None else min(config.keep, len(pairs))
    if config.kind != "fifa":
        order = list(range(len(pairs)))
        if config.kind == "random":
            order = np.random.default_rng(config.seed).permutation(len(pairs)).tolist()
        # in file order; the choice is random, not the order of training
        chosen = sorted(order[:keep])
        return Selection([pairs[index] for index in chosen], torch.zeros(len(chosen), dtype=torch.float64), {})
    if config.reward is not None:
        pairs = score_pairs(pairs, config.reward)
    weights = {"margin": 1.0, "quality": config.alpha, "diversity": config.gamma}
    terms = {"margin": _margins(pairs, config)}
    if config.alpha:
        terms["quality"] = _quality(pairs, config)
    if config.gamma:
        terms["diversity"] = _diversity([pair.caption for pair in pairs], config.neighbours, embed)
    parts = [
        weights[name] * (_standardised(term) if config.normalise == "zscore" else term) for name, term in terms.items()
    ]
    importance = torch.stack(parts).sum(0)
    # stable: pairs of equal importance stay in file order on every machine
    best = torch.argsort(importance, descending=True, stable=True)[:keep]
    kept = {name: term[best] for name, term in terms.items()}
    return Selection([pairs[index] for index in best.tolist()], importance[best], kept)


def score_pairs(pairs: Sequence[ImagePair], reward: str) -> list[ImagePair]:
    """Score both images of each pair."""
    from diffusion.data.prompts import DiffusionTask
    from diffusion.diffusion_recipe import score_images
    from diffusion.rewards.image_rewards import load_rewards
    from mmrl.rewards import RewardConfig

    scores: list[float] = []
    with closing(load_rewards([RewardConfig(name=reward)], [])) as rewards:
        try:
            rewards.check_columns([])
        except UserError as error:
            raise UserError(
                f"filter.reward: {error}; filter.reward passes no options and no columns: write a function that calls "
                "the reward with them, and set filter.reward=file.py:function"
            ) from error
        for start in range(0, len(pairs), CHUNK):
            part = pairs[start : start + CHUNK]
            # both sides share the caption
            tasks = [DiffusionTask(pair.id, pair.caption) for pair in part for _ in (0, 1)]
            images = [side for pair in part for side in pair.read()]
            result = score_images(rewards, tasks, images, [True] * len(tasks))
            if result.errors:
                raise UserError(f"filter.reward {reward} failed: {'; '.join(result.examples.values())}")
            scores += result.terms[reward]
    both = zip(pairs, scores[::2], scores[1::2], strict=True)
    return [
        dataclasses.replace(pair, numbers={**pair.numbers, "score_chosen": chosen, "score_rejected": rejected})
        for pair, chosen, rejected in both
    ]


def neighbour_distances(embeddings: Tensor, neighbours: int) -> Tensor:
    """Distance (U,) float64 of each row of (U, D), U at least 2, to its k-th nearest other row."""
    table = embeddings.double()
    # a small set has fewer than k other rows
    k = min(neighbours, len(table) - 1)
    parts = []
    # U^2 distances of a large set do not fit in memory
    for start in range(0, len(table), CHUNK):
        # the matrix-product form of cdist is inexact for near-duplicates, whose distances matter most here
        distances = torch.cdist(table[start : start + CHUNK], table, compute_mode="donot_use_mm_for_euclid_dist")
        own = torch.arange(start, start + len(distances))
        # a row is not its own neighbour
        distances[own - start, own] = float("inf")
        parts.append(distances.kthvalue(k, dim=1).values)
    return torch.cat(parts)


def embed_captions(policy: Any) -> Callable[[Sequence[str]], Tensor]:
    """The pooled text embeddings of a policy's pipeline as a function of captions."""

    def embed(captions: Sequence[str]) -> Tensor:
        rows = policy.embeddings.rows(list(captions), allow_empty=True)
        return policy.family.text_vector(rows.values)[rows.index].float().cpu()

    return embed


def _margins(pairs: Sequence[ImagePair], config: PairFilterConfig) -> Tensor:
    lacking = next((pair for pair in pairs if not {"score_chosen", "score_rejected"} <= set(pair.numbers)), None)
    if lacking is not None:
        raise UserError(
            f"{lacking.id} has no score_chosen and score_rejected, which filter.kind=fifa needs; set filter.reward "
            "to an image reward, or use filter.kind=random"
        )
    scores = torch.tensor([[pair.numbers[name] for name in NUMBERS[:2]] for pair in pairs], dtype=torch.float64)
    margin = scores[:, 0] - scores[:, 1]
    return margin.abs() if config.margin == "absolute" else margin


def _quality(pairs: Sequence[ImagePair], config: PairFilterConfig) -> Tensor:
    if config.quality is None:
        lacking = next((pair for pair in pairs if "text_quality" not in pair.numbers), None)
        if lacking is not None:
            raise UserError(
                f"{lacking.id} has no text_quality, which filter.alpha={config.alpha:g} needs; set filter.quality to "
                "a function, or filter.alpha to 0"
            )
        return torch.tensor([pair.numbers["text_quality"] for pair in pairs], dtype=torch.float64)
    # each caption once, since a quality function may be a language model
    captions = list(dict.fromkeys(pair.caption for pair in pairs))
    scores = dict(zip(captions, load_function(config.quality, what="filter.quality")(captions), strict=True))
    return torch.tensor([float(scores[pair.caption]) for pair in pairs], dtype=torch.float64)


def _diversity(captions: Sequence[str], neighbours: int, embed: Callable[[Sequence[str]], Tensor]) -> Tensor:
    # over distinct captions: with repeats, the nearest neighbour of a caption would be itself
    distinct = list(dict.fromkeys(captions))
    if len(distinct) < 2:
        return torch.zeros(len(captions), dtype=torch.float64)
    # log of the nearest-neighbour distance is an entropy estimate; 1 + keeps duplicates finite
    term = torch.log1p(neighbour_distances(embed(distinct), neighbours))
    index = {caption: number for number, caption in enumerate(distinct)}
    return term[torch.tensor([index[caption] for caption in captions])]


def _standardised(term: Tensor) -> Tensor:
    deviation = term.std(correction=0)
    # a constant term ranks nothing, and 0 / 0 would make every importance NaN
    return (term - term.mean()) / deviation if float(deviation) > 0 else torch.zeros_like(term)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the most important pairs of a file to a .npz file."""
    parser = argparse.ArgumentParser(prog="python -m diffusion.methods.fifa", description=main.__doc__)
    parser.add_argument("pairs", help=".npz or .jsonl file of pairs with scores")
    parser.add_argument("output", help=".npz file to write to")
    parser.add_argument("--keep", type=int, required=True, help="number of pairs to keep")
    parser.add_argument("--pipeline", default="", help="pipeline whose text encoders embed captions; used by --gamma")
    for item in dataclasses.fields(PairFilterConfig):
        if item.name in ("alpha", "gamma", "margin", "neighbours", "normalise", "reward", "quality"):
            kind = str if item.default is None else type(item.default)
            parser.add_argument(f"--{item.name}", type=kind, default=item.default, help=f"filter.{item.name}")
    args = vars(parser.parse_args(argv))
    source, output, pipeline = (args.pop(name) for name in ("pairs", "output", "pipeline"))
    config = PairFilterConfig(kind="fifa", **args)
    try:
        check_config(config, "filter")
        found = select_pairs(load_pairs(ImagePairConfig(path=source)).tasks, config, _encoders(pipeline, config.gamma))
        images = _stacked(found.pairs)
    except (UserError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    numbers = {name: [pair.numbers[name] for pair in found.pairs] for name in NUMBERS if name in found.pairs[0].numbers}
    write_pairs(output, [pair.caption for pair in found.pairs], images[::2], images[1::2], **numbers)
    means = ", ".join(f"{name} {float(term.mean()):.4g}" for name, term in found.terms.items())
    sys.stdout.write(f"{len(found.pairs)} pairs written to {output}; means: {means}\n")
    return 0


def _stacked(pairs: Sequence[ImagePair]) -> np.ndarray:
    """Both images of each pair (2 K, h, w, 3); raises UserError if they differ in size."""
    images = [side for pair in pairs for side in pair.read()]
    for index, image in enumerate(images):
        if image.shape != images[0].shape:
            raise UserError(
                f"{pairs[index // 2].id} has an image of {image.shape} and {pairs[0].id} one of {images[0].shape}; a "
                ".npz file needs images of one size, so resize them"
            )
    return np.stack(images)


def _encoders(path: str, gamma: float) -> Callable[[Sequence[str]], Tensor]:
    if not gamma:
        return lambda captions: torch.zeros(len(captions), 1)
    if not path:
        raise UserError("--gamma weights caption diversity, which requires --pipeline; pass --pipeline or --gamma 0")
    from diffusion.models.diffusion_policy import PipelineConfig, load_policy

    return embed_captions(load_policy(PipelineConfig(path=path)))


if __name__ == "__main__":
    sys.exit(main())
