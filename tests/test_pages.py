"""Pages and what they are about: names, variables, and commands that a reader types."""

import ast
import contextlib
import enum
import importlib
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import vpool
from vpool import errors
from vpool.commands import main

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.rst"))


def blocks(page, language):
    """The code of a page in a language, each block by itself."""
    found = re.findall(
        rf"^( *)\.\. code-block:: {language}\n(?: +:.*\n)*\n((?:\1 +.*\n|\n)+)", page.read_text() + "\n", re.MULTILINE
    )
    return [dedent(text) for _, text in found]


def public(owner):
    """Public names of a module or a class, but for what a class has of other packages' and Python's own ones."""
    if inspect.isclass(owner):
        package = owner.__module__.partition(".")[0]
        own = {base: base.__module__.partition(".")[0] == package for base in owner.__mro__}
        names = {key for base in own if own[base] for key in vars(base)}
        names -= {key for base in own if not own[base] for key in vars(base)}
    else:
        names = {
            key
            for key, value in vars(owner).items()
            if str(getattr(value, "__module__", "")).startswith(owner.__name__)
        }
        names = getattr(owner, "__all__", names)
    return sorted(name for name in names if re.match(r"[a-zA-Z]\w", name))


@pytest.mark.parametrize(
    ("page", "module"),
    [
        ("from_torch", "torch.cuda.memory"),
        *(("rmm", f"rmm{name}") for name in ("", ".mr", ".mr.experimental", ".statistics", ".pylibrmm.stream")),
        *(("rmm", f"rmm.pylibrmm.{name}") for name in ("cuda_stream_pool", "device_buffer", "logger")),
        *(("rmm", f"rmm.allocators.{name}") for name in ("cupy", "numba", "torch")),
        *(("cupy", f"cupy.cuda.{name}") for name in ("memory", "pinned_memory", "memory_hook", "memory_hooks")),
    ],
)
def test_who_comes_from_another_pool_finds_every_name(page, module):
    """Of the release that is installed: what the module has, and of each of its classes what that has."""
    text = (DOCS / "frameworks" / f"{page}.rst").read_text()
    pytest.importorskip(module.partition(".")[0])
    module = pytest.importorskip(module)
    names = public(module)
    for cls in (getattr(module, name, None) for name in public(module)):
        if inspect.isclass(cls) and not issubclass(cls, enum.Enum):
            names += public(cls)
    foreign = {"CUDARuntimeError"}  # of CUDA's wrapper, for functions of all kinds
    assert [name for name in names if name not in foreign and not re.search(rf"\b{name}\b", text)] == []


def test_errors_are_documented_with_what_else_they_are():
    text = (DOCS / "errors.rst").read_text()
    written = dict(re.findall(r"\* - :class:`vpool\.(\w+)`\n +- :class:`(\w+)`\n +- \w", text))
    kinds = {name: getattr(vpool, name) for name in errors.__all__ if name != "Error"}
    assert written == {
        name: next(base.__name__ for base in kind.__mro__ if base.__module__ == "builtins")
        for name, kind in kinds.items()
    }


def test_compiled_names_are_documented():
    text = (DOCS / "compiled.rst").read_text()
    declared = (ROOT / "vpool" / "__init__.pxd").read_text()
    names = re.findall(r"^    (\w+),$", declared, re.MULTILINE) + re.findall(r"cimport (\w+)$", declared, re.MULTILINE)
    header = (ROOT / "vpool" / "capi.h").read_text()
    names += re.findall(r"\(\*(\w+)\)\(", header) + re.findall(r"^ +VPOOL_(\w+) = ", header, re.MULTILINE)
    names += re.findall(
        r"^static inline const vpool_capi \*(\w+)|^#define (?!VPOOL_CAPI_H)(\w+) ", header, re.MULTILINE
    )
    names = {name for entry in names for name in ([entry] if isinstance(entry, str) else entry) if name}
    assert {"Pool", "Buffer", "OK", "stream_of", "pool_of", "vpool_import", "VPOOL_CAPI_VERSION"} <= names
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", text)] == []


def variables(*patterns):
    """Environment variables that files read."""
    texts = [path.read_text() for pattern in patterns for path in ROOT.glob(pattern)]
    read = r"""(?:environ\.get|getenv)\(b?"([A-Z]\w+)"|VARIABLE = "(\w+)\""""
    return {name for text in texts for pair in re.findall(read, text) for name in pair if name}


def test_environment_variables_are_documented():
    def table(page):
        rows = re.findall(r"^(``[A-Z]\w+``(?:, ``[A-Z]\w+``)*)  ", (DOCS / page).read_text(), re.MULTILINE)
        return set(re.findall(r"\w+", " ".join(rows)))

    of_users, of_tests = table("platforms.rst"), table("contributing.rst")
    read = variables("vpool/**/*.py", "vpool/**/*.pxd", "pyx/**/*.pyx", "setup.py")
    assert {"VPOOL_POLICY", "VPOOL_DEBUG", "VPOOL_BIASED_LOCKS", "VPOOL_SANITIZE", "CUDA_PATH"} <= read
    assert of_users - {"CC"} == read, "CC is for setuptools"
    assert of_tests == {name for name in variables("tests/**/*.py") if name.startswith("VPOOL_")} - read


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_code_that_is_not_run_has_names_that_exist(page):
    """It needs a GPU, or a program of the reader's."""
    objects = {"vpool": vpool, "pool": vpool.Pool, "staging": vpool.Pool, "buffer": vpool.Buffer}
    for name in ("cupy", "rmm", "numba", "prometheus_client"):
        with contextlib.suppress(ImportError):
            objects[name] = importlib.import_module(name)
    for text in blocks(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute):
                chain = ast.unparse(node)
                root, *names = chain.split(".")
                if root in objects and re.fullmatch(r"[\w.]+", chain):
                    value = objects[root]
                    for name in names:
                        if inspect.ismodule(value) and not hasattr(value, name):
                            importlib.import_module(f"{value.__name__}.{name}")
                        assert hasattr(value, name), chain
                        value = getattr(value, name)


@pytest.mark.parametrize("page", ["out_of_memory", "serving", "examples"])
def test_commands_of_tutorials_run(page, tmp_path, monkeypatch, capsys):
    """In their order, in one folder; the search of `tune` is a shorter one."""
    (tmp_path / "vpool").symlink_to(ROOT / "vpool")  # where a checkout has the recorded run
    shutil.copy(ROOT / "vpool" / "data" / "two_streams.npz", tmp_path / "hour.npz")
    monkeypatch.chdir(tmp_path)
    lines = [line for text in blocks(DOCS / f"{page}.rst", "console") for line in text.splitlines() if line]
    assert len(lines) > 1
    for line in lines:
        command = line.removeprefix("$ ")
        if command.startswith("vpool tune"):
            command += " --trials 8"
        if command.startswith("vpool "):
            assert main(command.split()[1:]) == 0, line
        else:
            assert command.startswith("python -c "), line
            code = command.partition(" -c ")[2].strip('"')
            subprocess.run([sys.executable, "-c", code], check=True, stdin=subprocess.DEVNULL)
        assert capsys.readouterr().err == "", line
