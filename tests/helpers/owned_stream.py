"""Simulated streams that objects own."""


class Stream:
    """A stream object as a framework has it: the stream lives as long as this does."""

    def __init__(self, driver):
        self.driver = driver
        self.handle = driver.create_stream()

    def __del__(self):
        self.driver.destroy_stream(self.handle)
