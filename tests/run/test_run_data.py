"""Which store a configuration gets: what decides it, what does not, and where it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.config import Config
from whet.core.errors import WhetError
from whet.data.loader import Loader
from whet.data.prepare.build import PreparedStore
from whet.model.load.builtin_models import builtin_folder
from whet.run.data import RunData, describe_step, make_plan, prepare_data, read_ledger

Go = Callable[..., RunData]


def conversation_of(number: int, exchanges: int = 1) -> str:
    turns = [("user", f"{number}?"), ("assistant", f"{number}!")] * exchanges
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With ten conversations in train.jsonl, a model of one's own, and a cache that nobody else uses."""
    model = shutil.copytree(builtin_folder("builtin:tiny"), tmp_path / "model")
    assert model.is_dir()
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    (tmp_path / "train.jsonl").write_text("".join(map(conversation_of, range(10))))
    return tmp_path


@pytest.fixture
def settings(folder: Path) -> Callable[..., Config]:
    """The configuration: config({"epochs": 2} of the source, model={…}, train={…}, **data)."""

    def make(source: dict[str, Any] | None = None, **changed: Any) -> Config:
        model, train = changed.pop("model", {}), changed.pop("train", {})
        data = {"sources": [{"path": str(folder / "train.jsonl"), **(source or {})}], "max_length": 64, **changed}
        return Config.model_validate(
            {
                "model": {"path": str(folder / "model"), **model},
                "data": data,
                "train": {"epochs": 1.0, "batch": {"conversations": 4}, **train},
            }
        )

    return make


@pytest.fixture
def go(settings: Callable[..., Config]) -> Go:
    return lambda *source, **changed: prepare_data(settings(*source, **changed))


def place(data: RunData) -> Path:
    made: PreparedStore = data.train
    return made.store.folder


# What decides


def test_options_that_change_no_token_change_no_store(go: Go) -> None:
    first = go()
    assert not first.train.reused
    for source, changed in (
        ({"epochs": 2.5}, {}), ({"weight": 3.0}, {}), ({}, {"packing": "none"}), ({}, {"packing": "k-bin", "bins": 3}),
        ({}, {"validation": {"fraction": 0.2}}), ({}, {"train": {"row_length": 128}}),
    ):  # fmt: skip
        again = go(source, **changed)
        assert again.train.reused, (source, changed)
        assert place(again) == place(first)


@pytest.mark.parametrize(
    "file", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]
)
def test_another_tokenizer_generation_or_template_is_another_store(go: Go, folder: Path, file: str) -> None:
    first, path = go(), folder / "model" / file
    path.write_text(path.read_text() + ("{# another #}" if file.endswith(".jinja") else " "))
    second = go()
    assert (second.train.reused, place(second) == place(first)) == (False, False)


def test_other_model_weights_use_the_same_store(go: Go, folder: Path) -> None:
    first = go()
    (folder / "model" / "model.safetensors").write_bytes(b"")
    assert place(go()) == place(first)


@pytest.mark.parametrize(
    "changed", [{"train_on": "all"}, {"max_length": 63}, {"too_long": "split"}, {"deduplicate": True}]
)
def test_another_mask_rule_is_another_store(go: Go, changed: dict[str, Any]) -> None:
    assert place(go(**changed)) != place(go())


def test_the_same_content_elsewhere_is_the_same_store_under_its_new_names(go: Go, folder: Path) -> None:
    (folder / "one").mkdir()
    for name in ("a", "b"):
        (folder / "one" / f"{name}.jsonl").write_text(
            ("{\n" if name == "b" else "") + conversation_of(1) + conversation_of(2)
        )
    first = go({"path": str(folder / "one")}, on_bad="skip")
    assert str(first.train.store.origin(0)) == f"{folder}/one/a.jsonl:1"
    shutil.move(folder / "one", folder / "two")
    again = go({"path": str(folder / "two")}, on_bad="skip")
    assert (again.train.reused, place(again)) == (True, place(first))
    names = [str(again.train.store.origin(i)) for i in range(4)]
    assert names == [f"{folder}/two/{name}" for name in ("a.jsonl:1", "a.jsonl:2", "b.jsonl:2", "b.jsonl:3")]
    account = again.ledger()["sources"][0]
    assert account["source"] == f"{folder}/two"
    assert account["first"]["broken JSON"] == [f"{folder}/two/b.jsonl:1"]
    again.write_ledger_lines(folder / "ledger.jsonl")
    listed = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    same = f"the same tokens as {folder}/one/a.jsonl"
    assert [tuple(entry.values()) for entry in listed] == [
        ("train", 0, f"{folder}/two/b.jsonl", 1, "dropped", "broken JSON", listed[0]["detail"]),
        ("train", 0, f"{folder}/two/b.jsonl", 2, "kept", "duplicate", f"{same}:1"),
        ("train", 0, f"{folder}/two/b.jsonl", 3, "kept", "duplicate", f"{same}:2"),
    ]


@pytest.mark.parametrize("packing", ["best-fit", "none"])
@pytest.mark.parametrize("batch", [{"tokens": 250}, {"rows": 3}, {"conversations": 4}])
def test_what_is_announced_of_a_step_is_what_its_batches_hold(
    settings: Callable[..., Config], batch: dict[str, int], packing: str
) -> None:
    config = settings(train={"batch": batch, "row_length": 80}, packing=packing)
    data = prepare_data(config)
    plan, held = make_plan(config, data), 0
    for rank in range(2):  # the second may have no row: its batch is padding without a document
        loader = Loader(data.train.store, plan, micro_rows=2, rank=rank, world=2)
        batches = [found for step in range(len(plan)) for _, found in loader.micro_batches(step)]
        held += sum(len(found.tokens) for found in batches if len(found.documents))
    announced = describe_step(config, plan)
    assert announced.endswith(f"together {held / len(plan):,.0f} tokens on average")
    assert announced.startswith("4 conversations, " if "conversations" in batch else "3 rows of 80 tokens, ")


def test_filters_of_one_file_may_not_share_a_record(go: Go, folder: Path) -> None:
    file = folder / "train.jsonl"
    records = [json.loads(conversation_of(number)) | {"split": "ab"[number % 4 == 3]} for number in range(10)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    held = {"sources": [{"path": str(file), "where": "split == 'b'"}]}
    data = go({"where": "split == 'a'"}, validation=held)
    assert (len(data.train_documents), len(data.validation_documents)) == (8, 2)
    message = rf"data\.validation\.sources\.0: 1 records of .*, first {file}:8, so validation would measure memor"
    with pytest.raises(WhetError, match=message):
        go({"start": 4}, validation=held)


def test_the_lines_of_training_and_validation_data_are_listed_with_their_use(go: Go, folder: Path) -> None:
    (folder / "held.jsonl").write_text(conversation_of(100) + "[1]\n")
    with (folder / "train.jsonl").open("a") as file:
        file.write("null\n")
    held = {"sources": [{"path": str(folder / "held.jsonl")}]}
    go(validation=held, on_bad="skip").write_ledger_lines(folder / "ledger.jsonl")
    listed = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert [(entry["use"], entry["line"]) for entry in listed] == [("train", 11), ("validation", 2)]
    go(validation={"fraction": 0.5}, on_bad="skip").write_ledger_lines(folder / "ledger.jsonl")
    assert [json.loads(line)["use"] for line in (folder / "ledger.jsonl").read_text().splitlines()] == ["train"]


def test_a_folder_with_one_file_is_named_by_the_file(go: Go, folder: Path) -> None:
    (folder / "one").mkdir()
    shutil.move(folder / "train.jsonl", folder / "one" / "train.jsonl")
    store = go({"path": str(folder / "one")}).train.store
    assert str(store.origin(0)) == f"{folder}/one/train.jsonl:1"


def test_a_template_with_a_date_has_a_store_per_day(settings: Callable[..., Config], folder: Path) -> None:
    config = settings()
    monday, tuesday = (prepare_data(config, today) for today in ("2031-02-03", "2031-02-04"))
    assert place(monday) == place(tuesday)
    assert monday.ledger()["today"] is None
    template = folder / "model" / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}" + template.read_text())
    monday, tuesday = (prepare_data(config, today) for today in ("2031-02-03", "2031-02-04"))
    assert place(monday) != place(tuesday)
    assert monday.ledger()["today"] == "2031-02-03"
    assert monday.tokenizer.decode(monday.train.store.ids(0)).startswith("03 Feb 2031")
    assert place(prepare_data(config, "2031-02-03")) == place(monday)


# data.template


SHOUT = "{% for m in messages %}{{ '<|im_start|>' + m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}" \
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"  # fmt: skip


def test_a_template_file_is_used_and_part_of_the_key(go: Go, folder: Path) -> None:
    file = folder / "mine.jinja"
    file.write_text(SHOUT)
    plain, own = go(), go(template=str(file))
    assert (
        own.tokenizer.decode(own.train.store.ids(0))
        == "<|im_start|>user:0?<|im_end|><|im_start|>assistant:0!<|im_end|>"
    )
    assert own.tokenizer.decode(plain.train.store.ids(0)).startswith("<|im_start|>user\n")
    assert own.tokenizer.chat_template == SHOUT
    shutil.move(file, folder / "other.jinja")
    assert place(go(template=str(folder / "other.jinja"))) == place(own)
    file.write_text(SHOUT.replace(":", ";"))
    assert place(go(template=str(file))) not in (place(own), place(plain))


def test_a_named_template_is_used(go: Go, folder: Path) -> None:
    unknown = "{} is neither a file nor a template of the tokenizer, which has {}"
    with pytest.raises(WhetError, match=rf"data\.template: {unknown.format('loud', 'one template')}"):
        go(template="loud")
    others = folder / "model" / "additional_chat_templates"
    others.mkdir()
    (others / "loud.jinja").write_text(SHOUT)
    plain, loud = go(), go(template="loud")
    assert loud.tokenizer.chat_template == SHOUT
    assert loud.tokenizer.decode(loud.train.store.ids(0)).startswith("<|im_start|>user:0?")
    assert plain.tokenizer.decode(plain.train.store.ids(0)).startswith("<|im_start|>user\n")
    assert place(plain) != place(loud)
    with pytest.raises(WhetError, match=unknown.format("soft", r"default, loud\.")):
        go(template="soft")


def test_a_missing_template_file_is_an_error(go: Go, folder: Path) -> None:
    with pytest.raises(WhetError, match=rf"data\.template: {folder}/no\.jinja: no such file \(looked in"):
        go(template=f"{folder}/no.jinja")
    assert not (folder / "cache" / "stores").exists()


def test_a_run_keeps_its_template_and_its_export_has_it(whet: Any, recipe: str, tmp_path: Path, monkeypatch) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "mine.jinja").write_text(SHOUT)
    monkeypatch.chdir(tmp_path)
    ended = whet(
        "train",
        recipe,
        f"run.dir={tmp_path / 'run'}",
        "train.steps=1",
        "data.template=mine.jinja",
        "export.at_end=merged",
    )
    assert ended.code == 0, ended.err
    assert AutoTokenizer.from_pretrained(tmp_path / "run/exports/merged").chat_template == SHOUT
    monkeypatch.chdir("/")
    ended = whet("inspect", tmp_path / "run", "--limit", 1, "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["documents"][0]["text"].startswith("<|im_start|>user:")


# data.store


def test_a_folder_for_the_store_is_filled_and_found_again(go: Go, folder: Path) -> None:
    held = {"sources": [{"path": str(folder / "held.jsonl")}]}
    (folder / "held.jsonl").write_text(conversation_of(3) + conversation_of(77))
    first = go(store=str(folder / "mine"), validation=held)
    assert first.store_folders() == {"train": f"{folder}/mine/train", "validation": f"{folder}/mine/validation"}
    assert sorted(file.name for file in (folder / "mine").iterdir()) == ["train", "validation"]
    assert not (folder / "cache" / "stores").exists()
    again = go(store=str(folder / "mine"), validation=held)
    assert again.train.reused
    assert again.overlap() == [f"{folder}/held.jsonl:1"]


def test_a_folder_with_other_data_is_refused_and_kept(go: Go, folder: Path) -> None:
    first = go(store=str(folder / "mine"))
    with pytest.raises(
        WhetError, match=rf"data\.store: {folder}/mine/train was prepared from other data, with other settings"
    ):
        go(store=str(folder / "mine"), max_length=63)
    assert go(store=str(folder / "mine")).train.reused
    assert len(first.train.store) == 10
    assert sorted(file.name for file in (folder / "mine").iterdir()) == ["train"]


def test_a_folder_with_something_else_is_refused_and_kept(go: Go, folder: Path) -> None:
    (folder / "mine" / "train").mkdir(parents=True)
    (folder / "mine" / "train" / "thesis.tex").write_text("precious")
    with pytest.raises(WhetError, match=rf"data\.store: {folder}/mine/train is neither empty nor a complete store"):
        go(store=str(folder / "mine"))
    assert [str(path.relative_to(folder / "mine")) for path in (folder / "mine").rglob("*")] == [
        "train", "train/thesis.tex",
    ]  # fmt: skip


def test_leftovers_of_a_killed_preparation_are_not_reused_for_other_data(
    go: Go, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("whet.data.prepare.build.merge_chunks", killed)
        with pytest.raises(KeyboardInterrupt):
            go(store=str(folder / "mine"))
    (folder / "train.jsonl").write_text("".join(map(conversation_of, range(50, 60))))
    store = go(store=str(folder / "mine"))
    assert "50?" in store.tokenizer.decode(store.train.store.ids(0))


# Validation


def test_overlap_of_training_and_validation_is_reported(go: Go, folder: Path) -> None:
    (folder / "held.jsonl").write_text(
        conversation_of(77) + conversation_of(3) + conversation_of(78) + conversation_of(3) + conversation_of(9)
    )
    ledger = go(validation={"sources": [{"path": str(folder / "held.jsonl")}]}).ledger()
    assert ledger["overlap"] == {
        "conversations": 3, "first": [f"{folder}/held.jsonl:{number}" for number in (2, 4, 5)],
    }  # fmt: skip
    assert [(account["use"], account["conversations"]["kept"]) for account in ledger["sources"]] == [
        ("train", 10), ("validation", 5),
    ]  # fmt: skip
    assert ledger["held_out"] == 5


def test_validation_equal_to_training_overlaps_completely(go: Go, folder: Path) -> None:
    shutil.copy(folder / "train.jsonl", folder / "copy.jsonl")
    data = go(validation={"sources": [{"path": str(folder / "copy.jsonl")}]})
    ledger = data.ledger()
    assert ledger["overlap"]["conversations"] == 10
    assert ledger["overlap"]["first"][0] == f"{folder}/copy.jsonl:1"
    assert [(account["use"], account["source"]) for account in ledger["sources"]] == [
        ("train", f"{folder}/train.jsonl"), ("validation", f"{folder}/copy.jsonl"),
    ]  # fmt: skip


def test_a_split_conversation_counts_once_in_the_overlap(go: Go, folder: Path) -> None:
    (folder / "train.jsonl").write_text(conversation_of(1, exchanges=6) + conversation_of(2))
    (folder / "held.jsonl").write_text(conversation_of(1, exchanges=6) + conversation_of(3))
    data = go(validation={"sources": [{"path": str(folder / "held.jsonl")}]}, too_long="split", max_length=40)
    assert len(data.train.store) > 2
    assert data.overlap() == [f"{folder}/held.jsonl:1"]


def test_a_fraction_held_out_shares_nothing_with_training(go: Go, folder: Path) -> None:
    (folder / "train.jsonl").write_text(
        "".join(conversation_of(i % 7 + 10 * (i % 2), exchanges=1 + 5 * (i % 2)) for i in range(28))
    )
    data = go(validation={"fraction": 0.3}, too_long="split", max_length=40)
    store, held = data.train.store, set(data.validation_documents.tolist())
    assert held
    assert held.isdisjoint(data.train_documents.tolist())
    assert len(held) + len(data.train_documents) == len(store)
    texts = [tuple(store.ids(i).tolist()) for i in range(len(store))]
    assert not {texts[i] for i in held} & {texts[int(i)] for i in data.train_documents}
    assert data.ledger()["overlap"]["conversations"] == 0
    assert data.ledger()["held_out"] == len(held)


def test_a_configuration_is_planned_from_its_store(go: Go, settings: Callable[..., Config]) -> None:
    config = settings(validation={"fraction": 0.2})
    plan = make_plan(config, prepare_data(config))
    assert sorted(plan.documents.tolist()) == sorted(go(validation={"fraction": 0.2}).train_documents.tolist())


# Markers


def test_markers_are_part_of_the_key(go: Go, folder: Path) -> None:
    (folder / "train.jsonl").write_text(json.dumps({"text": "<u>Hi<u><a>Hello<a>"}) + "\n")
    marks = {"user": {"text": "<u>", "id": 1}, "assistant": {"text": "<a>", "id": 0}}
    source = {"format": "marked"}
    one = go(source, markers=marks)
    other = go(source, markers={**marks, "append_eod": False})
    last = go(source, markers=marks, train_on="last")
    assert len({place(one), place(other), place(last)}) == 3
    assert go(source, markers=marks).train.reused
    assert one.train.store.ids(0)[[0, -2]].tolist() == [1, 0]


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b'{"stores": 3, "today": null}', b'{"stores": {"train": 7}, "today": null, "speech": null}',
     b'{"stores": {}, "today": [1]}', b"[" * 99_999],
)  # fmt: skip
def test_a_damaged_ledger_is_an_error_with_a_remedy(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ledger.json").write_bytes(content)
    with pytest.raises(WhetError, match=r"ledger\.json.*Bring it back, or start a new run"):
        read_ledger(tmp_path / "ledger.json")
