"""The worker's side of isolated rewards: loads reward functions and calls them; see `mmrl.workers.serve`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from mmrl.rewards.calling import Batch, RewardFailure, call, signature_of
from mmrl.rewards.reward_config import TrainerState
from mmrl.workers.loading import LoadError, find_function
from mmrl.workers.wire import decode, error_text


class RewardService:
    """Calls reward functions; requests are of the kinds load, together and row."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}

    def hello(self) -> dict[str, Any]:
        """Send an empty description."""
        return {}

    def answer(self, fields: Mapping[str, Any], arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Load or call a function: once with all rows, or with the only row that is given."""
        if fields["kind"] == "load":
            return self._load(fields["function"], fields["what"]), {}
        prompts, completions, columns, options, state = decode(fields["arguments"], arrays)
        batch = Batch(prompts, completions, columns, None if state is None else TrainerState(**state))
        found = call(self._functions[fields["function"]], batch, options)
        if isinstance(found, RewardFailure):
            return {"failure": asdict(found)}, {}
        return {"outcomes": [asdict(each) if isinstance(each, RewardFailure) else each for each in found]}, {}

    def close(self) -> None:
        """Nothing to free."""

    def _load(self, function: str, what: str) -> dict[str, Any]:
        try:
            self._functions[function] = find_function(function, what=what)
        except LoadError:
            raise
        except BaseException as error:
            reason = f"{type(error).__name__}: {error_text(error)}"
            raise LoadError(f"{what}: {function} cannot be loaded: {reason}") from error
        return asdict(signature_of(self._functions[function]))


def make() -> RewardService:
    """Make the service of a worker."""
    return RewardService()
