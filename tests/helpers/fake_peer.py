"""A peer that measures nothing: it answers as one of vpool bench's peers does, in the way that its argument says."""

import json
import sys
import time

FIGURES = {
    "trace": {"cold_ns": 900.0, "warm_ns": 500.0, "reserved_bytes": 1 << 30},
    "miss": {"miss_ns": 60_000.0, "hit_ns": 300.0},
    "latency_pair": {"p50_ns": 300.0, "p99_ns": 400.0, "p999_ns": 500.0},
    "latency_random": {"p50_ns": 300.0, "p99_ns": 400.0, "p999_ns": 500.0},
}


def main(way):
    if way == "no device":
        print(json.dumps({"error": "CUDA says no"}), flush=True)
        return
    if way == "dies at once":
        sys.exit("Segmentation fault, as it were")
    print(json.dumps({"ready": "1.0"}), flush=True)
    for number, line in enumerate(sys.stdin):
        name, *numbers = line.split()
        if way == "hangs":
            time.sleep(600)
        if way == "dies":
            sys.exit("it was\nout of luck")
        if way == "babbles":
            print("hello", flush=True)
            continue
        if way == "refuses" or (way == "refuses later" and number > 3):
            print(json.dumps({"error": f"cannot {name}"}), flush=True)
            continue
        figures = FIGURES.get(name, {"ns": 300.0, "per_us": 2.0} if name[:3] in ("own", "one") else {"ns": 300.0})
        print(json.dumps({"elapsed": 300.0 * int(numbers[0 if name == "trace" else -1]), **figures}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
