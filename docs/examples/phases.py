"""Who takes memory, and when: the phases of a training step, with tags, a recording and a report.

On ordinary memory, so that it runs anywhere.  In a program of yours leave out ``source="host"``.
"""

import sys

import vpool
from vpool.sizes import format_bytes

LAYERS = [3 << 20, 5 << 20, 2 << 20, 7 << 20]


def step(pool, weights):
    """One step: activations grow forwards and go backwards, each with a gradient of its weights."""
    with pool.measure() as forward, vpool.tag("activations"):
        activations = [pool.empty(2 * nbytes) for nbytes in LAYERS]
    with pool.measure() as backward, vpool.tag("gradients"):
        gradients = []
        while activations:
            gradients.append(pool.empty(weights[len(activations) - 1].requested))
            activations.pop()
    return forward, backward


def main(path):
    pool = vpool.Pool(vpool.Dynamic(initial="64MiB", limit="256MiB"), source="host", name="training")
    with pool.record(sites=True) as recording:
        with vpool.tag("weights"):
            weights = [pool.empty(nbytes) for nbytes in LAYERS]
        for _ in range(3):
            recording.mark()
            forward, backward = step(pool, weights)
    print("forward ", format_bytes(forward.peak_allocated_bytes))
    print("backward", format_bytes(backward.peak_allocated_bytes))
    for row in pool.inspect().tags:
        print(f"{row['tag']:12} {format_bytes(row['peak_bytes'])} at most")
    recording.save(path)
    print(f"recorded {len(recording)} events: vpool view {path} -o page.html")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "phases.npz")
