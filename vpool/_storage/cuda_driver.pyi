from vpool._storage.driver import Driver

class CudaDriver(Driver):
    def __new__(cls) -> CudaDriver: ...
