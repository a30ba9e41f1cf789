"""models:NAME wherever a model path may be given; which version that is, and that it is the one that was added."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from whet.config import read_config
from whet.core.checksums import read_hashed_json, write_hashed_json
from whet.core.errors import WhetError
from whet.model.load.weight_files import locate_model
from whet.registry.references import model_folder
from whet.registry.registry import Registry
from whet.run.models.model_reference import resolve_model_reference
from whet.run.models.register_model import add_model, run_reference
from whet.run.multiprocess import require_consistent_ranks


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setenv("WHET_MODELS", str(tmp_path / "registry"))
    return Registry()


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    """A finished run whose files may be changed, without what other tests have exported from it."""
    left_out = shutil.ignore_patterns("optimizer", "tensorboard", "*-step-*")
    return Path(shutil.copytree(tiny_run, tmp_path / "run", ignore=left_out))


def test_a_version_knows_where_it_comes_from(tiny_run: Path, whet: Any) -> None:
    version = add_model("support", str(tiny_run))
    assert version.folder == tiny_run / "exports" / "merged"
    assert (version.run, version.step, version.kind) == (str(tiny_run), 12, "merged")
    lineage = version.lineage
    assert lineage["config"]["train"]["precision"] == "fp64"
    assert lineage["base"] == {"path": "builtin:tiny", "hash": None}
    assert lineage["certificate"]["verified"] is True
    last = json.loads((tiny_run / "metrics.jsonl").read_text().splitlines()[-1])
    assert lineage["scores"]["val_loss"] == last["val_loss"]
    assert {each["source"]: each["conversations"] for each in lineage["data"]["sources"] if each["use"] == "train"} == {
        "builtin:orders": 200
    }
    assert [len(key) for key in lineage["data"]["stores"].values()] == [20, 20]
    shown = whet("models", "show", "support", "--json")
    assert json.loads(shown.out)["lineage"] == json.loads(json.dumps(lineage))
    text = whet("models", "show", "support").out
    assert "model: models:support@1" in text
    assert "val_loss:" in text


def test_a_run_keeps_the_version_it_began_with(
    whet: Any, recipe: str, tmp_path: Path, tiny_run: Path, registry: Registry
) -> None:
    for _ in range(3):
        add_model("m", str(tiny_run))
    registry.set_alias("m", 2, "production")
    folder = tmp_path / "new"
    words = [
        "train", recipe, "model.path=models:m@production", "train.precision=fp64", "train.steps=2",
        "eval.at_start=false", "data.validation=null", f"run.dir={folder}", "export.at_end=none", "track=[]",
    ]  # fmt: skip
    ended = whet(*words, "--until", "1")
    assert ended.code == 0, ended.err
    assert "path: models:m@2\n" in (folder / "config.yaml").read_text()
    registry.set_alias("m", 3, "production")
    registry.remove("m", 2)  # what was trained from it still needs it
    ended = whet(*words, "--resume")
    assert ended.code == 0, ended.err
    assert "models:m@production: this run continues with models:m@2, as it began" in ended.err
    assert "path: models:m@2\n" in (folder / "config.yaml").read_text()
    ended = whet(*words, "model.path=models:m@3", "--resume")
    assert ended.code == 1
    assert "model.path: 'models:m@2' then, 'models:m@3' now" in ended.err


def test_chat_eval_recipes_and_export_take_a_registered_model(
    whet: Any, recipe: str, tiny_run: Path, lora_run: Path, registry: Registry, tmp_path: Path
) -> None:
    add_model("m", str(tiny_run))
    registry.set_alias("m", 1, "production")
    said = whet("chat", "models:m@production", "-p", "Two teas", "--max-new-tokens", 4, "--json")
    assert said.code == 0, said.err
    answer = json.loads(said.out)
    assert answer["model"] == "models:m@1"
    direct = whet("chat", tiny_run / "exports/merged", "-p", "Two teas", "--max-new-tokens", 4, "--json")
    assert answer["answer"] == json.loads(direct.out)["answer"]
    scored = whet("eval", "models:m", "--tasks", "[{path: orders, max_new_tokens: 2}]", "eval.examples=2", "--json")
    assert scored.code == 0, scored.err
    assert json.loads(scored.out)["model"] == "models:m@1"
    config = read_config(Path(recipe), ["model.path=models:m@production", f"run.dir={tmp_path / 'x'}"])
    assert resolve_model_reference(config).model.path == "models:m@1"  # what check, prepare, inspect and train do
    exported = whet("export", "models:m@production", "--dtype", "bf16", "--out", tmp_path / "out", "--json")
    assert exported.code == 0, exported.err
    assert str(tiny_run) not in (tmp_path / "out" / "certificate.json").read_text(), "it may be published"
    assert add_model("m", str(tmp_path / "out")).run is None
    with pytest.raises(WhetError, match=r"--run .*: not a run"):
        add_model("m", str(tmp_path / "out"), tmp_path)
    with pytest.raises(WhetError, match="Leave --run out"):
        add_model("m", str(tiny_run), lora_run)
    version = add_model("m", str(tmp_path / "out"), tiny_run)
    assert (version.run, version.step, version.kind) == (str(tiny_run), 12, "merged")
    assert run_reference("models:m@production") == f"{tiny_run}@12"
    assert add_model("other", "models:m@production").folder == tiny_run / "exports" / "merged"


def test_an_adapter_is_a_model_for_chat_alone(whet: Any, lora_run: Path, tmp_path: Path) -> None:
    exported = whet("export", lora_run, "--to", "adapter", "--out", tmp_path / "adapter")
    assert exported.code == 0, exported.err
    version = add_model("a", str(tmp_path / "adapter"), lora_run)
    assert version.kind == "adapter"
    assert version.lineage["base"]["hash"] is not None
    said = whet("chat", "models:a", "-p", "Two teas", "--max-new-tokens", 2, "--json")
    assert said.code == 0, said.err
    with pytest.raises(WhetError, match="models:a@1: this is an adapter, not a whole model"):
        locate_model("models:a@1")


def test_files_that_are_gone_or_others_are_named(run: Path, whet: Any, recipe: str) -> None:
    version = add_model("m", str(run))
    export = run / "exports" / "merged"
    assert locate_model("models:m@1") == str(export)
    certificate = read_hashed_json(export / "certificate.json")
    write_hashed_json(export / "certificate.json", certificate | {"verified": False, "conversations": 0})
    assert model_folder(version.reference) == export, "another look at the same files is not another model"
    write_hashed_json(export / "certificate.json", certificate | {"files": certificate["files"] | {"config.json": "0"}})
    with pytest.raises(WhetError, match="holds another model than when this version was added"):
        model_folder(version.reference)
    write_hashed_json(export / "certificate.json", certificate)
    (export / "config.json").write_text("{}")
    ended = whet("chat", "models:m", "-p", "x")
    assert ended.code == 1
    assert "missing or altered since the export" in ended.err
    for words in (["delete", run, "--yes"], ["rename", run, "other"]):
        ended = whet("runs", *words)
        assert ended.code == 1
        assert "models:m@1 would be gone if this run were" in ended.err
    shutil.rmtree(run)
    for words in (["chat", "models:m", "-p", "x"], ["train", recipe, "model.path=models:m"], ["export", "models:m"]):
        ended = whet(*words)
        assert ended.code == 1
        assert "Traceback" not in ended.err
        assert str(run) in ended.err
    assert "its files are gone" in whet("chat", "models:m@1", "-p", "x").err
    shown = whet("models", "show", "m")
    assert shown.code == 0
    assert "its files are gone" in shown.err
    assert "val_loss" in shown.out, "the lineage outlives the run"


def test_a_run_that_was_trained_again_is_not_the_version(run: Path) -> None:
    from whet.checkpoint.directory import read_manifest, write_manifest

    add_model("m", str(run))
    folder = run / "checkpoints" / "step-000012"
    manifest = read_manifest(folder)
    manifest.pop("hash")
    for name, file in manifest["files"].items():
        file["hash"] = "0" if name.startswith("model/__") else file["hash"]
    write_manifest(folder, manifest)
    with pytest.raises(WhetError, match="has other weights than when this version was added"):
        run_reference("models:m")
    shutil.rmtree(folder)
    with pytest.raises(WhetError, match="has no checkpoint of step 12 any more"):
        run_reference("models:m")
    assert add_model("m", str(run)).step == 12, "an export may outlive its checkpoint"
    assert add_model("m", f"{run}@12").step == 12


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("{run}@8", "step 8 has no export; there are exports of step 12"),
        ("{run}@7", "no such checkpoint. Use one of 8, 12"),
        ("{run}/nothing", "no such folder"),
        ("{run}/plan", "neither a run (no config.yaml) nor an export (no certificate.json)"),
        ("{run}/config.yaml", "no such folder"),
    ],
)
def test_what_cannot_be_added_is_named(reference: str, said: str, run: Path, registry: Registry) -> None:
    with pytest.raises(WhetError) as error:
        add_model("m", reference.format(run=run))
    assert said in str(error.value)
    with pytest.raises(WhetError, match="whet numbers the versions"):
        add_model("m@3", str(run))
    assert registry.names() == []


def test_exports_that_prove_nothing_are_not_added(run: Path, registry: Registry) -> None:
    certificate = run / "exports" / "merged" / "certificate.json"
    content = read_hashed_json(certificate)
    write_hashed_json(certificate, content | {"verified": False, "reasons": ["other logits"]})
    with pytest.raises(WhetError, match="does not match the trained model \\(other logits\\)"):
        add_model("m", str(certificate.parent))
    with pytest.raises(WhetError, match="has no export"):
        add_model("m", str(run))
    write_hashed_json(certificate, content)
    (certificate.parent / "config.json").rename(certificate.parent / "x.gguf")
    with pytest.raises(WhetError, match="which whet does not load"):
        add_model("m", str(certificate.parent))
    shutil.copytree(certificate.parent, certificate.parent.with_name(".merged.host-1"))  # of a process that was killed
    (run / "ledger.json").write_text("{")
    (certificate.parent / "x.gguf").rename(certificate.parent / "config.json")
    added = add_model("m", str(run))
    assert added.folder == certificate.parent
    assert added.lineage["data"] is None
    assert registry.versions("m") == [1]


def test_ranks_with_different_versions_are_refused(tmp_path: Path) -> None:
    """An alias that moves while the processes of a run start."""

    class TwoRanks:
        world_size, is_main = 2, True

        def all_gather(self, items: list[Any]) -> list[Any]:
            if not isinstance(items[0], dict):
                return items
            other = "models:m@2" if str(items[0]["model"]).startswith("models:") else items[0]["model"]
            return [*items, {**items[0], "host": "node2", "model": other}]

    ranks: Any = TwoRanks()
    require_consistent_ranks(tmp_path, {}, "/local/disk/model", ranks)
    with pytest.raises(WhetError, match="begins with models:m@1, node2 with models:m@2"):
        require_consistent_ranks(tmp_path, {}, "models:m@1", ranks)
