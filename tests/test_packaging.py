"""What a stranger installs: the wheel outside of the repository, and the container image."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tomllib
import urllib.request
import venv
from pathlib import Path

import pytest

from whet.cli.app import VERBS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, arguments) of every line; those continued by a backslash are one."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1].strip()) for line in text.splitlines() if line.strip()]


def given(instruction: str) -> list[str]:
    return [arguments for name, arguments in dockerfile() if name == instruction]


def test_the_dockerfile_names_what_there_is() -> None:
    """Versions, files, extras and commands; the slow test below runs it."""
    (image,) = given("FROM")
    python = image.removeprefix("python:")
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = [name for line in given("COPY") for name in line.split()[:-1]]
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored
    assert {"src", "constraints.txt", PROJECT["readme"], *PROJECT["license-files"]} <= set(copied)
    commands = " && ".join(given("RUN"))
    (extras,) = re.findall(r"\.\[([\w,-]+)\]", commands)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    assert commands.count("-c constraints.txt") == commands.count("pip install")
    assert set(re.findall(r"\bwhet ([a-z]+)", commands)) <= VERBS.keys()
    assert given("ENTRYPOINT") == ['["whet"]']


@pytest.mark.slow
def test_the_commands_of_the_dockerfile_run_in_a_fresh_environment(tmp_path: Path, real_python: str) -> None:
    """As `docker build` runs them, with a virtual environment in place of the image. Downloads gigabytes without a
    cache."""
    folder, home = tmp_path / "src", tmp_path / "venv"
    folder.mkdir()
    venv.create(home, with_pip=True)
    for name in (name for line in given("COPY") for name in line.split()[:-1]):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for line in given("ENV"):
        environment |= dict(pair.split("=", 1) for pair in shlex.split(line))
    environment |= {
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "HF_HOME": str(tmp_path),
        "WHET_CACHE": str(tmp_path),
    }
    for command in given("RUN"):
        done = subprocess.run(["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "whet 0." in done.stdout + done.stderr


def test_the_demo_needs_no_extra() -> None:
    """`pip install whet`, then `whet demo`: SmolLM2 is a GGUF file."""
    assert "gguf" in {re.split(r"[<>=]", each)[0] for each in PROJECT["dependencies"]}


def test_nothing_in_the_package_is_read_from_the_repository() -> None:
    """A wheel has src/whet alone."""
    for file in (ROOT / "src/whet").rglob("*.py"):
        assert not re.search(r"__file__\)(?:\.resolve\(\))?\.parents\[[2-9]", file.read_text()), file


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, the wheel built from it, and that installed into a folder, without its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [os.environ["WHET_TEST_PYTHON"], "-m", "pip", "--quiet", "--disable-pip-version-check"]
    builder = folder / "builder"
    subprocess.run([*pip, "install", "--target", str(builder), "hatchling>=1.27"], check=True)
    subprocess.run(
        [os.environ["WHET_TEST_PYTHON"], "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)], cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(builder)}, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    (source,) = folder.glob("*.tar.gz")
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    return folder


@pytest.mark.slow
def test_the_wheel_works_outside_of_the_repository(installed: Path, real_python: str) -> None:
    site = installed / "site"
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    outside = installed / "outside"
    outside.mkdir()
    (outside / "fragen.csv").write_bytes(
        ("Frage;Antwort\n" + "".join(f"Wie viel ist {n}?;{n} Stück.\n" for n in range(40))).encode("utf-8-sig")
    )

    def run(*command: str) -> str:
        done = subprocess.run(
            [real_python, *command], cwd=outside, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    program = (
        "import whet; r = whet.train({'model': {'path': 'builtin:tiny'}, 'data': {'sources': [{'path': "
        "'builtin:orders', 'max_samples': 40}]}, 'train': {'steps': 3}, 'eval': {'prompts': []}, "
        "'export': {'at_end': 'none'}}); "
        "print(whet.__file__); print(r.metrics().tail())"
    )
    shown = run("-c", program)
    assert str(site) in shown
    assert "loss" in shown
    whet = str(site / "bin" / "whet")
    assert "written to fragen.yaml" in run(whet, "init", "fragen.csv", "--model", "builtin:tiny")
    assert "next:" in run(whet, "train", "fragen.yaml", "train.steps=2", "eval.every=null")
    assert run(whet, "chat", "runs/fragen", "--prompt", "Wie viel ist 3?")
    shipped = {file.name for file in (site / "whet/recipes").glob("*.yaml")}
    assert shipped == {file.name for file in (ROOT / "recipes").glob("*.yaml")}  # demo.yaml is what `whet demo` runs
    assert "--fresh" in run(whet, "demo", "--help")
    assert "libraries" in run(whet, "doctor")
    with subprocess.Popen(
        [real_python, whet, "dash", "--json"], cwd=outside, env=environment, stdout=subprocess.PIPE,
        text=True,
    ) as dash:  # fmt: skip
        try:
            assert dash.stdout is not None
            address = re.findall(r'"url": "([^"]+)"', dash.stdout.readline())[0]
            page = urllib.request.urlopen(address, timeout=30).read().decode()
            script = re.findall(r'src="([^"]+\.js)"', page)[0]
            root = address.split("?")[0]
            assert urllib.request.urlopen(f"{root.rstrip('/')}/{script.lstrip('/')}", timeout=30).status == 200
        finally:
            dash.terminate()
