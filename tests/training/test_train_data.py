"""The text of the trainer: its files, their split, and its batches."""

import dataclasses
import json
import os
import shutil

import numpy as np
import pytest
from support.tiny_run import TINY, one_device

from models.training.files import MARK
from models.training.processes import UserError
from models.training.text import (
    held_out_batches,
    load_text,
    read_files,
    split_files,
    training_batch,
    why_left_out,
)

pytestmark = pytest.mark.usefixtures("compile_once")


def test_batches_are_a_function_of_seed_and_step(config):
    text = load_text(config).train
    first = training_batch(text, 3, config, one_device())
    np.testing.assert_array_equal(first, training_batch(text, 3, config, one_device()))
    for other in (
        training_batch(text, 4, config, one_device()),
        training_batch(text, 3, dataclasses.replace(config, seed=1), one_device()),
    ):
        assert (first != other).any()


def test_windows_reach_both_ends_of_the_text(config):
    """A text of one window more than the context: an index too far would be an error."""
    text = np.arange(14, dtype=np.uint8)
    starts = set()
    for step in range(20):
        batch = np.asarray(training_batch(text, step, config, one_device()), int)
        np.testing.assert_array_equal(np.diff(batch), 1)
        starts |= set(batch[..., 0].ravel().tolist())
    assert starts == {0, 1}
    held_out = held_out_batches(text, config, one_device())
    assert held_out.shape == (4, 2, 13)
    assert (held_out[0, 0, 0], held_out[-1, -1, -1]) == (0, 13)


def test_documents_end_where_they_were_written_to(config):
    """Documents of 1, 5, 1, 30 and 2 tokens, all equal; windows of 13 begin and end anywhere."""
    ends = np.cumsum([1, 5, 1, 30, 2])
    text, numbers = np.zeros(39, np.uint8), np.repeat(np.arange(5), np.diff(ends, prepend=0))
    config = dataclasses.replace(config, eval_batches=30)
    tokens, documents = held_out_batches(text, config, one_device(), ends)
    assert (tokens.shape, documents.dtype) == ((60, 2, 13), np.int32)
    starts = np.linspace(0, 26, 120).astype(int)
    for row, start in zip(np.asarray(documents).reshape(-1, 13), starts, strict=True):
        np.testing.assert_array_equal(row, numbers[start : start + 13] - numbers[start])


def test_hash_of_a_text_is_of_both_sides(config, corpus):
    text = load_text(config)
    more = np.append(text.train, np.uint8(1)), np.append(text.held_out, np.uint8(1))
    others = text._replace(train=more[0]), text._replace(held_out=more[1])
    assert len({x.sha256 for x in (text, *others)}) == 3


def test_no_file_is_on_both_sides(config, corpus):
    text = load_text(config)
    assert not set(text.train_files) & set(text.held_out_files)
    everything = {p.relative_to(corpus).as_posix() for p in corpus.rglob("*.txt")}
    assert set(text.train_files) | set(text.held_out_files) == everything
    for names, side in ((text.train_files, text.train), (text.held_out_files, text.held_out)):
        # Whole files in the named order, a zero byte between them.
        expected = b"\0".join((corpus / name).read_bytes() for name in names)
        assert side.tobytes() == expected
    assert 0 < len(text.held_out) < 0.3 * len(text.train)


def test_default_text_is_the_standard_library(config):
    default = dataclasses.replace(config, data=None)
    text, again = load_text(default), load_text(default)
    assert text.sha256 == again.sha256
    assert not set(text.train_files) & set(text.held_out_files)
    names = text.train_files + text.held_out_files
    assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    for name in names:
        assert name.endswith(".py")
        folders = set(name.split("/")[:-1])
        assert not folders & {"site-packages", "test", "tests", "idle_test", "encodings"}
    assert len(text.train) > 3_000_000
    assert 0.08 < len(text.held_out) / (len(text.train) + len(text.held_out)) < 0.2


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
    assert text.train.tolist() == list(range(1, 181))
    assert text.held_out.tolist() == list(range(181, 201))


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
    assert after.left_out == ["runs/one", "runs/two"]


@pytest.mark.parametrize("name", ["runs/1", "."])
def test_folder_of_a_run_is_no_text(corpus, tmp_path, name):
    texts = shutil.copytree(corpus, tmp_path / "texts")
    (texts / "runs" / "1").mkdir(parents=True)
    (texts / "runs" / "1" / "run.json").write_text(json.dumps(MARK))
    with pytest.raises(UserError, match="`data` must be text, not the folder of a run; got"):
        read_files(str(texts / name), str(texts))
