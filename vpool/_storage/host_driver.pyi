from vpool._storage.driver import Driver

class HostDriver(Driver):
    def __new__(cls) -> HostDriver: ...
