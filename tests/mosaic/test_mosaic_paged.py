"""Pages by the forward for Hopper: the emulated kernel, and how its work is divided.

See mosaic_cases for the emulator, and paged_cases for the calls.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import broken_kernels, cases, paged_cases
from support import mosaic_emulator as emulator
from support.compiled_code import shaped
from support.lowered import launches, lowered
from support.mosaic_cases import on_sms
from support.paged_cases import Config, check, draw

import pallas_flash
from pallas_flash._arguments.paged import validate
from pallas_flash._backends import xla_paged
from pallas_flash._backends.mosaic import paged
from pallas_flash._backends.mosaic import splits as kv_splits
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.paged import RowTiles

# Groups of 4, 7, 8 and 1 heads, and pages shorter and longer than a block, or neither.
CONFIGS = [
    Config("plain", 16, (8, 2), (64, 64), "bfloat16"),
    Config("window", 64, (7, 1), (128,) * 2, "bfloat16", options=("local_window_size", "sinks")),
    Config("scores", 128, (8, 1), (256,) * 2, "float16", options=("alibi_slopes", "sinks")),
    Config("cap", 48, (2, 2), (72, 40), "bfloat16", options=("logits_soft_cap", "scale")),
    Config("long pages", 256, (4, 1), (128, 64), options=("local_window_size", "alibi_slopes")),
]
CONFIGS[-1] = dataclasses.replace(CONFIGS[-1], dtype="bfloat16")


@pytest.fixture(autouse=True)
def many_keys(monkeypatch):
    """Requests of several K/V blocks, so that stages are used again, and splits have some each."""
    monkeypatch.setattr(paged_cases, "ROOM", 1100)


def problem_of(schedule):
    given = dict.fromkeys(
        ("scale", "local_window_size", "logits_soft_cap", "sinks", "alibi_slopes")
    )
    scales = dict.fromkeys(("key_scales", "value_scales", "precision"))
    named = dict(return_lse=True, batch_invariant=False, implementation="mosaic")
    return validate(*schedule.arrays, **given | schedule.options, **scales, **named)


def run(schedule):
    with emulator.emulated(pytest.MonkeyPatch()), jax.numpy_rank_promotion("raise"):
        return paged.forward(problem_of(schedule))


# On 2 SMs each CTA has many work tiles; on 132 each work tile has several splits.
EACH = list(itertools.product(CONFIGS, [132, 2]))


@pytest.mark.parametrize(("config", "sms"), cases.default(EACH[1::3], EACH), ids=str)
def test_random_schedules(config, sms, kernel_case, monkeypatch):
    """Pages in any order, requests of any length and of none; NaN in all that is not read."""
    on_sms(monkeypatch, sms)
    splits, found = paged.num_splits, []
    monkeypatch.setattr(paged, "num_splits", lambda *x: found.append(splits(*x)) or found[-1])
    for seed in range(2):
        schedule = draw(config, seed)
        check(schedule, run(schedule))
    assert found == [1] * 2 if sms == 2 else min(found) > 1


def test_pages_that_no_query_sees_and_numbers_outside():
    """Full blocks between partial ones, as many queries for each request, NaN in other pages."""
    q = jax.random.normal(jax.random.key(0), (3, 2, 6, 64), jnp.bfloat16)
    k, v = jax.random.normal(jax.random.key(1), (2, 70, 32, 2, 64), jnp.bfloat16)
    table = np.array(jax.random.permutation(jax.random.key(2), 66)).reshape(3, 22)
    names = "key_scales", "value_scales", "scale", "logits_soft_cap", "sinks", "alibi_slopes"
    options = dict.fromkeys((*names, "precision"), None)
    options |= dict(local_window_size=280, batch_invariant=False)
    arrays = q, k, v, jnp.int32([700, 0, 33]), jnp.asarray(table, jnp.int32)
    problem = validate(*arrays, None, **options, return_lse=True, implementation=None)
    table[0, :13] = table[2, 2:] = 67
    # A number outside counts as the nearest page.
    table[0, 15:17] = -5, 99
    requests = dataclasses.replace(problem.requests, page_indices=jnp.asarray(table, jnp.int32))
    pages = dict(key_pages=k.at[67].set(jnp.nan), value_pages=v.at[67].set(jnp.nan))
    problem = dataclasses.replace(problem, requests=requests, **pages)
    with emulator.emulated(pytest.MonkeyPatch()):
        o, lse = paged.forward(problem)
    want, want_lse = xla_paged.forward(problem)
    assert not o[2:4].any()
    np.testing.assert_allclose(o.astype(jnp.float32), want.astype(jnp.float32), atol=0.01)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


def method(owner, name, change):
    """Break a method: `change` takes the right one and its arguments."""

    def broken(patch):
        patch.setattr(owner, name, functools.partialmethod(change, getattr(owner, name)))

    return broken


def with_units_reversed(self, right, *args):
    first, rows_of = right(self, *args)
    return first, lambda key: rows_of(key)[::-1]


def with_rows_moved(self, right, *args):
    h, q_pos, k_pos = right(self, *args)
    return h, q_pos + 1, k_pos


def with_queries_of_the_next_head(self, right, *args):
    first, tokens, heads = right(self, *args)
    return first, tokens, emulator.pl.ds(heads.start + 1, heads.size)


def with_rows_of_other_requests(self, right, *args):
    own = self.work_tile.own._replace(queries=self.work_tile.own.queries + 1)
    tile = self.work_tile._replace(own=own)
    right(dataclasses.replace(self, work_tile=tile), *args)


def function(module, name, change):
    right = getattr(module, name)
    return lambda patch: patch.setattr(module, name, functools.partial(change, right))


BROKEN = {
    "pages in another order": method(paged.PagedProducer, "keys_of", with_units_reversed),
    "positions of the next row": method(
        paged.PagedConsumer, "heads_and_positions", with_rows_moved
    ),
    "queries of the next head": method(
        paged.PagedProducer, "queries_of", with_queries_of_the_next_head
    ),
    "rows of other requests": method(paged.PagedConsumer, "epilogue", with_rows_of_other_requests),
    "values behind the last key": method(paged.PagedConsumer, "clean_values", lambda *_: None),
    "a split left out": function(kv_splits, "ascending", lambda right, x: right(x[:, 1:])),
    "sums of other maxima": function(
        paged, "combine", lambda right, p, sinks, acc, m, l: right(p, sinks, acc, 0 * m, l)
    ),
    "no wait for values": broken_kernels.without_waiting_at({"v_full"}),
    "an arrival too few": broken_kernels.with_arrivals("k_full", -1),
}


@pytest.mark.parametrize(
    "broken",
    cases.default([x for x in BROKEN if "split" in x or "page" in x or "head" in x], list(BROKEN)),
)
def test_emulator_finds_a_broken_kernel(broken, monkeypatch):
    schedule = draw(CONFIGS[0], 0)
    monkeypatch.setattr(emulator, "TIMEOUT", 1.0)
    BROKEN[broken](monkeypatch)
    with pytest.raises((AssertionError, emulator.EmulationError)):
        check(schedule, run(schedule))


@pytest.mark.parametrize(
    ("seed", "splits"), cases.default([(0, 1), (1, 3)], [(n, s) for n in range(6) for s in (1, 3)])
)
def test_schedule_visits_what_queries_see(seed, splits, monkeypatch):
    """A head of a query is in one work tile of each split; these visit all that it sees once."""
    on_sms(monkeypatch, 2)  # More work tiles are sorted.
    p = problem_of(draw(CONFIGS[seed % 2], seed))
    tile, block = paged.default_tile(p), 128
    queries = 64 // paged.room_of(p.groups)
    kv = Tiling(p.kv_len, block)
    tiles = RowTiles.from_problem(p, 2 * queries, kv, groups=1)
    _, *rows, last = np.asarray(paged.schedule(p, tiles, kv, 2, splits))
    assert last[0] == -1 and tile.block_kv == block
    counts = np.zeros((p.batch, p.num_kv_heads, p.q_len, kv.count), int)
    lengths, work = [], []
    exists = [row[0] >= 0 for row in rows]
    assert exists == sorted(exists, reverse=True)
    for row in np.stack(rows)[exists]:
        lengths.append(row[4])
        for w in range(2):
            found = paged.RequestRows.unpack([row[i] for i in paged.RequestRows.columns(w)])
            first, own, visited = found.index + w * queries, found.own, found.visited
            offset = int(p.requests.offset[found.b])
            assert (
                own.token == p.requests.starts[found.b] and own.queries == p.requests.new[found.b]
            )
            work.append((found.b, found.h, first, own.split))
            mine = np.arange(first, min(first + queries, own.queries))
            for place in range(visited.start, visited.stop):
                key = found.kv_blocks.block_at(place, None) * block + np.arange(block)
                distance = key[None] - (mine + offset)[:, None]
                sees = (distance <= 0) & ((p.left is None) | (distance >= -(p.left or 0)))
                if visited.full <= place < visited.tail:
                    assert sees.all()
                counts[found.b, found.h // p.groups, mine, key[0] // block] += 1
                seen = key[sees.any(axis=0)]
                assert ((seen >= own.first_key) & (seen < own.stop_key)).all()
    assert len(set(work)) == len(work)
    assert splits > 1 or lengths == sorted(lengths, reverse=True)
    assert counts.max() <= 1
    for r in range(p.batch):
        for n in range(int(p.requests.new[r])):
            at = int(p.requests.offset[r]) + n
            first = 0 if p.left is None else max(0, at - p.left)
            assert counts[r, :, n, first // block : at // block + 1].all()


@pytest.mark.parametrize(
    ("work_tiles", "blocks", "splits"),
    [(8, 256, 16), (8, 12, 3), (512, 32, 1), (136, 32, 2), (1, 256, 64), (600, 1024, 1)],
)
def test_splits_fill_idle_sms(work_tiles, blocks, splits):
    assert paged.num_splits(work_tiles, blocks) == splits


def call(query, pages, scales=None, implementation="mosaic", **options):
    """Lower a call of 3 requests for an H200; return the launches of "mosaic"."""
    others = shaped(3), shaped(3, 9), shaped(4)
    scales = dict.fromkeys(("key_scales", "value_scales"), scales)

    def attend(q, k, v, *rest):
        named = {x: jnp.ones(2) for x in scales if scales[x]}
        return pallas_flash.paged_attention(
            q, k, v, *rest, implementation=implementation, **named, **options
        )

    return launches(lowered(attend, shapes=[query, pages, pages, *others]).as_text())


def test_lowers_also_under_vmap():
    query, pages = (shaped(*x, dtype=jnp.bfloat16) for x in ((9, 14, 72), (5, 48, 2, 72)))
    assert call(query, pages, local_window_size=5, logits_soft_cap=9.0) == 1
    assert call(query, pages, implementation=None) == 1

    def mapped(q, k, lengths, *rest):
        attend = functools.partial(pallas_flash.paged_attention, implementation="mosaic")
        return jax.vmap(lambda q, n: attend(q, k, k, n, *rest))(q, lengths)

    shapes = shaped(2, 9, 14, 72, dtype=jnp.bfloat16), pages, shaped(2, 3), shaped(3, 9), shaped(4)
    assert launches(lowered(mapped, shapes=shapes).as_text()) == 1


def arrays(page_size=16, groups=2, head_dim=64, dtype=jnp.bfloat16, cache=None):
    query = shaped(9, 2 * groups, head_dim, dtype=dtype)
    return query, shaped(5, page_size, 2, head_dim, dtype=cache or dtype)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (dict(page_size=8), 'Got pages of 8 keys, and they serve multiples of 16. Use "triton".'),
        (dict(groups=65), "Got 65 query heads for a key head, and with pages they serve up to 64."),
        (
            dict(head_dim=60),
            "Got head dims of 60 and 60 (of values), and they serve multiples of 8",
        ),
        (dict(head_dim=264), "Got a head dim of 264, and the kernels serve up to 256."),
        (dict(dtype=jnp.float32), "Got float32, and they serve float16 and bfloat16."),
        (dict(cache=jnp.int8), "Got pages of int8, and they serve pages in the query's dtype."),
    ],
)
def test_says_what_it_does_not_serve(sizes, said):
    with pytest.raises(NotImplementedError) as error:
        call(*arrays(**sizes), scales=sizes.get("cache"))
    assert said in str(error.value)
