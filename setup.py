"""Build of the compiled modules.  Everything else stands in pyproject.toml."""

import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
# For `make coverage`: counters in the compiled modules, named by the lines of the .pyx and .pxd files.
COVERAGE = bool(os.environ.get("VPOOL_COVERAGE"))
GENERATED = ROOT / "build" / "cython"

# By hand, bottom layer first: a glob that finds nothing would build an empty wheel without an error.
MODULES = {
    "storage": (
        "fork",
        "driver",
        "simulated_captures",
        "simulated_streams",
        "host_driver",
        "upstream_driver",
        "virtual_memory",
        "simulated_driver",
        "shared_memory",
        "fake_cuda",
        "cuda_built",
        "cuda_driver",
        "source",
        "mapped_source",
        "heaps",
    ),
    "management": (
        *(
            "order",
            "pending",
            "arena",
            "journal",
            "lend",
            "cross",
            "holes",
            "mapped",
            "window",
            "core",
            "moves",
            "room",
        ),
        *("idle", "ladder", "adapt", "walk", "absences", "suspended", "noted", "planned", "areas", "resize", "placed"),
    ),
    "interface": (
        "arguments",
        "tags",
        "snapshot",
        "events",
        "diagnosis",
        "captures",
        "streams",
        "access",
        "ledger",
        "pressure",
        "lender",
        "exchange",
        "buffer",
        "sharing",
        "recorder",
        "gauge",
        "deferred",
        "segments",
        "c_allocator",
        "numbered",
        "upkeep",
        "mover",
        "pool",
        "compiled",
        "replay",
        "bench",
    ),
    "planning": ("packing", "search"),
}
WITH_CUDA_HEADERS = {"cuda_built", "cuda_driver"}
WITH_EXCEPTIONS = {"c_allocator"}  # of C++
DIRECTIVES = {
    "language_level": "3",
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
    "freethreading_compatible": True,
}
SANITIZE = [f"-fsanitize={os.environ['VPOOL_SANITIZE']}"] if os.environ.get("VPOOL_SANITIZE") else []
# Threads count at once: counters that lose some may even fall below zero.
INSTRUMENT = ["--coverage", "-fprofile-update=atomic"] if COVERAGE else SANITIZE
# CYTHON_INLINE: the hit path is many small functions, and calls between them would double its time.  What counts lines
# or checks each access gains little from an optimizer, which takes longer than the tests.
SPEED = ["-O0"] if INSTRUMENT else ["-O3", "-DCYTHON_INLINE=inline __attribute__((always_inline))"]
# -fno-strict-aliasing: Cython's own choice for extension types.  No -march: a wheel runs anywhere.
COMPILE_ARGS = [
    *SPEED,
    "-fno-strict-aliasing",
    "-Wall",
    "-Wno-unused-function",
    *INSTRUMENT,
]


# A build is for one major version of CUDA: that of the bindings that are there when it is built.
CUDA_MAJOR = int(importlib.metadata.version("cuda-bindings").partition(".")[0])
HEADERS = {12: "nvidia-cuda-runtime-cu12 nvidia-cuda-nvcc-cu12"}  # wheels


def cuda_version(folder):
    """CUDA_VERSION of a folder of headers, such as 13000; 0 where a build could not use it."""
    if not (folder / "cuda_runtime_api.h").exists() or not (folder / "cuda.h").exists():
        return 0
    found = re.search(r"#define CUDA_VERSION (\d+)", (folder / "cuda.h").read_text(errors="replace"))
    return int(found[1]) if found else 0


def cuda_include_dirs():
    """The folders of CUDA's headers: of a toolkit or of NVIDIA's wheels, whichever is newer.

    They must declare all that cuda.bindings declares, so a toolkit that is older would not do.
    Nothing of them gets into the build, which runs with any driver that cuda.bindings runs with.
    """
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [Path(root) / "include" for root in toolkits if root]
    wheels = importlib.util.find_spec("nvidia")
    for root in wheels.submodule_search_locations if wheels else ():
        folders += Path(root).glob("cu*/include")
    usable = [folder for folder in folders if cuda_version(folder) // 1000 == CUDA_MAJOR]
    if not usable:
        raise SystemExit(
            f"vpool needs CUDA {CUDA_MAJOR}'s headers to build: "
            f"pip install {HEADERS.get(CUDA_MAJOR, 'nvidia-cuda-runtime nvidia-cuda-crt')}, "
            f"or set CUDA_HOME to a toolkit"
        )
    found = max(usable, key=cuda_version)
    # The wheels of CUDA 12 have those of the compiler, which the others include, in a folder of their own.
    compiler = [] if (found / "crt").is_dir() else [folder for folder in folders if (folder / "crt").is_dir()]
    return [str(folder) for folder in (found, *compiler)]


def drop_stale(layer, name):
    """Delete the generated source of a module whose own .pxd is newer.

    cythonize() looks for a module's own .pxd beside its .pyx, and so would not notice.
    """
    declarations = ROOT / "vpool" / f"_{layer}" / f"{name}.pxd"
    for generated in (GENERATED / "pyx" / layer).glob(f"{name}.c*"):
        if declarations.exists() and declarations.stat().st_mtime > generated.stat().st_mtime:
            generated.unlink()


def extension(layer, name):
    drop_stale(layer, name)
    cuda = name in WITH_CUDA_HEADERS
    return Extension(
        f"vpool._{layer}.{name}",
        [f"pyx/{layer}/{name}.pyx"],
        language="c++" if cuda or name in WITH_EXCEPTIONS else "c",
        include_dirs=cuda_include_dirs() if cuda else [],
        extra_compile_args=COMPILE_ARGS,
        extra_link_args=INSTRUMENT,
    )


def drop_removed():
    """Delete what an earlier build left of modules that are gone: setuptools would pack it once more."""
    kept = {f"vpool/_{layer}/{name}" for layer, names in MODULES.items() for name in names}
    built = [(lib, path) for lib in (ROOT / "build").glob("lib*") for path in lib.rglob("*") if path.is_file()]
    built += [(ROOT, path) for path in (ROOT / "vpool").rglob("*.so")]
    for lib, path in built:
        module = path.relative_to(lib).as_posix().partition(".")[0]
        if path.suffix != ".so" or module not in kept:
            path.unlink()


def mark_lines(generated):
    """Have each line of C count as the line of the .pyx that it is of, or as none.

    Cython's #line directives say where a statement begins, never where it ends: the further lines of C of a statement
    would count as the lines below it, and the clean-up of a function, its wrapper and Cython's own functions as lines
    that never run.
    """
    own = f'"{generated.name}"'
    lines = [""]
    mark = None
    for line in generated.read_text().splitlines():
        if line.startswith("#line "):
            mark = None if line.endswith(own) else line
            continue
        if mark and not lines[-1].endswith("\\"):
            lines.append(mark)
        lines.append(line)
        if line == "}" or line.strip() in ("/* function exit code */", "/* Python wrapper */"):
            lines.append(f"#line {len(lines) + 1} {own}")
            mark = None
    generated.write_text("\n".join(lines[1:]) + "\n")


def modules():
    """What is built; translated only where something is: pip and build ask for other things first."""
    found = [extension(layer, name) for layer, names in MODULES.items() for name in names]
    if sys.argv[1:2] and sys.argv[1] in ("dist_info", "egg_info", "sdist"):
        return found
    translated = cythonize(
        found,
        include_path=["."],
        build_dir=str(GENERATED.relative_to(ROOT)),
        emit_linenums=COVERAGE,
        annotate=bool(os.environ.get("VPOOL_ANNOTATE")),
        compiler_directives=DIRECTIVES,
        nthreads=os.cpu_count() or 1,
    )
    if COVERAGE:
        for module in translated:
            mark_lines(Path(module.sources[0]))
    return translated


drop_removed()
setup(
    ext_modules=modules(),
    install_requires=["numpy>=1.26", f"cuda-python>={CUDA_MAJOR},<{CUDA_MAJOR + 1}"],
    options={"build_ext": {"parallel": os.cpu_count() or 1}},
)
