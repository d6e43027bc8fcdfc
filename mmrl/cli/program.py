"""The `mmrl` command: runs one of `mmrl.cli.commands`, turns errors into exit codes, and reports crashes.

Exit codes: 0 done, 1 failed run, 2 bad usage or configuration, 128 + n stopped by signal n (130: Ctrl-C). An exception
that nothing expected is a failed run too: one line, and the traceback in a file. Nothing heavy is imported before a
command runs, so that `mmrl --help` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import logging
import math
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

from mmrl.cli.commands import COMMANDS, in_columns, is_first_process, say
from mmrl.errors import PeerLostError, RunError, RunStopped, UserError, did_you_mean
from mmrl.findings import DISTRIBUTION
from mmrl.runs.launch import LAST_WORDS

if TYPE_CHECKING:
    from types import FrameType


class _Lasting:
    """A text stream that drops output it cannot write, as on a full disk; a closed pipe is still an error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failed = False

    def write(self, text: str) -> int:
        """Write text, or drop it if that fails."""
        self._keep_going(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush buffered text, or leave it for later."""
        self._keep_going(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _keep_going(self, attempt: Any) -> None:
        try:
            attempt()
        except BrokenPipeError:
            raise
        except OSError:
            self.failed = True


@contextlib.contextmanager
def lasting_streams() -> Iterator[None]:
    """Make standard output and error drop output that cannot be written, inside the context.

    A run whose log is on a full disk then continues and reports its end by its exit code.
    """
    before = sys.stdout, sys.stderr
    lasting = _Lasting(sys.stdout), _Lasting(sys.stderr)
    sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in lasting)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in (stream for stream in lasting if stream.failed):
            # buffered text would fail again at exit and change the exit code
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


LONGEST_MESSAGE = 300


def describe_crash(error: Exception, arguments: Sequence[str], run_dir: Path | None) -> str:
    """Write the traceback of an unexpected exception to a file."""
    command = shlex.join(["mmrl", *arguments])
    text = f"{command}\n\n{''.join(traceback.format_exception(error))}"
    name = f"mmrl-crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    folders = [folder for folder in (run_dir, Path.cwd()) if folder is not None and folder.is_dir()]
    place = _write([*folders, Path(tempfile.gettempdir())], name, text)
    where = "the traceback could not be written to any folder" if place is None else f"traceback in {place}"
    return f"{type(error).__name__}: {_message(error)}; {where}"


def _message(error: Exception) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:  # the exception of a user's own code may fail on this too
        text = ""
    return f"{text[:LONGEST_MESSAGE]}..." if len(text) > LONGEST_MESSAGE else text or "no message"


def _write(folders: Sequence[Path], name: str, text: str) -> Path | None:
    for folder in folders:
        file = folder / name
        try:
            file.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError:  # a full or read-only disk
            continue
        return file
    return None


LONGEST_LINE = 4000
QUIET_ENVIRONMENT = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",  # else each retry of an unreachable hub is a line
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",  # reward workers are forked; the tokenizer's threads warn about it
    "PYTHONWARNINGS": "ignore::FutureWarning",  # for worker processes; this process gets a filter below
}
GONE = {"--gpu-tflops": "plans no longer estimate run time; time a few steps with trainer.steps=3"}
"""Hints for options that were removed."""
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors for a folder or a disk that this user may not read or write."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    with lasting_streams():
        code = _run(list(sys.argv[1:] if argv is None else argv))
    # after the streams are flushed: gloo may abort the interpreter's teardown
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from mmrl.training.processes import leave

        leave(code)
    return code


def _run(arguments: list[str]) -> int:
    args = argparse.Namespace()
    with _noted_interrupts() as interrupts:
        try:
            # before anything else, so that a mistake costs no import
            args = _parse(arguments)
            _quieten_libraries()
            _show_log()
            return int(args.run(args))
        except SystemExit as stop:  # argparse leaves this way after --help and --version
            return int(stop.code or 0)
        except RunStopped as stop:
            return _stopped(stop, arguments)
        except BrokenPipeError:  # the reader, such as `head`, has seen enough; nothing may be flushed to it at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except KeyboardInterrupt:
            return _interrupted(arguments)
        except Exception as error:
            return _interrupted(arguments) if interrupts else _failed(error, arguments, getattr(args, "run_dir", None))


@contextlib.contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """The Ctrl-C so far: some libraries turn one that arrives while they load a model into another exception."""
    # a library may swallow KeyboardInterrupt and raise its own error
    noted: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        noted.append(signum)
        raise KeyboardInterrupt

    main_thread = threading.current_thread() is threading.main_thread()
    # only where Python's own handler is installed: others have their reasons
    if not main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield noted
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupted(arguments: list[str]) -> int:
    return _complain(f"interrupted; {_how_to_continue(arguments)}", code=130)


def _failed(error: Exception, arguments: list[str], run_dir: Path | None) -> int:
    if isinstance(error, UserError):
        return _complain(f"error: {error}", code=2)
    if isinstance(error, PeerLostError):
        begun = run_dir is not None and (run_dir / "config.yaml").is_file()
        advice = f"{_how_to_continue(arguments, resumable=begun)}, using the launcher that started it"
        return _complain(f"run failed: {error}; {advice}", code=1)
    if isinstance(error, RunError):
        return _complain(f"run failed: {error}", code=1)
    if isinstance(error, OSError) and error.errno in NOT_ALLOWED and error.filename is not None:
        return _complain(f"error: {os.fsdecode(error.filename)}: {error.strerror}; choose another folder", code=2)
    return _complain(f"run failed: {describe_crash(error, arguments, run_dir)}", code=1)


class _Parser(argparse.ArgumentParser):
    """Takes options before, between and after the other arguments of a command."""

    _mixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        # argparse itself calls this for the arguments of a command, and twice from the method below
        if self._mixing or self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        self._mixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixing = False

    def error(self, message: str) -> NoReturn:
        # as every other mistake: one line, code 2
        raise UserError(f"{message}; `{self.prog} --help` shows the usage")


def _build_parser(commands: Iterable[str] = COMMANDS) -> _Parser:
    parser = _Parser(
        prog="mmrl",
        usage="mmrl [-h] [--version] COMMAND ...",
        description=_described_commands(),
        epilog="Exit codes: 0 done, 1 failed run, 2 bad usage or configuration, 128 + n stopped by signal n.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parsers = parser.add_subparsers(prog="mmrl", help=argparse.SUPPRESS)
    for name in commands:
        command = COMMANDS[name]
        sub = parsers.add_parser(name, description=command.run.__doc__, allow_abbrev=False)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run, takes_overrides=command.takes_overrides)
    return parser


def _described_commands() -> str:
    """Description of the suite, and its commands by group, which argparse cannot show."""
    lines = ["Reinforcement learning for vision-language models, diffusion models and robot policies."]
    for group, names in itertools.groupby(COMMANDS, lambda name: COMMANDS[name].group):
        lines += ["", f"{group}:", *(in_columns(name, COMMANDS[name].run.__doc__ or "", 14) for name in names)]
    return "\n".join(lines)


def _parse(arguments: list[str]) -> argparse.Namespace:
    _check_command(arguments)
    # the options of the other commands would be made for nothing
    own = [name for name in arguments[:1] if name in COMMANDS]
    args, rest = _build_parser(own or COMMANDS).parse_known_args(arguments)
    if args.version:
        args.run = _version
        return args
    if not hasattr(args, "run"):
        raise UserError(f"no command given; commands: {', '.join(COMMANDS)}; see `mmrl --help`")
    if rest:
        # an unknown option takes the overrides after it along
        surplus = [text for text in rest if text.startswith("-") or not args.takes_overrides]
        usage = GONE.get(surplus[0].partition("=")[0]) or f"`mmrl {arguments[0]} --help` shows the usage"
        raise UserError(f"unknown arguments: {' '.join(surplus)}; {usage}")
    for name, value in vars(args).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"--{name.replace('_', '-')} is {value}; must be finite")
    if args.takes_overrides:
        args.overrides = _checked_overrides(args.overrides)
    return args


def _check_command(arguments: list[str]) -> None:
    name = next(iter(arguments), "-")
    if name.startswith("-") or name in COMMANDS:
        return
    raise UserError(f"unknown command '{name}'; {did_you_mean(name, COMMANDS)}commands: {', '.join(COMMANDS)}")


def _checked_overrides(overrides: list[str]) -> list[str]:
    for text in overrides:
        key, equals, _ = text.partition("=")
        if not equals or not key.strip():
            raise UserError(f"override '{text}' is not of the form a.b=c, for example trainer.steps=10")
    return overrides


def _quieten_libraries() -> None:
    """Silence third-party progress bars and advice; a variable or `-W` option set by the user wins."""
    for name, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not sys.warnoptions:
        warnings.simplefilter("ignore", FutureWarning)


class _LogLines(logging.Handler):
    """Write messages to the current streams, which a progress bar redirects; warnings as one line on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno < logging.WARNING:
            say(text)
        else:
            indent = text[: len(text) - len(text.lstrip(" "))]  # a traceback comes line by line
            say(f"mmrl: {record.levelname.lower()}: {indent}{' '.join(text.split())}", sys.stderr)


def _show_log() -> None:
    """Show the suite's own messages; of several processes, all but the first show warnings only."""
    logger = logging.getLogger("mmrl")
    logger.setLevel(logging.INFO if is_first_process() else logging.WARNING)
    if not any(isinstance(handler, _LogLines) for handler in logger.handlers):
        logger.addHandler(_LogLines())


def _stopped(stop: RunStopped, arguments: list[str]) -> int:
    from mmrl.training.processes import leave

    code = 128 + stop.signum
    if is_first_process():
        _complain(f"{stop}; {_how_to_continue(arguments, resumable=stop.resumable)}", code)
    leave(code)
    return code


def _how_to_continue(arguments: list[str], *, resumable: bool = False) -> str:
    """Command that continues; a run interrupted outside its loop has written nothing since it started."""
    keeps_finished_parts = bool(arguments) and arguments[0] in ("compare", "demo", "reproduce")
    resume = ["--resume"] if resumable and not keeps_finished_parts and "--resume" not in arguments else []
    goes_on = resumable or keeps_finished_parts
    # of a process that `--processes` has started; other launchers are started again as they were
    several = ["--processes", os.environ["WORLD_SIZE"]] if LAST_WORDS in os.environ else []
    command = shlex.join(["mmrl", *arguments, *several, *resume])
    return f"{'continue' if goes_on else 'start again'} with: {command}"


def _complain(message: str, code: int) -> int:
    line = " ".join(message.split())
    if len(line) > LONGEST_LINE:  # a path or value of that length may be what is wrong
        line = f"{line[: LONGEST_LINE // 2]} ... {line[-LONGEST_LINE // 2 :]}"
    if LAST_WORDS in os.environ:
        with open(os.environ[LAST_WORDS], "w", encoding="utf-8", errors="backslashreplace") as file:
            say(f"mmrl: {line}", file)
    else:
        say(f"mmrl: {line}", sys.stderr)
    return code


def _version(args: argparse.Namespace) -> int:
    from importlib.metadata import PackageNotFoundError, version

    try:
        say(f"mmrl {version(DISTRIBUTION)}")
    except PackageNotFoundError:
        say("mmrl (not installed; run from a checkout)")
    return 0
