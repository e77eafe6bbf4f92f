"""The documentation: it builds, its examples run, and its signatures are those of the code."""

import ast
import doctest
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import zlib
from pathlib import Path
from xml.etree import ElementTree

import pytest

import vpool
from vpool.bench import bench
from vpool.commands import COMMANDS, _parser, main
from vpool.data import bundled_trace
from vpool.sizes import format_bytes

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MODULES = sorted(
    found.name for found in pkgutil.walk_packages(vpool.__path__, "vpool.") if "__main__" not in found.name
)


def code_block(language):
    """The README's block of a language."""
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return block


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages, built with every warning an error."""
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-n", "-W", "--keep-going", "-d", out / "trees", DOCS, out],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return out


def test_every_public_name_is_documented(site):
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    named = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
    assert set(vpool.__all__) <= {name.rpartition(".")[2] for name in named}
    # Of each class what is its own, and not what it has of Python's exceptions and tuples.
    for cls in filter(inspect.isclass, map(vpool.__dict__.get, vpool.__all__)):
        for name in sorted({key for base in cls.__mro__ if base.__module__.startswith("vpool") for key in vars(base)}):
            if (
                name.startswith("_")
                or name == "of_records"
                or re.search(rf"^ +(?:\w+, )*{name}\b.* : ", cls.__doc__, re.MULTILINE)
            ):
                continue  # a field is among the parameters or attributes of its class; one is for the compiled modules
            assert any(entry.endswith(f"{cls.__name__}.{name}") for entry in named), f"{cls.__name__}.{name}"


def test_signatures_are_those_of_the_stubs():
    """Of types that cannot tell them at run time; their stubs are checked against the code."""
    stubs = [
        ast.parse((ROOT / "vpool" / "_interface" / f"{name}.pyi").read_text())
        for name in ("lender", "upkeep", "mover", "pool", "buffer")
    ]
    bases = {"Lender": "Pool", "Upkeep": "Pool", "Mover": "Pool"}
    signatures = {}
    for cls in (node for stub in stubs for node in stub.body if isinstance(node, ast.ClassDef)):
        for method in (node for node in cls.body if isinstance(node, ast.FunctionDef)):
            if any(ast.unparse(decorator) != "classmethod" for decorator in method.decorator_list):
                continue
            for arg in method.args.args + method.args.kwonlyargs:
                arg.annotation = None
            name = "" if method.name in ("__new__", "__init__") else method.name
            args = ast.unparse(method.args).replace("=", " = ")
            signatures[bases.get(cls.name, cls.name), name] = re.sub(r"^(self|cls)(, )?", "", args).replace(" = ", "=")
    written = {}
    text = (DOCS / "api.rst").read_text()
    for cls, args, body in re.findall(r"^\.\. autoclass:: (Pool|Buffer)\((.*)\)\n((?:\n| +.*\n)*)", text, re.MULTILINE):
        written[cls, ""] = args
        written.update({(cls, name): args for name, args in re.findall(r"automethod:: (\w+)\((.*)\)", body)})
    assert written == {key: args for key, args in signatures.items() if not key[1].startswith("__")}


def test_the_site_has_its_pictures(site):
    """Sphinx warns of one that is not there; that each was drawn by this build is seen here."""
    drawn = {path.name for path in (DOCS / "_pictures").glob("*.svg")}
    assert drawn <= {path.name for path in (site / "_images").iterdir()}
    assert len(drawn) >= 5
    assert "two_streams.npz" in (site / "two_streams.html").read_text()


@pytest.fixture(scope="module")
def pictures():
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(path):
    """What a drawing shows: its texts, and of each bar where it begins and ends, as shares of the widest."""
    svg = ElementTree.parse(path).getroot()
    texts = ["".join(node.itertext()).strip() for node in svg.iter("{http://www.w3.org/2000/svg}text")]
    bars = []
    for group in svg.iter("{http://www.w3.org/2000/svg}g"):
        if group.get("id", "").startswith(("PolyCollection", "FillBetween")):
            for node in group.iter("{http://www.w3.org/2000/svg}path"):
                xs = [float(x) for x in re.findall(r"[ML] (\S+)", node.get("d"))]
                bars.append((min(xs), max(xs)))
    left, right = min(start for start, _ in bars), max(end for _, end in bars)
    return texts, [round((x - left) / (right - left), 2) for bar in bars for x in bar]


def test_picture_of_the_readme_is_what_vpool_draws(pictures, tmp_path):
    """`make picture` draws it anew.  Texts and sizes are compared: fonts differ from machine to machine."""
    pictures.readme_picture(tmp_path / "now.svg")
    kept = shown(pictures.README_PICTURE)
    assert shown(tmp_path / "now.svg") == kept
    assert "replay: 7.15 GiB live of 8.01 GiB reserved" in kept[0]
    assert len(kept[1]) > 100


def test_readme_shows_its_picture_and_how_it_was_drawn():
    text = (ROOT / "README.md").read_text()
    (path,) = re.findall(r"!\[[^]]+\]\((.*)\)", text)
    assert (ROOT / path).exists()
    assert f"`vpool inspect vpool/data/two_streams.npz --plot {Path(path).name}`" in text


def test_comparison_of_the_readme():
    found = re.findall(
        r"^\| (.+?) +\| (\S+ \wiB) \| ([\d.]+) \| ([\d,]+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    rows = vpool.compare(bundled_trace()).rows
    assert found == [
        (row.title, format_bytes(row.peak_reserved_bytes), f"{row.reserved_over_live:.3f}", f"{row.source_calls:,}")
        for row in rows
    ]


def test_readme_names_pages_that_exist():
    text = (ROOT / "README.md").read_text().partition("## Where to read on")[2]
    named = re.findall(r"`((?:frameworks/)?[a-z_]+)`", text)
    assert len(named) > 15
    for page in named:
        assert (DOCS / f"{page}.rst").exists(), page


def test_versions_agree():
    first = re.search(r"^(\d\S*?),? .*\n-+$", (ROOT / "CHANGELOG.rst").read_text(), re.MULTILINE)[1]
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
    assert first == cited == vpool.__version__


def test_commands_of_contributors_are_those_of_the_tests():
    makefile = (ROOT / "Makefile").read_text()
    assert f"\t$(PYTHON) {code_block('sh').splitlines()[1].removeprefix('python ')}\n" in makefile
    hooks = re.findall(r"entry: (\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert set(hooks) == {"ruff", "cython-lint", "mypy"}
    for tool in hooks:
        assert tool in makefile
        importlib.import_module(tool.replace("-", "_"))


PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.rst") if ">>>" in path.read_text())


@pytest.mark.parametrize("page", PAGES)
def test_examples_of_pages(page):
    failed, tried = doctest.testfile(str(DOCS / page), module_relative=False, verbose=False)
    assert tried
    assert not failed


def test_pages_import_what_they_use():
    """A doctest finds also what other tests imported; who follows a page has that page alone."""
    code = "import vpool; print(*dir(vpool))"
    there = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    for path in DOCS.rglob("*.rst"):
        lines = re.findall(r"^ *(?:>>>|\.\.\.) (.*)", path.read_text(), re.MULTILINE)
        imported = set(re.findall(r"^(?:import|from) vpool\.(\w+)", "\n".join(lines), re.MULTILINE))
        used = {name for line in lines for name in re.findall(r"(?<![\w.])vpool\.(\w+)", line)}
        assert used <= there | imported, path.name


@pytest.mark.parametrize("module", MODULES)
def test_examples_of_docstrings(module):
    assert not doctest.testmod(importlib.import_module(module), verbose=False).failed


def documented(command):
    """Options and keys that the page of the commands has for one."""
    text = (DOCS / "commands.rst").read_text()
    (section,) = re.findall(
        rf"^vpool {command}\b[^\n]*\n-+\n(.*?)(?=^vpool \w+[^\n]*\n---|\Z)", text, re.MULTILINE | re.DOTALL
    )
    (keys,) = re.findall(r"^Keys: (.*?)(?:\n\n|\Z)", section, re.MULTILINE | re.DOTALL)
    names = re.findall(r"``([a-z]\w*)``", re.sub(r"\([^)]*\)", "", keys))
    return set(re.findall(r"^``(--[\w-]+)``$", section, re.MULTILINE)), names


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_have_the_options_that_are_documented(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    offered = set(re.findall(r"(?<![\w-])--[a-z-]+", capsys.readouterr().out))
    assert documented(command)[0] == offered - {"--help", "--json"}


def test_every_command_is_documented():
    assert re.findall(r"^vpool (\w+).*\n---", (DOCS / "commands.rst").read_text(), re.MULTILINE) == list(COMMANDS)


def test_command_lines_of_pages_are_right():
    """Those in the text too, with names in capitals for what is passed."""
    found = []
    for path in [ROOT / "README.md", *DOCS.rglob("*.rst")]:
        lines = re.findall(r"^ +\$ vpool (.*)$|`vpool ([a-z]+ [^`]+)`", path.read_text(), re.MULTILINE)
        found += [(path.name, first or second) for first, second in lines]
    assert len(found) >= 18
    for page, line in found:
        try:
            _parser().parse_args(line.replace("PID", "1").split())
        except SystemExit:
            pytest.fail(f"{page}: vpool {line}")


def test_results_have_the_keys_that_are_documented(capsys, tmp_path):
    def keys_of(*arguments):
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    trace = str(Path(vpool.data.__file__).with_name("two_streams.npz"))
    assert documented("replay")[1] == list(keys_of("replay", trace))
    assert documented("compare")[1] == list(keys_of("compare", trace, "--no-peers"))
    assert documented("tune")[1] == list(keys_of("tune", trace, "--trials", "8"))
    assert documented("inspect")[1] == list(keys_of("inspect", trace))
    assert documented("convert")[1] == list(keys_of("convert", trace, str(tmp_path / "out.csv")))
    view = keys_of("view", trace, "--out", str(tmp_path / "page.html"))
    assert [name for name in documented("view")[1] if name != "blocks"] == list(view)
    assert documented("doctor")[1] == list(keys_of("doctor"))
    result = bench(only=["random"], rounds=1, scale=0.01, peers=False).to_dict()
    assert documented("bench")[1] == [*result, *result["rows"][0]]
    assert documented("demo")[1] == list(keys_of("demo", "--source", "host"))


def test_readme_example(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", code_block("python")],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "cannot lend 1,073,741,824 bytes" in done.stdout
    assert "utilization" in done.stdout


def test_ci_runs_the_commands_of_the_readme():
    first, second = code_block("sh").splitlines()
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert second in lines
    for command in first.split(" && ")[2:]:
        assert command.replace("pip install", "pip install -q") in lines


def test_design_page_shows_the_layers():
    """It includes them from the test that holds them, between two comments."""
    text = (ROOT / "tests" / "test_source_code.py").read_text()
    page = (DOCS / "design.rst").read_text()
    for mark in re.findall(r":(?:start-after|end-before): (.*)", page):
        assert text.count(mark) == 1
