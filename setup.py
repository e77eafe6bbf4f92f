"""Build of the compiled modules.  Everything else stands in pyproject.toml."""
import importlib.util
import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
GENERATED = ROOT / "build" / "cython"

# By hand, bottom layer first: a glob that finds nothing would build an empty wheel without an error.
MODULES = {
    "storage": ("driver", "host_driver", "simulated_driver", "fake_cuda", "cuda_driver", "source"),
    "management": ("arena", "core", "walk"),
    "interface": ("arguments", "snapshot", "pool", "replay", "bench"),
}
WITH_CUDA_HEADERS = {"cuda_driver"}
DIRECTIVES = {
    "language_level": "3",
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
    "freethreading_compatible": True,
}
SANITIZE = [f"-fsanitize={os.environ['VPOOL_SANITIZE']}"] if os.environ.get("VPOOL_SANITIZE") else []
# -fno-strict-aliasing: Cython's own choice for extension types.  No -march: a wheel runs anywhere.
COMPILE_ARGS = ["-O3", "-fno-strict-aliasing", "-Wall", "-Wno-unused-function", *SANITIZE]


def cuda_include_dirs():
    """Folders of CUDA's headers: a toolkit that is there, else those of NVIDIA's wheels."""
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    found = [Path(root) / "include" for root in toolkits if root]
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec else ():
        found += sorted(Path(root).glob("cu*/include"), reverse=True)
    found = [str(folder) for folder in found if (folder / "cuda_runtime_api.h").exists()]
    if not found:
        raise SystemExit(
            "vpool needs CUDA's headers to build: pip install nvidia-cuda-runtime nvidia-cuda-crt, "
            "or set CUDA_HOME to a toolkit"
        )
    return found[:1]


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
        language="c++" if cuda else "c",
        include_dirs=cuda_include_dirs() if cuda else [],
        extra_compile_args=COMPILE_ARGS,
        extra_link_args=SANITIZE,
    )


# setuptools keeps what it once built: a removed module would stay in the next wheel.
def drop_removed():
    kept = {f"{name}." for names in MODULES.values() for name in names}
    for built in (ROOT / "build").glob("lib*/vpool/_*/*.so"):
        if not any(built.name.startswith(name) for name in kept):
            built.unlink()


drop_removed()
setup(
    ext_modules=cythonize(
        [extension(layer, name) for layer, names in MODULES.items() for name in names],
        include_path=["."],
        build_dir=str(GENERATED.relative_to(ROOT)),
        annotate=bool(os.environ.get("VPOOL_ANNOTATE")),
        compiler_directives=DIRECTIVES,
        nthreads=os.cpu_count() or 1,
    ),
    options={"build_ext": {"parallel": os.cpu_count() or 1}},
)
