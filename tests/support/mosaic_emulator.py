"""Runs the kernels of `_mosaic` on a CPU: their Python, with threads for warpgroups and warps.

Asynchronous work of a GPU runs as late as it may, and memory that must not be touched meanwhile
holds NaN, or as an index is outside of all arrays, so that a wait too few shows, and one too many
is a deadlock, which raises:

* a copy to shared memory poisons its destination at once, and delivers when somebody waits for it;
* a product of matrix units reads shared memory when it is waited for, a copy from shared memory
  likewise;
* a barrier counts arrivals, and a wait that lags two phases behind raises: a GPU sees only parity;
* of a copy to several programs each makes a part, which may arrive before the others have asked.

It knows neither memory fences nor how arrays lie in memory and registers.
"""

import concurrent.futures
import contextlib
import dataclasses
import fractions
import importlib
import itertools
import pkgutil
import random
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_flash._problem import dropout

AT_A_TIME = 2  # Programs.
OUTSIDE = 2**20  # No array has so many elements along an axis.
TIMEOUT = 20.0  # Seconds after which a wait counts as a deadlock.


class EmulationError(Exception):
    """A kernel would hang on a GPU, or read what is not there."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """`plgpu.SMEM` and `plgpu.ACC`."""

    shape: tuple
    dtype: object


@dataclasses.dataclass(frozen=True)
class Barrier:
    """`plgpu.Barrier`."""

    num_barriers: int = 1
    num_arrivals: int = 1


@dataclasses.dataclass(frozen=True)
class ClusterBarrier(Barrier):
    """`plgpu.ClusterBarrier`, of all programs of a cluster."""

    collective_axes: tuple = ()


class At:
    """The value of `ref.at`: an index gives another reference."""

    def __init__(self, make):
        self._make = make

    def __getitem__(self, index):
        return self._make(index if isinstance(index, tuple) else (index,))


def number(x):
    return int(np.asarray(x))


def static(index):
    """An index with numbers of Python's."""

    def one(i):
        if isinstance(i, pl.Slice):
            return slice(number(i.start), number(i.start) + i.size)
        return i if isinstance(i, slice) or i is Ellipsis else number(i)

    return tuple(map(one, index))


class Shared:
    """A reference to shared memory, a view of it; `all` are those of the cluster's programs."""

    def __init__(self, array, everyone=()):
        self.array, self.all = array, everyone

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)
    T = property(lambda self: Shared(self.array.T))
    at = property(lambda self: At(self._part))

    def transpose(self, axes):
        return Shared(self.array.transpose(axes))

    def reshape(self, *shape):
        return Shared(self.array.reshape(shape))

    def _part(self, index):
        index = self._inside(index)
        return Shared(self.array[index], [x[index] for x in self.all])

    def _inside(self, index):
        index = static(index)
        for i, n in zip(index, self.shape, strict=False):
            if isinstance(i, int) and not 0 <= i < n:
                raise EmulationError(f"index {i} of {n} in shared memory")
            if isinstance(i, slice) and i.stop is not None and not 0 <= i.start <= i.stop <= n:
                raise EmulationError(f"{i} of {n} in shared memory")
        return index

    def __setitem__(self, index, value):
        index = index if isinstance(index, tuple) else (index,)
        self.array[self._inside(index)] = np.asarray(value)

    def read(self):
        return self.array.copy()


class Device:
    """A reference to device memory: copies of tiles may reach beyond its end."""

    def __init__(self, array, index=()):
        self.array, self.index = array, index

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)
    at = property(lambda self: At(lambda index: Device(self.array, static(index))))

    def _clipped(self):
        """The part of the index that exists, where that is in the tile, and the tile's shape."""
        inside, place, shape = [], [], []
        index = (*self.index, *(slice(0, n) for n in self.array.shape[len(self.index) :]))
        for i, n in zip(index, self.array.shape, strict=True):
            if isinstance(i, int):
                if not 0 <= i < n:
                    raise EmulationError(f"index {i} of {n} in device memory")
                inside.append(i)
                continue
            if i.start < 0:
                raise EmulationError(f"index {i.start} in device memory")
            stop = max(i.start, min(i.stop, n))
            inside.append(slice(i.start, stop))
            place.append(slice(0, stop - i.start))
            shape.append(i.stop - i.start)
        return tuple(inside), tuple(place), tuple(shape)

    def check_whole(self, verb):
        """Raise if the index reaches beyond the end."""
        inside, _, shape = self._clipped()
        found = tuple(i.stop - i.start for i in inside if isinstance(i, slice))
        if found != shape:
            raise EmulationError(f"{verb} {shape} numbers of which {found} exist")

    def read(self):
        inside, place, shape = self._clipped()
        tile = np.zeros(shape, self.array.dtype)
        tile[place] = self.array[inside]
        return tile

    def write(self, tile):
        inside, place, _ = self._clipped()
        self.array[inside] = tile[place]

    def __setitem__(self, index, value):
        inside = Device(self.array, static(index))
        if inside._clipped()[2] != np.shape(value):
            raise EmulationError(f"stores {np.shape(value)} in {inside._clipped()[2]}")
        inside.write(np.asarray(value))


class Accumulator:
    """`plgpu.ACC`."""

    def __init__(self, shape):
        self.value, self.shape = np.zeros(shape, np.float32), shape

    def __getitem__(self, index):
        complete(0)
        return self.value

    def __setitem__(self, index, value):
        self.value = np.asarray(value)


class Phases:
    """One barrier in shared memory."""

    def __init__(self, arrivals):
        self.arrivals = self.pending = fractions.Fraction(arrivals)
        self.phase, self.waits = 0, {}
        self.copies, self.waiting = [], 0
        self.changed = threading.Condition()
        # Barriers of the cluster's CTAs at this place; with `of_all`, arrivals are at them all.
        self.all, self.of_all = [self], False
        self.exists = True  # Until its program ends.

    def arrive(self, part=1):
        with self.changed:
            if not self.exists:
                raise EmulationError("reports to a program that has ended")
            self.pending -= part
            if not self.pending:
                self.pending, self.phase = self.arrivals, self.phase + 1
                self.changed.notify_all()

    def after(self, copy, part=1):
        """Copies, and arrives, when somebody waits."""
        with self.changed:
            self.copies.append((copy, part))
            if self.waiting:
                self._deliver()

    def _deliver(self):
        while self.copies:
            copy, part = self.copies.pop(0)
            copy()
            self.arrive(part)

    def wait(self, who):
        with self.changed:
            number = self.waits.get(who, 0)
            self.waits[who] = number + 1
            self._deliver()
            self.waiting += 1
            arrived = self.changed.wait_for(lambda: self.phase > number, TIMEOUT)
            self.waiting -= 1
            if not arrived:
                raise EmulationError(f"deadlock: {who} waits for phase {number}")
            if self.phase > number + 1:
                raise EmulationError(f"{who} waits for phase {number}, and it is {self.phase}")


class Barriers:
    def __init__(self, spec: Barrier, members: int):
        self.of_all = isinstance(spec, ClusterBarrier)
        arrivals = spec.num_arrivals * (members if self.of_all else 1)
        self.all = [Phases(arrivals) for _ in range(spec.num_barriers)]
        self.at = At(lambda index: self.all[number(index[0])])


here = threading.local()
device_memory = threading.Lock()
counted = threading.Condition()


def one_barrier(barrier):
    return barrier.all[0] if isinstance(barrier, Barriers) else barrier


def arrive(barrier):
    barrier = one_barrier(barrier)
    for x in barrier.all if barrier.of_all else [barrier]:
        x.arrive()


def complete(running: int):
    """Computes all products of this warpgroup but the last ones."""
    while len(here.products) > running:
        here.products.pop(0)()


def float32_sums(a, b, acc):
    """Return acc + a @ b with sums by NumPy, whose order may depend on the shapes."""
    return acc + a.astype(np.float32) @ b.astype(np.float32)


def matrix_units(a, b, acc):
    """Return acc + a @ b with the bits of Hopper's `wgmma` and `mma`, for operands of 16 bits.

    16 products and the accumulator are aligned to the largest exponent, truncated to 25 fractional
    bits, summed exactly and truncated to float32. The exponent of a product is the sum of its
    factors' exponents. The model is MMA-Sim's (arXiv 2511.10909), but that zeros have no exponent;
    docs/tried.md has the comparison with a card. It takes some 10 ms for 64 x 128 x 128.
    """
    if {a.dtype.itemsize, b.dtype.itemsize} != {2}:
        raise EmulationError(f"a product of {a.dtype} and {b.dtype}")
    acc = np.broadcast_to(acc, (len(a), b.shape[1]))
    for n in range(0, a.shape[1], 16):
        x, y = a[:, n : n + 16, None], b[None, n : n + 16]
        products, c = x.astype(np.float64) * y.astype(np.float64), acc.astype(np.float64)
        largest = np.maximum((power_of_two(x) * power_of_two(y)).max(axis=1), power_of_two(acc))
        unit = np.where(largest > 0, largest, 1) * 2.0**-25
        total = unit * (np.trunc(products / unit[:, None]).sum(axis=1) + np.trunc(c / unit))
        acc = total.astype(np.float32)
        rounded_up = (np.abs(acc) > np.abs(total)) & (np.abs(total) < 2.0**128)
        acc = np.where(rounded_up, np.nextafter(acc, np.float32(0)), acc)
    return acc


def power_of_two(x):
    """Return 2 to the exponent of each number, that of denormals too; 0 for zeros."""
    power = np.exp2(np.frexp(x.astype(np.float64))[1] - 1.0)
    return np.where(x == 0, 0, np.maximum(power, float(jnp.finfo(x.dtype).smallest_normal)))


add_product = float32_sums  # Unless `emulated` is asked for others.


def multiply(a, b, acc=0):
    """Return acc + a @ b."""
    a, b = (np.asarray(x.array if isinstance(x, Shared) else x) for x in (a, b))
    # Rows past the end may see what holds NaN.
    with np.errstate(invalid="ignore", over="ignore"):
        return add_product(a, b, np.asarray(acc, np.float32))


class Running:
    """The result of a product that may not have been computed yet."""

    def __init__(self, shape):
        self.shape, self.value = shape, None


def done(x):
    """The result of a product that was waited for."""
    if x.value is None:
        raise EmulationError("uses a product that may still be running")
    return x.value


def layout_cast(x, layout):
    return done(x) if isinstance(x, Running) else x


class Program:
    """The state that the threads of one program share."""

    def __init__(self, cluster=None):
        self.lock = threading.Lock()
        self.meetings = {}
        self.failed = []
        self.cluster = cluster

    def run(self, functions):
        threads = [threading.Thread(target=self._guarded, args=(f,)) for f in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _guarded(self, function):
        try:
            function()
        except Exception as error:  # Any error of a thread ends all threads.
            self.failed.append(error)


# ------------------------------------------------------------------------------------------------
# The operations
# ------------------------------------------------------------------------------------------------


def check_end(ref):
    """Copies of tiles end where the array does; those of numbers go on in what is behind it."""
    if len(ref._clipped()[2]) == 1:
        ref.check_whole("copies")


def copy_gmem_to_smem(source, destination, barrier, collective_axes=None):
    if source._clipped()[2] != destination.shape:
        raise EmulationError(f"copies {source._clipped()[2]} to {destination.shape}")
    check_end(source)
    barrier, rows = one_barrier(barrier), slice(None)
    places, barriers, member = [destination.array], [barrier], 0
    if collective_axes is not None:
        places, barriers, member = destination.all, barrier.all, here.axes[collective_axes]
        share = len(places[0]) // len(places)
        rows = slice(member * share, (member + 1) * share)
    for place, of_place in zip(places, barriers, strict=True):
        place[rows] = nothing(destination.dtype)

        def copy(place=place):
            place[rows] = source.read()[rows]

        of_place.after(copy, fractions.Fraction(1, len(places)))


def copy_smem_to_gmem(source, destination):
    check_end(destination)
    here.stores.append(lambda: destination.write(source.read()))


def wait_smem_to_gmem(n, wait_read_only=False):
    while len(here.stores) > n:
        here.stores.pop(0)()


def load(ref, layout=None, optimized=True):
    if isinstance(ref, Device):
        ref.check_whole("threads read")  # A copy of a tile ends where the array does; they go on.
    value = ref.read()
    # Numbers without a sign wrap around in JAX, and NumPy warns of it.
    return jnp.asarray(value)[()] if value.ndim or value.dtype.kind == "u" else value[()]


def wgmma(acc, a, b):
    def product():
        acc.value = multiply(a, b, acc.value)

    here.products.append(product)


def wgmma_accumulator_load(acc, wait_n=0):
    complete(wait_n)
    return acc.value


def warp_map(function):
    program, context = here.program, vars(here).copy()

    def warp(i):
        vars(here).update(context, warp=i, stores=[], products=[])
        function(i)

    program.run([lambda i=i: warp(i) for i in range(4)])


plgpu = types.SimpleNamespace(
    SMEM=lambda shape, dtype, transforms=(): Memory(shape, dtype),
    ACC=Memory,
    RefUnion=lambda *groups: groups,  # Each in memory of its own.
    Barrier=Barrier,
    ClusterBarrier=ClusterBarrier,
    set_max_registers=lambda *_, **__: None,
    layout_cast=layout_cast,
    load=load,
    barrier_wait=lambda barrier: one_barrier(barrier).wait((here.warpgroup, here.warp)),
    barrier_arrive=arrive,
    commit_smem=lambda: None,
    copy_gmem_to_smem=copy_gmem_to_smem,
    copy_smem_to_gmem=copy_smem_to_gmem,
    wait_smem_to_gmem=wait_smem_to_gmem,
    wgmma=wgmma,
    wgmma_wait=complete,
    wgmma_accumulator_load=wgmma_accumulator_load,
    warp_map=warp_map,
    Layout=types.SimpleNamespace(WGMMA=None),
)


def when(condition):
    return lambda function: function() if bool(condition) else None


def loop(start, stop):
    def run(step):
        for i in range(number(start), number(stop)):
            step(jnp.int32(i))

    return run


def while_loop(condition, step, carry):
    while bool(condition(carry)):
        carry = step(carry)
    return carry


def fori_loop(start, stop, step, carry):
    for i in range(number(start), number(stop)):
        carry = step(jnp.int32(i), carry)
    return carry


def select(condition, yes, no):
    return yes if bool(condition) else no


def switch(index, branches, *operands):
    return branches[number(index)](*operands)


fake_pl = types.SimpleNamespace(
    ds=pl.ds,
    when=when,
    loop=loop,
    run_scoped=lambda function, *specs, **named: function(
        *(Accumulator(x.shape) for x in specs),
        **{name: Accumulator(x.shape) for name, x in named.items()},
    ),
)
fake_lax = types.SimpleNamespace(
    **{
        name: getattr(jax.lax, name)
        for name in ("rem", "div", "broadcast_in_dim", "broadcasted_iota", "optimization_barrier")
    },
    axis_index=lambda name: jnp.int32(here.axes[name]),
    fori_loop=fori_loop,
    while_loop=while_loop,
    select=select,
    switch=switch,
)


def unblocked(ref):
    """[rows, columns] for shared memory in blocks or strips of columns."""
    return np.concatenate(list(ref.array), axis=1)


def check_widths(*widths):
    """Operands of a product lie alike."""
    if len(set(widths)) > 1 or widths[0] not in (16, 32, 64):
        raise EmulationError(f"a product of tiles whose widths are {widths}")


def product_t(a_ref, b_ref, inner=None, acc=None):
    check_widths(a_ref.shape[-1], b_ref.shape[-1])
    result = Running((a_ref.shape[1], b_ref.shape[1]))

    def product():
        taken = slice(-(-inner // 16) * 16 if inner else None)
        before = () if acc is None else (acc.value,)
        result.value = multiply(unblocked(a_ref)[:, taken], unblocked(b_ref)[:, taken].T, *before)

    here.products.append(product)
    return result


def product_of_transposed(a_ref, b_ref):
    result = Running((a_ref.shape[1], b_ref.shape[0] * b_ref.shape[2]))

    def product():
        result.value = multiply(a_ref.T, unblocked(b_ref))

    here.products.append(product)
    return result


def accumulate(acc, a, b_ref):
    result = Running(acc.shape)

    def product():
        result.value = multiply(a, unblocked(b_ref)[:, : acc.shape[1]], acc)

    here.products.append(product)
    return result


def wait(products, x, a=None):
    complete(products)
    return done(x)


def meet(barrier, threads):
    with here.program.lock:
        meeting = here.program.meetings.setdefault(barrier, threading.Barrier(threads // 128))
    meeting.wait(TIMEOUT)


def fragment_places(group):
    """Where the numbers of 8 columns lie, and their rows and columns."""
    thread = np.arange(128)
    warp, row, pair = thread // 32, thread % 32 // 4, thread % 4
    for half, two in itertools.product(range(2), range(2)):
        # Four numbers of a thread side by side.
        place = 4 * thread + 2 * half + two
        yield place, 16 * warp + 8 * half + row, 8 * group + 2 * pair + two


def fragments(x):
    """[groups, 4, 128]."""
    x = np.asarray(x)
    flat = np.zeros((x.shape[1] // 8, 512), np.float32)
    for group, numbers in enumerate(flat):
        for place, rows, columns in fragment_places(group):
            numbers[place] = x[rows, columns]
    return flat.reshape(-1, 4, 128)


def load_fragments(ref, count):
    x = np.zeros((64, 8 * count), np.float32)
    for group, numbers in enumerate(groups_at(ref, range(count)).reshape(-1, 512)):
        for place, rows, columns in fragment_places(group):
            x[rows, columns] = numbers[place]
    return x


def groups_at(ref, numbers):
    """Groups counted from where a reference is."""
    [first] = ref.index
    return ref.array[first + numbers.start : first + numbers.stop]


def add_fragments(x, ref, taken=slice(None)):
    x = fragments(x)
    with device_memory:
        place = groups_at(ref, range(len(x))[taken])
        place += x[taken]


def count_up(ref):
    with device_memory:
        before = ref.array[ref.index].copy()
        ref.array[ref.index] += 1
    return before


def await_count(ref, count):
    with counted:
        if not counted.wait_for(lambda: ref.array[ref.index] >= number(count), TIMEOUT):
            raise EmulationError(f"deadlock: waits for a count of {number(count)}")


def raise_count(ref):
    with counted:
        ref.array[ref.index] += 1
        counted.notify_all()


def store_fragments(x, ref):
    x = fragments(x)
    groups_at(ref, range(len(x)))[...] = x


def message(barriers, n, rank=None):
    """The barrier of a buffer, of this CTA or of one of the cluster.

    Each of two warpgroups sends, and one thread expects it.
    """
    array = barriers.array if rank is None else barriers.all[rank]
    place = array.__array_interface__["data"][0] + 8 * number(n)
    with here.program.cluster.lock:
        return here.program.cluster.meetings.setdefault(place, Phases(3))


def start_messages(barriers, count, size):
    for n in range(count):
        message(barriers, n).arrive()


def wait_for_message(barriers, n, parity):
    phases, who = message(barriers, n), (here.warpgroup, here.warp)
    if phases.waits.get(who, 0) % 2 != number(parity):
        raise EmulationError(f"waits for parity {parity} of message {phases.waits.get(who, 0)}")
    phases.wait(who)


def send(value, ref, barriers, n, rank):
    """Sends what `value` returns, as 16 bits, when somebody waits for it."""
    place = ref.all[rank]
    place[...] = np.nan

    def arrive():
        found = value()
        place.view(found.dtype)[...] = found

    message(barriers, n, rank).after(arrive)


def send_words(x, ref, barriers, n, rank, width):
    send(lambda: np.asarray(x), ref, barriers, n, rank)


def send_tile(source, ref, barriers, n, rank, width):
    send(source.read, ref, barriers, n, rank)


def store_rows(x, ref, first, stop, column, stop_column, *, room):
    rows, x = ref.array[ref.index], np.asarray(x)
    place = number(first) + np.arange(64) // room, number(column) + np.arange(64) % room
    exists = (place[0] < number(stop)) & (place[1] < number(stop_column))
    place = tuple(i[exists] for i in place)
    if any(((i < 0) | (i >= n)).any() for i, n in zip(place, rows.shape, strict=False)):
        raise EmulationError(f"stores at {place} of {rows.shape}")
    rows[place] = x[exists]


def store_zeros(ref, first, head, rows):
    ref.array[ref.index][number(first) : number(first) + rows, number(head)] = 0


def put_strips(x, ref):
    width = ref.shape[-1]
    for i, place in enumerate(ref.array):
        place[...] = np.asarray(x)[:, i * width : (i + 1) * width]


def zero_rows(ref, first, stop=None):
    stop = len(ref.array) if stop is None else max(0, number(stop))
    ref.array[max(0, number(first)) : stop] = 0


def columns(x, first):
    x = np.asarray(x)[:, first : first + 64]
    return np.pad(x, ((0, 0), (0, 64 - x.shape[1])))


def gather(ref, at, pairs):
    at = np.asarray(at)
    if pairs:
        if (at[:, ::2] % 2).any():
            raise EmulationError("reads pairs at an odd place")
        at = np.repeat(at[:, ::2], 2, axis=1) + np.arange(at.shape[1]) % 2
    if at.min() < 0 or at.max() >= len(ref.array):
        raise EmulationError(f"index {at.min()} to {at.max()} of {len(ref.array)}")
    value = ref.array[at]
    wide = {"f": np.float32, "V": np.float32, "i": np.int32, "u": np.uint32}[value.dtype.kind]
    return jnp.asarray(value.astype(wide))


def bits(ref, at, columns, apart):
    at, columns = np.asarray(at), np.asarray(columns)
    n = at.shape[1]
    first = columns[:, :1]
    if (first % n).any() or (columns != first + np.arange(n)).any():
        raise EmulationError("reads bits of other columns than a tile's")
    bit = first % 32 + np.arange(n)
    place = at[:, :1] + bit // 32 * apart
    if place.min() < 0 or place.max() >= len(ref.array):
        raise EmulationError(f"words {place.min()} to {place.max()} of {len(ref.array)}")
    return jnp.asarray((ref.array[place] >> (bit % 32).astype(np.uint32) & 1) != 0)


def columns_to_float(x, dtype, per_column):
    if (np.diff(np.asarray(x), axis=1) != per_column).any():
        raise EmulationError(f"columns do not change by {per_column}")
    return x.astype(dtype)


def bits_of_tile(ref, first):
    words = ref.array[:, number(first) : number(first) + 64].T
    if words.shape[0] != 64:
        raise EmulationError(f"bits of {words.shape[0]} rows")
    bit = np.arange(32 * words.shape[1])
    return jnp.asarray((words[:, bit // 32] >> (bit % 32).astype(np.uint32) & 1) != 0)


def halves_of_neighbours(words):
    """Each thread has one of each word for two rows and two columns of each 8 columns of 16."""
    words = np.stack([np.asarray(x) for x in words])
    rows, columns = words.shape[1:]
    blocks = words.reshape(4, rows // 16, 2, 8, columns // 16, 2, 4, 2)
    if (blocks != blocks[:, :, :1, :, :, :1, :, :1]).any():
        raise EmulationError("words that differ in a thread")
    row, column = np.ogrid[:rows, :columns]
    word = (column & 8) // 4 + (row & 8) // 8
    # The thread that drew for this column has the row of its parity.
    drawn = words[word, (row | 1) - 1 + (column & 1), column]
    return jnp.asarray(drawn << (16 - 16 * (row & 1)).astype(np.uint32))


def load_transposed(ref):
    if ref.shape[1] != 64:
        raise EmulationError(f"rows of {ref.shape[1]} numbers")
    return jnp.asarray(ref.read()).T


fake_ptx = dict(
    positions=lambda shape, axis, start: start + jax.lax.broadcasted_iota(jnp.int32, shape, axis),
    gather=gather,
    bits=bits,
    bits_of_tile=bits_of_tile,
    load_transposed=load_transposed,
    load_strips=lambda ref: jnp.asarray(unblocked(ref)),
    columns=columns,
    store_rows=store_rows,
    store_zeros=store_zeros,
    put_strips=put_strips,
    zero_rows=zero_rows,
    where=jnp.where,
    difference=lambda x, y: jnp.asarray(np.asarray(x) - np.asarray(y)),
    logistic=lambda x, apart: 1 / (1 + jnp.exp2(jnp.minimum(x, 30))),
    columns_to_float=columns_to_float,
    tanh=jnp.tanh,
    multiply_wide=dropout.multiply_wide,
    halves_of_neighbours=halves_of_neighbours,
    joined=lambda parts: jnp.concatenate(parts, axis=1),
    product_t=product_t,
    product_of_transposed=product_of_transposed,
    accumulate=accumulate,
    wait=wait,
    uniform_zero=lambda x: 0,
    rescale=lambda acc, alpha: np.asarray(acc) * np.asarray(alpha)[:, None],
    add_fragments=add_fragments,
    store_fragments=store_fragments,
    load_fragments=load_fragments,
    count_up=count_up,
    await_count=await_count,
    raise_count=raise_count,
    anew=lambda x: x,
    meet=meet,
    fence=lambda: None,
    start_messages=start_messages,
    expect_message=lambda barriers, n, size: message(barriers, n).arrive(),
    wait_for_message=wait_for_message,
    send_words=send_words,
    send_tile=send_tile,
    take_words=lambda ref, dtype, width: jnp.asarray(ref.read().view(dtype)),
)


def launch(
    kernel, operands, *, outputs, memory, grid, warpgroups, static, sums=(), cluster_size=1, **_
):
    """As `common.launch`: CTAs, or clusters of them, in any order, `AT_A_TIME`.

    CTAs that take turns start in the order of the grid.
    """
    sums = jax.tree.map(np.array, tuple(sums))
    outputs = [np.full(shape, np.nan, jnp.dtype(dtype)) for shape, dtype in outputs]
    results = [*jax.tree.leaves(sums), *outputs]
    arrays = *jax.tree.map(np.asarray, tuple(operands)), *sums, *outputs
    refs = jax.tree.map(Device, arrays)
    places = list(itertools.product(*map(range, grid.values())))
    if not getattr(static, "in_turn", False):
        random.Random(0).shuffle(places)

    def run_program(place, cluster, rank, memory):
        program = Program(cluster)
        axes = dict(zip(grid, place, strict=True), rank=rank)

        def thread(warpgroup):
            vars(here).update(
                program=program,
                axes=axes | {"warpgroup": warpgroup},
                warpgroup=warpgroup,
                warp=None,
                stores=[],
                products=[],
            )
            kernel(*refs, static=static, **memory)
            if here.stores or here.products:
                raise EmulationError("ends while something is running")

        program.run([lambda w=w: thread(w) for w in range(warpgroups)])
        for x in jax.tree.leaves(memory):
            for barrier in x.all if isinstance(x, Barriers) else []:
                barrier.exists = False
        if program.failed:
            raise program.failed[0]

    def run(place):
        memories = [
            jax.tree.map(lambda x: allocate(x, cluster_size), memory) for _ in range(cluster_size)
        ]
        connect(memories)
        cluster = Program()
        cluster.run([lambda x=x: run_program(place, cluster, *x) for x in enumerate(memories)])
        if cluster.failed:
            raise cluster.failed[0]

    with concurrent.futures.ThreadPoolExecutor(AT_A_TIME) as cores:
        list(cores.map(run, places))
    return [jnp.asarray(x) for x in results]


def nothing(dtype):
    """Return the content of memory of a dtype that must not be read."""
    return OUTSIDE if jnp.issubdtype(dtype, jnp.integer) else np.nan


def connect(memories):
    """Makes known to each program's memory that of all programs of its cluster."""
    for of_all in zip(*map(jax.tree.leaves, memories), strict=True):
        for x in of_all:
            if isinstance(x, Shared):
                x.all = [y.array for y in of_all]
            elif isinstance(x, Barriers):
                for i, barrier in enumerate(x.all):
                    barrier.all, barrier.of_all = [y.all[i] for y in of_all], x.of_all


def allocate(spec, members):
    if isinstance(spec, Barrier):
        return Barriers(spec, members)
    return Shared(np.full(spec.shape, nothing(spec.dtype), jnp.dtype(spec.dtype)))


def batch_instances(function, batch):
    """As `common.batch_instances`, without `jax.vmap`."""
    return function


@contextlib.contextmanager
def emulated(monkeypatch, add_product=float32_sums):
    """Within it, the functions of `_mosaic` run here; not under `jit`.

    `add_product` is `float32_sums`, or `matrix_units` for the bits of a card's products.
    """
    package = importlib.import_module("pallas_flash._backends.mosaic")
    modules = {
        module.name: importlib.import_module(f"{package.__name__}.{module.name}")
        for module in pkgutil.iter_modules(package.__path__)
    }
    with monkeypatch.context() as patch:
        for module in modules.values():
            for name, fake in dict(plgpu=plgpu, pl=fake_pl, lax=fake_lax).items():
                if hasattr(module, name):
                    patch.setattr(module, name, fake)
        for name, fake in fake_ptx.items():
            patch.setattr(modules["ptx"], name, fake)
        patch.setattr(modules["common"], "launch", launch)
        patch.setattr(modules["common"], "batch_instances", batch_instances)
        patch.setitem(globals(), "add_product", add_product)
        yield
