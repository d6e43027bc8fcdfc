"""Numbers about a step's rollouts that every domain reports."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from mmrl.core.filters import zero_variance_groups
from mmrl.core.groups import group_std
from mmrl.core.rollouts import Rollouts


def metric_label(name: str) -> str:
    """A reward's name as one part of a metric's name, without the slashes of a path."""
    return name.replace("/", ".")


def batch_metrics(batches: Sequence[Rollouts], rewards: bool) -> dict[str, float]:
    """Rewards, lengths and zero-variance groups of all that was sampled in a step, before filtering."""
    lengths = torch.cat([batch.mask.sum(1) for batch in batches])
    metrics = {
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
    }
    if not rewards:
        return metrics
    reward = torch.cat([batch.reward for batch in batches])
    scored = torch.isfinite(reward)
    metrics |= {
        "reward/mean": float(reward[scored].mean()) if bool(scored.any()) else float("nan"),
        "reward/std": float(reward[scored].std()) if int(scored.sum()) > 1 else 0.0,
        "reward/errors": float((~scored).sum()),
    }
    if any(len(batch.group.unique()) < len(batch.group) for batch in batches):
        flat = torch.cat([~zero_variance_groups(batch) for batch in batches]).float()
        metrics["reward/zero_variance_groups"] = float(flat.mean())
        metrics["reward/std_within_groups"] = float(torch.cat([_std_in_groups(batch) for batch in batches]).mean())
    for name in batches[0].reward_terms:
        values = torch.cat([batch.reward_terms[name] for batch in batches])
        finite = values[torch.isfinite(values)]
        if len(finite):
            metrics[f"reward/{metric_label(name)}"] = float(finite.mean())
    return metrics


def _std_in_groups(batch: Rollouts) -> torch.Tensor:
    """Standard deviation (B,) of the rewards of each row's group, 0 where fewer than two were scored."""
    return group_std(torch.nan_to_num(batch.reward), batch.group, torch.isfinite(batch.reward), 0)


def restart_peak_memory(device: torch.device) -> None:
    """Have `peak_memory_mb` look for a new peak, where the device can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_mb(device: torch.device) -> float:
    """Largest memory in 10^6 bytes: on a GPU of tensors since `restart_peak_memory`, else resident so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    status = Path("/proc/self/status")  # getrusage also counts the process that started this one
    if status.is_file():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        return int(fields["VmHWM"].split()[0]) * 1024 / 1e6
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return float("nan")
