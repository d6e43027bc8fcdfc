"""LSPO, simplified: utterances as strategies of a game, and pairs of a better and a worse one (arXiv 2502.04686).

    build_strategy_pairs("pairs.jsonl", model="my-vlm", prompts=["You buy.", "You sell."], payoff="my.py:payoff")

Latent space policy optimisation makes a finite game of free speech. A model says many things in each role; utterances
whose last states are close together are one strategy of the role; the mean payoff of every two strategies is the game's
table; counterfactual regret minimisation, on a table regret matching, finds a mixture that nobody gains by leaving.
Utterances of strategies that do well against the other role's mixture are preferred to those of strategies that do
badly: rows for `recipe: preference`. A further round names the trained model.

Left out of the paper: Werewolf and any game of more than one move, whose tree CFR walks; deductions about hidden roles;
and the discussion before a move. A payoff is a function of yours, for instance a judge.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.files import write_atomically
from mmrl.rewards.reward_loading import load_function
from mmrl.training.processes import make_generator
from mmrl.vlm.data.prompt import join_prompts
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.rows import text_prompt
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig, sample
from mmrl.vlm.model.model_config import FrozenModelConfig

Array = NDArray[np.float64]


def regret_matching(payoff: Array, steps: int = 2000) -> tuple[Array, Array]:
    """Average strategies (K,) and (L,) of regret matching in a zero-sum game with the table (K, L) of the first player.

    Source: Zinkevich et al., CFR, 2007, on a game of one move; Hart and Mas-Colell, 2000.
    """
    tables = (payoff, -payoff.T)
    regrets, sums = [np.zeros(len(table)) for table in tables], [np.zeros(len(table)) for table in tables]
    for _ in range(steps):
        # both players move at once: each regret is against the other's strategy of this step
        now = [_matched(regret) for regret in regrets]
        for player, table in enumerate(tables):
            values = table @ now[1 - player]
            regrets[player] += values - now[player] @ values
            sums[player] += now[player]
    # the average strategies approach the equilibrium; the last ones may cycle
    return sums[0] / steps, sums[1] / steps


def clusters_of(states: Array, count: int, seed: int = 0) -> NDArray[np.int64]:
    """Cluster (n,) of each of n states (n, H), by k-means; at most as many clusters as distinct states."""
    from sklearn.cluster import KMeans

    # KMeans refuses more clusters than points, and warns of equal ones
    count = min(count, len(np.unique(states.round(6), axis=0)))
    return np.asarray(KMeans(count, n_init=10, random_state=seed).fit_predict(states), dtype=np.int64)


def build_strategy_pairs(
    path: str | Path,
    *,
    model: str,
    prompts: Sequence[str],
    payoff: str,
    utterances: int = 64,
    strategies: int = 4,
    pairs: int = 64,
    temperature: float = 1.0,
    max_new_tokens: int = 64,
    seed: int = 0,
) -> Path:
    """Write pairs of utterances from strategies that do well and badly against the other role's mixture.

    Args:
        path: JSONL file to write; columns prompt, chosen, rejected, score_chosen, score_rejected and role.
        model: folder or hub id of the model that plays both roles.
        prompts: the question of each of the two roles.
        payoff: `module:function` (utterance of the first role, of the second) -> what the first wins, and the second
            loses.
        utterances: sampled of each role.
        strategies: clusters of each role.
        pairs: most pairs of each role.
        temperature: of the utterances.
        max_new_tokens: the longest utterance.
        seed: of everything drawn.

    Raises:
        UserError: there are not two roles, or no strategy does better than another.
    """
    if len(prompts) != 2:
        raise UserError(f"prompts has {len(prompts)} entries; a game has two roles, each with one prompt")
    wins, rng = load_function(payoff, what="payoff"), np.random.default_rng([seed, 41])
    policy = load_policy(FrozenModelConfig(path=model))
    said, groups = [], []
    config = SamplerConfig(max_new_tokens=max_new_tokens, temperature=temperature)
    for role, text in enumerate(prompts):
        task = VlmTask(f"role-{role}", [{"role": "user", "content": [{"type": "text", "text": text}]}])
        prompt = policy.encode(task)
        drawn = sample(policy, [prompt], utterances, config, make_generator(seed, "utterances", role)).texts
        # an utterance said twice would be paired with itself
        texts = list(dict.fromkeys(text for text in drawn if text.strip()))
        if not texts:
            raise UserError(f"the model wrote nothing as role {role}; raise max_new_tokens")
        said.append(texts)
        ids = [torch.tensor(policy.encode_answer(prompt, text)) for text in texts]
        with torch.no_grad():
            states = policy.last_states([join_prompts([prompt, text_prompt(own)]) for own in ids])
        groups.append(clusters_of(states.double().cpu().numpy(), strategies, seed))
    single = np.array([[float(wins(a, b)) for b in said[1]] for a in said[0]])
    # mean payoff of each pair of clusters
    table = _means(_means(single, groups[0]).T, groups[1]).T
    mixtures = regret_matching(table)
    values = (table @ mixtures[1], -table.T @ mixtures[0])
    rows = []
    for role, text in enumerate(prompts):
        rows += [
            {"prompt": text, "role": role, **row} for row in _pairs(said[role], values[role][groups[role]], pairs, rng)
        ]
    if not rows:
        raise UserError(
            "no strategy does better than another; sample more (utterances) or use more clusters (strategies)"
        )
    write_atomically(Path(path), "".join(f"{json.dumps(row)}\n" for row in rows))
    return Path(path)


def _matched(regret: Array) -> Array:
    positive = regret.clip(min=0)
    return positive / positive.sum() if positive.sum() > 0 else np.full(len(regret), 1 / len(regret))


def _means(table: Array, groups: NDArray[np.int64]) -> Array:
    """Mean of the rows of each group."""
    return np.stack([table[groups == group].mean(0) for group in range(groups.max() + 1)])


def _pairs(texts: Sequence[str], values: Array, most: int, rng: np.random.Generator) -> list[dict[str, str | float]]:
    """Some pairs of utterances whose strategies differ in value."""
    better = [(a, b) for a in range(len(texts)) for b in range(len(texts)) if values[a] > values[b] + 1e-6]
    chosen = rng.permutation(len(better))[:most]
    return [
        {"chosen": texts[a], "rejected": texts[b], "score_chosen": values[a], "score_rejected": values[b]}
        for a, b in (better[index] for index in sorted(chosen))
    ]
