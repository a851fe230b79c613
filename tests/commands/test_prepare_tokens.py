"""`scripts/prepare_tokens.py`: token files have the text, document by document."""

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
from support.repository import assert_none

from models.tokens import FromFolder
from models.training import text
from models.training.files import lock
from models.training.processes import UserError
from models.training.settings import TrainConfig
from scripts import prepare_tokens
from scripts.prepare_tokens import END_TOKEN, main

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture
def prepare(tmp_path, capsys):
    """A function that runs the script, and returns its folder and tokens.json."""

    def prepare(data, *flags):
        main([str(x) for x in (data, "--out-dir", tmp_path / "tokens", *flags)])
        folder = tmp_path / "tokens"
        return folder, json.loads((folder / "tokens.json").read_text())

    return prepare


def documents_of(folder, side):
    """The tokens of the documents of a side, in order."""
    found = json.loads((folder / "tokens.json").read_text())
    ids = np.fromfile(folder / f"{side}.bin", found["dtype"])
    ends = np.fromfile(folder / f"{side}_ends.bin", "<i8")
    assert len(ids) == found["tokens"][side] == ends[-1]
    assert len(ends) == found["documents"][side]
    assert (ids[ends - 1] == found["end"]).all()
    return [x.tolist() for x in np.split(ids, ends[:-1])]


def texts_of(folder, side):
    """The texts of the documents of a side, in order."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.decode(x[:-1]) for x in documents_of(folder, side)]


def all_of(function, folder):
    return [x for side in text.SIDES for x in function(folder, side)]


def test_tokens_are_the_documents(corpus, prepare):
    folder, found = prepare(corpus, "--vocab-size", 300)
    documents = {path.read_text() for path in corpus.rglob("*.txt")}
    sides = [texts_of(folder, side) for side in text.SIDES]
    assert set(sides[0]) | set(sides[1]) == documents
    assert sum(map(len, sides)) == len(documents)
    assert found["vocab_size"] <= 300
    for side, there in zip(text.SIDES, sides, strict=True):
        assert found["bytes"][side] == sum(len(x.encode()) for x in there)
        assert found["tokens"][side] < found["bytes"][side]
    mapped = text.map_tokens(folder)
    assert isinstance(mapped.train.tokens, np.memmap)
    assert isinstance(mapped.train.ends, np.memmap)
    words = FromFolder(folder)
    assert words.stop_tokens == [found["end"]]
    assert words.decode(words.encode("a fig a day")) == "a fig a day"


def test_each_line_of_a_jsonl_file_is_a_document(tmp_path, prepare):
    lines = [f"text {n}\u2028\x85é\n" for n in range(40)] + ["", "\ufeffa"]
    content = "\r\n".join(json.dumps({"text": x}, ensure_ascii=False) for x in lines)
    (tmp_path / "a.jsonl").write_text("\ufeff" + content + "\n\n", encoding="utf-8", newline="")
    folder, found = prepare(tmp_path / "a.jsonl", "--vocab-size", 300)
    assert sorted(all_of(texts_of, folder)) == sorted(lines)
    assert 0 < found["documents"]["held_out"] <= 7


def test_single_document_is_cut_between_letters(tmp_path, prepare):
    # Nine tenths of the bytes end inside of a letter.
    (tmp_path / "book").write_text("\ufeff" + "é" * 105, encoding="utf-8")
    folder, found = prepare(tmp_path / "book", "--vocab-size", 300)
    assert all_of(texts_of, folder) == ["é" * 94, "é" * 11]
    assert found["bytes"] == {"train": 188, "held_out": 22}


@pytest.fixture
def words(tmp_path):
    """A tokenizer.json of more words than 16 bits can number, which begins texts with 1."""
    names = ["<end>", "<begin>", *(f"w{n}" for n in range(70_000)), "?"]
    model = tokenizers.models.WordLevel({x: n for n, x in enumerate(names)}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    begins = tokenizers.processors.TemplateProcessing("<begin> $A", special_tokens=[("<begin>", 1)])
    tokenizer.post_processor = begins
    folder = tmp_path / "weights"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def changed(words):
    """A function that changes the tokenizer by a function."""
    path = str(words / "tokenizer.json")

    def changed(change):
        tokenizer = tokenizers.Tokenizer.from_file(path)
        change(tokenizer)
        tokenizer.save(path)
        return words

    return changed


def test_given_tokenizer_begins_and_ends_documents(words, tmp_path, prepare):
    (tmp_path / "texts").mkdir()
    for n in range(3):
        (tmp_path / "texts" / f"{n}.txt").write_text(" ".join(f"w{n + 69_900}" for _ in range(9)))
    folder, found = prepare(
        tmp_path / "texts", "--tokenizer", words / "tokenizer.json", "--end-token", "<end>"
    )
    assert found["dtype"] == "<u4"
    assert found["vocab_size"] == 70_003
    rows = sorted(all_of(documents_of, folder))
    assert rows == [[1, *[n + 69_902] * 9, 0] for n in range(3)]
    (words / "config.json").write_text('{"eos_token_id": [7, 8]}')
    assert prepare(tmp_path / "texts", "--tokenizer", words, "--replace")[1]["end"] == 7


@pytest.mark.parametrize("kept", ["truncation", "padding"])
def test_lengths_of_batches_in_a_tokenizer_change_nothing(kept, changed, tmp_path, prepare):
    """A tokenizer that was saved while it made batches cuts texts to a length, or fills them."""
    lengths = {
        "truncation": lambda x: x.enable_truncation(4),
        "padding": lambda x: x.enable_padding(),
    }
    words = changed(lengths[kept])
    (tmp_path / "a.jsonl").write_text("".join('{"text": "%s"}\n' % ("w0 " * n) for n in range(9)))
    folder, _ = prepare(tmp_path / "a.jsonl", "--tokenizer", words, "--end-token", "<end>")
    assert sorted(map(len, all_of(documents_of, folder))) == [*range(2, 11)]
    assert len(FromFolder(folder).encode("w0 " * 30)) == 31


def test_name_of_a_special_token_is_text(corpus, tmp_path, prepare, capsys):
    """Unless --special-tokens says that a template has written it."""
    given = f"one {END_TOKEN}two"
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": given}) + "\n") * 20)
    data = tmp_path / "a.jsonl", "--vocab-size", 300
    folder, found = prepare(*data)
    documents = all_of(documents_of, folder)
    assert [x.count(found["end"]) for x in documents] == [1] * 20
    assert all_of(texts_of, folder) == [given] * 20
    out = capsys.readouterr().out
    assert f"name a special token, as {END_TOKEN}: it is text without --special-tokens" in out
    prepare(*data, "--special-tokens", "--replace")
    documents = all_of(documents_of, folder)
    # A document ends where it ends, and not at each end token.
    assert [x.count(found["end"]) for x in documents] == [2] * 20
    assert "name a special token" not in capsys.readouterr().out


def test_text_of_a_template_begins_once(changed, tmp_path, prepare, capsys):
    """A template writes the token with which the tokenizer begins texts, too."""
    words = changed(lambda tokenizer: tokenizer.add_special_tokens(["<begin>"]))
    lines = [json.dumps({"text": x}) for x in ("<begin> w0 <begin> no", "w1", "<begin>")]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    flags = "--tokenizer", words, "--end-token", "<end>", "--special-tokens"
    folder, _ = prepare(tmp_path / "a.jsonl", *flags)
    assert sorted(all_of(documents_of, folder)) == [[1, 0], [1, 2, 1, 70_002, 0], [1, 3, 0]]
    assert "1 tokens are for letters or words that the tokenizer does not know" in (
        capsys.readouterr().out
    )


OTHER = ["--tokenizer", "OTHER", "--end-token", "<end>"]
MISTAKES = [
    ("NO", [], "DATA must be a file or a folder; got "),
    ("TEXT", ["--vocab-size", "256"], "--vocab-size must be at least 257, all bytes and the end"),
    ("TEXT", ["--vocab-size", "2000000000"], "and the end token, and at most 1,048,576; got 20"),
    ("/dev/null", [], "DATA must be a file or a folder; got '/dev/null', which is neither."),
    ("TEXT", ["--tokenizer", "no.json"], "no.json must be a tokenizer.json that the package tok"),
    ("TEXT", ["--end-token", "<no>"], "--end-token must be a token that ends a document; got '<"),
    ("TEXT", ["--end-token", ""], "--end-token must be a token that ends a document; got '', wh"),
    ("TEXT", ["--tokenizer", "OTHER"], "--end-token must be a token that ends a document; got 70"),
    ("TEXT", ["--out-dir", "HERE"], "--out-dir must be new, empty, or a folder of this script;"),
    ("latin", [], "DATA must be UTF-8; got other bytes in 'latin': leave that file out."),
    ("none", [], "DATA must have text in it; found none in"),
    ("utf16", [], "have zero bytes and are no UTF-8: utf16): pass another DATA."),
    ("blank.jsonl", [], "DATA must have text in it; got 2 empty documents"),
    ("named", OTHER, "write a name as text; got '<end>', which is always its special token"),
    *(
        (
            f"{name}.jsonl",
            [],
            'DATA must have lines like {"text": "..."} in .jsonl files; got anoth',
        )
        for name in ("field", "number", "list", "surrogate", "deep", "cut")
    ),
]
LINES = {
    "field": '{"words": "b"}',
    "number": '{"text": 5}',
    "list": '["a"]',
    "surrogate": '{"text": "\\ud800"}',
    "deep": "[" * 100_000,
    "cut": '{"text": "a',
    "blank": '{"text": ""}',
}


def test_mistakes_end_in_one_sentence(corpus, changed, tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "none").touch()
    (tmp_path / "utf16").write_text("text", encoding="utf-16")
    (tmp_path / "named").write_text("w1 <end> w2")
    for name, line in LINES.items():
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": ""}}\n{line}\n')
    # Its model knows the name as a word, too.
    other = changed(lambda tokenizer: tokenizer.add_special_tokens(["<end>"]))
    (other / "config.json").write_text('{"eos_token_id": 70003}')
    paths = {"TEXT": corpus, "HERE": tmp_path, "OTHER": other}
    offenders = []
    for data, flags, fragment in MISTAKES:
        flags = [str(paths.get(x, x)) for x in ["--out-dir", tmp_path / "tokens", *flags]]
        with pytest.raises(SystemExit) as end:
            main([str(paths.get(data, tmp_path / data)), *flags])
        if fragment not in end.value.code or "\n" in end.value.code:
            offenders.append((data, flags, end.value.code))
    assert_none(offenders)


def test_token_without_a_name_is_refused(changed, tmp_path, prepare):
    """Such a number has no room in the type of the file, or in the model."""
    template = tokenizers.processors.TemplateProcessing
    begins = template("<begin> $A", special_tokens=[("<begin>", 99_999)])
    words = changed(lambda tokenizer: setattr(tokenizer, "post_processor", begins))
    (tmp_path / "a").write_text("w1 " * 20)
    with pytest.raises(SystemExit, match="must have tokens below 70,003; got 99,999 in a document"):
        prepare(tmp_path / "a", "--tokenizer", words, "--end-token", "<end>")


def test_missing_package_is_named(corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(SystemExit, match="needs the package tokenizers: run pip install"):
        main([str(corpus), "--out-dir", str(tmp_path / "tokens")])


# ------------------------------------------------------------------------------ the folder


def content_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_tokens_of_another_tokenizer_stay(corpus, words, prepare):
    folder, _ = prepare(corpus, "--vocab-size", 300)
    before = content_of(folder)
    other = corpus, "--tokenizer", words, "--end-token", "<end>"
    with pytest.raises(
        SystemExit, match=r"--out-dir must have no tokens of another tok.*--replace"
    ):
        prepare(*other)
    assert content_of(folder) == before
    assert prepare(*other, "--replace")[1]["vocab_size"] == 70_003
    assert content_of(folder).keys() == before.keys()


@pytest.mark.parametrize(
    ("text", "end", "of"),
    [
        ("w0 w2", "<end>", "another text or of other flags"),
        ("w0 w123", "<end>", "another text"),
        ("w0 w1", "<begin>", "another text or of other flags"),
    ],
)
def test_tokens_of_another_text_stay(text, end, of, words, tmp_path, prepare):
    def prepared(text, *flags):
        (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n" + '{"text": ""}\n' * 9)
        return prepare(tmp_path / "a.jsonl", "--tokenizer", words, *flags)[0]

    first = "w0 w1", "--end-token", "<end>"
    folder = prepared(*first)
    before = content_of(folder)
    with pytest.raises(SystemExit, match=f"--out-dir must have no tokens of {of}; got .*--replace"):
        prepared(text, "--end-token", end)
    assert content_of(folder) == before
    # The same tokens again repair a damaged file.
    (folder / "train.bin").write_bytes(b"")
    assert content_of(prepared(*first)) == before
    assert content_of(prepared(text, "--end-token", end, "--replace")) != before


def test_folder_in_use_is_refused(corpus, prepare):
    """A run removes what an earlier one has left unfinished."""
    folder, _ = prepare(corpus, "--vocab-size", 300)
    (folder / text.NEW).mkdir()
    before = content_of(folder)
    said = f"--out-dir must be in no other run's use; got .*, where process {os.getpid()} on .*:"
    with lock(folder / text.LOCK), pytest.raises(SystemExit, match=said):
        prepare(corpus, "--vocab-size", 300, "--replace")
    assert content_of(folder) == before
    assert (folder / text.NEW).exists()
    prepare(corpus, "--vocab-size", 300)


def test_tokens_without_their_tokenizer_stay(corpus, prepare):
    folder, _ = prepare(corpus, "--vocab-size", 300)
    (folder / "tokenizer.json").unlink()
    before = content_of(folder)
    with pytest.raises(SystemExit, match="--out-dir must have no tokens of another tokenizer"):
        prepare(corpus, "--vocab-size", 280)
    assert content_of(folder) == before
    assert prepare(corpus, "--vocab-size", 280, "--replace")[1]["vocab_size"] <= 280


def test_folder_with_tokens_of_something_else_stays(corpus, tmp_path, prepare):
    folder = tmp_path / "tokens"
    folder.mkdir()
    for name in ("tokens.json", "train.bin"):
        (folder / name).write_text('{"made_by": "somebody"}')
    before = content_of(folder)
    for flags in ([], ["--replace"]):
        with pytest.raises(SystemExit, match="--out-dir must be new, empty, or a folder of this"):
            prepare(corpus, "--vocab-size", 300, *flags)
    assert content_of(folder) == before


class Killed(BaseException):
    """The end of a process."""


@pytest.mark.parametrize("moved", [0, 1, 3, 5])
def test_kill_loses_no_tokens(moved, corpus, words, prepare, monkeypatch):
    """Either the old tokens are there, or the new ones are, after the same or another command."""
    folder, old = prepare(corpus, "--vocab-size", 300)
    before, real, calls = content_of(folder), Path.replace, itertools.count()

    def replace(self, target):
        # Two files of the new folder are replaced while it is written.
        if next(calls) == 2 + moved:
            raise Killed
        return real(self, target)

    new = corpus, "--tokenizer", words, "--end-token", "<end>", "--replace"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        with pytest.raises(Killed):
            prepare(*new)
    with pytest.raises(UserError, match=r"tokens by prepare_tokens\.py; got unfinished ones"):
        text.load_text(TrainConfig(data=str(folder)))
    prepare_tokens.put_into_place(folder)
    assert content_of(folder).keys() == before.keys()
    assert text.map_tokens(folder).vocab_size == 70_003
    assert old["vocab_size"] < 301


def test_mistake_or_kill_while_writing_leaves_the_folder(corpus, words, prepare, monkeypatch):
    folder, _ = prepare(corpus, "--vocab-size", 300)
    before = content_of(folder)
    new = corpus, "--tokenizer", words, "--replace"
    with pytest.raises(SystemExit, match="--end-token must be a token"):
        prepare(*new)
    assert not (folder / text.NEW).exists()
    with monkeypatch.context() as patch:
        # A kill removes nothing.
        patch.setattr(prepare_tokens.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(SystemExit, match="--end-token must be a token"):
            prepare(*new)
    assert (folder / text.NEW / "tokenizer.json").exists()
    assert content_of(folder) == before
    text.map_tokens(folder)
    prepare(corpus, "--vocab-size", 300)
    assert not (folder / text.NEW).exists()
    assert content_of(folder) == before


def test_damaged_tokens_are_refused(corpus, prepare):
    folder, found = prepare(corpus, "--vocab-size", 300)
    for name, unit in (("train.bin", "tokens"), ("held_out_ends.bin", "documents")):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-1])
        with pytest.raises(UserError, match=rf"`data` must have the .* {unit} of .*: prepare"):
            text.map_tokens(folder)
        # As in a folder of an older version of the script.
        (folder / name).unlink()
        with pytest.raises(UserError, match=r"got a file of 0 bytes: prepare them again"):
            text.map_tokens(folder)
        (folder / name).write_bytes(whole)
    (folder / "tokens.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokens by prepare_tokens.py; got another tokens\.json"):
        text.map_tokens(Path(folder))
    assert found["end"] == tokenizers.Tokenizer.from_file(
        str(folder / "tokenizer.json")
    ).token_to_id(END_TOKEN)
