"""Times at which noise is added to finished samples: how many, from which distribution, shared by which samples.

Sources: scxue/advantage_weighted_matching; X-GenGroup/Flow-Factory, timestep sampler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffusion.matching.losses import stratified
from diffusion.sampling.schedule import shift_sigmas
from mmrl.errors import UserError
from mmrl.fields import bounded, choice, rare
from mmrl.training.processes import Streams

CONTINUOUS = ("logit_normal", "uniform")
SHARING = ("batch", "group", "image")
LOWEST_TIME = 0.01
LOWEST_UNIFORM_TIME = 0.2


@dataclass
class TimestepConfig:
    """The noisy versions of a sample to train on."""

    count: int = bounded(6, at_least=1)
    """Number T of times per image in an epoch."""
    times: str = choice("discrete_wo_init", lambda: TIME_SAMPLERS)
    """Distribution of the times: discrete, discrete_wo_init, discrete_with_init (of the sampler's grid),
    logit_normal or uniform."""
    fraction: float = bounded(0.9, above=0, at_most=1)
    """Fraction of the grid that the discrete kinds use, from the noisy end."""
    shift: float = bounded(3.0, above=0)
    """Shift of the continuous kinds towards noise; 1 = no shift."""
    share_times: str = rare(choice("group", SHARING))
    """Which images share their times: batch (all images), group (images of one prompt) or image (none)."""
    share_noise: bool = rare(False)
    """Use the same noises for all images of a group."""


def check_times(config: Any) -> None:
    """Reject a changed option of `timesteps` that the chosen distribution does not read; raises ValueError."""
    # the method's own default, which may differ from that of `TimestepConfig`
    make_default: Any = next(item.default_factory for item in fields(config) if item.name == "timesteps")
    times = config.timesteps.times
    unread = "fraction" if times in CONTINUOUS else "shift"
    value = getattr(config.timesteps, unread)
    if value != getattr(make_default(), unread):
        raise ValueError(f"timesteps.{unread} is {value}, but timesteps.times '{times}' does not read it; leave it out")


def draw_times(options: TimestepConfig, grid: Tensor, groups: int, group_size: int, streams: Streams) -> Tensor:
    """Draw the times (B, T) float32 of B = groups * group_size samples; `grid` (S + 1,) descends to 0."""
    if options.share_times == "batch":
        # from the stream of the step, so that all processes use the same times
        return sample_times(options, grid, streams.shared("times")).repeat(groups * group_size, 1)
    distinct = group_size if options.share_times == "image" else 1

    def draw(own: torch.Generator) -> Tensor:
        return torch.stack([sample_times(options, grid, own) for _ in range(distinct)])

    # each task draws from its own stream: its times do not depend on the process that has it
    return streams.stack(groups, draw, "times").repeat_interleave(group_size // distinct, 0)


def sample_times(options: TimestepConfig, grid: Tensor, generator: torch.Generator) -> Tensor:
    """Draw the times (T,) float32 of a sample, one from each of T strata.

    * discrete: times of the grid, strata over its first int(fraction * S)
    * discrete_wo_init: the same without the grid's first time, pure noise
    * discrete_with_init: the grid's first time, and T - 1 strata over the others
    * logit_normal: sigmoid of a standard normal, shifted, at least 0.01, in random order
    * uniform: strata of 0.2..1 in random order, shifted

    Args:
        options: distribution and number of times.
        grid: the sampler's times (S + 1,), descending to 0; read by the discrete kinds.
        generator: source of the draws; they are made on its device.

    Raises:
        UserError: the grid is too short.
    """
    return TIME_SAMPLERS[options.times](options, grid, generator)


def reachable_times(options: TimestepConfig, grid: Tensor) -> Tensor:
    """Times (T,) that can be drawn; for continuous kinds, the smallest and the largest."""
    if options.times in CONTINUOUS:
        return torch.tensor([LOWEST_TIME, 1.0])
    # the first time of the grid is pure noise, which `wo_init` leaves out
    return _usable(options, grid, first=0)[int(options.times == "discrete_wo_init") :]


def _discrete_with_init(options: TimestepConfig, grid: Tensor, generator: torch.Generator) -> Tensor:
    # always pure noise, the one state that all images share
    initial = _usable(options, grid, first=0)[:1]
    if options.count == 1:
        return initial
    return torch.cat([initial, _grid_times(options, grid, generator, first=1, strata=options.count - 1)])


def _grid_times(
    options: TimestepConfig, grid: Tensor, generator: torch.Generator, first: int, strata: int | None = None
) -> Tensor:
    """One index per stratum of first..int(fraction * S) - 1; an empty stratum takes the nearest index below."""
    times = _usable(options, grid, first)
    strata = strata or options.count
    device = generator.device
    # whole edges in exact arithmetic: with more strata than times some are empty, and their edge serves as the index
    edges = torch.arange(strata + 1, device=device) * (len(times) - first) // strata + first
    offset = torch.rand(strata, generator=generator, device=device) * (edges[1:] - edges[:-1])
    # floor of edge + offset, so an empty stratum (offset 0) returns its lower edge
    return times.to(device)[edges[:-1] + offset.long()]


def _usable(options: TimestepConfig, grid: Tensor, first: int) -> Tensor:
    """The grid's first int(fraction * S) times; raises UserError if none is left from `first` on."""
    # truncated like the public code: 14 steps at 0.9 leave 12
    last = int((len(grid) - 1) * options.fraction)
    if last <= first:
        raise UserError(
            f"fraction={options.fraction} of a grid of {len(grid) - 1} steps leaves no time to draw from; use more "
            "steps or a fraction closer to 1"
        )
    return grid[:last].float()


def _logit_normal(options: TimestepConfig, grid: Tensor, generator: torch.Generator) -> Tensor:
    # inverse CDF of stratified uniforms: one normal per stratum, then in random order
    normal = torch.special.ndtri(stratified(options.count, 1, generator)[:, 0])
    # near time 0 the noise target is hardly visible in x_t
    times = shift_sigmas(normal.sigmoid(), options.shift).clamp(min=LOWEST_TIME)
    return times[torch.randperm(options.count, generator=generator, device=generator.device)]


def _uniform(options: TimestepConfig, grid: Tensor, generator: torch.Generator) -> Tensor:
    times = LOWEST_UNIFORM_TIME + (1 - LOWEST_UNIFORM_TIME) * stratified(options.count, 1, generator)[:, 0]
    order = torch.rand(options.count, generator=generator, device=generator.device).argsort()
    return shift_sigmas(times[order], options.shift)


TIME_SAMPLERS: dict[str, Callable[[TimestepConfig, Tensor, torch.Generator], Tensor]] = {
    "discrete": partial(_grid_times, first=0),
    "discrete_wo_init": partial(_grid_times, first=1),
    "discrete_with_init": _discrete_with_init,
    "logit_normal": _logit_normal,
    "uniform": _uniform,
}
