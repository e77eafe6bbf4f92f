"""The source code itself: linters, types, stubs, layers, sizes."""

import ast
import graphlib
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("vpool", "pyx", "tests", "docs")
HAND_WRITTEN = (".py", ".pyi", ".pyx", ".pxd", ".h", ".cpp", ".js", ".css")
MOST_LINES = 600

# The layers, lowest first.  A name stands for the module, or the package with all that is in it.
LAYERS = {
    "base": (
        "vpool._base",
        "vpool.arrays",
        "vpool.errors",
        "vpool.files",
        "vpool.sizes",
        "vpool.tables",
        "vpool.version",
    ),
    # Plain figures and rules in Python, which know neither pools nor sources.
    "records": (
        *("vpool.formats", "vpool.report", "vpool.stats", "vpool.strategies", "vpool.streams", "vpool.trace"),
        *("vpool.sites", "vpool.leaks", "vpool.modes", "vpool.details", "vpool.placement"),
        *("vpool.advice", "vpool.rendering", "vpool.plots", "vpool.snapshot", "vpool.shortage"),
        *("vpool.compaction", "vpool.separators", "vpool.defrag", "vpool.trimming"),
    ),
    "storage": ("vpool._storage", "vpool.sources", "vpool.ipc", "vpool.policy"),
    "management": ("vpool._management",),
    "interface": (
        *("vpool._interface", "vpool.maintenance", "vpool.annotation", "vpool.debugging", "vpool.recording"),
        "vpool.measure",
    ),
    "tools": (
        "vpool._planning",
        "vpool.plan",
        "vpool.defaults",
        "vpool.explain",
        "vpool.gathered",
        "vpool.live",
        "vpool.metrics",
        "vpool.moments",
        "vpool.packing",
        "vpool.pages",
        "vpool.placing",
        "vpool.replay",
        "vpool.runs",
        "vpool.sizing",
        "vpool.data",
        "vpool.bench",
        "vpool.ranges",
        "vpool.peers",
        "vpool.compare",
        "vpool.claims",
        "vpool.trials",
        "vpool.search",
        "vpool.recommendation",
        "vpool.cluster",
        "vpool.tuning",
    ),
    "integrations": ("vpool.integrations",),
    "package": ("vpool",),
    "commands": ("vpool.commands", "vpool.__main__"),
}
# A constructor that replays: it is looked for where its class is, and nothing is imported before it is called.
UPWARDS = {("vpool.strategies", "vpool.sizing")}
# What is neither vpool's nor the standard library's, and the modules that may use it.
THIRD_PARTY = {
    "numpy": "vpool",
    "cuda": "vpool._storage.cuda_driver",
    "rich": "vpool.commands.console",
    "matplotlib": (
        "vpool.bench.drawing",
        "vpool.commands.compare",
        "vpool.commands.console",
        "vpool.plots",
        "vpool.recommendation",
    ),
    "distributed": "vpool.cluster",
    "prometheus_client": "vpool.metrics",
    "nvtx": "vpool.annotation",
}
# End of the layers.
CYTHON = {"cython", "cpython", "libc", "libcpp", "posix"}


def source_files(*suffixes):
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "_build" not in path.parts]
    files.append(ROOT / "setup.py")
    found = sorted(path for path in files if path.suffix in suffixes)
    assert found
    return found


def run(*command, cwd=ROOT):
    """The output of a Python module or script, which must succeed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


# Linters and types.


def test_ruff_finds_nothing():
    run("-m", "ruff", "check", "--no-cache", ".")


def test_ruff_would_change_nothing():
    run("-m", "ruff", "format", "--check", "--no-cache", ".")


def test_no_hash_table_of_numpys_is_made():
    """See `vpool.arrays`."""
    calls = re.compile(r"np\.(isin|intersect1d|setdiff1d|union1d|unique)\(((?!return_).)*$")
    found = [
        (path.name, line)
        for folder in ("vpool", "pyx")
        for path in (ROOT / folder).rglob("*.py*")
        if path.name != "arrays.py" and path.suffix in (".py", ".pyx")
        for line in path.read_text().splitlines()
        if calls.search(line)
    ]
    assert found == []


def test_cython_lint_finds_nothing():
    run("-c", "import sys; from cython_lint.cython_lint import main; sys.exit(main())", *source_files(".pyx", ".pxd"))


def test_mypy_finds_nothing(tmp_path):
    run("-m", "mypy", "--cache-dir", tmp_path)


def test_cython_has_no_hints(tmp_path):
    """A performance hint is a place where a nogil function takes the GIL without need."""
    for folder in ("pyx", "vpool"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "setup.py", tmp_path)
    output = run("setup.py", "--version", cwd=tmp_path)
    assert output.count("] Cythonizing") == len(source_files(".pyx")) - len(list((ROOT / "tests").rglob("*.pyx")))
    assert "performance hint" not in output
    assert "warning" not in output.lower()


# Stubs.


def compiled_modules():
    return sorted(f"vpool._{path.parent.name}.{path.stem}" for path in (ROOT / "pyx").glob("*/*.pyx"))


def test_stubs_agree_with_the_compiled_modules(tmp_path):
    allowed = (
        r".*\.__(reduce_cython|setstate_cython|test|pyx_capi)__",  # Cython's own names, which no user meets
        r"vpool\._interface\.\w+\.[A-Z_]+",  # constants that a module imports
        r"vpool\._interface\.(pool|buffer)\.Buffer\.__init__",  # always raises; Cython shows it with *args
    )
    (tmp_path / "allowed").write_text("\n".join(allowed))
    run(
        *("-m", "mypy.stubtest", "--concise", "--ignore-disjoint-bases", "--ignore-unused-allowlist"),
        *("--allowlist", tmp_path / "allowed", "--mypy-config-file", ROOT / "pyproject.toml"),
        *compiled_modules(),
    )


def stub_signatures(path):
    """Parameters of each function of a stub: names, each with the text of its default or None."""
    signatures = {}
    tree = ast.parse(path.read_text())
    for scope in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        for node in scope.body:
            # Properties have no signature; that they are there is checked above.
            if isinstance(node, ast.FunctionDef) and not node.decorator_list:
                args = node.args
                plain = args.posonlyargs + args.args
                defaults = [None] * (len(plain) - len(args.defaults)) + args.defaults + args.kw_defaults
                names = [arg.arg for arg in plain + args.kwonlyargs]
                if args.kwarg:
                    names.append(f"**{args.kwarg.arg}")
                    defaults.append(None)
                values = [None if value is None else ast.unparse(value) for value in defaults]
                signatures[getattr(scope, "name", ""), node.name] = dict(zip(names, values, strict=True))
    return signatures


def cython_signatures(path):
    """The same of a Cython module, from its text: its types may hide their signatures at run time."""
    signatures = {}
    pattern = r"^(?:cdef )?class (?P<cls>\w+)|^(?P<indent> *)def (?P<name>\w+)\((?P<args>.*?)\):$"
    cls = ""
    for found in re.finditer(pattern, path.read_text(), re.MULTILINE | re.DOTALL):
        if found["cls"]:
            cls = found["cls"]
            continue
        args = {}
        for arg in found["args"].replace(" not None", "").split(","):
            name, _, default = arg.partition("=")
            if name.strip() not in ("", "*"):
                args[name.split()[-1]] = default.strip().replace('"', "'") or None
        signatures[cls if found["indent"] else "", found["name"]] = args
    return signatures


@pytest.mark.parametrize("module", compiled_modules())
def test_stub_signatures_are_those_of_the_code(module):
    _, layer, name = module.split(".")
    stub = stub_signatures(ROOT / "vpool" / layer / f"{name}.pyi")
    code = cython_signatures(ROOT / "pyx" / layer[1:] / f"{name}.pyx")
    for (cls, function), parameters in stub.items():
        if function in ("__enter__", "__exit__", "__int__"):
            continue
        if function == "__new__":
            # A type that takes anything passes it on.
            function = "_make" if (cls, "_make") in code else "__cinit__"
        written = code.get((cls, function), {"self": None})
        assert [*parameters][1 if cls else 0 :] == [*written][1 if cls else 0 :], (cls, function)
        for parameter, default in list(parameters.items())[1 if cls else 0 :]:
            if default != written[parameter]:
                # Where the code names a constant, the stub has its value.
                assert default is not None, (function, parameter)
                assert re.fullmatch(r"[A-Z_]+", written[parameter] or ""), (function, parameter)


# Layers.


def module_files():
    """Every file that imports, by its module's name and whether it declares or implements."""
    files = {}
    for path in (ROOT / "pyx").glob("*/*.pyx"):
        files[f"vpool._{path.parent.name}.{path.stem}", "implements"] = path
    for path in [*(ROOT / "vpool").rglob("*.py"), *(ROOT / "vpool").rglob("*.pxd")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        files[name, "declares" if path.suffix == ".pxd" else "implements"] = path
    return files


FILES = module_files()
MODULES = {name for name, _ in FILES}


def imports_of_python(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (("import", alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (("import", node.module, alias.name) for alias in node.names)


def imports_of_cython(path):
    text = path.read_text()
    for found in re.finditer(r"^ *from +([\w.]+) +(c?import) +(\([^)]*\)|.*)$", text, re.MULTILINE):
        names = re.sub(r"#.*|[()]", "", found[3]).split(",")
        yield from ((found[2], found[1], name.split()[0]) for name in names if name.strip())
    for found in re.finditer(r"^ *(c?import) +([\w., ]+)", text, re.MULTILINE):
        yield from ((found[1], name.split()[0], "") for name in found[2].split(","))


def imports_of(path):
    """Pairs of the word, import or cimport, and the module it names."""
    for word, module, name in imports_of_python(path) if path.suffix == ".py" else imports_of_cython(path):
        yield word, f"{module}.{name}" if f"{module}.{name}" in MODULES else module


def layer_of(module):
    """Number of the layer whose name for a module is the longest."""
    named = [
        (len(name), number)
        for number, names in enumerate(LAYERS.values())
        for name in names
        if module == name or (name != "vpool" and module.startswith(f"{name}."))
    ]
    assert named, f"{module} is in no layer: add it to LAYERS"
    return max(named)[1]


@pytest.mark.parametrize(("module", "kind"), sorted(FILES))
def test_imports_point_down(module, kind):
    own = layer_of(module)
    for word, target in imports_of(FILES[module, kind]):
        top = target.partition(".")[0]
        if top == "vpool":
            assert target in MODULES, f"{module} names {target}, which is no module"
            assert layer_of(target) <= own or (module, target) in UPWARDS, (
                f"{module} {word}s {target}, of a higher layer"
            )
        elif top in THIRD_PARTY:
            users = THIRD_PARTY[top]
            users = (users,) if isinstance(users, str) else users
            assert any(module == user or module.startswith(f"{user}.") for user in users), f"{module} uses {top}"
        else:
            assert top in sys.stdlib_module_names or top in CYTHON, f"{module} uses {top}, which nobody declared"


def test_imports_have_no_cycle():
    graph = {}
    for (module, kind), path in FILES.items():
        targets = {(target, "declares" if word == "cimport" else "implements") for word, target in imports_of(path)}
        targets = {(target, how) for target, how in targets if (module, target) not in UPWARDS}
        if kind == "implements":
            targets.add((module, "declares"))
        else:
            targets.discard((module, "declares"))
        graph[module, kind] = targets & FILES.keys()
    graphlib.TopologicalSorter(graph).prepare()


def test_every_layer_exists():
    for names in LAYERS.values():
        for name in names:
            assert name in MODULES or (ROOT / name.replace(".", "/")).is_dir(), name


# Shape.


def test_files_are_short():
    long = {str(path): lines for path in source_files(*HAND_WRITTEN) if (lines := path.read_text().count("\n")) > 600}
    assert not long, f"more than {MOST_LINES} lines"


def test_nothing_was_left_for_later():
    marks = re.compile(r"\b(TO" + "DO|FIX" + "ME|XX" + r"X|place" + r"holder)\b", re.IGNORECASE)
    for path in source_files(*HAND_WRITTEN, ".rst", ".md"):
        found = marks.search(path.read_text())
        assert not found, f"{path}: {found[0]}"


def public_modules():
    """Modules a user may import.  Of the commands only their package is one."""
    private = re.compile(r"\._|\.commands\.|\.__main__")
    return sorted(name for name, kind in FILES if kind == "implements" and not private.search(name))


@pytest.mark.parametrize("module", public_modules())
def test_all_is_complete(module):
    """`__all__` names what is there and every function and class of the module's own (ruff sorts it)."""
    if module == "vpool.version":
        return
    exported = importlib.import_module(module).__all__
    assert not [name for name in exported if not hasattr(sys.modules[module], name)]
    body = ast.parse(FILES[module, "implements"].read_text()).body
    own = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert {name for name in own if not name.startswith("_")} <= set(exported)
