"""Variants of trace formats, as releases and users' tools differ."""

import json

import pytest

import vpool
from tests.helpers.samples import events_of, live_at_end, load, noted

HEADER = "Thread,Time,Action,Pointer,Size,Stream\n"
PLAIN = [(1, 100), (2, 50), -1]


def refused(text, *words, device=None):
    with pytest.raises(vpool.FormatError) as caught:
        load(text, device)
    for word in words:
        assert word in str(caught.value)


class TestRmm:
    @pytest.mark.parametrize(
        "text",
        [
            f"{HEADER}7,12:00:00.000001,allocate,0x7f00,100,0\n7,12:00:00.000002,allocate,0x7f80,50,0x5\n"
            "7,12:00:00.000003,free,0x7f00,100,0\n",
            # Without threads, colons before microseconds, addresses without 0x.
            "Time,Action,Pointer,Size,Stream\n12:00:00:000001,allocate,7f00,100,0\n12:00:00:000002,allocate,7f80,50,5\n"
            "12:00:00:000003,free,7f00,100,0\n",
            # Seconds, and the word that the guide has for a free.
            f"{HEADER}140,1634567890.123456,allocate,0x7F00,100,0x0\n140,1634567890.123457,allocate,0x7F80,50,0x5\n"
            "140,1634567890.123458,deallocate,0x7F00,100,0x0\n",
            # Ends of lines of another system, a mark of the encoding, blanks, an empty line, a comment.
            f"\ufeff{HEADER}# begin\n7, 12:00:00.1, allocate, 0x7f00, 100, 0\n\n7,12:00:00.2,allocate,0x7f80,50,0x5\n"
            "7,12:00:00.3,free,0x7f00,100,0\n".replace("\n", "\r\n"),
            # Columns in another order, and one more.
            "Size,Pointer,Action,Stream,Time,Device Name\n100,0x7f00,allocate,0,12:00:00,gpu\n"
            "50,0x7f80,allocate,0x5,12:00:00,gpu\n100,0x7f00,free,0,12:00:00,gpu\n",
            # No streams and no times.
            "Action,Pointer,Size\nallocate,0x7f00,100\nallocate,0x7f80,50\nfree,0x7f00,100\n",
            # The beginning is not there.
            "7,12:00:00.000001,allocate,0x7f00,100,0\n7,12:00:00.000002,allocate,0x7f80,50,0x5\n"
            "7,12:00:00.000003,free,0x7f00,100,0\n",
            "12:00:00.000001,allocate,0x7f00,100,0\n12:00:00.000002,allocate,0x7f80,50,0x5\n"
            "12:00:00.000003,free,0x7f00,100,0\n",
            # Quotes, and dates.
            '"Thread","Time","Action","Pointer","Size","Stream"\n"7","2024-05-31 23:59:59","allocate","0x7f00",'
            '"100","0"\n"7","2024-05-31T23:59:59.5Z","allocate","0x7f80","50","5"\n'
            '"7","2024-06-01 00:00:00","free","0x7f00","100","0"\n',
        ],
    )
    def test_headers_and_columns(self, text):
        trace = load(text)
        assert events_of(trace) == PLAIN
        assert trace.figures["rows"] == {"allocate": 2, "free": 1}
        assert (trace.t_us >= 0).all()

    @pytest.mark.parametrize(
        "rest",
        ["e00,100,0", "00.000001,allocate,0x7e00,100,0", ",12:00:00.0,allocate,0x7e00,1", "0", "free,0x7e00,5,0"],
    )
    @pytest.mark.parametrize("header", ["", HEADER])
    def test_a_file_that_begins_in_the_middle_of_a_row(self, rest, header):
        """The other rows tell what the columns are, not the rest of that one."""
        rows = ("allocate,0x7f00,100,0", "allocate,0x7f80,50,0x5", "free,0x7f00,100,0")
        trace = load(f"{rest}\n{header}" + "".join(f"7,12:00:00.{n},{row}\n" for n, row in enumerate(rows)))
        assert events_of(trace) == PLAIN
        assert trace.t_us.tolist() == [0, 100_000, 200_000]
        assert noted(trace, "line 1", "left out")

    def test_one_row_without_a_header(self):
        assert events_of(load("7,12:00:00.0,allocate,0x7f00,100,0\n")) == [(1, 100)]

    def test_dates_are_no_midnight(self):
        rows = ("2024-02-28 23:00:00,allocate", "2024-03-01 01:00:00.25,free")
        trace = load(HEADER + "".join(f"1,{row},0x7f00,9,0\n" for row in rows))
        assert trace.t_us.tolist() == [0, 26 * 3_600_000_000 + 250_000]
        assert not noted(trace, "midnight")

    def test_a_header_twice(self):
        row = "1,12:00:00.0,allocate,0x100,9,0\n"
        trace = load(HEADER + row + HEADER + row.replace("0x100", "0x200"))
        assert events_of(trace) == [(1, 9), (2, 9)]
        assert noted(trace, "2 headers")

    @pytest.mark.parametrize("pointer", ["", "(nil)", "0x0", "0", "(null)"])
    def test_failures(self, pointer):
        trace = load(f"{HEADER}1,12:00:00.0,allocate failure,{pointer},70,0\n1,12:00:00.1,allocate,0x100,9,0\n")
        assert events_of(trace) == [(1, 9)]
        assert trace.failures.tolist() == [[0, 70]]
        assert noted(trace, "1 request failed", "70 bytes")
        assert noted(trace, "line 2")

    def test_no_address_without_bytes_is_no_failure(self):
        trace = load(
            f"{HEADER}1,12:00:00.0,allocate,(nil),0,0\n1,12:00:00.0,allocate,0x0,0,0\n1,12:00:00.0,free,(nil),0,0\n"
        )
        assert events_of(trace) == [(1, 0), (2, 0), -1]
        assert len(trace.failures) == 0

    def test_midnight(self):
        times = ["23:59:59.999999", "00:00:00.000001", "23:59:59.999998", "00:00:00.000002", "12:00:00", "11:59:59.5"]
        rows = [f"1,{time},allocate,{hex(256 * n + 256)},1,0\n" for n, time in enumerate(times)]
        trace = load(HEADER + "".join(rows))
        assert trace.t_us.tolist() == [0, 2, -1, 3, 43_200_000_001, 43_199_500_001]
        assert noted(trace, "midnight 1 time")
        assert noted(trace, "the clock goes back 2 times")
        assert load(HEADER + 2 * ("1,22:00:00,allocate,0x1,1,0\n1,03:00:00,free,0x1,1,0\n")).t_us.tolist() == [
            hours * 3_600_000_000 for hours in (0, 5, 24, 29)
        ]

    def test_2019_with_devices(self):
        text = (
            "Event Type,Device ID,Address,Stream,Size (bytes),Free Memory,Total Memory,Current Allocs,Start,End,"
            "Elapsed,Location\n"
            "Alloc,0,0x100,0,64,0,0,1,41.5,41.6,0.1,/a.cu:85\n"
            "Alloc,1,0x100,0,65,0,0,1,41.6,41.7,0.1,/a.cu:85\n"
            "Free,1,0x100,0,0,0,0,1,41.7,41.8,0.1,/a.cu:85\n"
            "Realloc,1,0x100,0,0,0,0,1,41.8,41.9,0.1,/a.cu:85\n"
        )
        trace = load(text)
        assert events_of(trace) == [(1, 65), -1]
        assert trace.t_us.tolist() == [0, 100_000]
        assert noted(trace, "device 1", "not 0")
        assert noted(trace, "1 row", "realloc", "line 5")
        assert events_of(load(text, 0)) == events_of(load(text, "0")) == [(1, 64)]
        refused(text, "device 5", "0, 1", device=5)

    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            ("1,12:00:00.0,allocate,0x100,-9,0", "-9"),
            ("1,12:00:00.0,allocate,0x100,9.5,0", "9.5"),
            ("1,12:00:00.0,allocate,0x100,NaN,0", "NaN"),
            ("1,12:00:00.0,allocate,0x100,18446744073709551616,0", "line 2"),
            ("1,12:00:00.0,allocate failure,0x100,18446744073709551616,0", "line 2"),
            ("1,12:00:00.0,allocate,0x11112222333344445,9,0", "no address"),
            ("1,12:00:00.0,allocate,there,9,0", "no address"),
            ("1,12:00:00.0,allocate,0x100,9", "5 columns"),
            ("1,25:00:00.0,allocate,0x100,9,0", "time of day"),
            ("1,soon,allocate,0x100,9,0", "soon"),
            ("1,nan,allocate,0x100,9,0", "time"),
            ("1,2024-13-01 12:00:00,allocate,0x100,9,0", "month"),
            ("1,1e300,allocate,0x100,9,0", "time"),
            ("1,12:00:00.0,allocate,0x100,9,\xff", "line 2"),
            ("1,12:00:00.0,allocate,0x100," + "9" * 5000 + ",0", "line 2"),
        ],
    )
    def test_rows_that_are_damaged(self, row, reason):
        refused(f"{HEADER}{row}\n1,12:00:00.0,allocate,0x200,9,0\n", "line 2", reason)

    def test_more_streams_than_a_trace_has(self):
        rows = [f"1,12:00:00.0,allocate,{hex(n)},1,{hex(n)}\n" for n in range(1, (1 << 16) + 2)]
        refused(HEADER + "".join(rows), "line 65538", "streams")


def memory(ts, nbytes, address=None, kind=1, device=0, **more):
    told = {"Device Type": kind, "Device Id": device, "Bytes": nbytes, **more}
    if address is not None:
        told["Addr"] = address
    return {"ph": "i", "name": "[memory]", "ts": ts, "args": told}


class TestKineto:
    def test_times_order_the_events(self):
        events = [memory(30.5, -100, 1), memory(10.25, 100, 1), memory(20, 50, 2), {"ph": "X", "name": "aten::add"}]
        trace = load(json.dumps({"traceEvents": events}))
        assert events_of(trace) == PLAIN
        assert trace.t_us.tolist() == [0, 10, 20]
        assert noted(trace, "sorted")

    def test_equal_times_keep_the_order_of_the_file(self):
        events = [memory(1, 100, 1), memory(1, 50, 2), memory(1, -100, 1), memory(1, 70, 1)]
        trace = load(json.dumps({"traceEvents": events}))
        assert events_of(trace) == [*PLAIN, (3, 70)]
        assert not noted(trace, "sorted")

    def test_an_array_of_events_without_its_end(self):
        text = json.dumps([{"ph": "M", "name": "process"}, memory(1, 100, 1), memory(2, 50, 2), memory(3, -100, 1)])
        assert events_of(load(text)) == PLAIN
        trace = load(text[:-1] + ",\n")
        assert events_of(trace) == PLAIN
        assert noted(trace, "ends at character")
        assert events_of(load(text[:-1] + ",]")) == PLAIN

    def test_releases_without_addresses(self):
        trace = load(json.dumps({"traceEvents": [memory(1, 100), memory(2, 50), memory(3, -100), memory(4, -7)]}))
        assert events_of(trace) == PLAIN
        assert noted(trace, "4 memory events without an address")
        assert noted(trace, "1 free", "left out")

    def test_devices(self):
        events = [
            memory(1, 9, 1, 0, -1),
            memory(1, 100, 1),
            memory(2, 5, 1, 1, 3),
            memory(2, 50, 2),
            memory(3, -100, 1),
        ]
        text = json.dumps({"traceEvents": [*events, memory(4, -9, 1, 0, -1), memory(5, 9, 1, 0, -1)]})
        assert events_of(load(text)) == PLAIN
        assert noted(load(text), "device 0", "cpu", "3")
        assert events_of(load(text, 3)) == [(1, 5)]
        assert events_of(load(text, "cpu")) == [(1, 9), -1, (2, 9)]
        refused(text, "device 1", device=1)

    def test_memory_of_the_host_alone_is_not_read_unasked(self):
        text = json.dumps({"traceEvents": [memory(1, 9, 1, 0, -1)]})
        assert len(load(text)) == 0
        assert noted(load(text), "cpu")
        assert len(load(text, "cpu")) == 1

    def test_events_without_device_are_of_the_first(self):
        assert events_of(load('{"traceEvents": [{"name": "[memory]", "ts": 1, "args": {"Bytes": 8, "Addr": 1}}]}')) == [
            (1, 8)
        ]

    def test_steps_and_failures(self):
        steps = [{"ph": "X", "name": f"ProfilerStep#{n}", "ts": 10 * n, "dur": 9} for n in (1, 2)]
        events = [*steps, {**steps[0], "ts": 12}, memory(11, 100, 1), {**memory(15, 77), "name": "[OutOfMemory]"}]
        trace = load(json.dumps({"traceEvents": events}))
        assert trace.marks_us.tolist() == [-1, 9]
        assert trace.failures.tolist() == [[1, 77]]

    def test_no_memory_events(self):
        trace = load(
            '{"schemaVersion": 1, "traceEvents": [{"ph": "X", "name": "aten::add", "ts": 1}], "traceName": "x"}'
        )
        assert len(trace) == 0
        assert noted(trace, "profile_memory")

    @pytest.mark.parametrize(
        "event",
        [
            {"name": "[memory]", "ts": 1},
            {"name": "[memory]", "ts": 1, "args": {}},
            {"name": "[memory]", "args": {"Bytes": 1}},
            {"name": "[memory]", "ts": "soon", "args": {"Bytes": 1}},
            {"name": "[memory]", "ts": float("nan"), "args": {"Bytes": 1}},
            memory(1, 1.5, 1),
            memory(1, 2**63, 1),
            memory(1, 1, -1),
            memory(1, 1, 2**64),
            memory(1, True, 1),
            {"ph": "X", "name": "ProfilerStep#1", "ts": float("nan")},
            {"ph": "X", "name": "ProfilerStep#1", "ts": 1e300},
            memory(1, [], 1),
            memory(1, 1, 1, "gpu"),
            17,
        ],
    )
    def test_damaged_events(self, event):
        refused(json.dumps({"traceEvents": [memory(1, 100, 1), event, memory(1, 100, 2)]}), "character", "event 1")


class TestTimeline:
    def test_rows(self):
        rows = [
            [-1, 1, 100, 7],
            [5000, 2, 50, 0],
            [6000, 3, -100, 7],
            [6000, 3, 100, 3],
            [9000, 4, -100, 3],
            [9000, 4, -1, 3],
        ]
        trace = load(json.dumps(rows))
        assert events_of(trace) == PLAIN
        assert trace.t_us.tolist() == [0, 0, 4]
        assert noted(trace, "1 free", "left out")
        assert noted(trace, "1 row without a time")
        assert noted(trace, "no addresses")

    def test_totals_are_refused_with_advice(self):
        totals = [[1, 2, 3, 4, 5], [[0] * 9] * 5]
        refused(json.dumps(totals), "totals", ".raw.json.gz")
        refused(json.dumps([[1], [[0] * 9]]), "totals")

    @pytest.mark.parametrize(
        "row",
        [
            [1, 2, 3],
            [1, 2, 3, 4, 5],
            [1, 9, 3, 4],
            [1, 2, -3, 4],
            [1, 2, 2**63, 4],
            ["a", 2, 3, 4],
            [2**70, 2, 3, 4],
            {},
            5,
        ],
    )
    def test_damaged_rows(self, row):
        refused(json.dumps([[1, 2, 3, 4], row, [1, 2, 3, 4]]), "row 1")


class TestMinimalloc:
    @pytest.mark.parametrize(
        "text",
        [
            "id,lower,upper,size\na,0,4,100\nb,2,9,50\n",
            "size,upper,id,lower\n100,4,a,0\n50,9,b,2\n",
            "buffer_id,start,end,size\r\na,0,3,100\r\nb,2,8,50\r\n",
            "buffer,begin,end,size,alignment,gaps,offset\na,0,3,100,8,1-2 3-3@0:5,0\nb,2,8,50,8,,128\n",
            "id,lower,upper,size\nb,2,9,50\na,0,4,100",
            "# of a compiler\nid,lower,upper,size\n# the first\na,0,4,100\nb,2,9,50\n",
            '"id","lower","upper","size"\n"a","0","4","100"\n"b","2","9","50"\n',
        ],
    )
    def test_columns(self, text):
        trace = load(text)
        assert events_of(trace) == [*PLAIN, -2]
        assert trace.t_us.tolist() == [0, 2, 4, 9]
        assert bool(noted(trace, "1 buffer with gaps")) == ("gaps" in text)
        assert bool(noted(trace, "offsets")) == ("offset" in text)

    def test_what_ends_makes_room_for_what_begins(self):
        trace = load("id,lower,upper,size\na,5,9,100\nb,0,5,50\nc,5,5,70\n")
        assert events_of(trace) == [(1, 50), -1, (2, 100), -2]
        assert noted(trace, "1 buffer that never live")

    @pytest.mark.parametrize(
        "row",
        ["a,5,4,1", "a,0,1,-1", "a,0,1", "a,0,1,2,3", "a,0,1,x", "a,0,1,1.5", f"a,0,1,{2**63}", f"a,{-(2**63)},1,1"],
    )
    def test_damaged_rows(self, row):
        refused(f"id,lower,upper,size\n{row}\nb,2,9,50\n", "line 2")


class TestUmpire:
    @staticmethod
    def old(event, payload, result=None, uid=1, t=1000):
        record = {"kind": "replay", "uid": uid, "timestamp": t, "event": event, "payload": payload}
        return json.dumps(record if result is None else {**record, "result": result}) + "\n"

    def test_two_records_for_a_call(self):
        text = "# comment\n"
        for pointer, size, t in (("0x10", 100, 1000), ("0x20", 50, 2000)):
            text += self.old("allocate", {"allocator_ref": "0x1", "size": size}, t=t)
            text += self.old("allocate", {"allocator_ref": "0x1", "size": size}, {"memory_ptr": pointer}, t=t)
        text += self.old("deallocate", {"allocator_ref": "0x1", "memory_ptr": "0x10"}, t=5000)
        trace = load(text)
        assert events_of(trace) == PLAIN
        assert trace.t_us.tolist() == [0, 1, 4]
        again = load(text + self.old("deallocate", {"allocator_ref": "0x1", "memory_ptr": "0x10"}, {}, t=6000))
        assert events_of(again) == PLAIN
        assert not noted(again, "left out")

    def test_one_record_for_a_call(self):
        def record(name, pointer, **numbers):
            told = {"allocator_ref": "0x1", "pointer": pointer}
            return (
                json.dumps(
                    {
                        "category": "operation",
                        "name": name,
                        "numeric_args": numbers,
                        "string_args": told,
                        "timestamp": 5,
                    }
                )
                + "\n"
            )

        text = (
            record("allocate", "0x10", size=100)
            + record("named_allocate", "0x20", size=50)
            + record("deallocate", "0x10")
        )
        trace = load('{"category":"statistic","name":"x","tags":{},"timestamp":1}\n' + text)
        assert events_of(trace) == PLAIN

    @pytest.mark.parametrize(
        "rest", ['0x7f"} }', '{"memory_ptr": "0x7f"} }', "a banner", '"payload": { }, "result": {']
    )
    def test_a_file_that_begins_in_the_middle_of_a_line(self, rest):
        text = self.old("allocate", {"size": 100}, {"memory_ptr": "0x10"})
        text += self.old("allocate", {"size": 50}, {"memory_ptr": "0x20"}) + self.old(
            "deallocate", {"memory_ptr": "0x10"}
        )
        trace = load(f"{rest}\n{text}")
        assert events_of(trace) == PLAIN
        assert noted(trace, "1 line", "left out")

    @pytest.mark.parametrize(("begin", "end"), [("[", "]"), ("[\n", "\n]\n")])
    def test_an_array_of_records(self, begin, end):
        records = [
            self.old("allocate", {"size": 100}, {"memory_ptr": "0x10"}),
            self.old("allocate", {"size": 50}, {"memory_ptr": "0x20"}),
            self.old("deallocate", {"memory_ptr": "0x10"}),
        ]
        assert events_of(load(begin + ",\n".join(map(str.strip, records)) + end)) == PLAIN

    def test_a_record_without_arguments(self):
        empty = '{"category":"statistic","name":"x","numeric_args":null,"string_args":null,"timestamp":1}\n'
        assert events_of(load(empty + self.old("allocate", {"size": 9}, {"memory_ptr": "0x10"}))) == [(1, 9)]

    def test_reallocation_and_allocators_and_processes(self):
        text = self.old("allocate", {"allocator_ref": "0x1", "size": 100}, {"memory_ptr": "0x10"})
        text += self.old("allocate", {"allocator_ref": "0x2", "size": 50}, {"memory_ptr": "0x10"}, uid=2)
        text += self.old(
            "reallocate", {"allocator_ref": "0x1", "current_ptr": "0x10", "size": 70}, {"memory_ptr": "0x10"}
        )
        text += self.old(
            "reallocate", {"allocator_ref": "0x1", "current_ptr": "(nil)", "size": 7}, {"memory_ptr": "0x30"}
        )
        text += '{"other": 1}\n'
        trace = load(text)
        assert events_of(trace) == [*PLAIN, (3, 70), (4, 7)]
        assert noted(trace, "2 allocators")
        assert noted(trace, "2 reallocations")
        assert noted(trace, "1 line")

    @pytest.mark.parametrize(
        "line",
        [
            '{"kind":"replay","event":"allocate","payload":{"size":1},"result":{}}',
            '{"kind":"replay","event":"allocate","payload":{"size":-1},"result":{"memory_ptr":"0x1"}}',
            '{"kind":"replay","event":"allocate","payload":{"size":1e400},"result":{"memory_ptr":"0x1"}}',
            '{"kind":"replay","event":"allocate","payload":7,"result":{"memory_ptr":"0x1"}}',
            '{"kind":"replay","event":"deallocate","payload":{"memory_ptr":[]}}',
            '{"kind":"replay","event":"deallocate","payload":{"memory_ptr":"0x1"},"timestamp":1e30}',
            '{"kind":"replay","event":',
            "no json",
            '{"a":' * 100_000,
        ],
    )
    def test_damaged_lines(self, line):
        first = self.old("version", {"major": 0})
        refused(f"{first}{line}\n{first}", "line 2")


class TestStalloc:
    def test_lines(self):
        text = "Iteration Index : head\n1 0x10 100 0\nIteration Index : 0\nmicro-batch : F\n1 0x20 50 0x55aa\n"
        trace = load(
            text
            + "module->MLP Layer : F-start\nIteration Index : 1\n0 0x10 100 0\n0 0x99 100 0\nIteration Index : end\n"
        )
        assert events_of(trace) == PLAIN
        assert trace.stream.tolist() == [0, 1, 0]
        assert trace.marks_us.tolist() == [1, 2]
        assert noted(trace, "2 lines", "micro-batch")
        assert noted(trace, "1 free", "left out")

    def test_no_step_and_no_stream(self):
        assert events_of(load("1 0x10 100\n1 0x20 50\n0 0x10 100\n")) == PLAIN

    def test_nothing_at_address_0(self):
        trace = load("1 0 0 0\n1 0 70 0\n1 0x10 5 0\n")
        assert events_of(trace) == [(1, 0), (2, 5)]
        assert trace.failures.tolist() == [[1, 70]]

    @pytest.mark.parametrize("line", ["1 0x10 -5 0", "1 0x10", "1 0x10 5 0 0", "0 there 5 0", f"1 0x10 {2**64} 0"])
    def test_damaged_lines(self, line):
        refused(f"1 0x10 5 0\n{line}\n1 0x20 5 0\n", "line 2")


class TestBfc:
    DUMP = (
        "2024-07-12 14:40:46.0: I tsl/framework/bfc_allocator.cc:1075] Next region of size 40231108608\n"
        "2024-07-12 14:40:46.1: I bfc_allocator.cc:1095] InUse at 7f2e72000000 of size 256 next 1\n"
        "2024-07-12 14:40:46.1: I bfc_allocator.cc:1095] Free  at 7f2e72000100 of size 512 next 2\n"
        "2024-07-12 14:40:46.2: I bfc_allocator.cc:1095] InUse at 7f2e72000300 of size 1280 next 5\n"
    )
    FAILED = (
        "2024-07-12 14:40:45.0: W bfc_allocator.cc:485] Allocator (GPU_0_bfc) ran out of memory trying to "
        "allocate 2.00GiB (rounded to 2147483904)requested by op Mul\n"
    )

    def test_newer_lines_and_what_stands_around(self):
        trace = load("epoch 1\n" * 20_000 + self.FAILED + "BFCAllocator dump for GPU_0_bfc\n" + self.DUMP + "done\n")
        assert events_of(trace) == [(1, 256), (2, 1280)]
        assert trace.failures.tolist() == [[2, 2147483904]]
        assert trace.figures["largest_free"] == 512
        assert noted(trace, "1 picture", "2 chunks in use")

    def test_dumps_after_one_another(self):
        later = (
            self.DUMP.replace("Free  at 7f2e72000100", "InUse at 7f2e72000100")
            .replace("size 1280", "size 2560")
            .replace(":46.", ":48.")
        )
        trace = load(self.DUMP + self.FAILED.replace(" (rounded to 2147483904)", "") + later)
        assert events_of(trace) == [(1, 256), (2, 1280), -2, (3, 512), (4, 2560)]
        assert trace.t_us.tolist() == [0, 0, 2_000_000, 2_000_000, 2_000_000]
        assert trace.failures.tolist() == [[5, 2 << 30]]

    def test_allocators(self):
        other = (
            self.FAILED.replace("GPU_0", "GPU_1")
            + "Chunk at 0x7f of size 5\nChunk at 0x9f of size 6\nChunk at 0xaf of size 7\n"
        )
        trace = load(self.FAILED + self.DUMP + other)
        assert events_of(trace) == [(1, 5), (2, 6), (3, 7)]
        assert noted(trace, "GPU_1_bfc", "not GPU_0_bfc")
        assert live_at_end(load(self.FAILED + self.DUMP + other, "GPU_0_bfc")) == 2

    def test_units_beyond_terabytes(self):
        trace = load(self.FAILED.replace("2.00GiB (rounded to 2147483904)", "1.50PiB") + self.DUMP)
        assert trace.failures.tolist() == [[2, 3 << 49]]

    def test_sizes_out_of_range(self):
        refused("Chunk at 0x7f of size 9999999999999999999999\n", "none of")
        refused(f"Chunk at 0x7f of size 5\nChunk at 0x8f of size {2**63}\n", "event 1")

    @pytest.mark.parametrize("size", ["9999999999999999999EiB", "9.00EiB (rounded to 9999999999999999999)"])
    def test_a_failed_request_out_of_range(self, size):
        failed = self.FAILED.replace("2.00GiB (rounded to 2147483904)", size)
        refused("nothing\n" + failed + self.DUMP, "line 2")
        refused(self.DUMP + failed, f"line {self.DUMP.count(chr(10)) + 1}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "hello\n",
        "{}",
        "[]",
        "5",
        '"text"',
        "{",
        "[",
        '{"a": 1}',
        "[[]]",
        "[5]",
        "op,id,bytes\n",
        "<html>",
        "a,b\n1,2\n",
        # Lines that end as of old, all of which would be the header.
        "Thread,Time,Action,Pointer,Size,Stream\r1,12:00:00.000001,allocate,0x7f00,100,0\r",
    ],
)
def test_what_is_none_of_them(text):
    refused(text)
