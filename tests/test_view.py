"""The page of `vpool view`, in a real browser: what it shows is what the reports say."""

import json
import time

import numpy as np
import pytest

import vpool
from tests.helpers.traces import FOLDER, SMALL, made, recorded
from vpool.commands import main
from vpool.moments import moment
from vpool.pages import page_of_snapshot, page_of_trace
from vpool.placing import placed

pytest.importorskip("selenium")
from tests.helpers.browser import Page, browser

ENTER, LEFT, RIGHT, END = "\ue007", "\ue012", "\ue014", "\ue010"


@pytest.fixture(scope="module")
def chrome(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as chrome:
        yield chrome


@pytest.fixture
def opened(chrome, tmp_path):
    """A function that opens the page of a trace or a snapshot; no page may complain or ask for anything."""
    pages = []

    def open_it(what, title="a trace"):
        path = tmp_path / f"{len(pages)}.html"
        text = page_of_snapshot(what, title) if isinstance(what, vpool.Snapshot) else page_of_trace(what, title, "here")
        path.write_text(text, encoding="utf-8")
        pages.append(Page(chrome, path))
        return pages[-1]

    yield open_it
    for page in pages:
        assert page.problems() == []
        assert page.requests() == []


@pytest.fixture(scope="module")
def recording():
    """A small run with tags, sites, steps and segments that come and go, and its pool's snapshot in the middle."""
    random = np.random.default_rng(7)
    pool = vpool.Pool(
        vpool.Dynamic(initial="2MiB", growth="2MiB", limit="64MiB"), source="simulated", name="<b>run</b>"
    )
    held = []
    with pool, pool.record(sites=True) as trace:
        for step in range(12):
            trace.mark()
            with vpool.tag("</script>" if step % 3 else "kv & more"):
                held += [pool.empty(int(size)) for size in random.integers(1000, 900_000, 9)]
            with pool.empty(700_000):
                held = [one for one in held if random.random() < 0.7]
            if step == 6:
                snapshot = pool.snapshot()
        pool.trim()
        del held
    return trace, snapshot


def expect_report(page, report):
    """The page shows a report's figures."""
    shown = page.figures()
    for name in ("reserved", "allocated", "requested", "free"):
        assert shown[name] == getattr(report, f"{name}_bytes"), name
    assert shown["largest free"] == report.largest_free_bytes
    for name, share in (
        ("utilization", report.utilization),
        ("external fragmentation", report.external_fragmentation),
        ("internal fragmentation", report.internal_fragmentation),
    ):
        assert shown[name] == pytest.approx(share, abs=1e-12)
    tiers = [[row.live_blocks, row.live_bytes] for row in report.size_classes]
    assert [row[1:] for row in page.rows("tiers")] == tiers
    tags = {row["tag"] or "": [row["live_blocks"], row["live_bytes"], row["requested_bytes"]] for row in report.tags}
    if any(tags):
        assert {row[0]: row[1:] for row in page.rows("tags")} == {name: row for name, row in tags.items() if row[0]}
    pinned = sorted(
        (row for row in report.segment_rows if row["live_blocks"] and row["free_bytes"]),
        key=lambda row: (-row["free_bytes"], row["live_bytes"]),
    )
    columns = ("nbytes", "free_bytes", "largest_free_bytes", "live_blocks", "live_bytes")
    expected = [[f"{row['address']:#x}", *(row[name] for name in columns)] for row in pinned[:10]]
    assert page.rows("pinned") == expected


def test_figures_are_those_of_the_report_at_any_moment(opened, recording):
    trace, _ = recording
    page = opened(trace)
    assert page.text("#moment-title") == f"After event {trace.peak_event:,}"
    expect_report(page, moment(trace, trace.peak_event).report)
    # What came from the source for an event, or went, is not there after the one before it.
    changed = np.concatenate([trace.details.segments.event - 1, trace.details.segments.event])
    assert len(np.unique(changed)) > 10
    for event in np.unique(np.concatenate([np.linspace(0, len(trace) - 1, 15).astype(int), changed])).tolist():
        if 0 <= event < len(trace):
            page.choose(event)
            expect_report(page, moment(trace, event).report)


def test_the_curve_of_fragmentation_is_of_the_same_moments(opened, recording):
    trace, _ = recording
    page = opened(trace)
    columns = "const {sampleEvent, sampleLargest} = window.vpoolPage.model.columns;"
    events, largest = page.run(f"{columns} return [[...sampleEvent], [...sampleLargest]]")
    assert len(events) == len(trace)
    assert largest == [moment(trace, event).report.largest_free_bytes for event in events]


def test_sites_are_those_of_the_blocks(opened, recording):
    trace, _ = recording
    page = opened(trace)
    snapshot = moment(trace, trace.peak_event)
    sums = {}
    for block in snapshot.blocks[snapshot.blocks["state"] == "live"]:
        row = sums.setdefault(snapshot.sites[block["site"]], [0, 0, 0])
        for place, more in enumerate((1, int(block["nbytes"]), int(block["requested"]))):
            row[place] += more
    assert {row[0]: row[1:] for row in page.rows("sites")} == sums
    assert all("test_view.py:" in name for name in sums)


def test_snapshot(opened, recording):
    _, snapshot = recording
    page = opened(snapshot, "a snapshot")
    expect_report(page, snapshot.report)
    assert page.run("return document.getElementById('moment-controls').hidden")


def test_snapshot_with_memory_that_is_pending(opened):
    with vpool.Pool(source="simulated") as pool:
        driver = pool.source.driver
        streams = [driver.create_stream(), driver.create_stream()]
        blocks = [pool.allocate(1 << 20, stream) for stream in streams for _ in range(3)]
        for ptr in blocks[:2]:
            pool.record_stream(ptr, streams[1])
            pool.deallocate(ptr)
        snapshot = pool.snapshot()
        page = opened(snapshot)
        expect_report(page, snapshot.report)
        assert page.figures()["pending"] == snapshot.report.pending_bytes > 0
        for ptr in blocks[2:]:
            pool.deallocate(ptr)


def test_memory_that_is_mapped_in_pieces(opened):
    """A snapshot and a recording tell the pieces."""
    with vpool.Pool(vpool.Dynamic(initial="8MiB", limit="256MiB"), source="simulated-vmm") as pool:
        held = []
        with pool.record() as trace:
            for size in range(3_000_000, 6_000_000, 100_000):
                held.append(pool.empty(size))
            del held[3:20]
            pool.trim()
            snapshot = pool.snapshot()
            held.append(pool.empty(60_000_000))
            del held[4:12]
        page = opened(snapshot)
        expect_report(page, snapshot.report)
        unmapped = snapshot.blocks["nbytes"][snapshot.blocks["state"] == "unmapped"]
        assert page.figures()["unmapped"] == unmapped.sum() > 0
        assert page.run("return vpoolPage.charts.end * vpoolPage.model.unit") <= snapshot.report.reserved_bytes * 2
        page = opened(trace)
        assert "lie beyond" not in page.text("#notes")
        page.choose(len(trace) - 1)
        shown, report = page.figures(), pool.inspect()
        for name in ("reserved", "free", "allocated", "requested"):
            assert shown[name] == getattr(report, f"{name}_bytes"), name
        held.clear()


def test_memory_that_is_suspended(opened):
    """It counts neither as live nor as free, after each event as in the pool's own report."""
    with vpool.Pool(vpool.Dynamic(initial=0), source="simulated-vmm") as pool, pool.record() as trace:
        held = [pool.allocate(nbytes) for nbytes in (2 << 20, 1 << 20)]
        with vpool.tag("kv"):
            held += [pool.allocate(nbytes) for nbytes in (3 << 20, 4 << 20)]
        pool.suspend(tag="kv")
        pool.deallocate(held.pop(0))
        report = pool.inspect()
    page = opened(trace)
    page.choose(len(trace) - 1)
    shown = page.figures()
    assert shown["unmapped"] == report.suspended_bytes > 0
    for name in ("reserved", "free", "allocated", "requested"):
        assert shown[name] == getattr(report, f"{name}_bytes"), name


def test_blocks_beyond_the_segments_of_a_file(opened, recording):
    trace, _ = recording
    segments = trace.details.segments
    columns = {name: getattr(trace, name) for name in ("op", "id", "bytes", "stream", "t_us")}
    smaller = trace.details._replace(segments=segments._replace(nbytes=segments.nbytes // 64))
    assert "lie beyond the recorded segments" in opened(vpool.Trace(**columns, details=smaller)).text("#notes")
    assert "lie beyond" not in opened(trace).text("#notes")


def test_a_placed_trace_is_what_its_replay_did(opened):
    trace = recorded("two_streams")
    result = vpool.replay(trace)
    page = opened(placed(trace))
    shown, report = page.figures(), result.report
    for name in ("reserved", "allocated", "requested", "free"):
        assert shown[name] == getattr(report, f"{name}_bytes")
    assert "30 steps" in page.text("#about")
    assert page.text("#moment-where").endswith("the most is live")


def test_a_trace_that_does_not_fit(opened):
    whole = recorded("two_streams")
    trace = placed(whole, "dynamic", int(whole.peak_live_bytes * 0.9))
    assert len(trace) < len(whole)
    assert trace.failures[-1].tolist() == [len(trace), int(whole.bytes[len(trace)])]
    page = opened(trace)
    assert "out of memory at event" in page.text("#notes")
    steps = int(np.count_nonzero(whole.marks_us <= whole.t_us[len(trace)]))
    assert len(trace.marks_us) == steps < len(whole.marks_us)


@pytest.mark.parametrize("events", [(), ((1, 0),), ((1, 100),), ((1, 100), -1)])
def test_next_to_nothing(opened, events):
    page = opened(placed(made(*events)))
    assert page.run("return document.documentElement.dataset.ready") == "yes"
    assert page.figures()["requested"] == sum(event[1] for event in events[:1])
    assert "event" in page.text("#about")


def test_numbers_that_a_page_cannot_hold():
    with pytest.raises(ValueError, match=r"from 0 to 2\*\*53: requested has some from 1 to 9007199254740993"):
        page_of_trace(placed(made((1, 1), (2, 2**53 + 1))), "large", "here")


def test_blocks_without_bytes_are_in_no_table(opened):
    """They lie nowhere, so a report has none of them, and they keep no segment."""
    trace = placed(made((1, 0), (2, 100), (3, 0), -2))
    page = opened(trace)
    for event in range(len(trace)):
        page.choose(event)
        expect_report(page, moment(trace, event).report)


def test_names_in_a_file_are_text(opened, recording):
    trace, snapshot = recording
    page = opened(trace, "<img src=x onerror=alert(1)>.npz")
    assert page.text("#title") == "<img src=x onerror=alert(1)>.npz"
    assert page.run("return document.querySelectorAll('img').length") == 0
    assert {row[0] for row in page.rows("tags")} - {""} == {"</script>", "kv & more"}
    assert "<b>run</b>" in opened(snapshot, "{{data}}").text("#about")


def test_an_axis_of_few_events_counts_whole_ones(opened):
    """Each number stands there once."""
    page = opened(placed(made((1, 100), (2, 200), -1)))
    drawn = page.run(
        "const { charts } = window.vpoolPage, drawn = [], context = CanvasRenderingContext2D.prototype;"
        "const before = context.fillText;"
        "context.fillText = function (text, ...rest) {"
        " drawn.push([text, this.textAlign]); before.call(this, text, ...rest); };"
        "try { charts.draw(); } finally { context.fillText = before; }"
        "return drawn.filter(([, align]) => align === 'center').map(([text]) => text)"
    )
    counts = [text for text in drawn if text.isdigit()]
    assert counts == ["0", "1", "2", "3"]


def test_a_long_name_leaves_the_page_its_width(opened):
    with vpool.Pool(source="simulated", name="n" * 500) as pool, vpool.tag("t" * 500):
        held = pool.empty(1000)
        page = opened(pool.snapshot())
        held.close()
    assert page.run("return document.documentElement.scrollWidth <= window.innerWidth")


def test_a_name_that_utf_8_cannot_write(opened, recording):
    assert opened(recording[0], "run\udcff.npz").text("#title") == r"run\udcff.npz"


class TestUse:
    """What a person does with the page."""

    @pytest.fixture
    def page(self, opened, recording):
        return opened(recording[0])

    def keys(self, page, *keys):
        page.run("document.getElementById('stage').focus()")
        page.chrome.switch_to.active_element.send_keys(*keys)

    def event(self, page):
        return int(page.run("return document.documentElement.dataset.event"))

    def test_keys_choose_moments(self, page, recording):
        trace, _ = recording
        peak = trace.peak_event
        self.keys(page, LEFT)
        assert self.event(page) == peak - 1
        expect_report(page, moment(trace, peak - 1).report)
        self.keys(page, RIGHT, RIGHT)
        assert self.event(page) == peak + 1
        self.keys(page, "p")
        assert self.event(page) == peak
        self.keys(page, END)
        assert self.event(page) == len(trace) - 1
        marks = np.searchsorted(trace.t_us, trace.marks_us)
        self.keys(page, "[")
        assert self.event(page) == marks[-1]
        self.keys(page, "[")
        assert self.event(page) == marks[-2]
        self.keys(page, "]")
        assert self.event(page) == marks[-1]

    def test_the_slider_chooses_moments(self, page):
        before = self.event(page)
        page.chrome.find_element("id", "moment").send_keys(LEFT)
        assert self.event(page) == before - 1
        page.chrome.find_element("id", "to-peak").click()
        assert self.event(page) == before

    def test_a_click_chooses_the_moment_under_it(self, page, recording):
        trace, _ = recording
        stage = page.chrome.find_element("id", "stage")
        page.chrome.execute_cdp_cmd("Page.bringToFront", {})
        box = page.run("return window.vpoolPage.charts.layout().map")
        x = box["left"] + box["width"] // 3
        press(page, stage, x, box["top"] + 20)
        assert self.event(page) == pytest.approx(len(trace) / 3, abs=2)

    def test_pointing_at_a_block_tells_of_it(self, page, recording):
        trace, _ = recording
        number = int(np.argmax(np.where(trace.op == 0, trace.bytes, 0)))
        block = int(trace.number[number])
        x, y = page.run(
            "const { charts } = window.vpoolPage, box = charts.boxOf(arguments[0], charts.layout().map);"
            "return [(box.left + box.right) / 2, (box.top + box.bottom) / 2]",
            block,
        )
        page.run("window.vpoolPage.point(arguments[0], arguments[1])", x, y)
        tip = page.text("#tip")
        assert f"{int(trace.bytes[number]):,} B" in tip
        assert f"{int(trace.details.address[number]):#x}" in tip
        assert trace.details.tags[trace.details.tag[number]] in tip
        assert "test_view.py" in tip
        page.run("window.vpoolPage.point(-1, -1)")
        assert page.run("return document.getElementById('tip').hidden")

    def test_zoom_and_back(self, page):
        def view():
            return page.run("return { ...window.vpoolPage.charts.view }")

        whole = view()
        self.keys(page, "+", "+")
        near = view()
        assert near["right"] - near["left"] == pytest.approx((whole["right"] - whole["left"]) / 4)
        self.keys(page, "0")
        assert view() == whole
        page.chrome.find_element("css selector", "#pinned tbody tr button").click()
        assert view()["high"] - view()["low"] < whole["high"]
        page.chrome.find_element("id", "zoom-reset").click()
        assert view() == whole

    def test_axis_colours_and_theme(self, page):
        before = page.run("return document.getElementById('base').toDataURL()")
        for selector in ("#axis option[value=time]", "#colour option[value=life]", "#theme"):
            page.chrome.find_element("css selector", selector).click()
            page.run("window.vpoolPage.charts.draw()")
            after = page.run("return document.getElementById('base').toDataURL()")
            assert after != before, selector
            before = after
        page.chrome.find_element("id", "theme").click()


def press(page, stage, x, y):
    """Press and release the button at a place of an element."""
    place = page.run(
        "const box = arguments[0].getBoundingClientRect(); return [box.left + arguments[1], box.top + arguments[2]]",
        stage, x, y,
    )  # fmt: skip
    for kind in ("mousePressed", "mouseReleased"):
        page.chrome.execute_cdp_cmd(
            "Input.dispatchMouseEvent",
            {"type": kind, "x": place[0], "y": place[1], "button": "left", "clickCount": 1},
        )


def test_half_a_million_events(chrome, tmp_path, capsys):
    """At most 15 MB, built within 20 s; the first map within 3 s, and the tables of a moment within half a second."""
    path = tmp_path / "page.html"
    begun = time.monotonic()
    assert main(["view", str(FOLDER / "llm_generate.npz"), "-o", str(path), "--json"]) == 0
    seconds = time.monotonic() - begun
    assert json.loads(capsys.readouterr().out)["events"] == 540_407
    assert path.stat().st_size < 15e6
    assert seconds < 20
    page = Page(chrome, path)
    assert page.timing("firstMap") < 3000
    trace = recorded("llm_generate")
    for event in (trace.peak_event, 0, 270_000, len(trace) - 1):
        page.choose(event)
        assert page.timing("choose") < 500
        assert page.figures()["requested"] == trace.live_bytes[event]
    assert page.problems() == []


class TestPlacing:
    def test_blocks_that_are_live_at_once_do_not_overlap(self):
        trace = placed(recorded("two_streams"))
        details, live = trace.details, {}
        for event in range(len(trace)):
            number, begin, nbytes = trace.number[event], int(details.address[event]), int(details.allocated[event])
            if trace.op[event]:
                assert live.pop(number) == (begin, begin + nbytes)
                continue
            assert nbytes >= trace.bytes[event]
            if event % 50 == 0:
                assert all(end <= begin or start >= begin + nbytes for start, end in live.values())
            live[number] = begin, begin + nbytes

    def test_the_trace_stays_as_it_is(self):
        trace = made(*SMALL, (9, 0), -9)
        other = placed(trace, "hybrid")
        for name in ("op", "number", "bytes", "stream", "t_us", "marks_us"):
            assert (getattr(other, name) == getattr(trace, name)).all()
        assert other.details.address[-1] == other.details.allocated[-1] == 0

    def test_tags_and_sites_stay(self, recording):
        trace, _ = recording
        other = placed(trace, "dynamic")
        assert (other.details.tag == trace.details.tag).all()
        assert other.details.sites == trace.details.sites


class TestCommand:
    def test_trace_and_snapshot(self, tmp_path, capsys, recording):
        trace, snapshot = recording
        trace.save(tmp_path / "trace.npz")
        snapshot.save(tmp_path / "snapshot.npz")
        for name, kind in (("trace", "events"), ("snapshot", "blocks")):
            out = tmp_path / f"{name}.html"
            assert main(["view", str(tmp_path / f"{name}.npz"), "-o", str(out)]) == 0
            assert kind in capsys.readouterr().out
            assert out.read_text().startswith("<!doctype html>")
        fails = ["view", str(tmp_path / "snapshot.npz"), "-o", str(tmp_path / "x.html"), "--strategy", "dynamic"]
        assert main(fails) == 1
        assert "a snapshot's blocks are where they were" in capsys.readouterr().err

    def test_a_page_needs_addresses(self):
        with pytest.raises(ValueError, match="needs addresses"):
            page_of_trace(made(*SMALL), "x", "nowhere")
