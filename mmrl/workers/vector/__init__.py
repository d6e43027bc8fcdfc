"""Gymnasium's vector interface over a pool of workers, with observations and actions in shared memory."""

from mmrl.entries import lazy_names

_NAMES = {
    "mmrl.workers.vector.env": ("PoolVectorEnv", "VectorSettings"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
