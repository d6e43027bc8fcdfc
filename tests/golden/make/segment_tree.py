"""Advantages of the branches of a tree by the public code of SPO-tree."""

import copy
import json

import numpy as np

from tests.golden.make.peers import Clone, Made

FILE, CLASS = "src/treetune/episode_generators/tree_episode_generator.py", "TreeEpisodeUtils"
LEAVES = {"000": 1.0, "001": 0.0, "002": 1.0, "01": 0.0, "020": 0.25, "021": 0.5, "1": 1.0, "20": 0.0, "21": 0.0}
"""Rewards of the leaves by the numbers of their branches: a branch without change, one that all leaves fail."""


def make(path: str) -> Made:
    clone = Clone(path, "AIFrameResearch/SPO", "b9fc6a263dec54e28137fd488a9b9c0e0d026025")
    root = grow("") | {"_request_object": {"_treetune__idx": 0}}
    utils = clone.function(FILE, CLASS, copy=copy, json=json)()
    peers = []
    for kind in ("rloo", "grpo"):
        edges = utils.extract_edges_from_tree(root, kind, False)
        kept = [edge["response_text"] for edge in utils.extract_edges_from_tree(root, kind)]
        peer = {"program": clone.name, "calls": [f"{FILE}:{CLASS}.extract_edges_from_tree"], "relative": 1e-12}
        peer |= {"kind": kind, "kept": kept, "branches": [edge["response_text"] for edge in edges]}
        peers.append(peer | {"advantage": [edge["advantage"] for edge in edges]})
    return "SPO-tree, arXiv 2505.23564", {"leaves": LEAVES}, peers, clone


def grow(path):
    """A node as the code's sampler leaves it; hybrid_inference_strategy.py averages rewards in this way."""
    node = {"text": path, "full_text": path, "leaf": path in LEAVES}
    if path in LEAVES:
        return node | {"reward": LEAVES[path], "reward_std": 0.0}
    children = [grow(one) for one in sorted({x[: len(path) + 1] for x in LEAVES if x.startswith(path)})]
    rewards = [child["reward"] for child in children]
    return node | {"children": children, "reward": float(np.mean(rewards)), "reward_std": float(np.std(rewards))}
