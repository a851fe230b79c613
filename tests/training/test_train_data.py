"""The text of the trainer: its files, their split, and its batches."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.tiny_run import TINY, one_device

from models.training.files import MARK
from models.training.processes import UserError
from models.training.text import (
    Stream,
    Text,
    held_out_batches,
    load_text,
    read_files,
    split_files,
    training_batch,
    why_left_out,
)

pytestmark = pytest.mark.usefixtures("compile_once")


def test_batches_are_a_function_of_seed_and_step(config):
    text = load_text(config)
    first = tokens_of(text, 3, config)
    np.testing.assert_array_equal(first, tokens_of(text, 3, config))
    for other in (
        tokens_of(text, 4, config),
        tokens_of(text, 3, dataclasses.replace(config, seed=1)),
    ):
        assert (first != other).any()


def tokens_of(text, step, config):
    return training_batch(text, step, config, one_device()).tokens


def text_of(tokens, ends=None):
    return Text(*2 * [Stream(tokens, ends=ends)], 256, "", [])


def test_windows_reach_both_ends_of_the_text(config):
    """A text of one window more than the context: an index too far would be an error."""
    text = text_of(np.arange(14, dtype=np.uint8))
    starts = set()
    for step in range(20):
        batch = np.asarray(tokens_of(text, step, config), int)
        np.testing.assert_array_equal(np.diff(batch), 1)
        starts |= set(batch[..., 0].ravel().tolist())
    assert starts == {0, 1}
    held_out = held_out_batches(text, config, one_device()).tokens
    assert held_out.shape == (4, 2, 13)
    assert (held_out[0, 0, 0], held_out[-1, -1, -1]) == (0, 13)


def test_documents_end_where_they_were_written_to(config):
    """Documents of 1, 5, 1, 30 and 2 tokens, all equal; windows of 13 begin and end anywhere."""
    ends = np.cumsum([1, 5, 1, 30, 2])
    text, numbers = (
        text_of(np.zeros(39, np.uint8), ends),
        np.repeat(np.arange(5), np.diff(ends, prepend=0)),
    )
    config = dataclasses.replace(config, eval_batches=30)
    tokens, documents, answers = held_out_batches(text, config, one_device())
    assert answers is None
    assert (tokens.shape, documents.dtype) == ((60, 2, 13), np.int32)
    starts = np.linspace(0, 26, 120).astype(int)
    for row, start in zip(np.asarray(documents).reshape(-1, 13), starts, strict=True):
        np.testing.assert_array_equal(row, numbers[start : start + 13] - numbers[start])


def test_hash_of_a_text_is_of_both_sides(config, corpus):
    text = load_text(config)
    with_more = shutil.copytree(corpus, Path(config.out_dir).with_name("more"))
    hashes = {text.sha256}
    for side in (text.train, text.held_out):
        with open(with_more / side.names[-1], "a") as file:
            file.write("!")
        hashes.add(load_text(dataclasses.replace(config, data=str(with_more))).sha256)
    assert len(hashes) == 3


def test_no_file_is_on_both_sides(config, corpus):
    text = load_text(config)
    assert not set(text.train.names) & set(text.held_out.names)
    everything = {p.relative_to(corpus).as_posix() for p in corpus.rglob("*.txt")}
    assert set(text.train.names) | set(text.held_out.names) == everything
    for side in (text.train, text.held_out):
        # Whole files in the named order, a zero byte between them.
        expected = b"\0".join((corpus / name).read_bytes() for name in side.names)
        assert side.tokens.tobytes() == expected
    assert 0 < len(text.held_out.tokens) < 0.3 * len(text.train.tokens)


def test_default_text_is_the_standard_library(config):
    default = dataclasses.replace(config, data=None)
    text, again = load_text(default), load_text(default)
    assert text.sha256 == again.sha256
    assert not set(text.train.names) & set(text.held_out.names)
    names = text.train.names + text.held_out.names
    assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    for name in names:
        assert name.endswith(".py")
        folders = set(name.split("/")[:-1])
        assert not folders & {"site-packages", "test", "tests", "idle_test", "encodings"}
    train, held_out = len(text.train.tokens), len(text.held_out.tokens)
    assert train > 3_000_000
    assert 0.08 < held_out / (train + held_out) < 0.2


def test_file_keeps_its_side_when_others_come():
    files = [(f"{i}.txt", b"x" * 100) for i in range(40)]
    before = {name for name, _ in split_files(files)[1]}
    after = {name for name, _ in split_files([*files, ("new.txt", b"x" * 100)])[1]}
    assert len(before) == 4
    assert len(before & after) >= 3


@pytest.mark.parametrize("sizes", [(1000, 10), (10, 1000), (500, 500)])
def test_smaller_of_two_files_is_held_out(sizes):
    files = [(f"{i}", b"x" * size) for i, size in enumerate(sizes)]
    train_side, held_out = split_files(files)
    assert len(train_side) == len(held_out) == 1
    assert len(held_out[0][1]) == min(sizes)


def test_single_file_is_cut(config, tmp_path):
    (tmp_path / "book").write_bytes(bytes(range(1, 201)))
    text = load_text(dataclasses.replace(config, data=str(tmp_path / "book")))
    assert text.train.tokens.tolist() == list(range(1, 181))
    assert text.held_out.tokens.tolist() == list(range(181, 201))


def test_folder_gives_its_texts(tmp_path):
    for name in ("a.txt", "b.md", ".hidden", ".git/config", "run/metrics.jsonl", "deep/er/c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("some text")
    (tmp_path / "empty").touch()
    (tmp_path / "image").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "wide").write_text("text", encoding="utf-16")
    # Without an end.
    os.mkfifo(tmp_path / "pipe")
    files, left_out = read_files(str(tmp_path), str(tmp_path / "run"))
    assert [name for name, _ in files] == ["a.txt", "b.md", "deep/er/c"]
    assert left_out == ["image", "run", "wide"]
    assert why_left_out(left_out).endswith("zero bytes and are no UTF-8: image, run, wide")
    assert why_left_out([*"abcdefghijklm"]).endswith(": a, b, c, d, e, f, g, h, i, j and 3 more")


def test_run_folders_are_left_out(corpus, tmp_path):
    """A run that read its own folder, or another's, would read other texts when it is resumed."""
    texts = shutil.copytree(corpus, tmp_path / "texts")
    config = dataclasses.replace(TINY, data=str(texts), out_dir=str(texts / "runs" / "two"))
    before = load_text(config)
    for name in ("one", "two"):
        (texts / "runs" / name).mkdir(parents=True)
        (texts / "runs" / name / "run.json").write_text(json.dumps(MARK))
        (texts / "runs" / name / "metrics.jsonl").write_text("numbers")
    after = load_text(config)
    assert after.sha256 == before.sha256
    assert after.said[1].endswith("and are no UTF-8: runs/one, runs/two")


@pytest.mark.parametrize("name", ["runs/1", "."])
def test_folder_of_a_run_is_no_text(corpus, tmp_path, name):
    texts = shutil.copytree(corpus, tmp_path / "texts")
    (texts / "runs" / "1").mkdir(parents=True)
    (texts / "runs" / "1" / "run.json").write_text(json.dumps(MARK))
    with pytest.raises(UserError, match="`data` must be text, not the folder of a run; got"):
        read_files(str(texts / name), str(texts))
