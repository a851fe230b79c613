"""Mutants: faults that are made by rules, one place of one function each.

A mutant's name says where it is, `file:function:line:kind`; its number follows if a line has
several of a kind. The same tree has the same mutants, so a name or a seed makes one again.
"""

from __future__ import annotations

import ast
import itertools
import pathlib
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from scripts.maintenance.faults.listed import ROOT, Fault, paths

FOLDERS = "pallas_flash", "models", "scripts"
# Most test files that run for a mutant.
MOST_FILES = 6

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: (r"\bis\b", "is not"),
    ast.IsNot: (r"\bis\s+not\b", "is"),
    ast.In: (r"\bin\b", "not in"),
    ast.NotIn: (r"\bnot\s+in\b", "in"),
}
SIGNS = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: (r"\|", "&"),
    ast.And: (r"\band\b", "or"),
    ast.Or: (r"\bor\b", "and"),
}
# Operators of which either side, or the left one alone, is a value of the same kind.
EITHER_SIDE = ast.Add, ast.Mult, ast.BitAnd, ast.BitOr
LEFT_SIDE = ast.Sub, ast.Div, ast.FloorDiv, ast.Mod
_OPPOSITES = [("min", "max"), ("minimum", "maximum"), ("any", "all"), ("floor", "ceil")]
OPPOSITES = {x: y for pair in _OPPOSITES for x, y in (pair, pair[::-1])}
# Calls whose first two arguments may change places, or must not.
SYMMETRIC = {*OPPOSITES, "add", "multiply", "equal", "gcd", "lcm", "logical_and", "logical_or"}
SYMMETRIC |= {"isinstance", "issubclass", "getattr", "hasattr", "setattr", "zip", "print"}
# Calls that only tell a person something.
QUIET = r"(print|warnings\.|logging\.|logger\.).*|.*(Error|Warning)"
# Functions whose result only a person reads.
SHOWN = "__repr__", "__str__"
SIMPLE = ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant


class _Finder(ast.NodeVisitor):
    """Collects the changes of a file: (function, line, kind, start, stop, new text), in bytes."""

    def __init__(self, source: bytes):
        self._source = source
        lengths = map(len, source.splitlines(keepends=True))
        self._starts = [0, *itertools.accumulate(lengths)]
        self._inside: tuple[str, ...] = ()
        self._function = ""
        self.changes: list[tuple[str, int, str, int, int, str]] = []

    def _start(self, node) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _stop(self, node) -> int:
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def _bare(self, node) -> str:
        return self._source[self._start(node) : self._stop(node)].decode()

    def _text(self, node) -> str:
        return self._bare(node) if isinstance(node, SIMPLE) else f"({self._bare(node)})"

    def _replace(self, kind: str, start: int, stop: int, new: str):
        if self._function:
            line = self._source.count(b"\n", 0, start) + 1
            self.changes.append((self._function, line, kind, start, stop, new))

    def _replace_node(self, kind: str, node, new: str):
        self._replace(kind, self._start(node), self._stop(node), new)

    def _replace_operator(self, kind: str, table, op, left, right):
        if type(op) in table:
            old, new = table[type(op)]
            between = self._source[self._stop(left) : self._start(right)]
            if match := re.search(old.encode(), between):
                first = self._stop(left) + match.start()
                self._replace(kind, first, first + len(match[0]), new)

    def visit_ClassDef(self, node):
        before, self._inside = self._inside, (*self._inside, node.name)
        for statement in node.body:
            self.visit(statement)
        self._inside = before

    def visit_FunctionDef(self, node):
        if node.name in SHOWN:
            return
        before = self._inside, self._function
        self._inside = (*self._inside, node.name)
        self._function = ".".join(self._inside)
        # Neither decorators nor annotations.
        for x in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(x)
        self._inside, self._function = before

    def visit_Raise(self, node):
        """Sentences of errors stay."""

    def visit_JoinedStr(self, node):
        """So do texts, whose parts have no positions in Python 3.11."""

    def visit_AnnAssign(self, node):
        if node.value:
            self.visit(node.value)

    def visit_Assert(self, node):
        """So do assertions, which hold: less of one lives."""

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Call) and not self._is_quiet(node.value):
            self._replace_node("statement", node, "pass")
        self.generic_visit(node)

    def visit_Compare(self, node):
        operands = [node.left, *node.comparators]
        for op, left, right in zip(node.ops, operands, operands[1:], strict=False):
            self._replace_operator("comparison", COMPARISONS, op, left, right)
        self.generic_visit(node)

    def visit_BinOp(self, node):
        if not _is_text(node):
            if isinstance(node.op, (*EITHER_SIDE, *LEFT_SIDE)):
                self._replace_node("term", node, self._text(node.left))
            if isinstance(node.op, EITHER_SIDE):
                self._replace_node("term", node, self._text(node.right))
            self._replace_operator("sign", SIGNS, node.op, node.left, node.right)
        self.generic_visit(node)

    def visit_AugAssign(self, node):
        self._replace_operator("sign", SIGNS, node.op, node.target, node.value)
        self.visit(node.value)

    def visit_BoolOp(self, node):
        word = " and " if isinstance(node.op, ast.And) else " or "
        for left_out in node.values:
            rest = [self._text(x) for x in node.values if x is not left_out]
            self._replace_node("term", node, f"({word.join(rest)})")
        if len(node.values) == 2:
            self._replace_operator("sign", SIGNS, node.op, *node.values)
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if not isinstance(node.op, ast.UAdd):
            self._replace_node("sign", node, self._text(node.operand))
        self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, bool):
            self._replace_node("flag", node, str(not node.value))
        elif isinstance(node.value, int):
            self._replace_node("shift", node, str(node.value + 1))

    def visit_Name(self, node):
        if node.id in OPPOSITES:
            self._replace_node("opposite", node, OPPOSITES[node.id])

    def visit_Attribute(self, node):
        if node.attr in OPPOSITES:
            stop = self._stop(node)
            self._replace("opposite", stop - len(node.attr), stop, OPPOSITES[node.attr])
        self.generic_visit(node)

    def visit_Call(self, node):
        if self._is_quiet(node):
            return
        plain = not any(isinstance(x, ast.Starred) for x in node.args)
        if plain and ast.unparse(node.func).split(".")[-1] not in SYMMETRIC:
            for left, right in itertools.pairwise(node.args[:2]):
                between = self._source[self._stop(left) : self._start(right)].decode()
                texts = [self._bare(right), self._bare(left)]
                self._replace(
                    "arguments", self._start(left), self._stop(right), between.join(texts)
                )
        self.generic_visit(node)

    @staticmethod
    def _is_quiet(call: ast.Call) -> bool:
        return re.fullmatch(QUIET, ast.unparse(call.func), re.DOTALL) is not None

    def _negate(self, node):
        # A comparison and a `not` have changes of their own.
        if not isinstance(node.test, (ast.Compare, ast.UnaryOp)):
            self._replace_node("condition", node.test, f"(not {self._text(node.test)})")
        self.generic_visit(node)

    visit_If = visit_While = visit_IfExp = _negate


def _is_text(node) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def mutants(file: str, tests: Sequence[str] = (), root: pathlib.Path = ROOT) -> list[Fault]:
    """Return the mutants of a file, from top to bottom; not all are `real`."""
    source = (root / file).read_bytes()
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    count: Counter[str] = Counter()
    made = []
    for function, line, kind, start, stop, new in sorted(finder.changes, key=lambda x: x[3:]):
        name = f"{file}:{function}:{line}:{kind}"
        count[name] += 1
        name += f"-{count[name]}" if count[name] > 1 else ""
        at, old = len(source[:start].decode()), source[start:stop].decode()
        made.append(Fault(name, file, old, new, (*tests,), at=at))
    return made


def real(mutant: Fault, root: pathlib.Path = ROOT) -> bool:
    """Whether a mutant is Python, and another program than the file."""
    text = (root / mutant.file).read_text(encoding="utf-8")
    try:
        return ast.dump(ast.parse(mutant.broken(text))) != ast.dump(ast.parse(text))
    except SyntaxError:
        return False


def files(root: pathlib.Path = ROOT) -> list[str]:
    """Return the files that have mutants."""
    names = (str(x.relative_to(root)) for folder in FOLDERS for x in (root / folder).rglob("*.py"))
    # Tests of faults do not run in a tree that has one.
    return sorted(x for x in names if not re.match(r"scripts/(deliberate_)?faults", x))


def tests_of(file: str, listed: Sequence[Fault], root: pathlib.Path = ROOT) -> tuple[str, ...]:
    """Return the names of test files for a source file, from what listed faults name.

    They are named by faults of the same file, else of the same folder, else of the folder above;
    the most frequent come first, after a test file that has the name of the source file.
    """
    name = pathlib.Path(file).stem.strip("_")
    own = [f"test_{name}.py"] if paths(f"test_{name}.py", root) else []
    for place in (file, *map(str, pathlib.Path(file).parents)):
        here = [x for x in listed if x.file == place or str(pathlib.Path(x.file).parent) == place]
        here = here or [x for x in listed if x.file.startswith(f"{place}/")]
        if count := Counter(test for fault in here for test in fault.tests):
            return (*dict.fromkeys(own + [test for test, _ in count.most_common()]),)[:MOST_FILES]
    return (*own,)


def every(listed: Sequence[Fault], root: pathlib.Path = ROOT) -> list[Fault]:
    """Return the mutants of all files; not all are `real`."""
    return [x for file in files(root) for x in mutants(file, tests_of(file, listed, root), root)]


def draw(
    count: int, seed: int, listed: Sequence[Fault], root: pathlib.Path = ROOT
) -> Iterator[Fault]:
    """Yield mutants, one of each function in turn; a higher count adds to a lower one's."""
    chance, functions = random.Random(seed), defaultdict(list)
    for mutant in every(listed, root):
        functions[mutant.name.rsplit(":", 2)[0]].append(mutant)
    order = list(functions.values())
    chance.shuffle(order)
    for of_function in order:
        chance.shuffle(of_function)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*order))
    return itertools.islice((x for x in turns if x and real(x, root)), count)
