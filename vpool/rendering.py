"""A report as text of at most 100 columns, and as HTML."""

import html

from vpool.sizes import format_bytes, plural
from vpool.tables import columns, padded, printable, shortened, wrapped

__all__ = ["as_html", "as_text"]

_WIDTH = 98
_MOST_ROWS = 8  # of a table
_BOUNDLESS = 1 << 60  # bytes of a device that only simulates


def as_text(report):
    """The report for a terminal."""
    lines = [_title(report), ""]
    for name, nbytes, where, peak in _figures(report):
        line = f"{name:>14} {format_bytes(nbytes):>11}  {where}"
        lines.append(line if peak is None else f"{line:<52} peak {format_bytes(peak)}")
    lines += ["", *_ratios(report), *_core_lines(report)]
    for header, rows in _tables(report):
        lines += ["", *_aligned(header, rows)]
    sentences = report.advice
    if sentences:
        lines.append("")
    for sentence in sentences:
        lines += wrapped(sentence, _WIDTH)
    return "\n".join(lines)


def as_html(report):
    """The report for a notebook: the same, with a bar of what is reserved."""
    parts = [f"<p><b>{html.escape(_title(report))}</b></p>", _bar(report)]
    rows = [
        (name, format_bytes(nbytes), where, "" if peak is None else f"peak {format_bytes(peak)}")
        for name, nbytes, where, peak in _figures(report)
    ]
    parts.append(_html_table((), rows))
    parts += [f"<p>{html.escape(line)}</p>" for line in (*_ratios(report), *_core_lines(report))]
    parts += [_html_table(header, rows) for header, rows in _tables(report)]
    if report.advice:
        parts.append("<ul>" + "".join(f"<li>{html.escape(one)}</li>" for one in report.advice) + "</ul>")
    return f'<div class="vpool-report">{"".join(parts)}</div>'


def _title(report):
    limit = "no limit" if report.limit_bytes >= 2**62 else f"limit {format_bytes(report.limit_bytes)}"
    return f"pool {shortened(repr(report.name), 42)} on source {report.source!r}, device {report.device}, {limit}"


def _figures(report):
    yield "reserved", report.reserved_bytes, f"in {plural(report.segments, 'segment')}", report.peak_reserved_bytes
    yield "allocated", report.allocated_bytes, f"in {plural(report.live_blocks, 'block')}", report.peak_allocated_bytes
    yield "requested", report.requested_bytes, "by callers", report.peak_requested_bytes
    yield "free", report.free_bytes, f"in {plural(report.free_blocks, 'block')}", None
    yield "largest", report.largest_free_bytes, "free in one piece", None
    yield "pending", report.pending_bytes, "freed, perhaps in use", None
    if report.captured_bytes:
        yield "captured", report.captured_bytes, "free or pending, kept for graphs", None
    if report.suspended_bytes:
        yield "suspended", report.suspended_bytes, "lent, without memory until resume()", None


def _ratios(report):
    largest = report.largest_allocatable()
    largest = "no bound" if largest >= _BOUNDLESS else format_bytes(largest)
    yield (
        f"utilization {report.utilization:.1%}   external fragmentation {report.external_fragmentation:.1%}   "
        f"internal {report.internal_fragmentation:.1%}"
    )
    yield (
        f"reuse {report.reuse_ratio:.1%} of bytes   {plural(report.source_calls, 'source call')}   "
        f"largest request that would succeed: {largest}"
    )


def _core_lines(report):
    core = report.core
    if core is None:
        return
    blocks = ", ".join(f"{count:,} of {format_bytes(size)}" for size, count in core["block_sizes"][:4])
    more = ", ..." if len(core["block_sizes"]) > 4 else ""
    yield (
        f"fixed core: {format_bytes(core['allocated_bytes'])} live of {format_bytes(core['reserved_bytes'])} "
        f"({blocks + more or 'one slab'}), served {core['share']:.1%} of requests"
    )


def _tables(report):
    """Header and rows of each table that says something; the first column is text."""
    yield (
        ("blocks up to", "live", "bytes", "free", "bytes"),
        [
            (
                format_bytes(row.up_to) if row.up_to else "above",
                row.live_blocks,
                format_bytes(row.live_bytes),
                row.free_blocks,
                format_bytes(row.free_bytes),
            )
            for row in report.size_classes
        ],
    )
    if len(report.streams) > 1:
        yield (
            ("stream", "live", "bytes", "free", "pending"),
            _first(
                report.streams,
                lambda row: row["live_bytes"] + row["free_bytes"] + row["pending_bytes"],
                lambda row: (
                    f"{row['stream']:#x}",
                    row["live_blocks"],
                    *(format_bytes(row[f"{state}_bytes"]) for state in ("live", "free", "pending")),
                ),
            ),
        )
    if any(row["tag"] is not None for row in report.tags):
        yield (
            ("tag", "live", "bytes", "peak", "limit"),
            _first(
                report.tags,
                lambda row: row["live_bytes"],
                lambda row: (
                    "none" if row["tag"] is None else shortened(repr(row["tag"]), 30),
                    row["live_blocks"],
                    format_bytes(row["live_bytes"]),
                    *("" if row[name] is None else format_bytes(row[name]) for name in ("peak_bytes", "limit_bytes")),
                ),
            ),
        )
    if report.pending:
        yield (
            ("pending on stream", "blocks", "bytes", "why"),
            _first(
                report.pending,
                lambda row: row["pending_bytes"],
                lambda row: (
                    f"{row['stream']:#x}",
                    row["blocks"],
                    format_bytes(row["pending_bytes"]),
                    row["reason"],
                ),
            ),
        )
    if report.segments > 1:
        yield (
            ("segment", "bytes", "live", "bytes", "largest free"),
            _first(
                report.segment_rows,
                lambda row: row["free_bytes"],
                lambda row: (
                    f"{row['address']:#x}",
                    format_bytes(row["nbytes"]),
                    row["live_blocks"],
                    format_bytes(row["live_bytes"]),
                    format_bytes(row["largest_free_bytes"]),
                ),
            ),
        )


def _first(rows, weight, cells):
    """The cells of the weightiest rows."""
    found = [cells(row) for row in sorted(rows, key=weight, reverse=True)[:_MOST_ROWS]]
    if len(rows) > _MOST_ROWS:
        found.append((f"and {len(rows) - _MOST_ROWS} more", *[""] * (len(found[0]) - 1)))
    return found


def _aligned(header, rows):
    """Lines of a table: the first column ends where the names of figures do, and words stand to the left."""
    cells = [[printable(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(columns(row[column]) for row in cells) for column in range(len(header))]
    widths[0] = max(14, widths[0])
    words_last = header[-1] == "why"
    for *others, last in cells:
        front = [padded(cell, width, right=True) for cell, width in zip(others, widths, strict=False)]
        yield "  ".join([*front, padded(last, widths[-1], right=not words_last)]).rstrip()


def _html_table(header, rows):
    head = "".join(f"<th>{html.escape(str(cell))}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(printable(str(cell)))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table>{f'<thead><tr>{head}</tr></thead>' if header else ''}<tbody>{body}</tbody></table>"


def _bar(report):
    """A bar of what is reserved, by state."""
    colours = {"allocated": "#4c78a8", "pending": "#f58518", "free": "#e0e0e0"}
    spans = [
        f'<span title="{name} {format_bytes(nbytes)}" style="display:inline-block;height:1em;'
        f'width:{100 * nbytes / report.reserved_bytes:.2f}%;background:{colours[name]}"></span>'
        for name in colours
        if report.reserved_bytes and (nbytes := getattr(report, f"{name}_bytes"))
    ]
    return f'<div style="width:100%;max-width:60em;line-height:0">{"".join(spans)}</div>'
