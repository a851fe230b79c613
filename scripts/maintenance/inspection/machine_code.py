"""Reads a kernel's machine code (SASS): its loops over tiles, and the cost of one tile.

`unset` finds registers that ptxas, which makes machine code of PTX, has forgotten to set.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re

_MATRIX = re.compile(r"[A-Z]*GMMA|[A-Z]MMA|UTC[A-Z]*MMA")

# Instructions in the order of a loop; `(n)` is the number of groups that a wait leaves in flight.
_SHOWN = (
    (_MATRIX, ""),
    (re.compile(r"MUFU\.EX2"), "exp2"),
    (re.compile(r"LDGSTS|UTMALDG|UBLKCP"), "copy"),
    (re.compile(r"WARPGROUP\.DEPBAR"), "wait(n)"),
    (re.compile(r"SYNCS.*TRYWAIT"), "wait"),
    (re.compile(r"DEPBAR\.LE"), "copied(n)"),
    (re.compile(r"BAR\.SYNC"), "barrier"),
    (re.compile(r"STSM|STS\b"), "stage"),
    (re.compile(r"LDG\b"), "load"),
    (re.compile(r"STL|LDL"), "SPILL"),
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of disassembly."""

    predicate: str
    opcode: str
    operands: str

    @property
    def is_matrix(self) -> bool:
        """Whether it multiplies matrices."""
        return bool(_MATRIX.match(self.opcode))

    @property
    def is_spill(self) -> bool:
        """Whether it moves a register to or from local memory."""
        return self.opcode.startswith(("STL", "LDL"))

    @property
    def kind(self) -> str:
        """The opcode without modifiers that do not change its purpose."""
        name, *modifiers = self.opcode.split(".")
        return f"{name}.{modifiers[0]}" if name in ("MUFU", "WARPGROUP") else name

    @property
    def product(self) -> tuple[int, int] | None:
        """Rows and columns of the result of a matrix instruction of Hopper."""
        match = re.match(r"HGMMA\.(\d+)x(\d+)x", self.opcode)
        return (int(match[1]), int(match[2])) if match else None

    @property
    def flops(self) -> float:
        """Matrix operations for one warp; NaN if the opcode does not have them."""
        if match := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", self.opcode):
            return 2 * math.prod(map(int, match.groups())) / 4  # One for each four warps.
        if match := re.match(r"HMMA\.16(8)(\d+)\.", self.opcode):
            return 2 * 16 * 8 * int(match[2])
        return math.nan if self.is_matrix else 0

    @property
    def uniform_written(self) -> list[int]:
        """The uniform registers that it writes; the threads of a warp share these."""
        # Some name a predicate before the result; those that write only predicates name two.
        match = re.match(r"(?:U?P[T\d],)?UR(\d+)", self.operands)
        if not match:
            return []
        wide = re.search(r"\.64$|\.WIDE|^CS2UR$", self.opcode)
        return [int(match[1]) + n for n in range(2 if wide else 1)]

    @property
    def uniform_read(self) -> set[int]:
        """The uniform registers that it reads."""
        registers = [int(n) for n in re.findall(r"\bUR(\d+)", self.operands)]
        registers = registers[len(self.uniform_written[:1]) :]
        if match := re.match(r"UTMA(LDG|STG|REDG)\.(\d)D", self.opcode):
            # The address in shared memory, a barrier to report to if that is the destination, an
            # index for each axis, and the address of the array's descriptor.
            first, described = registers[:2]
            indices = range(first, first + int(match[2]) + (2 if match[1] == "LDG" else 1))
            return {*registers, *indices, described + 1}
        if self.opcode.startswith("HGMMA"):
            # Descriptors of the operands in shared memory; the first operand may have one.
            in_registers = re.match(r"R\d+,R\d+,", self.operands)
            return set(range(registers[0] + (2 if in_registers else 0), registers[0] + 4))
        if re.match(r"U.*\.64$", self.opcode) or "desc[" in self.operands:
            return {*registers, *(n + 1 for n in registers)}
        return set(registers)

    @property
    def jump(self) -> int | None:
        """The number of a branch's target; every instruction has 16 bytes."""
        match = re.search(r"0x([0-9a-f]+)$", self.operands)
        return int(match[1], 16) // 16 if match and self.opcode.startswith("BRA") else None

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction can come after this one."""
        if self.predicate or not self.opcode.startswith(("BRA", "BRX", "JMX", "EXIT", "RET")):
            return True
        # A branch with a condition among its operands, or one that only diverged threads take.
        return self.opcode.startswith("BRA") and ("," in self.operands or ".DIV" in self.opcode)


@dataclasses.dataclass(frozen=True)
class Loop:
    """One innermost loop with matrix instructions.

    Its path is the shortest way through it among those with the most matrix instructions. A full
    block takes this path: the mask of a partial block lies under a branch, the products do not.

    Attributes:
        instructions: Instructions that one warp issues on the path.
        body: All instructions of the loop.
        spills: Local memory instructions (LDL, STL) among these.
        opcodes: How often each opcode occurs on the path, most frequent first.
        order: The matrix, exp2, copy and wait instructions on the path, in order.
        exp2_hidden: The part of the exponentials that are issued while an asynchronous Hopper
            matrix instruction is in flight; None without such instructions.
        flops: Matrix operations of one warp on the path; NaN if the opcodes do not have them.
        first_product: Rows and columns of the first matrix instruction of Hopper on the path.
    """

    instructions: int
    body: int
    spills: int
    opcodes: dict[str, int]
    order: str
    exp2_hidden: float | None
    flops: float
    first_product: tuple[int, int] | None = None

    @property
    def matrix(self) -> dict[str, int]:
        """The matrix instructions by kind: HGMMA (Hopper), HMMA (Ampere), UTCHMMA (tcgen05)."""
        return {kind: n for kind, n in self.opcodes.items() if _MATRIX.match(kind)}


def loops(code: list[Instruction]) -> list[Loop]:
    """Return the innermost loops with matrix instructions, the cheapest first."""
    blocks, successors = _blocks(code)
    costs = [(sum(i.is_matrix for i in block), -len(block)) for block in blocks]
    natural = _natural_loops(successors)
    natural = [(head, body) for head, body in natural if any(costs[n][0] for n in body)]
    inner = []
    for head, body in natural:
        if any(other < body for _, other in natural):
            continue
        path = [i for n in _path(head, body, successors, costs) for i in blocks[n]]
        inner.append(
            Loop(
                instructions=len(path),
                body=sum(len(blocks[n]) for n in body),
                spills=sum(i.is_spill for n in body for i in blocks[n]),
                opcodes=dict(collections.Counter(i.kind for i in path).most_common()),
                order=_order(path),
                exp2_hidden=_exp2_hidden(path),
                flops=sum(i.flops for i in path),
                first_product=next((i.product for i in path if i.product), None),
            )
        )
    return sorted(inner, key=lambda loop: loop.instructions)


def between_products(code: list[Instruction]) -> list[dict[str, int]]:
    """Return how often each opcode occurs between matrix instructions, as they lie in memory.

    So each copy of the code of a softmax has an entry, in a loop or not, with what lies around it.
    """
    runs = itertools.groupby(code, lambda i: i.is_matrix)
    return [dict(collections.Counter(i.kind for i in run)) for matrix, run in runs if not matrix]


def unset(code: list[Instruction]) -> list[str]:
    """Return copies, products and waits that read a uniform register that some path leaves unset.

    Arithmetic may read such a register, for instructions that have a predicate; then its result is
    unset, too. A register that is set under a predicate counts as set for readers with a predicate.
    """
    blocks, successors = _blocks(code)
    # Registers that are set on all paths to a block; and registers that are if predicates are true.
    before: dict[int, tuple[set[int], set[int]]] = {0: (set(), set())}
    faults: dict[int, list[str]] = {}
    todo = [0]
    while todo:
        n = todo.pop()
        always, perhaps = (set(x) for x in before[n])
        faults[n] = []
        for i in blocks[n]:
            missing = i.uniform_read - (perhaps if i.predicate else always)
            if i.opcode.startswith(("UTMA", "UBLKCP", "HGMMA", "SYNCS")):
                faults[n] += [f"{i.opcode} {i.operands} reads UR{x}" for x in sorted(missing)]
            perhaps.update(i.uniform_written)
            if not i.predicate:
                always.difference_update(i.uniform_written)
                always.update([] if missing else i.uniform_written)
        for other in successors[n]:
            old = before.get(other, (always, perhaps))
            joined = old[0] & always, old[1] & perhaps
            if other not in before or joined != old:
                before[other] = joined
                todo.append(other)
    return [fault for n in sorted(faults) for fault in faults[n]]


def _blocks(code: list[Instruction]) -> tuple[list[list[Instruction]], list[list[int]]]:
    """Basic blocks, and the blocks that can follow each."""
    starts = {0, len(code)}
    for n, instruction in enumerate(code):
        if instruction.jump is not None:
            starts.add(instruction.jump)
        if instruction.jump is not None or not instruction.falls_through:
            starts.add(n + 1)
    edges = list(itertools.pairwise(sorted(starts)))
    at = {start: n for n, (start, _) in enumerate(edges)}
    successors = []
    for _, stop in edges:
        last = code[stop - 1]
        following = {at[last.jump]} if last.jump is not None else set()
        if last.falls_through and stop in at:
            following.add(at[stop])
        successors.append(sorted(following))
    return [code[start:stop] for start, stop in edges], successors


def _natural_loops(successors: list[list[int]]) -> list[tuple[int, set[int]]]:
    """Return the head and the blocks of each loop: blocks that reach a jump back to the head.

    A jump to a lower address is no loop by itself: slow paths out of line return by one.
    """
    predecessors: dict[int, list[int]] = {0: []}
    todo = [0]
    while todo:
        block = todo.pop()
        for other in successors[block]:
            if other not in predecessors:
                todo.append(other)
            predecessors.setdefault(other, []).append(block)
    dominators = _dominators(predecessors)
    natural = []
    for head, before in predecessors.items():
        # Each jump is a loop of its own, because nested loops can share a head.
        for tail in before:
            if head in dominators[tail]:
                body, todo = {head}, [tail]
                while todo:
                    block = todo.pop()
                    if block not in body:
                        body.add(block)
                        todo += predecessors[block]
                natural.append((head, body))
    return natural


def _dominators(predecessors: dict[int, list[int]]) -> dict[int, set[int]]:
    """Return for each reachable block the blocks on every path to it from block 0."""
    dominators = {block: set(predecessors) for block in predecessors} | {0: {0}}
    changed = True
    while changed:
        changed = False
        for block in sorted(predecessors)[1:]:
            new = set.intersection(*(dominators[other] for other in predecessors[block])) | {block}
            changed |= new != dominators[block]
            dominators[block] = new
    return dominators


def _path(
    head: int, body: set[int], successors: list[list[int]], costs: list[tuple[int, int]]
) -> tuple[int, ...]:
    """Return the path around a loop with the most products, and then the fewest instructions."""
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {}
    seen = set()

    def visit(block: int) -> None:
        seen.add(block)
        for other in successors[block]:
            if other in body and other not in seen:
                visit(other)
        # A visited block without a best path lies on the path here: an inner loop.
        ways = [best[other] for other in successors[block] if other in best]
        if head in successors[block]:
            ways.append((0, 0, ()))
        if ways:
            products, length, rest = max(ways)
            own = costs[block]
            best[block] = (own[0] + products, own[1] + length, (block, *rest))

    visit(head)
    return best[head][2]


def _order(path: list[Instruction]) -> str:
    words = []
    for i in path:
        name = next((name for pattern, name in _SHOWN if pattern.match(i.opcode)), None)
        if name is not None:
            words.append(name.replace("(n)", f"({i.operands.rpartition('0x')[2]})") or i.kind)
    runs = [(word, len(list(run))) for word, run in itertools.groupby(words)]
    return " ".join(word if n == 1 else f"{word}x{n}" for word, n in runs)


def _exp2_hidden(path: list[Instruction]) -> float | None:
    if not any(i.opcode.startswith("HGMMA") for i in path):
        return None
    groups, unfinished = 0, False
    hidden: list[bool] = []
    # Twice around, because an instruction may stay in flight over the end of the loop.
    for i in path + path:
        if i.opcode.startswith("HGMMA"):
            # The last instruction of a group names the barrier that its wait names.
            unfinished = "gsb0" not in i.operands
            groups += not unfinished
        elif i.opcode.startswith("WARPGROUP.DEPBAR"):
            groups = min(groups, int(i.operands.rpartition("0x")[2], 16))
        elif i.opcode == "MUFU.EX2":
            hidden.append(groups > 0 or unfinished)
    second = hidden[len(hidden) // 2 :]
    return sum(second) / len(second) if second else None
