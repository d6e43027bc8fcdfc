"""Work in other processes, which may raise, hang or die without harm to this one."""

from mmrl.lazy import lazy_names

_NAMES = {
    "mmrl.workers.engine": ("Engine", "WorkerHandle", "WorkerSpec"),
    "mmrl.workers.failures": ("WORKER_FAILURES", "WorkerFailure"),
    "mmrl.workers.pool": ("WorkerPool",),
    "mmrl.workers.run_code": ("CodeResult", "run_code"),
    "mmrl.workers.sandbox": ("Limits",),
    "mmrl.workers.wire": ("Message",),
    "mmrl.workers.vector.env": ("PoolVectorEnv",),
    "mmrl.workers.vector.settings": ("VectorSettings",),
    "mmrl.workers.worker": ("Answer", "Preparation", "Request"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
