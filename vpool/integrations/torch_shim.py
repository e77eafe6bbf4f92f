"""The functions that PyTorch calls, compiled against the PyTorch that is installed."""

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["load"]

_SOURCE = Path(__file__).with_suffix(".cpp")


def load(torch):
    """The library of these functions, compiled when it is first wanted.

    It is kept in the folder ``vpool`` of ``XDG_CACHE_HOME``, or of ``~/.cache``, for each version of PyTorch.

    Raises
    ------
    RuntimeError
        Where there is no C++ compiler, or it fails; the message has what it said.
    """
    root = Path(torch.__file__).parent
    source = _SOURCE.read_bytes()
    key = hashlib.sha256(source + str(root).encode() + torch.__version__.encode()).hexdigest()[:16]
    name = f"torch-{torch.__version__}-{key}.so"
    for folder in _folders():
        path = folder / name
        with contextlib.suppress(OSError):
            if not path.exists():
                folder.mkdir(parents=True, exist_ok=True)
                _compile(torch, root, path)
            return ctypes.CDLL(str(path))
    raise RuntimeError("vpool's functions for PyTorch could not be written anywhere: set XDG_CACHE_HOME")


def _folders():
    """Where the library may be; the last one is new each time."""
    base = os.environ.get("XDG_CACHE_HOME")
    yield (Path(base) if base else Path.home() / ".cache") / "vpool"
    yield Path(tempfile.mkdtemp(prefix="vpool-"))


def _compile(torch, root, path):
    wanted = os.environ.get("CXX")
    compiler = wanted or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise RuntimeError(
            "PyTorch can only be told that memory is out by functions that are compiled for it, and there is no C++"
            " compiler: install one, or use vpool.integrations.torch.mem_pool, which needs none"
        )
    abi = int(getattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", True))
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        done = subprocess.run(
            [
                *(compiler.split() if wanted else [compiler]),
                *("-O2", "-std=c++20", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-I", root / "include"),
                *(_SOURCE, "-o", made, "-L", root / "lib", "-lc10"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if done.returncode:
            raise RuntimeError(f"vpool's functions for PyTorch do not compile:\n{done.stdout}")
        made.replace(path)  # at once, since other processes may look
