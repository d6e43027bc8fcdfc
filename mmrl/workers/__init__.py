"""Work in other processes, which may raise, hang or die without affecting this one."""

from mmrl.entries import lazy_names

_NAMES = {
    "mmrl.workers.engine": (
        "Engine",
        "WORKER_FAILURES",
        "WorkerFailure",
        "WorkerHandle",
        "WorkerSpec",
    ),
    "mmrl.workers.pool": ("WorkerPool",),
    "mmrl.workers.row_pool": (
        "RowLimits",
        "RowPool",
    ),
    "mmrl.workers.run_code": (
        "CodeResult",
        "run_code",
    ),
    "mmrl.workers.sandbox": ("Limits",),
    "mmrl.workers.vector.env": ("PoolVectorEnv", "VectorSettings"),
    "mmrl.workers.wire": ("Message",),
    "mmrl.workers.worker": ("Answer", "Preparation", "Request"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
