"""A server with workers on streams of their own, a cache with a limit, and an answer where memory is short.

On ordinary memory, to run anywhere.  In a program of yours leave out ``source="host"`` and pass stream objects.
"""

import threading

import vpool


class Cache:
    """Blocks that can be made again: the oldest go when the cache reaches its limit, or the pool needs memory."""

    def __init__(self, pool, limit):
        self._pool = pool
        self._blocks = {}
        self._lock = threading.Lock()
        pool.limit("cache", limit)
        pool.on_pressure(self.shrink)

    def put(self, key, nbytes):
        with vpool.tag("cache"):
            block = self._pool.empty(nbytes)  # not under the lock: this may call `shrink`
        with self._lock:
            self._blocks[key] = block

    def shrink(self, nbytes):
        with self._lock:
            while self._blocks and nbytes > 0:
                nbytes -= self._blocks.pop(next(iter(self._blocks))).nbytes

    def __len__(self):
        return len(self._blocks)


def serve(pool, stream, requests, answers):
    """A worker: its requests one by one, on its own stream."""
    for nbytes in requests:
        if pool.memory_info().available_bytes < nbytes:  # before the cache is asked to give way in vain
            answers.append("busy")
            continue
        try:
            with vpool.tag("request"), pool.empty(nbytes, stream):
                answers.append("done")
        except vpool.OutOfMemoryError:  # free bytes may lie in pieces; the pool is as it was, and the server goes on
            answers.append("busy")


def main():
    strategy = vpool.Dynamic(initial="32MiB", growth="16MiB", limit="64MiB")
    with vpool.Pool(strategy, source="host", name="server") as pool:
        cache = Cache(pool, "40MiB")
        for key in range(14):
            cache.put(key, 4 << 20)
        answers = []
        workers = [
            threading.Thread(target=serve, args=(pool, 0x7F00 + 16 * number, [6 << 20, 1 << 20, 1 << 30], answers))
            for number in range(2)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        print(f"{answers.count('done')} done, {answers.count('busy')} busy")
        print(f"{len(cache)} of 14 blocks are left in the cache")
        pool.check()
        cache.shrink(1 << 40)


if __name__ == "__main__":
    main()
