"""The process of a LeRobot model, as seen by this package; `service` runs in it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch

from mmrl.errors import RunError, UserError
from mmrl.fields import bounded, check_config, only_with, rare
from mmrl.files import expanded
from mmrl.trust import check_foreign, remember
from mmrl.workers.engine import WorkerFailure, WorkerSpec
from mmrl.workers.pool import Request, WorkerPool
from robotics.policies.base.action_policy import ActionPolicy, PolicyInputs
from robotics.policies.base.action_statistics import BEYOND, FARTHEST, ActionRange, check_bounds
from robotics.policies.base.saved import (
    check_sizes,
    make_config,
    read_config,
    read_units,
    read_weights,
    write_config,
    write_weights,
)

LOGGER = logging.getLogger("mmrl")
SERVICE = Path(__file__).resolve().with_name("service.py")
MAX_REPLY_BYTES = 4 << 30
"""The gradients of an action expert arrive in one message, which is 1.2 GB for pi0."""


@dataclass
class LeRobotServerConfig:
    """Which LeRobot policy to serve, and how."""

    folder: str = rare("")
    """Folder that lerobot saved the policy to: config.json, model.safetensors and the processors."""
    python: str | None = rare(None)
    """Interpreter of an environment with lerobot. Default: the current one."""
    device: str = rare("cpu")
    """Torch device of the served policy."""
    cameras: list[str] = rare(field(default_factory=list))
    """Names of the policy's image features, such as observation.images.wrist, in the order of the simulator's cameras:
    `sim.camera`, then `sim.views`; empty = the policy's own order."""
    tokenizer: str | None = rare(None)
    """Local folder of the tokenizer (for GR00T: the processor). Default: the Hub id in the policy's config, such as the
    gated google/paligemma-3b-pt-224 of pi0 and pi0.5."""
    action_low: list[float] = rare(only_with(field(default_factory=list), action_box=False))
    """For each entry of an action, the value in the policy's data that corresponds to -1 in the simulator, such as [0,
    0] for PushT; empty = -1."""
    action_high: list[float] = rare(only_with(field(default_factory=list), action_box=False))
    """The value that corresponds to 1 in the simulator, such as [512, 512] for PushT; empty = 1."""
    action_box: bool = rare(False)
    """Take both from the bounds of the environment's `action_space`; for `sim.kind: gymnasium`, and for policies
    trained on data in the environment's own units."""
    start_timeout_s: float = rare(bounded(600.0, above=0))
    """Time limit in seconds for importing lerobot and loading the policy."""
    call_timeout_s: float = rare(bounded(300.0, above=0))
    """Time limit in seconds for one batch of observations."""

    def validate(self) -> None:
        """Reject an empty folder and invalid bounds; raises ValueError."""
        if not self.folder:
            raise ValueError("folder is empty; set model.options.folder to the folder of a LeRobot policy")
        check_bounds(self.action_low, self.action_high)


@dataclass(frozen=True)
class ServedSizes:
    """Sizes of a served policy's inputs."""

    image_size: tuple[int, int] | None
    """Height and width; None without a camera."""
    state_size: int | None
    """Entries; None without a state."""


class LeRobotProcess:
    """A process in lerobot's Python environment that serves a saved model.

    Args:
        what: names the model in messages, such as LeRobot policy.
        folder: of the model.
        service: factory in the service's file.
        arguments: of the factory, besides the folder.
        python: interpreter; None = the current one.
        option: names the option with the interpreter in messages.
        start_timeout_s: seconds for importing lerobot and loading the model.
        call_timeout_s: seconds for one request.

    Raises:
        UserError: the model is refused.
        RunError: the process did not start.
    """

    def __init__(
        self,
        what: str,
        folder: str,
        service: str,
        arguments: Mapping[str, Any],
        *,
        python: str | None,
        option: str,
        start_timeout_s: float = 600.0,
        call_timeout_s: float = 300.0,
    ) -> None:
        self.folder = expanded(folder).resolve()
        self._what, self._option, self._timeout_s = what, option, call_timeout_s
        spec = WorkerSpec(
            f"{SERVICE}:{service}",
            {"folder": str(self.folder), **arguments},
            purpose=f"the {what} {self.folder}",
            python=python,
            environment={"HF_HUB_OFFLINE": "1"},
            start_timeout_s=start_timeout_s,
            # a forward pass of a large model sends no heartbeat
            heartbeat_timeout_s=None,
            max_reply_bytes=MAX_REPLY_BYTES,
        )
        self.pool = WorkerPool(spec, 1)
        hello = self.pool.start()
        if isinstance(hello, WorkerFailure):
            raise self._error(hello)
        self.hello: dict[str, Any] = dict(hello.fields)

    def send(self, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Send a request and wait for the response."""
        answer = self.pool.ask({0: Request(dict(fields), dict(arrays))}, self._timeout_s)[0]
        if isinstance(answer, WorkerFailure):
            raise self._error(answer)
        return answer.arrays

    def _error(self, failure: WorkerFailure) -> UserError | RunError:
        if failure.for_user:
            return UserError(failure.reason)
        return RunError(
            f"the process of the {self._what} {self.folder} {failure.kind}: {failure.reason}; it needs an interpreter "
            f"with lerobot, {self._option}\n{failure.evidence}"
        )


class LeRobotServer(LeRobotProcess):
    """The process of a LeRobot policy; copies of a policy share it."""

    def __init__(self, config: LeRobotServerConfig, service: str) -> None:
        if config.action_box:
            raise UserError(
                "action_box needs a simulator, as in load_action_policy; otherwise pass action_low and action_high"
            )
        tokenizer = None if config.tokenizer is None else expanded(config.tokenizer).resolve()
        if tokenizer is not None and not tokenizer.is_dir():
            raise UserError(f"model.options.tokenizer is {config.tokenizer}, which is not a folder")
        arguments = {"device": config.device, "cameras": list(config.cameras)}
        super().__init__(
            "LeRobot policy",
            config.folder,
            service,
            arguments if tokenizer is None else {**arguments, "tokenizer": str(tokenizer)},
            python=config.python,
            option="model.options.python",
            start_timeout_s=config.start_timeout_s,
            call_timeout_s=config.call_timeout_s,
        )
        size = self.hello["image_size"]
        self.sizes = ServedSizes(None if size is None else (size[0], size[1]), self.hello["state_size"])
        self.cameras: tuple[str, ...] = tuple(self.hello["cameras"])
        """Image features of the policy, in the order of the simulator's cameras."""
        self.views = max(len(self.cameras) - 1, 0)
        self.image_fit: str | None = self.hello.get("image_fit")
        self.past = int(self.hello["history"]) - 1
        """P, number of previous control steps whose observations the policy also takes."""
        self._warned = False
        chunk, executed = (int(self.hello[name]) for name in ("chunk", "executed"))
        if executed < chunk:
            LOGGER.info(
                "%s predicts %d control steps and in lerobot executes %d of them before it observes again, as with "
                "acting.n_action_steps: %d here",
                *(self.folder, chunk, executed, executed),
            )
        if self.hello.get("ensemble") is not None:
            LOGGER.warning(
                "%s averages its overlapping chunks in lerobot; here, set acting.ensemble: %g to do so in greedy "
                "evaluation",
                *(self.folder, self.hello["ensemble"]),
            )
        try:
            self.action_range = ActionRange.of(
                config.action_low, config.action_high, self.hello["action_size"], str(self.folder)
            )
            data = self.hello.get("data") or {}
            check_data(str(self.folder), data, self.action_range)
            self.units_known = self.action_range is not None or "action" in data
        except UserError:
            # the process has started; an error must not leave it running
            self.pool.close()
            raise

    def ask(
        self,
        fields: Mapping[str, Any],
        batch: PolicyInputs | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> Mapping[str, np.ndarray]:
        """Send a request and wait for the response."""
        observed = {} if batch is None else self._observation(batch)
        tasks = {} if batch is None else {"tasks": list(batch.instructions)}
        return self.send({**fields, **tasks}, {**observed, **(arrays or {})})

    def _observation(self, batch: PolicyInputs) -> dict[str, np.ndarray]:
        arrays = {}
        for name, needed in (
            ("images", self.sizes.image_size),
            ("views", self.views),
            ("state", self.sizes.state_size),
        ):
            value = getattr(batch, name)
            if needed and value is None:
                cameras = f"; its cameras are {', '.join(self.cameras)}" if name == "views" else ""
                raise UserError(f"{self.folder} needs {name}, which is missing from the observations{cameras}")
            if needed:
                arrays[name] = value.cpu().numpy()
        arrays |= self._past_observations(batch, list(arrays)) if self.past else {}
        views = arrays["views"].shape[1] if "views" in arrays else 0
        if views != self.views:
            raise UserError(
                f"{self.folder} uses the cameras {', '.join(self.cameras)}, but the observations have {views} views "
                "in addition to the image"
            )
        return arrays

    def _past_observations(self, batch: PolicyInputs, names: Sequence[str]) -> dict[str, np.ndarray]:
        """The past observations in the batch; without any, the server process repeats the current one."""
        parts = {f"past_{name}": getattr(batch, f"past_{name}") for name in names}
        lengths = {name: part.shape[1] for name, part in parts.items() if part is not None}
        if not lengths:
            if not self._warned:
                LOGGER.warning(
                    "%s takes %d consecutive observations but gets only the current one, which is repeated; it was "
                    "not trained this way. A custom simulator can keep past observations if its reset takes a "
                    "`past` (see RobotSim); a custom loop can pass them in PolicyInputs; robots can send them to "
                    "mmrl serve (see the metadata)",
                    self.folder,
                    self.past + 1,
                )
            self._warned = True
            return {}
        if set(lengths) != set(parts) or set(lengths.values()) != {self.past}:
            found = ", ".join(f"{name} {lengths.get(name, 'missing')}" for name in parts)
            raise UserError(f"{self.folder} takes the observations of {self.past} previous control steps; got {found}")
        return {name: part.cpu().numpy() for name, part in parts.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # a reference or average shares the process: it uploads its own weights before each request
        return self


def _program(python: object) -> tuple[dict[str, object], str]:
    """The interpreter that a saved policy names, as content and text of `mmrl.trust`: the folder may be a copy."""
    return {"python": python}, f"python {python}"


def check_data(folder: str, data: Mapping[str, Mapping[str, list[float]]], units: ActionRange | None) -> None:
    """Compare a policy's statistics of its data with the units that its actions are converted from.

    Args:
        folder: of the policy, for messages.
        data: min and max by feature; empty where the policy keeps none.
        units: the values that are -1 and 1 of the simulator; None = -1 and 1.

    Raises:
        UserError: the data reach more than a whole range outside, or outside at all of units that nobody stated.
    """
    actions, state = data.get("action"), data.get("observation.state")
    if actions is not None:
        ends = torch.tensor([actions["min"], actions["max"]], dtype=torch.float64)
        # another number of entries is reported elsewhere, by the check against the simulator
        fitting = units is None or len(units.low) == ends.shape[1]
        scaled = ends if units is None or not fitting else units.to_sim(ends)
        farthest = float(scaled.abs().max()) if fitting else 0.0
        reach = f"{folder} was trained on actions from {float(ends.min()):.4g} to {float(ends.max()):.4g}"
        # radians, for example, lie within a range of -1..1, and the clipped rest of a pose moves an arm elsewhere
        if farthest > FARTHEST or (farthest > BEYOND and units is None):
            raise UserError(
                f"{reach}, {'far ' * (farthest > FARTHEST)}outside {units or '-1..1'}, which is mapped to the "
                "simulator's -1..1; set model.options.action_low and action_high to the values that are -1 and 1, such "
                f"as the robot's limits (the data have {actions['min']} and {actions['max']}), or action_box"
            )
        if farthest > BEYOND:
            LOGGER.warning("%s, outside %s; its actions are clipped to that", reach, units)
    if state is not None:
        pairs = enumerate(zip(state["min"], state["max"], strict=True))
        still = [entry for entry, (least, most) in pairs if least == most]
        if still:
            LOGGER.warning(
                "the state entries %s never changed in the data of %s; if lerobot normalises states, it divides "
                "these by 1e-8, so any other value in the simulator overwhelms the rest",
                *(still, folder),
            )


class ServedActionPolicy(ActionPolicy):
    """Base of policies around a LeRobot policy in a separate process; a saved one keeps its path, not its folder."""

    kind: ClassVar[str]
    """Key of `robotics.policies.base.action_policy.SAVED_POLICIES`."""
    config_class: ClassVar[type[Any]]

    def __init__(self, config: Any, service: str) -> None:
        super().__init__()
        check_config(config)
        self.settings = config
        self._server = LeRobotServer(config, service)
        self.config = self._server.sizes
        self.cameras = self._server.cameras
        self.views = self._server.views
        self.past = self._server.past
        self.image_fit = self._server.image_fit
        self.action_range = self._server.action_range
        self.units_known = self._server.units_known
        self.chunk = self._server.hello["chunk"]
        self.action_size = self._server.hello["action_size"]

    def save_pretrained(self, path: Path | str) -> None:
        """Write the trained weights and the path of the LeRobot policy, whose folder is not copied."""
        write_config(Path(path), self.kind, self.settings, self)
        # the user has run this interpreter, so loading the policy again need not ask
        remember(*_program(self.settings.python))
        write_weights(self, Path(path))

    def load_weights(self, path: Path | str) -> None:
        """Restore the trained weights and the statistics."""
        read_weights(self, Path(path))
        read_units(Path(path), self)

    @classmethod
    def from_pretrained(cls, path: Path | str) -> Self:
        """Open what `save_pretrained` or `export` wrote; only an exported folder contains the LeRobot policy itself."""
        entries = {key: value for key, value in read_config(Path(path)).items() if key != "kind"}
        inside = entries.pop("inside", None)
        if inside is not None:
            # an export may have been moved: its inner folder is found relative to it
            entries["folder"] = str(Path(path) / inside)
        check_sizes(entries, Path(path))
        check_foreign(*_program(entries.get("python")), f"{path}/policy.json")
        policy = cls(make_config(cls.config_class, entries, f"{path}/policy.json"))  # type: ignore[call-arg]
        policy.load_weights(path)
        return policy

    def close(self) -> None:
        """End the process of the LeRobot policy; another call of the policy starts a new one."""
        self._server.pool.close()
