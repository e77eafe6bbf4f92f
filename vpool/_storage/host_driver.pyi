from vpool._storage.simulated_streams import StreamedDriver

class HostDriver(StreamedDriver):
    def __new__(cls) -> HostDriver: ...
