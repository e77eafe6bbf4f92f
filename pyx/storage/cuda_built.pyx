"""Which CUDA the CUDA sources were built for.

A module of its own, without cuda.bindings: it can be imported whatever CUDA is there, as theirs cannot.
"""

cdef extern from "cuda.h":
    const int CUDA_VERSION

CUDA_MAJOR = CUDA_VERSION // 1000
