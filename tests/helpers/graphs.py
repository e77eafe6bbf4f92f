"""Streams and graphs of a real device, by CUDA's own calls."""

import time

# The names of CUDA's capture modes.
MODES = {
    "global": "cudaStreamCaptureModeGlobal",
    "thread_local": "cudaStreamCaptureModeThreadLocal",
    "relaxed": "cudaStreamCaptureModeRelaxed",
}
NON_BLOCKING = 1

try:
    from cuda.bindings import runtime as cudart
except ImportError:  # only what has a device uses it
    cudart = None


def ok(result):
    """The values of a runtime call, which must succeed."""
    status, *values = result
    assert int(status) == 0, status
    return values[0] if len(values) == 1 else values


class Stream:
    """A stream object as any framework's, so that the pool knows while it lives."""

    def __init__(self, flags=NON_BLOCKING):
        self.handle = int(ok(cudart.cudaStreamCreateWithFlags(flags)))

    def __cuda_stream__(self):
        return (0, self.handle)

    def synchronize(self):
        ok(cudart.cudaStreamSynchronize(self.handle))

    def __del__(self):
        cudart.cudaStreamDestroy(self.handle)


class Graph:
    """A capture, and the graph it gives."""

    def __init__(self, stream=None, mode="global", *, spoil=False):
        self.stream = stream or Stream()
        self.mode = getattr(cudart.cudaStreamCaptureMode, MODES[mode])
        self.spoil = spoil
        self.graph = self.launchable = None

    def __enter__(self):
        ok(cudart.cudaStreamBeginCapture(self.stream.handle, self.mode))
        self.id = int(ok(cudart.cudaStreamGetCaptureInfo(self.stream.handle))[1])
        return self

    def __exit__(self, kind, error, trace):
        if self.spoil:
            cudart.cudaStreamSynchronize(self.stream.handle)
        status, graph = cudart.cudaStreamEndCapture(self.stream.handle)
        cudart.cudaGetLastError()
        if kind is None:
            assert (int(status) == 0) == (not self.spoil), status
        if int(status) == 0:
            self.graph = graph
            self.launchable = ok(cudart.cudaGraphInstantiate(graph, 0))

    def launch(self, stream=None):
        ok(cudart.cudaGraphLaunch(self.launchable, (stream or self.stream).handle))

    def destroy(self):
        ok(cudart.cudaGraphExecDestroy(self.launchable))
        ok(cudart.cudaGraphDestroy(self.graph))
        time.sleep(0.2)  # the driver tells from a thread of its own
