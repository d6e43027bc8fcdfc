"""One Ray for the rollout workers of all runs of an experiment, so that no two of them take the same GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmrl.training.settings import RollersConfig


class SharedRay:
    """A Ray on this machine that starts when a run first asks for it.

    Args:
        configs: all configurations of the experiment.
        jobs: wanted number of runs at a time.
    """

    def __init__(self, configs: Sequence[Any], jobs: int) -> None:
        self.wanted = [options for config in configs if (options := own_ray(config)) is not None]
        """Options of the runs that would start a Ray of their own."""
        self._address = ""
        self.jobs = jobs
        """Runs at a time; fewer than wanted where the GPUs do not hold the workers of as many."""

    def arguments(self, config: Any) -> list[str]:
        """Further arguments of a run, which have its workers join."""
        if own_ray(config) is None:
            return []
        if not self._address:
            self._start()
        return [f"rollers.address={self._address}"]

    def close(self) -> None:
        """End Ray and what still runs in it."""
        if self._address:
            import ray

            ray.shutdown()

    def _start(self) -> None:
        from mmrl.training.ray_rollers import start_ray

        self._address = start_ray(self.jobs * max(options.workers * options.num_cpus for options in self.wanted))
        import ray

        gpus = max(options.workers * options.num_gpus for options in self.wanted)
        if gpus:
            self.jobs = max(1, min(self.jobs, int(ray.cluster_resources().get("GPU", 0.0) / gpus)))


def own_ray(config: Any) -> RollersConfig | None:
    """Worker options of a run that would start its own Ray; None for other runs."""
    options: RollersConfig | None = getattr(config, "rollers", None)
    return options if options is not None and options.engine == "ray" and not options.address else None
