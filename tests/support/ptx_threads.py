"""PTX of one warpgroup without branches, executed in NumPy: each register has 128 numbers.

Emulated kernels do not show which thread has what, or which one gives it to which.
"""

import re

import jax.numpy as jnp
import numpy as np

THREADS = np.arange(128, dtype=np.uint32)
# Labels and declarations, and what says in which order threads go on.
IGNORED = "$", ".", "elect", "bar", "fence"


def permuted(a, b, selector):
    """Bytes of two words, one for each of four digits of the selector."""
    both, result = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), np.zeros_like(a)
    for i in range(4):
        digit = selector >> np.uint32(4 * i) & np.uint32(15)
        assert (digit < 8).all(), "signs of bytes"
        byte = both >> np.uint64(8) * digit.astype(np.uint64) & np.uint64(255)
        result |= byte.astype(np.uint32) << np.uint32(8 * i)
    return result


# By the start of an instruction; operands are integers of 32 bits, or of 64 in addresses.
INSTRUCTIONS = {
    "mov": lambda a: a,
    "cvta": lambda a: a,
    "not": np.bitwise_not,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": np.left_shift,
    "shr.u": np.right_shift,
    "add": np.add,
    "mul.wide": lambda a, b: a.astype(np.uint64) * b,  # No number is negative.
    "cvt.s64": lambda a: a.astype(np.uint64),
    "cvt.rn.f32.u": lambda a: a.astype(np.float32).view(np.uint32),
    "cvt.rn.bf16.u": lambda a: a.astype(jnp.bfloat16).view(np.uint16).astype(np.uint32),
    "max.NaN": lambda a, b: np.maximum(a.view(np.float32), b.view(np.float32)).view(np.uint32),
    "bfe.u32": lambda a, first, count: a >> first & (1 << count) - 1,
    "setp.eq": np.equal,
    "setp.ne": np.not_equal,
    "setp.gt.u": np.greater,
    "setp.lt": np.less,
    "selp": lambda a, b, condition: np.where(condition, a, b),
    "prmt": permuted,
    "shfl.sync.bfly": lambda a, apart, *_: a[THREADS ^ apart],
    "shfl.sync.idx": lambda a, lane, *_: a[THREADS & ~np.uint32(31) | lane],
}


def execute(text: str, arguments: list):
    """Run a kernel; `arguments` are arrays of 32-bit numbers, which it reads and fills."""
    body = re.sub(r"//.*", "", text[text.index("$L__func_begin") : text.index("ret;")])
    registers = {"%tid.x": THREADS}
    # An address counts bytes from the first argument, each of which has so many.
    size, memory = 2**32, [x.reshape(-1).view(np.uint32) for x in arguments]

    def value(name: str):
        if name in registers:
            return registers[name]
        number = int(name[2:], 16) if name.startswith("0f") else int(name) % 2**32
        return np.full(len(THREADS), number, np.uint32)

    def place(name: str, i: int = 0):
        register, _, offset = name.partition("+")
        first = registers[register] + np.uint64(offset or 0)
        return memory[int(first[0]) // size], first % np.uint64(size) // np.uint64(4) + np.uint64(i)

    for statement in re.split(r"[;\n]", body):
        condition, statement = re.fullmatch(r"\s*(?:@(\S+))?(.*)", statement).groups()
        stores = registers[condition] if condition else np.ones(len(THREADS), bool)
        instruction, *rest = statement.strip(" \t{}").split(None, 1)[:2] or [""]
        if not rest or instruction.startswith(IGNORED):
            continue
        first, *names = re.findall(r"[^\s,{}\[\]]+", *rest)
        if instruction.startswith("ld.param"):
            number = int(names[0].rpartition("_")[2])
            registers[first] = np.full(len(THREADS), number * size, np.uint64)
        elif instruction.startswith("ld.global"):
            for i, name in enumerate([first, *names[:-1]]):
                array, at = place(names[-1], i)
                registers[name] = array[at]
        elif instruction.startswith("st.global"):
            for i, name in enumerate(names):
                array, at = place(first, i)
                array[at[stores]] = value(name)[stores]
        elif instruction == "mov.b32" and names[1:]:
            low, high = map(value, names)
            registers[first] = low | high << np.uint32(16)
        elif instruction == "mov.b64":
            for i, half in enumerate((first, names[0])):
                registers[half] = (registers[names[1]] >> np.uint64(32 * i)).astype(np.uint32)
        else:
            [function] = (f for x, f in INSTRUCTIONS.items() if instruction.startswith(x))
            registers[first] = function(*map(value, names))
