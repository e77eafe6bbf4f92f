"""As much of PyTorch as its allocator meets: headers to compile against, and a module that notes what it is given."""

import contextlib
import ctypes
import shutil
import subprocess
import types
from pathlib import Path

EXCEPTION = """
#pragma once
#include <cstdint>
#include <exception>
#include <string>
namespace c10 {
struct SourceLocation { const char* function; const char* file; std::uint32_t line; };
class Error : public std::exception {
public:
    Error(SourceLocation, std::string text) : text_(text) {}
    const char* what() const noexcept override { return text_.c_str(); }
private:
    std::string text_;
};
class OutOfMemoryError : public Error { public: using Error::Error; };
}
"""


def compiler():
    return shutil.which("c++") or shutil.which("g++")


def compiled(source, path, *options):
    subprocess.run([compiler(), "-shared", "-fPIC", "-std=c++20", *options, source, "-o", path], check=True)
    return path


def installed(folder):
    """The files of a PyTorch, and the library that catches what its allocator throws."""
    header = folder / "torch" / "include" / "c10" / "util" / "Exception.h"
    header.parent.mkdir(parents=True)
    header.write_text(EXCEPTION)
    (folder / "torch" / "lib").mkdir()
    (folder / "empty.cpp").write_text("")
    compiled(folder / "empty.cpp", folder / "torch" / "lib" / "libc10.so")
    source = Path(__file__).with_name("torch_catcher.cpp")
    return ctypes.CDLL(str(compiled(source, folder / "catcher.so", "-I", folder / "torch" / "include")))


class Allocator:
    """What PyTorch makes of two functions."""

    def __init__(self, *functions):
        self.functions = functions
        self.hooks = {}

    def __getattr__(self, name):
        if not name.startswith("set_"):
            raise AttributeError(name)
        return lambda address: self.hooks.__setitem__(name, address)


def torch_of(folder):
    """The module; `torch.current` is the id and the handle of the stream that is current."""
    torch = types.ModuleType("torch")
    torch.__file__ = str(folder / "torch" / "__init__.py")
    torch.__version__ = "0.0"
    torch.current = (0, 0)
    torch.devices = []
    torch.allocator = None

    def change(allocator):
        torch.allocator = allocator

    @contextlib.contextmanager
    def device(ordinal):
        torch.devices.append(ordinal)
        yield

    torch._C = types.SimpleNamespace(
        _cuda_customAllocator=Allocator,
        _cuda_changeCurrentAllocator=change,
        _cuda_getCurrentStream=lambda device: (torch.current[0], device, 1),
        _cuda_getCurrentRawStream=lambda device: torch.current[1],
        _GLIBCXX_USE_CXX11_ABI=True,
    )
    torch.cuda = types.SimpleNamespace(
        MemPool=lambda allocator, **options: (allocator, options),
        device=device,
        current_device=lambda: 0,
        is_initialized=lambda: False,
        memory=types.SimpleNamespace(),
        _utils=types.SimpleNamespace(_get_device_index=lambda device, optional: 0 if device is None else device),
    )
    return torch
