"""How a module on top of vpool is built: no CUDA headers, and nothing to link with."""

from Cython.Build import cythonize
from setuptools import Extension, setup

import vpool

INCLUDE = [vpool.get_include()]

setup(
    name="downstream",
    ext_modules=[
        *cythonize([Extension("frames", ["frames.pyx"])], include_path=INCLUDE),
        Extension("scratch", ["scratch.cpp"], include_dirs=INCLUDE, extra_compile_args=["-Wall", "-Wextra", "-Werror"]),
    ],
)
