"""The size of the house: what may only become less. A change that needs more takes out as much elsewhere.

pytest tests/test_house.py -s      prints the counts
"""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

import stagewright

ROOT = Path(stagewright.__file__).parent
LIBRARY = ("schedules", "partition", "pipe", "comm", "viz")
TOOLS = ("cli", "experiments")

# At most so many: lower them with the counts. Code lines are without docstrings, comments and blank lines. A room is a
# folder, or a file in a folder that has folders too; imports inside functions count, those for types alone do not.
MOST = {
    "library lines": 74_341,
    "library code lines": 53_429,
    "tools lines": 17_190,
    "library files": 333,
    "library classes": 631,
    "annotated fields": 1_634,
    "functions above 60 lines": 0,
    "functions above 8 parameters": 3,
    "modules with one importer": 27,
    "circles of rooms": 0,
    "class names twice": 0,
}


class Source:
    def __init__(self, path: Path) -> None:
        self.name = path.relative_to(ROOT).as_posix()
        self.text = path.read_text(encoding="utf-8")
        self.nodes = list(ast.walk(ast.parse(self.text)))
        self.imports = [node for node in self.nodes if isinstance(node, ast.ImportFrom) and node.level]
        self.is_package = path.name == "__init__.py"
        self.is_library = self.name.split("/")[0] in (*LIBRARY, "__init__.py", "__main__.py")
        self.module = self.name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    @property
    def folder(self) -> str:
        return self.name.rpartition("/")[0]

    @property
    def typed(self) -> set[ast.AST]:
        """What is there for type checkers alone."""
        blocks = (node for node in self.nodes if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        return {inner for block in blocks for inner in ast.walk(block)}

    def num_code_lines(self) -> int:
        docs = {number for node in self.nodes for number in lines_of_docstring(node)}
        lines = [line.strip() for number, line in enumerate(self.text.splitlines(), 1) if number not in docs]
        code = [line for line in lines if line and not line.startswith("#")]
        return len(code) + sum(line.count("; ") for line in code)

    def imported(self, *, types: bool = True) -> Iterator[str]:
        """Dotted names of modules, or of what stands in them, below the package's root.

        Arguments:
            types: whether those for type checkers alone are among them.
        """
        package = self.module.split(".") if self.is_package else self.module.split(".")[:-1]
        left_out = set() if types else self.typed
        for node in self.imports:
            if node not in left_out:
                base = [*package[: len(package) - node.level + 1], *filter(None, [node.module])]
                yield ".".join(base)
                yield from (".".join([*base, alias.name]) for alias in node.names)


def lines_of_docstring(node: ast.AST) -> range:
    body = getattr(node, "body", None)
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not body:
        return range(0)
    first = body[0]
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return range(first.lineno, (first.end_lineno or first.lineno) + 1) if is_text else range(0)


def functions(sources: list[Source]) -> Iterator[tuple[int, int]]:
    """(lines without docstring, parameters without self) of each."""
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                length = (node.end_lineno or node.lineno) - node.lineno + 1 - len(lines_of_docstring(node))
                yield length, sum(one.arg not in ("self", "cls") for one in given)


def counts() -> dict[str, int]:
    paths = [path for folder in (*LIBRARY, *TOOLS) for path in (ROOT / folder).rglob("*.py")]
    sources = [Source(path) for path in sorted([*ROOT.glob("*.py"), *paths])]
    library = [source for source in sources if source.is_library]
    classes = [node for source in library for node in source.nodes if isinstance(node, ast.ClassDef)]
    sizes = list(functions(library))
    by_module = {source.module: source for source in sources}
    importers: dict[str, set[Source]] = defaultdict(set)
    rooms: nx.DiGraph[str] = nx.DiGraph()
    with_folders = {source.folder.rpartition("/")[0] for source in sources}
    for source in sources:
        for target in {name for name in source.imported() if name in by_module and name != source.module}:
            importers[target].add(source)
        for target in {name for name in source.imported(types=False) if name in by_module}:
            if not source.is_package and not by_module[target].is_package:  # a face gives out names of its rooms
                one, other = (
                    each.name if each.folder in with_folders else each.folder for each in (source, by_module[target])
                )
                if one != other:
                    rooms.add_edge(one, other)
    return {
        "library lines": sum(source.text.count("\n") for source in library),
        "library code lines": sum(source.num_code_lines() for source in library),
        "tools lines": sum(source.text.count("\n") for source in sources if source.name.startswith(TOOLS)),
        "library files": len(library),
        "library classes": len(classes),
        "annotated fields": sum(isinstance(line, ast.AnnAssign) for one in classes for line in one.body),
        "functions above 60 lines": sum(length > 60 for length, _ in sizes),
        "functions above 8 parameters": sum(width > 8 for _, width in sizes),
        "modules with one importer": sum(
            not source.is_package and len(users := importers[source.module]) == 1 and not next(iter(users)).is_package
            for source in library
        ),
        "circles of rooms": sum(len(group) > 1 for group in nx.strongly_connected_components(rooms)),
        "class names twice": sum(times > 1 for times in Counter(node.name for node in classes).values()),
    }


def test_the_house_does_not_grow() -> None:
    found = counts()
    print("\n".join(f"{name:30} {count:7,} of {MOST[name]:7,}" for name, count in found.items()))
    assert {name: count for name, count in found.items() if count > MOST[name]} == {}
