"""The program that runs compiled peers (peer.cpp), compiled here against the headers that are installed."""

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from vpool.errors import Error

__all__ = ["FLAVOURS", "BuildError", "program"]

FLAVOURS = ("host", "cuda", "rmm", "torch")  # what is compiled in beside the C library's malloc
_FLAGS = ["-std=c++20", "-O3", "-pthread"]
_SOURCES = [Path(__file__).with_name(name) for name in ("peer.cpp", "allocators.h")]
_SECONDS = 600  # a machine that is busy takes minutes for RMM's headers


class BuildError(Error):
    """A peer cannot be built here; the message is one line."""


def program(flavour):
    """The compiled program of a flavour, made on first use and kept in the user's cache.

    Parameters
    ----------
    flavour : str
        One of `FLAVOURS`.

    Returns
    -------
    pathlib.Path

    Raises
    ------
    BuildError
        Where headers, libraries or a compiler are missing, or the compiler refuses; it says which.
    """
    command = [*_compiler(), *_FLAGS, str(_SOURCES[0]), *_arguments(flavour)]
    # Packages may be upgraded in place: what they were is part of the name.
    state = [*(path.read_text(encoding="utf-8") for path in _SOURCES), *command, *map(_state, command)]
    path = _cache() / hashlib.sha256("\0".join(state).encode()).hexdigest()[:24] / "peer"
    if not path.exists():
        _compile(command, path)
    return path


def _compile(command, path):
    made = path.with_name(f"peer-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [*command, "-o", str(made)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
        if done.returncode:
            raise BuildError(f"cannot be built: {_first_error(done.stderr)}")
        os.replace(made, path)
    except subprocess.TimeoutExpired:
        raise BuildError(f"cannot be built: the compiler took more than {_SECONDS} seconds") from None
    except OSError as error:
        raise BuildError(f"cannot be built: {error}") from None
    finally:
        made.unlink(missing_ok=True)


def _first_error(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line or "cannot find" in line or "undefined" in line]
    return (errors or lines or ["the compiler failed"])[0]


def _compiler():
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        return chosen
    for name in ("g++", "c++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise BuildError("cannot be built: no C++ compiler is here")


def _cache():
    root = os.environ.get("XDG_CACHE_HOME")
    return Path(root if root and os.path.isabs(root) else Path.home() / ".cache") / "vpool" / "bench"


def _state(argument):
    """When a library that is linked was installed."""
    try:
        return str(os.stat(argument).st_mtime_ns) if ".so" in argument else ""
    except OSError:
        return ""


def _arguments(flavour):
    if flavour == "host":
        return []
    if flavour == "cuda":
        return _cuda()
    return ["-DWITH_RMM", *_rmm()] if flavour == "rmm" else ["-DWITH_TORCH", *_torch()]


def _cuda():
    for root in _cuda_roots():
        libraries = [path for folder in ("lib64", "lib") for path in sorted((root / folder).glob("libcudart.so*"))]
        # Of wheels, the second header is another package's.
        headers = [root / "include" / name for name in ("cuda_runtime_api.h", "crt/host_defines.h")]
        if all(path.exists() for path in headers) and libraries:
            return ["-DWITH_CUDA", f"-I{root / 'include'}", *_linked(libraries[-1])]
    raise BuildError("cannot be built: no CUDA headers and runtime are here (nvidia-cuda-runtime, or a toolkit)")


def _cuda_roots():
    """NVIDIA's wheels first: they are what other wheels load."""
    for folder in _folders("nvidia"):
        yield from sorted(folder.glob("cu[0-9]*"), reverse=True)
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if root:
            yield Path(root)


def _rmm():
    found = ["-DLIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE"]
    for package, library in (("librmm", "librmm.so"), ("rapids_logger", "librapids_logger.so")):
        folder = next(iter(_folders(package)), None)
        libraries = [] if folder is None else sorted(folder.glob(f"lib*/{library}"))
        if folder is None or not libraries:
            raise BuildError(f"cannot be built: {package} is not installed as a wheel")
        includes = [folder / "include", folder / "include" / "rapids", folder / "include" / "rapids" / "libcudacxx"]
        found += [*(f"-I{one}" for one in includes if one.is_dir()), *_linked(libraries[-1])]
    return [*found, *_cuda()]


def _torch():
    folder = next(iter(_folders("torch")), None)
    if folder is None:
        raise BuildError("cannot be built: torch is not installed")
    libraries = [folder / "lib" / name for name in ("libc10_cuda.so", "libc10.so")]
    if not all(path.exists() for path in libraries):
        raise BuildError("cannot be built: torch is installed without CUDA")
    # What libc10_cuda needs is found by its own path when it is loaded.
    linked = [argument for path in libraries for argument in _linked(path)]
    return [f"-I{folder / 'include'}", *linked, "-Wl,--allow-shlib-undefined", *_cuda()]


def _linked(library):
    return [str(library), f"-Wl,-rpath,{library.parent}"]


def _folders(package):
    """Where a package is, without importing it."""
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        found = None
    return [Path(one) for one in found.submodule_search_locations or ()] if found else []
