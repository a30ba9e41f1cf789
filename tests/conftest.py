"""What all tests share: a cache of their own, one trained run, and tests that need more than Python."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite

import forkserver
from slow_cases import is_slow_case

pytest_plugins = ("small_models",)

# Before torch is imported: two cores shared by several processes are fastest with a thread each, and one number of
# threads everywhere is what makes runs comparable bit by bit. Nothing here may ask the network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell that starts something in the background lets it ignore Ctrl-C, and what it starts in turn; tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REAL_PYTHON = os.environ.setdefault("WHET_TEST_PYTHON", sys.executable)
COLLECTED = pytest.StashKey[list[str]]()
_FORKSERVER = "WHET_TEST_FORKSERVER"  # the folder of the server that all test workers share

RECIPE = str(Path(__file__).parent / "fixtures" / "tiny.yaml")
_NEEDS = "needs the Debian package "


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


def pytest_configure(config: pytest.Config) -> None:
    """Start the server whose forks stand for new Python processes (see forkserver.py), pytest's workers among them."""
    has_gpu = Path("/dev/nvidiactl").exists()  # CUDA, once initialized by an import, does not survive a fork
    if _FORKSERVER not in os.environ and not config.option.collectonly and not has_gpu:
        folder = Path(tempfile.mkdtemp(prefix="whet-forkserver-"))
        forkserver.write_stand_in(folder, REAL_PYTHON)
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen([REAL_PYTHON, forkserver.__file__, str(folder)], stdout=log, stderr=log)
        os.environ[_FORKSERVER] = str(folder)
        config.add_cleanup(lambda: _stop_forkserver(server, folder))
        if getattr(config.option, "numprocesses", None):
            _rewrite_assertions(config)  # while the server imports torch
    if _FORKSERVER in os.environ:
        sys.executable = str(Path(os.environ[_FORKSERVER]) / "python")


def _rewrite_assertions(config: pytest.Config) -> None:
    """Fill pytest's cache of rewritten test modules. Workers start at once: each would rewrite all of them, in 6 s."""
    with contextlib.suppress(AttributeError, TypeError, OSError):  # pytest's own functions; another version has others
        for file in (*Path(__file__).parent.rglob("test_*.py"), *Path(__file__).parent.rglob("conftest.py")):
            cached = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
            if rewrite._read_pyc(file, cached) is None:
                source_hash, code = rewrite._rewrite_test(file, config)
                cached.parent.mkdir(exist_ok=True)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, cached)


def _stop_forkserver(server: subprocess.Popen[bytes], folder: Path) -> None:
    server.kill()
    server.wait()
    shutil.rmtree(folder, ignore_errors=True)
    sys.executable = REAL_PYTHON
    del os.environ[_FORKSERVER]


@pytest.fixture
def collected(request: pytest.FixtureRequest) -> list[str]:
    """The ids of all tests that pytest has collected, also of those that it leaves out."""
    return request.config.stash[COLLECTED]


@pytest.fixture
def real_python(monkeypatch: pytest.MonkeyPatch) -> str:
    """The interpreter itself instead of a fork of one that has everything imported."""
    monkeypatch.setattr(sys, "executable", REAL_PYTHON)
    return REAL_PYTHON


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Stores are made anew; built-in models are shared with the user's own cache, because converting takes long."""
    models = Path(os.environ.get("WHET_CACHE") or Path.home() / ".cache" / "whet") / "models"
    models.mkdir(parents=True, exist_ok=True)
    cache = tmp_path_factory.mktemp("cache")
    (cache / "models").symlink_to(models.resolve())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHET_CACHE", str(cache))
        patch.setenv("WHET_MODELS", str(cache / "registry"))
        yield cache


@pytest.fixture(autouse=True)
def _speaking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that was asked to be quiet leaves the process so."""
    from whet.core import console

    monkeypatch.setattr(console, "_quiet", False)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A run whose host takes the steps uses all cores; the tests after it would go on so, on cores that others use."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(scope="session")
def whet() -> Callable[..., Ended]:
    """Run a command in this process; anything but a proper exit is raised."""
    from typer import testing

    from whet.cli.app import app

    testing._get_command = functools.cache(testing._get_command)  # the runner would build all verbs each time: 40 ms

    def run(*arguments: Any) -> Ended:
        result = testing.CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ended(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture(scope="session")
def shipped_recipe() -> str:
    """recipes/tiny.yaml, for numbers that were measured with it."""
    return str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")


@pytest.fixture(scope="session")
def recipe() -> str:
    """fixtures/tiny.yaml: recipes/tiny.yaml with less to compute."""
    return RECIPE


@pytest.fixture
def default_hangup() -> Iterator[None]:
    """SIGHUP is not ignored, also where `nohup` started pytest: whet leaves ignored signals ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Trains a small SentencePiece model, once for the same options: pieces("bpe", byte_fallback=True, …).

    Its first pieces are as on LUMI: <unk>, <s>, </s>, <|endoftext|> = 3, <|user|> = 7, <|assistant|> = 8.
    """
    import random

    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    folder, made = tmp_path_factory.mktemp("pieces"), dict[str, Path]()
    words = [
        "hello",
        "world",
        "sveiki",
        "kā",
        "jums",
        "klājas",
        "the",
        "quick",
        "data",
        "12",
        "345",
        "!!!",
        "aaaa",
        "----",
        "<div>",
        "</div>",
        "abab",
        "tick\tock",
        "<s",
    ]
    draw = random.Random(0)
    lines = [" ".join(draw.choices(words, k=12)) for _ in range(1500)]

    def train(kind: str = "bpe", **options: Any) -> Path:
        name = f"{kind} {sorted(options.items())}"
        if name not in made:
            made[name] = folder / f"{len(made)}.model"
            with made[name].open("wb") as file:
                trainer.train(**{
                    "sentence_iterator": iter(lines), "model_writer": file, "model_type": kind, "vocab_size": 420,
                    "hard_vocab_limit": False, "minloglevel": 2, "normalization_rule_name": "identity",
                    "control_symbols": ["<|endoftext|>", "r4", "r5", "r6", "<|user|>", "<|assistant|>"], **options,
                })  # fmt: skip
        return made[name]

    return train


@pytest.fixture(scope="session")
def make_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """make_once(name, make): a folder that the first worker who needs it makes and all others read."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder_of(name: str, make: Callable[[Path], None]) -> Path:
        folder = shared / "shared" / name
        folder.parent.mkdir(exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.with_suffix(".made").exists():
                shutil.rmtree(folder, ignore_errors=True)
                make(folder)
                folder.with_suffix(".made").touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def shared_run(whet: Callable[..., Ended], make_once: Callable[..., Path]) -> Callable[..., Path]:
    """shared_run(name, *settings): fixtures/tiny.yaml with these settings, finished, once for all workers. To be read,
    not changed: copy it for that."""

    def train(name: str, *settings: str, recipe: str = RECIPE) -> Path:
        def make(folder: Path) -> None:
            ended = whet("train", recipe, f"run.dir={folder}", *settings)
            assert ended.code == 0, ended.err

        return make_once(name, make)

    return train


@pytest.fixture(scope="session")
def tiny_run(shared_run: Callable[..., Path]) -> Path:
    """fixtures/tiny.yaml in fp64, finished."""
    return shared_run("tiny", "train.precision=fp64", "export.at_end=merged")


@pytest.fixture(scope="session")
def lora_run(shared_run: Callable[..., Path]) -> Path:
    """A short LoRA run with dropout, finished."""
    return shared_run("lora", "train.steps=8", "adapter.rank=4", "adapter.dropout=0.1", "export.at_end=merged")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = [item.nodeid for item in items]
    for item in items:
        if is_slow_case(item.nodeid):
            item.add_marker(pytest.mark.slow)
    if not config.option.markexpr and os.environ.get("WHET_TEST_ALL") != "1":
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("slow")])
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    for item in items:
        if item.get_closest_marker("gpu") and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        for marker in item.iter_markers("system"):
            if shutil.which(marker.kwargs.get("program", marker.args[0])) is None:
                item.add_marker(pytest.mark.skip(reason=_NEEDS + marker.args[0]))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the garbage collector need not visit them again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # a twentieth of the processor time went into ten thousands of small collections


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests have counted, and which tests the missing Debian packages would have enabled, by package."""
    missing: dict[str, list[str]] = {}
    for report in terminalreporter.stats.get("skipped", []):
        _, found, package = str(report.longrepr[2]).partition(_NEEDS)
        if found:
            missing.setdefault(package, []).append(report.nodeid)
    shown = [value for report in terminalreporter.stats.get("passed", []) for _, value in report.user_properties]
    if shown:
        terminalreporter.section("counted")
        for line in shown:
            terminalreporter.write_line(line)
    if missing:
        terminalreporter.section("`make system-deps` would enable")
        for package, tests in sorted(missing.items()):
            terminalreporter.write_line(f"{package}: {', '.join(tests)}")


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
