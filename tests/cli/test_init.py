"""`whet init`: a recipe for a stranger's file, with reasons, that trains as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedTokenizerFast

from data.template_families import FAMILIES, small_tokenizer
from data.trl_templates import TRL_TEMPLATES
from tiny_architectures import save_tiny_model
from whet.config import read_config
from whet.core.errors import WhetError
from whet.data.config import Source
from whet.data.read.sources import SourceReader
from whet.preflight.recipe_proposal import KNOWN_MODELS, KnownModel, ProposedSetting, propose_recipe, render_recipe

ROWS = "".join(f'Wie heißt Stück {n}?;Es heißt "Stück {n}", bitte.\n' for n in range(60))


@pytest.fixture
def fragen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fragen.csv").write_bytes(("Frage;Antwort\n" + ROWS).encode("utf-8-sig"))
    return tmp_path


def test_a_spreadsheet_becomes_a_model(fragen: Path, whet: Any) -> None:
    written = whet("init", "fragen.csv", "--model", "builtin:tiny", "--json")
    assert written.code == 0, written.err
    assert json.loads(written.out)["settings"]["data.validation"] == {"fraction": 0.1}
    text = Path("fragen.yaml").read_text()
    assert "guessed from the names of the columns" in text
    assert "semicolon-separated, UTF-8 with BOM; 60" in text
    config = read_config(Path("fragen.yaml"))
    assert config.data.sources[0].fields == {"prompt": "Frage", "completion": "Antwort"}
    assert config.adapter is not None
    assert config.train.micro_rows == 1024 // config.data.max_length
    trained = whet("train", "fragen.yaml", "train.steps=2", "eval.every=null", "export.at_end=none")
    assert trained.code == 0, trained.err
    assert "whet chat runs/fragen" in trained.err
    again = whet("train", "fragen.yaml")
    assert (again.code, "move it aside with --fresh" in again.err) == (1, True)
    fresh = whet("train", "fragen.yaml", "--fresh", "train.steps=1", "eval.every=null", "export.at_end=none")
    assert fresh.code == 0, fresh.err
    assert "now in runs/fragen.1" in fresh.err
    assert Path("runs/fragen.1/metrics.jsonl").exists()
    longer = whet("train", "fragen.yaml", "--resume", "train.steps=3", "eval.every=null", "export.at_end=none")
    assert (longer.code, "model.path=runs/fragen run.dir=runs/fragen-2" in longer.err) == (1, True)


def test_a_run_is_trained_on_with_new_data(fragen: Path, whet: Any, lora_run: Path) -> None:
    for model in (f"{lora_run}", f"{lora_run}@8"):
        written = whet("init", "fragen.csv", "--model", model, "--fresh")
        assert written.code == 0, written.err
        assert read_config(Path("fragen.yaml")).model.path == model
    missing = whet("init", "fragen.csv", "--model", f"{lora_run}@9", "--fresh")
    assert (missing.code, "no such checkpoint" in missing.err) == (1, True)
    (fragen / "new.jsonl").write_text("".join(f'{{"prompt": "{n}", "completion": "Yes"}}\n' for n in range(9)))
    trained = whet("train", "new.jsonl", f"model.path={lora_run}", "train.steps=1", "export.at_end=none")
    assert trained.code == 0, trained.err


def test_a_data_file_in_place_of_a_recipe(fragen: Path, whet: Any) -> None:
    refused = whet("train", "fragen.csv", "model.path=builtin:tiny")
    assert refused.code == 1
    assert "fields: {prompt: Frage, completion: Antwort}}]" in refused.err
    Path("good.csv").write_text("prompt,completion\n" + ROWS.replace(",", "").replace('"', "").replace(";", ","))
    done = whet(
        "train", "good.csv", "model.path=builtin:tiny", "train.steps=1", "eval.every=null", "export.at_end=none"
    )
    assert done.code == 0, done.err
    assert Path("runs/good/metrics.jsonl").exists()
    assert (
        "this is a data file, not a recipe. Make a recipe for it: whet init good.csv" in whet("check", "good.csv").err
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nix.csv"], "nix.csv: no such file"),
        ([], "DATA is missing"),
        (["fragen.csv", "--model", "no-such-model"], "no-such-model: no such folder"),
        (["fragen.csv", "--out", "fragen.csv"], "fragen.csv: it exists. Give another name (--out FILE), or --fresh"),
        (["fragen.csv", "--out", "no/recipe.yaml"], "--out no/recipe.yaml: no such folder: "),
        (["fragen.csv", "--out", ".", "--fresh"], "--out .: it is a folder"),
    ],
)
def test_bad_input(fragen: Path, whet: Any, arguments: list[str], message: str) -> None:
    ended = whet("init", *arguments)
    assert ended.code in (1, 2)
    assert message in ended.err
    assert (fragen / "fragen.csv").read_bytes().startswith(b"\xef\xbb\xbfFrage")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.md", "# Question\nWhat?\n", "a.md: whet does not read files of this kind. Write questions and answers as"),
        ("a.yaml", "- question: Q\n  answer: A\n", "a.yaml: whet does not read files of this kind"),
        (
            "a.jsonl",
            "{'question': 'Q', 'answer': 'A'}\n",
            "none of its 1 records can be used; the first: a.jsonl:1: not",
        ),
        ("a.jsonl", "{'question': 'Q', 'answer': 'A'}\n", "This is Python, not JSON: write it with json.dumps"),
        ("a", "broken\n" + '{"question": "Q", "answer": "A"}\n' * 2, ""),
    ],
)
def test_files_without_a_usable_record(
    whet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    ended = whet("init", name, "--model", "builtin:tiny", "--out", "recipe.yaml")
    assert (ended.code, Path("recipe.yaml").exists()) == ((1, False) if message else (0, True))
    assert message in ended.err


def test_models_are_listed(whet: Any) -> None:
    listed = whet("init", "--list", "--json")
    names = [each["name"] for each in json.loads(listed.out)["models"]]
    assert len(names) == len(set(names)) == len(KNOWN_MODELS)
    assert {"llama-3.1-8b", "qwen3-8b", "gemma-3-4b", "mistral-7b", "phi-4", "gpt-oss-20b"} <= set(names)


def test_the_recipe_is_what_was_proposed() -> None:
    settings = [
        ProposedSetting("model.path", "a b: c", ""),
        ProposedSetting("data.sources", [{"path": "ü.csv", "fields": {"prompt": "Was?"}}], "x " * 80),
        ProposedSetting("train.optimizer", {"lr": 2e-4}, "usual"), ProposedSetting("train.epochs", 3, ""),
    ]  # fmt: skip
    text = render_recipe(settings, "A heading")
    assert yaml.safe_load(text) == {
        "model": {"path": "a b: c"}, "data": {"sources": [{"path": "ü.csv", "fields": {"prompt": "Was?"}}]},
        "train": {"optimizer": {"lr": 2e-4}, "epochs": 3},
    }  # fmt: skip
    assert max(map(len, text.splitlines())) <= 110


def test_more_data_is_seen_less_often(tmp_path: Path) -> None:
    """Every value follows from the data: 6,000 conversations get fewer epochs and a smaller held-out share."""
    file = tmp_path / "many.jsonl"
    file.write_text("".join(f'{{"prompt": "a {n} b", "completion": "d e f"}}\n' for n in range(6000)))
    many = {each.key: each.value for each in propose_recipe(str(file), "builtin:tiny")}
    assert many["train.epochs"] == 2
    assert many["data.validation"] == {"fraction": 0.05}
    assert many["data.max_length"] == 64


def _trl(name: str) -> Callable[[], PreTrainedTokenizerFast]:
    return next(each for each in TRL_TEMPLATES if each.name == name).tokenizer


def _family(name: str) -> Callable[[], PreTrainedTokenizerFast]:
    found = next(each for each in FAMILIES if each.name == name)
    return lambda: small_tokenizer(found.template, found.markers, found.bos, found.eos)


def _phi4() -> PreTrainedTokenizerFast:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
    )
    return small_tokenizer(template, ("<|im_start|>", "<|im_sep|>", "<|im_end|>"), eos="<|im_end|>")


TEMPLATES = {
    "smollm": _family("chatml"), "llama-3.1": _trl("llama3_1"), "llama-3": _trl("llama3_2"),
    "qwen3-4b": _trl("qwen3_instruct_2507"), "qwen3-30b": _trl("qwen3_instruct_2507"), "qwen3": _trl("qwen3"),
    "gemma-3": _trl("gemma3"), "mistral": _family("mistral"), "phi-4-mini": _trl("phi3"), "phi-4": _phi4,
    "gpt-oss": _trl("gptoss"),
}  # fmt: skip
"""A stand-in tokenizer with the chat template of the models whose name begins so, from trl or as written here."""


@pytest.mark.parametrize(
    "known",
    [
        pytest.param(each, id=each.name, marks=[] if each.name == "gpt-oss-20b" else pytest.mark.slow)
        for each in KNOWN_MODELS
    ],
)
def test_the_recipe_of_each_known_model_passes_a_smoke_test(fragen: Path, whet: Any, known: KnownModel) -> None:
    """On a random model of its architecture, four layers deep, with its chat template."""
    written = whet("init", "fragen.csv", "--model", known.name, "--out", "a.yaml")
    assert written.code == 0, written.err
    assert f"model:\n  path: {known.path}" in Path("a.yaml").read_text()
    tokenizer = next(make for name, make in TEMPLATES.items() if known.name.startswith(name))()
    model = save_tiny_model(known.architecture, fragen / "model", tokenizer=tokenizer, layers=4)
    done = whet("train", "a.yaml", "--smoke", model, "data.max_length=1024")
    assert done.code == 0, done.err
    assert "smoke test passed" in done.err


def proposed(file: str) -> dict[str, Any]:
    return {each.key: each.value for each in propose_recipe(file, "builtin:tiny")}


def columns_of(file: str) -> tuple[str, dict[str, str]]:
    [source] = proposed(file)["data.sources"]
    return source["format"], source["fields"]


def test_a_column_that_belongs_to_the_question_is_guessed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A context, in other languages too, and the input of Alpaca in another case: without it the answer is a guess."""
    monkeypatch.chdir(tmp_path)
    tables = ("context question answer", "Kontext Frage Antwort", "CONTEXTO Pregunta Respuesta")
    for names in map(str.split, tables):
        rows = "".join(f"Der Wert {n} steht hier.;Wie lautet Wert {n}?;Er lautet {n}.\n" for n in range(5))
        Path("a.csv").write_text(";".join(names) + "\n" + rows)
        fields = {"instruction": names[1], "input": names[0], "output": names[2]}
        assert columns_of("a.csv") == ("alpaca", fields)
        with pytest.raises(WhetError, match=rf"{names[0]}.*, or let `whet init` write it"):
            propose_recipe("a.csv", "builtin:tiny", guess=False)
    Path("b.jsonl").write_text('{"Instruction": "Add one.", "Input": "4", "Output": "5"}\n' * 3)
    fields = {"instruction": "Instruction", "input": "Input", "output": "Output"}
    assert columns_of("b.jsonl") == ("alpaca", fields)


def test_a_number_is_no_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for table in ("id,satz\na7,Ein Satz.\n", "Stelle,satz\n1,Ein Satz.\n2,Zwei Sätze.\n"):
        Path("a.csv").write_text(table)
        with pytest.raises(WhetError, match="the format is not recognised"):
            propose_recipe("a.csv", "builtin:tiny")
    Path("a.csv").write_text("Aufgabe,Ergebnis\n1 + 1,2\n2 + 2,4\n")
    assert columns_of("a.csv") == ("prompt-completion", {"prompt": "Aufgabe", "completion": "Ergebnis"})


def test_of_several_splits_train_is_proposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = {"train": [{"Frage": "Q?", "Antwort": "A."}] * 2, "test": [{"Frage": "R?", "Antwort": "B."}]}
    Path("a.json").write_text(json.dumps(rows))
    [source] = proposed("a.json")["data.sources"]
    assert (source["split"], source["fields"]) == ("train", {"prompt": "Frage", "completion": "Antwort"})
    Path("a.json").write_text(json.dumps({"one": rows["train"], "two": rows["test"]}))
    with pytest.raises(WhetError, match="Set split to one of them"):
        propose_recipe("a.json", "builtin:tiny")


def test_more_names_of_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLAN's, and a cell of the header that Excel wrote on two lines."""
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"inputs": "Q?", "targets": "A.", "task": "arc"}\n')
    assert columns_of("a.jsonl") == ("prompt-completion", {"prompt": "inputs", "completion": "targets"})
    Path("b.csv").write_text('Question,"Answer\n(final)"\nWhere?,There.\n')
    assert columns_of("b.csv") == ("prompt-completion", {"prompt": "Question", "completion": "Answer\n(final)"})


def test_records_that_cannot_be_read_are_named_and_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whet: Any
) -> None:
    """`init` says which, and writes the line without which train would stop; train from the file alone does stop."""
    monkeypatch.chdir(tmp_path)
    good = '{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}\n'
    Path("dump.jsonl").write_text(good * 4 + good[:40] + "\n" + good * 5)
    written = whet("init", "dump.jsonl", "--model", "builtin:tiny")
    assert written.code == 0, written.err
    assert "1 of 10 records cannot be used and will be skipped; the first: dump.jsonl:5: not" in written.err
    trained = whet("train", "dump.yaml", "train.steps=1", "export.at_end=none")
    assert trained.code == 0, trained.err
    refused = whet("train", "dump.jsonl", "model.path=builtin:tiny", "run.dir=other")
    assert (refused.code, "dump.jsonl:5: not valid JSON" in refused.err) == (1, True)
    Path("whole.jsonl").write_text(good * 5)
    assert "data.on_bad" not in proposed("whole.jsonl")


def test_what_was_read_is_told_before_what_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("Nr;Frage;Antwort\n" + "".join(f"{n};Wie {n}?;So {n}.\n" for n in range(5)))
    source = SourceReader(Source(path="a.csv", format="prompt-completion", fields=columns_of("a.csv")[1]))
    assert str(source.description).endswith("completion), semicolon-separated; not used: Nr")


def test_a_cover_page_is_not_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    monkeypatch.chdir(tmp_path)
    for cover in ([["FAQ 2026"], ["by J. Smith"]], [["Author", "J. Smith"], ["Date", "2026"], ["Version", "3"]]):
        book = openpyxl.Workbook()
        book.active.title = "Cover"
        for row in cover:
            book.active.append(row)
        data = book.create_sheet("Data")
        for row in [["Question", "Answer"], *([f"What is {n}?", f"It is {n}."] for n in range(5))]:
            data.append(row)
        book.save("a.xlsx")
        assert columns_of("a.xlsx") == ("prompt-completion", {"prompt": "Question", "completion": "Answer"})
        assert "sheet 'Data' (not read: 'Cover'" in capfd.readouterr().err
    data["A1"], data["B1"], data["C1"] = "x", "y", "z"
    for row in range(2, 7):
        data[f"C{row}"] = "more words"
    del book["Cover"]
    book.create_sheet("Notes")
    book.save("c.xlsx")
    with pytest.raises(WhetError, match=r"the records have 'x', 'y', 'z'.* This is sheet 'Data' \(not read: 'Notes'"):
        propose_recipe("c.xlsx", "builtin:tiny")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "the file is empty. Write a row that names the columns, such as question and answer"),
        ("a.jsonl", b"", "the file is empty. Write one JSON object per line"),
        ("a.csv", b"a,b,c\n1 x,2 y,3 z\n", "The first row must name the columns, such as question and answer"),
        ("a.docx", b"PK\x03\x04 word/document.xml", "the file is a document. Save its text as .txt"),
        (
            "a.json",
            b'{"data": {"chats": [{"prompt": "Hi", "completion": "Yo"}]}}',
            "inside data.chats. Write each on a line: jq -c '.data.chats[]' FILE",
        ),
    ],
)
def test_files_that_strangers_bring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whet: Any, name: str, content: bytes, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    ended = whet("init", name, "--model", "builtin:tiny")
    assert (ended.code, "Traceback" in ended.err) == (1, False)
    assert message in ended.err


def test_what_is_no_recipe_and_what_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whet: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("runs/fragen").mkdir(parents=True)
    Path("runs/fragen/config.yaml").write_text("model: {path: builtin:tiny}\n")
    Path("fragen.yaml").write_text("model: {path: builtin:tiny}\n")
    for words, message in (
        (("train", "data"), "data: this is a folder. Give the path of a recipe"),
        (("train", "data"), "make one: whet init data"),
        (("train", "runs/fragen"), "To continue it: whet train runs/fragen/config.yaml --resume"),
        (("train", "fragen"), "fragen: no such file. Did you mean fragen.yaml?"),
        (("train", "frage.yaml"), "Did you mean fragen.yaml?"),
        (("report", "runs/fargen"), "Did you mean runs/fragen?"),
        (("export", "runs/fargen"), "Did you mean runs/fragen?"),
        (("eval", "runs/fargen", "--tasks", "orders"), "Did you mean runs/fragen?"),
        (("chat", "runs/fargen", "--prompt", "Hi"), "Did you mean runs/fragen?"),
    ):
        ended = whet(*words)
        assert (ended.code, message in ended.err) == (1, True), ended.err


def test_what_is_in_the_file_twice_is_dropped_so_that_check_passes(
    whet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    once = ROWS.splitlines(keepends=True)
    Path("twice.csv").write_text("".join(["Frage;Antwort\n", *once, *once[:20]]))
    assert whet("init", "twice.csv", "--model", "builtin:tiny").code == 0
    assert "20 of 80 records equal an earlier one" in Path("twice.yaml").read_text()
    checked = whet("check", "twice.yaml")
    assert checked.code == 0, checked.err
    assert read_config(Path("twice.yaml")).data.deduplicate


def test_records_are_counted_as_check_counts_them(whet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be read, what is no conversation, what is there twice, and empty lines; the same number of steps."""
    monkeypatch.chdir(tmp_path)
    turns = [[{"from": "human", "value": f"{n} cups?"}, {"from": "gpt", "value": f"Yes, {n}."}] for n in range(60)]
    lines = [json.dumps({"conversations": each}) for each in turns]
    bad = [lines[0][:20], json.dumps({"conversations": turns[0][:1]})]
    Path("dump.jsonl").write_text("\n".join([*lines[:30], "", *bad, *lines[30:], *lines[:5], "", ""]))
    written = whet("init", "dump.jsonl", "--model", "builtin:tiny")
    assert written.code == 0, written.err
    assert "dump.jsonl: 1 empty line is not counted" in written.err  # those at the end are none
    assert "2 of 67 records cannot be used and will be skipped; the first: dump.jsonl:32: " in written.err
    recipe = Path("dump.yaml").read_text()
    assert "5 of 67 records equal an earlier one" in recipe
    assert "about 6 of 60 are held out" in recipe
    assert "about 27 steps" in recipe
    checked = whet("check", "dump.yaml")
    assert checked.code == 0, checked.err
    assert "60 of 67 conversations kept; dropped: 1 broken JSON, 1 no assistant turn, 5 duplicate" in checked.err
    assert "✓ empty lines: dump.jsonl: 1 empty line is not counted" in checked.err
    assert "27 optimizer steps" in checked.err


@pytest.mark.parametrize("name", ["a.xlsx", "a.csv"])
def test_empty_rows_of_a_table_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whet: Any, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [("Frage", "Antwort"), *((f"Wie {n}?", f"So {n}.") for n in range(30))]
    rows[10:10] = [("", "")] * 3
    if name.endswith("csv"):
        Path(name).write_text("".join(f"{question};{answer}\n" for question, answer in rows))
    else:
        book = pytest.importorskip("openpyxl").Workbook()
        for question, answer in rows:
            book.active.append([question or None, answer or None])
        book.save(name)
    written = whet("init", name, "--model", "builtin:tiny")
    assert (written.code, f"{name}: 3 empty rows are not counted" in written.err) == (0, True), written.err
    assert "; 30 records" in Path("a.yaml").read_text()
    assert f"✓ empty lines: {name}: 3 empty rows are not counted" in whet("check", "a.yaml").err
