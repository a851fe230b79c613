"""`scripts/prepare_tokens.py`: token files have the text, document by document."""

import json
from pathlib import Path

import numpy as np
import pytest

from scripts.prepare_tokens import END_TOKEN, main
from scripts.training import text
from scripts.training.processes import UserError

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture
def prepare(tmp_path, capsys):
    """A function that runs the script, and returns its folder and tokens.json."""

    def prepare(data, *flags):
        main([str(x) for x in (data, "--out-dir", tmp_path / "tokens", *flags)])
        capsys.readouterr()
        folder = tmp_path / "tokens"
        return folder, json.loads((folder / "tokens.json").read_text())

    return prepare


def texts_of(folder, side):
    """The documents of a side, in order."""
    found = json.loads((folder / "tokens.json").read_text())
    ids = np.fromfile(folder / f"{side}.bin", found["dtype"])
    assert len(ids) == found["tokens"][side]
    assert ids[-1] == found["end"]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    documents = np.split(ids, np.flatnonzero(ids == found["end"]) + 1)[:-1]
    assert len(documents) == found["documents"][side]
    return [tokenizer.decode(x[:-1].tolist()) for x in documents]


def test_tokens_are_the_documents(corpus, prepare):
    folder, found = prepare(corpus, "--vocab-size", 300)
    documents = {path.read_text() for path in corpus.rglob("*.txt")}
    sides = [texts_of(folder, side) for side in ("train", "held_out")]
    assert set(sides[0]) | set(sides[1]) == documents
    assert sum(map(len, sides)) == len(documents)
    assert found["vocab_size"] <= 300
    for side, there in zip(("train", "held_out"), sides, strict=True):
        assert found["bytes"][side] == sum(len(x.encode()) for x in there)
        assert found["tokens"][side] < found["bytes"][side]
    mapped = text.map_tokens(folder)
    assert isinstance(mapped.train, np.memmap)
    assert mapped.tokens.stop_tokens == [found["end"]]
    assert mapped.tokens.decode(mapped.tokens.encode("a fig a day")) == "a fig a day"


def test_each_line_of_a_jsonl_file_is_a_document(tmp_path, prepare):
    lines = [f"text {n}\u2028é\n" for n in range(40)]
    content = "\n".join(json.dumps({"text": x}, ensure_ascii=False) for x in lines)
    (tmp_path / "a.jsonl").write_text(content + "\n\n")
    folder, found = prepare(tmp_path / "a.jsonl", "--vocab-size", 300)
    assert set(texts_of(folder, "train")) | set(texts_of(folder, "held_out")) == set(lines)
    assert 0 < found["documents"]["held_out"] <= 6


def test_single_document_is_cut(tmp_path, prepare):
    (tmp_path / "book").write_text("aé" * 100)
    folder, _ = prepare(tmp_path / "book", "--vocab-size", 300)
    [train], [held_out] = texts_of(folder, "train"), texts_of(folder, "held_out")
    assert (train + held_out).replace("é", "") == "a" * 100
    assert len(train + held_out) >= 199


@pytest.fixture
def words(tmp_path):
    """A tokenizer.json of more words than 16 bits can number, which begins texts with 1."""
    names = ["<end>", "<begin>", *(f"w{n}" for n in range(70_000)), "?"]
    model = tokenizers.models.WordLevel({x: n for n, x in enumerate(names)}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    begins = tokenizers.processors.TemplateProcessing("<begin> $A", special_tokens=[("<begin>", 1)])
    tokenizer.post_processor = begins
    folder = tmp_path / "weights"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_given_tokenizer_begins_and_ends_documents(words, tmp_path, prepare):
    (tmp_path / "texts").mkdir()
    for n in range(3):
        (tmp_path / "texts" / f"{n}.txt").write_text(" ".join(f"w{n + 69_900}" for _ in range(9)))
    folder, found = prepare(
        tmp_path / "texts", "--tokenizer", words / "tokenizer.json", "--end-token", "<end>"
    )
    assert found["dtype"] == "<u4"
    assert found["vocab_size"] == 70_003
    ids = np.concatenate([np.fromfile(folder / f"{x}.bin", "<u4") for x in text.SIDES])
    assert sorted(ids.reshape(3, 11).tolist()) == [[1, *[n + 69_902] * 9, 0] for n in range(3)]
    (words / "config.json").write_text('{"eos_token_id": [7, 8]}')
    assert prepare(tmp_path / "texts", "--tokenizer", words)[1]["end"] == 7


MISTAKES = [
    ("NO", [], "DATA must be a file or a folder; got "),
    ("TEXT", ["--vocab-size", "256"], "--vocab-size must be at least 257, all bytes and the end"),
    ("TEXT", ["--tokenizer", "missing.json"], "must have a missing.json that the package tok"),
    ("TEXT", ["--end-token", "<no>"], "--end-token must be a token that ends a document; got '<"),
    ("TEXT", ["--out-dir", "OTHER"], "--out-dir must be new, empty, or a folder of this script;"),
    ("latin", [], "DATA must be UTF-8; got other bytes in 'latin': leave that file out."),
    ("a.jsonl", [], 'DATA must have lines like {"text": "..."} in .jsonl files; got another in li'),
]


@pytest.mark.parametrize(("data", "flags", "fragment"), MISTAKES)
def test_mistake_ends_in_one_sentence(data, flags, fragment, corpus, tmp_path, capsys):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"words": "b"}\n')
    paths = {"TEXT": corpus, "OTHER": tmp_path}
    flags = [str(paths.get(x, x)) for x in ["--out-dir", tmp_path / "tokens", *flags]]
    with pytest.raises(SystemExit) as end:
        main([str(paths.get(data, tmp_path / data)), *flags])
    assert fragment in end.value.code
    assert "\n" not in end.value.code


def test_missing_package_is_named(corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(SystemExit, match="needs the package tokenizers: run pip install"):
        main([str(corpus), "--out-dir", str(tmp_path / "tokens")])


def test_damaged_tokens_are_refused(corpus, prepare):
    folder, found = prepare(corpus, "--vocab-size", 300)
    path = folder / "train.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"`data` must have the .* tokens of .*: prepare"):
        text.map_tokens(folder)
    (folder / "tokens.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokens by prepare_tokens.py; got another tokens\.json"):
        text.map_tokens(Path(folder))
    assert found["end"] == tokenizers.Tokenizer.from_file(
        str(folder / "tokenizer.json")
    ).token_to_id(END_TOKEN)
