"""Folders that plant code or sizes, and robots that send a server what grows when it is read."""

import json
import pickle
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.charts import draw_no_charts
from tests.faults.batches import Kind, Verdict, of_call, of_command
from tests.faults.damage import damage_bytes, damage_tree
from tests.faults.inputs.models import Model, prepare_models, prepare_robot
from tests.faults.inputs.tiny_runs import SMALL

__all__ = ["KINDS"]

CODE = "import pathlib\npathlib.Path({marker!r}).touch()\nclass Evil:\n    from_pretrained = classmethod(print)\n"
AUTOMATIC = ("AutoConfig", "AutoModel", "AutoModelForImageTextToText", "AutoProcessor", "AutoImageProcessor")
AUTO_MAP = {**dict.fromkeys(AUTOMATIC, "evilmod.Evil"), "AutoTokenizer": ["evilmod.Evil", "evilmod.Evil"]}
CLASSES = ("evilmod.Evil", "evilmod:Evil", "Evil", ["evilmod", "Evil"], ["diffusers", "Evil"], ["os", "system"])
NAMES = ("_class_name", "kind", "custom_pipeline", "processor_class", "tokenizer_class", "transformer", "scheduler")
PICKLES = ("pytorch_model.bin", "diffusion_pytorch_model.bin", "adapter_model.bin", "training_args.bin", "state.pt")
CLIENTS = 32
REPLY_S = 20.0


class _Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.marker),)


def _hostile(models: list[Model], rng: random.Random, folder: Path) -> Verdict:
    """A model folder that names code of its own in several ways; whatever the run says, nothing of it runs."""
    model, marker = rng.choice(models), folder / "it-ran"
    shutil.copytree(model.folder, folder / "model")
    places = [folder / "model", *(path for path in (folder / "model").rglob("*") if path.is_dir())]
    for place in places:
        for name in ("evilmod", "diffusers", "os"):
            (place / f"{name}.py").write_text(CODE.format(marker=str(marker)))
    files = sorted((folder / "model").rglob("*.json"))
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.2:
            place = rng.choice(places)
            (place / rng.choice(PICKLES)).write_bytes(pickle.dumps(_Payload(marker)))
            for weights in place.glob("*.safetensors"):
                weights.unlink()
            continue
        file = rng.choice(files)
        content = json.loads(file.read_text())
        if isinstance(content, dict):
            if rng.random() < 0.5:
                content["auto_map"] = AUTO_MAP
            content[rng.choice([*NAMES, *list(content)[:20]])] = rng.choice(CLASSES)
            file.write_text(json.dumps(content))
    draw_no_charts()
    own = (f"output_dir={folder / 'run'}", f"model.path={folder / 'model'}", *SMALL)
    verdict = of_command("train", model.config, *own, may_fail=True)
    return Verdict("code of the folder ran", verdict.note) if marker.exists() else verdict


def _prepare_policy(folder: Path) -> Model:
    from robotics.policies.base.action_policy import open_policy

    model = Model(Path(), prepare_robot(folder / "robot"))
    open_policy(model.folder)  # its imports are no case's time
    return model


def _policies(model: Model, rng: random.Random, folder: Path) -> Verdict:
    """A policy's folder with numbers of any size."""
    from robotics.policies.base.action_policy import open_policy

    shutil.copytree(model.folder, folder / "policy")
    file = rng.choice(sorted(path for path in (folder / "policy").rglob("*") if path.is_file()))
    if file.suffix == ".json" and rng.random() < 0.8:
        file.write_text(json.dumps(damage_tree(rng, json.loads(file.read_text()))))
    else:
        file.write_bytes(damage_bytes(rng, file.read_bytes(), head=512))
    return of_call(lambda: open_policy(folder / "policy"))


@dataclass(frozen=True)
class _Robots:
    message: Any
    bombs: list[bytes]


def _prepare_robots(folder: Path) -> _Robots:
    from tests.robotics.test_serving import BOMBS, pack, seen

    nested = b"\xa1a" + b"\x91" * 100_000 + b"\xc0"
    headers = [b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\x03\xff\xff\xff"]
    bombs = [message if isinstance(message, bytes) else pack(message) for message, _ in BOMBS]
    return _Robots(seen(), [*bombs, b"\x81" + nested, *headers])


def _serve(robots: _Robots, rng: random.Random, folder: Path) -> Verdict:
    """Robots that send damaged messages at the same time; one between them is answered."""
    from tests.robotics.test_serving import StatePolicy, ask, pack, robot, running, seen

    sound = pack(robots.message)
    damaged = [rng.choice(robots.bombs) if rng.random() < 0.3 else damage_bytes(rng, sound) for _ in range(CLIENTS - 1)]

    def disturb(message: bytes) -> None:
        from websockets.exceptions import ConnectionClosed

        with robot(server) as connection:
            try:
                ask(connection, message)
            except (ConnectionClosed, TimeoutError):  # a message that is refused with its connection
                return

    def answered(number: int) -> None:
        with robot(server) as connection:
            for _ in range(3):
                reply = ask(connection, seen(0.5))
                assert reply["actions"][0, 0] == 0.5, reply

    def meet() -> None:
        with ThreadPoolExecutor(CLIENTS) as clients:
            asked = [clients.submit(disturb, message) for message in damaged] + [clients.submit(answered, 0)]
            for one in asked:
                one.result(REPLY_S)
        answered(1)

    with running(StatePolicy()) as server:
        return of_call(meet)


KINDS = (
    Kind("hostile models", prepare_models, _hostile, share=0.3, limit_s=60),
    Kind("policy folders", _prepare_policy, _policies, share=1),
    Kind("robots of a server", _prepare_robots, _serve, share=0.1, limit_s=60),
)
