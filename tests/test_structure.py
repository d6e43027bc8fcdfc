"""How the packages are laid out: no circles, small folders and files, shallow inheritance, no toys in the library."""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.test_layers import PROJECT, SUITE, imported_modules, module_name

MOST_FILES, MOST_LINES, DEEPEST = 20, 700, 3
"""Files of a folder, lines of a file, steps of inheritance between classes of the packages."""
WORLD = re.compile(rf"\b({'|'.join(SUITE)})(\.\w+)*\.(toy|scenes)\b[\w.]*")
"""Dotted name of a module of the worlds, which only their own tables name."""


class Library:
    """Files, imports and classes of the packages below a folder."""

    def __init__(self, root):
        self.root = root
        paths = [path for name in SUITE for path in sorted((root / name).rglob("*.py"))]
        self.files = {module_name(path, root): path for path in paths}
        self.trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in self.files.items()}

    @functools.cached_property
    def imports(self):
        """Modules of the packages that each file imports, for types too, without faces of packages (`__init__`)."""
        return {module: list(self._imports(module)) for module in self.files}

    def _imports(self, module):
        face = self.files[module].name == "__init__.py"
        for _, name in imported_modules(self.trees[module], module, face):
            for target in (name, name.rpartition(".")[0]):
                if target in self.files:
                    if target != module and self.files[target].name != "__init__.py":
                        yield target
                    break

    def edges(self, key):
        """Imports between what `key` maps modules to; faces import for others and do not count."""
        found = defaultdict(set)
        for module, path in self.files.items():
            if path.name != "__init__.py":
                found[key(module)] |= {key(target) for target in self.imports[module]} - {key(module)}
        return found

    @functools.cached_property
    def classes(self):
        """Class to its direct bases, both as `module.Name`, as far as they are of the packages."""
        homes = {
            f"{module}.{node.name}": (module, node)
            for module, tree in self.trees.items()
            for node in tree.body
            if isinstance(node, ast.ClassDef)
        }
        bases = {}
        for full, (module, node) in homes.items():
            face = self.files[module].name == "__init__.py"
            named = {name.rpartition(".")[2]: name for _, name in imported_modules(self.trees[module], module, face)}
            texts = [ast.unparse(base).partition("[")[0] for base in node.bases]
            found = [f"{module}.{text}" if f"{module}.{text}" in homes else named.get(text, "") for text in texts]
            bases[full] = [base for base in found if base in homes]
        return bases


def circles(edges):
    """Groups of nodes that reach each other, sorted (Tarjan's strongly connected components)."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges.get(node, ()):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            part = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(part) > 1:
                found.append(sorted(part))

    for node in list(edges):
        if node not in index:
            visit(node)
    return sorted(found)


def folder_of(module):
    """Folder of a module; files at the top of `mmrl` are on different levels, see `tests/test_layers.py`."""
    return module if module.startswith("mmrl.") and module.count(".") == 1 else module.rpartition(".")[0]


def package_of(module):
    """Top folder of a package that a module is in, such as `robotics.flow3d`; the package of loose files."""
    folder = folder_of(module)
    return folder if folder in (module, *SUITE) else ".".join(folder.split(".")[:2])


def ancestors(name, bases):
    return {name}.union(*(ancestors(base, bases) for base in bases[name]))


def depth(name, bases):
    return max((1 + depth(base, bases) for base in bases[name]), default=0)


def file_circles(library):
    return circles(library.edges(lambda module: module))


def folder_circles(library):
    return circles(library.edges(folder_of))


def package_circles(library):
    return circles(library.edges(package_of))


def full_folders(library):
    sizes = defaultdict(int)
    for path in library.files.values():
        sizes[str(path.parent.relative_to(library.root))] += path.name != "__init__.py"
    return sorted((folder, size) for folder, size in sizes.items() if size > MOST_FILES)


def long_files(library):
    lengths = {str(path.relative_to(library.root)): path.read_bytes().count(b"\n") for path in library.files.values()}
    return sorted((file, length) for file, length in lengths.items() if length > MOST_LINES)


def deep_classes(library):
    bases = library.classes
    return sorted((name, depth(name, bases)) for name in bases if depth(name, bases) > DEEPEST)


def diamonds(library):
    bases = library.classes
    return sorted(
        name
        for name, direct in bases.items()
        for i, first in enumerate(direct)
        if any(ancestors(first, bases) & ancestors(second, bases) for second in direct[i + 1 :])
    )


def toys_in_the_library(library):
    return sorted(
        f"{module} imports {target}"
        for module in library.files
        if ".toy" not in f".{module}"
        for target in library.imports[module]
        if ".toy." in f".{target}."
    )


def worlds_in_strings(library):
    """Strings of the library that name a module of `toy/` or `scenes/`, apart from docstrings and what faces offer."""
    return sorted(
        f"{module} names {name}"
        for module, tree in library.trees.items()
        if not {"toy", "scenes", "contrib"} & set(module.split("."))
        for name in (found[0] for text in strings_of(tree) for found in WORLD.finditer(text))
    )


def strings_of(tree):
    """Strings that a module computes with, apart from the lazy imports of a face (`_NAMES`)."""
    lazy = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_NAMES"]
    prose = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    left_out = {part for node in (*lazy, *prose) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in left_out:
            yield node.value


@pytest.fixture(scope="module")
def library():
    return Library(PROJECT)


def test_no_circle_of_files(library):
    assert file_circles(library) == []


def test_no_circle_of_folders(library):
    assert folder_circles(library) == []


def test_no_circle_of_the_top_folders_of_packages(library):
    assert package_circles(library) == []


def test_no_folder_of_more_than_20_files(library):
    assert full_folders(library) == []


def test_no_file_of_more_than_700_lines(library):
    assert long_files(library) == []


def test_no_class_inherits_in_more_than_three_steps(library):
    assert deep_classes(library) == []


def test_no_diamond_of_classes(library):
    assert diamonds(library) == []


def test_no_library_file_imports_a_toy(library):
    assert toys_in_the_library(library) == []


def test_no_library_file_names_a_world_in_a_string(library):
    assert worlds_in_strings(library) == []


PLANTED = {
    "mmrl/a/one.py": "if TYPE_CHECKING:\n    from mmrl.b.two import Two\nclass One: ...\n",
    "mmrl/b/two.py": "from mmrl.a.one import One\nclass Two(One): ...\nclass Left(Two): ...\nclass Right(Two): ...\n",
    "mmrl/b/three.py": "from mmrl.b.two import Left, Right\nfrom mmrl.toy import grid\n"
    "class Both(Left, Right): ...\nclass Last(Both): ...\n",
    "mmrl/toy/grid.py": "x = 1\n" * 701,
    "mmrl/c/deep/low.py": "from mmrl.d.deep import other\n",
    "mmrl/d/high.py": "from mmrl.c.table import DEMO\n",
    "mmrl/d/deep/other.py": "",
    "mmrl/c/table.py": '"""Of mmrl.toy.grid."""\nDEMO = "mmrl.toy.grid:x"\n"""Not mmrl.toy.grid."""\n'
    'def open_sim(name): return load(f"robotics.scenes.{name}")\n',
    "mmrl/c/__init__.py": '_NAMES = {"robotics.scenes.arms": ("ARMS",)}\n',
}


def test_each_check_finds_the_planted_fault(tmp_path):
    for file, text in PLANTED.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    for number in range(MOST_FILES):
        (tmp_path / "mmrl" / "b" / f"more_{number}.py").write_text("")
    planted = Library(tmp_path)
    assert file_circles(planted) == [["mmrl.a.one", "mmrl.b.two"]]
    assert folder_circles(planted) == [["mmrl.a", "mmrl.b"]]
    assert package_circles(planted) == [["mmrl.a", "mmrl.b"], ["mmrl.c", "mmrl.d"]]
    assert full_folders(planted) == [("mmrl/b", 22)]
    assert long_files(planted) == [("mmrl/toy/grid.py", 701)]
    assert deep_classes(planted) == [("mmrl.b.three.Last", 4)]
    assert diamonds(planted) == ["mmrl.b.three.Both"]
    assert toys_in_the_library(planted) == ["mmrl.b.three imports mmrl.toy.grid"]
    assert worlds_in_strings(planted) == ["mmrl.c.table names mmrl.toy.grid", "mmrl.c.table names robotics.scenes."]


@pytest.mark.parametrize("name", SUITE)
def test_the_checks_see_the_packages(library, name):
    assert any(module.startswith(f"{name}.") for module in library.files)
    assert isinstance(library.files[name], Path)


def names_of(tree):
    """Names that a module binds at its top, imports included."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


def test_a_package_offers_only_what_its_modules_have(library):
    missing = []
    for face, tree in library.trees.items():
        tables = [
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_NAMES"
        ]
        for module, names in (item for table in tables for item in table.items()):
            missing += [f"{face}: {module}.{name}" for name in names if name not in names_of(library.trees[module])]
    assert missing == []
