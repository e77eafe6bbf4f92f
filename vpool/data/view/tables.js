// The figures and tables of a moment.  Whatever a file says is put in as text, never as markup.

/** An element with attributes, and children that are elements or text. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "onclick") made.addEventListener("click", value);
    else if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== undefined && child !== null));
  return made;
}

const bytesCell = (nbytes) => element("td", { "data-value": nbytes, title: `${countText(nbytes)} B` }, bytesText(nbytes));
const countCell = (count) => element("td", { "data-value": count }, countText(count));

function shareCell(part, whole) {
  const share = whole ? (100 * part) / whole : 0;
  const bar = element("div", {}, element("div", { style: `width:${share.toFixed(1)}%` }));
  return element("td", { class: "share", title: percentText(share / 100) }, bar);
}

// Columns of words, which stand to the left.
const WORDS = new Set(["held by", "since", "age", "whose"]);

/** A card with a table: titles of columns, then rows of cells; what to say where there are none. */
function card(id, title, columns, rows, { empty, sub, wide } = {}) {
  const parts = [element("h2", {}, title)];
  if (sub) parts.push(element("p", { class: "sub" }, sub));
  if (rows.length) {
    const head = element("tr", {}, ...columns.map((name) => element("th", { scope: "col", class: WORDS.has(name) && "words" }, name)));
    parts.push(element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
  } else parts.push(element("p", { class: "empty" }, empty));
  return element("section", { class: wide ? "card wide" : "card", id, "aria-label": title }, ...parts);
}

const ROWS = 10; // of a table

class Tables {
  constructor(model, actions) {
    this.model = model;
    this.actions = actions; // toSegment(segment), toBlock(block)
    this.trace = model.header.kind === "trace";
  }

  show(moment) {
    this.figures(moment);
    document.getElementById("tables").replaceChildren(...this.cards(moment));
  }

  figures(moment) {
    const rows = [
      ["reserved", moment.reserved, plural(moment.segments.length, "segment")],
      ["allocated", moment.allocated, plural(moment.liveBlocks, "block")],
      ["requested", moment.requested, ""],
      ["free", moment.free, ""],
      ["largest free", moment.largestFree, ""],
    ];
    if (!this.trace) rows.push(["pending", moment.pending, ""]);
    if (moment.unmapped) rows.push(["unmapped", moment.unmapped, ""]);
    const list = rows.flatMap(([name, nbytes, more]) => [
      element("dt", {}, name, more ? element("small", {}, ` in ${more}`) : null),
      element("dd", { "data-figure": name, "data-value": nbytes, title: `${countText(nbytes)} B` }, bytesText(nbytes)),
    ]);
    const shares = [
      ["utilization", moment.utilization, "allocated / reserved"],
      ["external fragmentation", moment.external, "1 − largest free range / free"],
      ["internal fragmentation", moment.internal, "1 − requested / allocated"],
    ];
    for (const [name, share, means] of shares) {
      list.push(element("dt", { title: means }, name), element("dd", { "data-figure": name, "data-value": share }, percentText(share)));
    }
    document.getElementById("figures").replaceChildren(...list);
    const bar = document.getElementById("bar");
    const parts = [["allocated", moment.allocated, "--requested"], ["pending", moment.pending, "--pending"]];
    bar.replaceChildren(...parts.filter(([, nbytes]) => nbytes).map(([name, nbytes, colour]) =>
      element("span", { style: `width:${(100 * nbytes) / Math.max(1, moment.reserved)}%;background:var(${colour})`, title: `${name} ${bytesText(nbytes)}` })));
    bar.setAttribute("aria-label", `${percentText(moment.utilization)} of what is reserved is allocated`);
  }

  cards(moment) {
    const { header } = this.model;
    const found = [];
    if (header.advice?.length) {
      const list = element("ul", {}, ...header.advice.map((sentence) => element("li", {}, sentence)));
      found.push(element("section", { class: "card wide", id: "advice" }, element("h2", {}, "Advice"), list));
    }
    found.push(this.pinned(moment));
    if (header.tags.some((name) => name)) found.push(this.groups("tags", "Tags", "tag", moment.tags, moment, "no tag"));
    if (header.sites.some((name) => name)) {
      found.push(this.groups("sites", "Call sites", "site", moment.sites, moment, "not known", true));
    }
    found.push(this.sizes(moment), this.tiers(moment));
    if (header.streams.length > 1) found.push(this.groups("streams", "Streams", "stream", moment.streams, moment, ""));
    if (!header.sites.some((name) => name)) {
      const how = "Call sites are not in this file: pool.record(sites=True) keeps them, and with vpool.tag(\"…\") names blocks.";
      found.push(element("section", { class: "card", id: "sites" }, element("h2", {}, "Call sites"), element("p", { class: "empty" }, how)));
    }
    found.push(this.largest(moment));
    return found;
  }

  groups(id, title, what, sums, moment, none, wide = false) {
    const shown = sums.top(ROWS).map((row) =>
      element("tr", { "data-name": row.name }, element("td", { title: row.name }, siteText(row.name) || none), countCell(row.blocks), bytesCell(row.allocated),
        bytesCell(row.requested), shareCell(row.allocated, moment.allocated)));
    const sub = sums.count > ROWS ? `${ROWS} of ${countText(sums.count)}` : undefined;
    return card(id, title, [what, "blocks", "bytes", "requested", ""], shown, { empty: "Nothing is live.", sub, wide });
  }

  sizes(moment) {
    const shown = moment.sizes.top(ROWS).map((row) =>
      element("tr", { "data-name": row.name }, element("td", { title: `${countText(row.key)} B` }, bytesText(row.key)),
        countCell(row.blocks), bytesCell(row.allocated), shareCell(row.allocated, moment.allocated)));
    const sub = moment.sizes.count > ROWS ? `${ROWS} of ${countText(moment.sizes.count)}` : undefined;
    return card("sizes", "Requested sizes", ["size", "blocks", "bytes", ""], shown, { empty: "Nothing is live.", sub });
  }

  tiers(moment) {
    const rows = moment.tiers.map((row) =>
      element("tr", { "data-name": row.name }, element("td", {}, row.name), countCell(row.blocks), bytesCell(row.allocated),
        shareCell(row.allocated, moment.allocated)));
    return card("tiers", "Size classes", ["blocks", "count", "bytes", ""], rows);
  }

  largest(moment) {
    const { size, requested } = this.model.columns;
    const rows = moment.largest(ROWS).map((block) =>
      element("tr", { class: "choosable", "data-block": block, onclick: () => this.actions.toBlock(block) },
        element("td", {}, element("button", { type: "button", title: "Show it in the map" }, element("code", {}, this.model.blockAddress(block)))),
        bytesCell(size[block] * this.model.unit), bytesCell(requested[block]), element("td", { class: "words" }, this.since(block, moment)),
        element("td", { class: "words" }, this.whose(block))));
    return card("largest", "Largest blocks", ["address", "bytes", "requested", this.trace ? "since" : "age", "whose"], rows,
      { empty: "Nothing is live.", wide: true });
  }

  /** Segments that could go back but for what is live in them. */
  pinned(moment) {
    const all = moment.pinned();
    const rows = all.slice(0, ROWS).map((segment) =>
      element("tr", { class: "choosable", "data-segment": segment.address, onclick: () => this.actions.toSegment(segment) },
        element("td", {}, element("button", { type: "button", title: "Show it in the map" }, element("code", {}, segment.address))),
        bytesCell(segment.nbytes * this.model.unit), bytesCell(segment.free), bytesCell(segment.largest), countCell(segment.blocks),
        bytesCell(segment.live), element("td", { class: "words" }, this.pins(segment, moment))));
    const idle = moment.segments.filter((one) => !one.blocks && !one.pending);
    const held = idle.reduce((sum, one) => sum + one.free, 0);
    const said = [`${plural(all.length, "segment")} with live blocks ${all.length === 1 ? "holds" : "hold"} ${bytesText(all.reduce((sum, one) => sum + one.free, 0))} free.`];
    if (idle.length) said.push(`${plural(idle.length, "segment")} with nothing live ${idle.length === 1 ? "holds" : "hold"} ${bytesText(held)}, which trim() gives back.`);
    return card("pinned", "What pins segments", ["segment", "bytes", "free", "largest free", "blocks", "live", "held by"], rows,
      { wide: true, empty: "No segment has both live blocks and free memory.", sub: said.join(" ") });
  }

  /** The oldest blocks of a segment in words. */
  pins(segment, moment) {
    const { birth, size, age } = this.model.columns;
    const older = this.trace ? (a, b) => birth[a] - birth[b] : (a, b) => age[b] - age[a] || size[b] - size[a];
    const shown = firstOf(segment.held, 2, older).map((block) =>
      [bytesText(size[block] * this.model.unit), this.since(block, moment), this.whose(block)].filter((text) => text && text !== "—").join(", "));
    const more = segment.blocks - shown.length;
    return shown.join("; ") + (more > 0 ? `; ${countText(more)} more` : "");
  }

  since(block, moment) {
    if (!this.trace) {
      const age = this.model.columns.age[block];
      return age ? timeText(age - 1) : "—";
    }
    const { birth, time } = this.model.columns;
    const step = this.model.stepOf(birth[block]);
    const place = step >= 0 ? `step ${step}` : `event ${countText(birth[block])}`;
    return this.model.timed ? `${place}, ${timeText(time[moment.event] - time[birth[block]])} ago` : place;
  }

  whose(block) {
    const { header, columns } = this.model;
    const parts = [header.tags[columns.tag[block]], siteText(header.sites[columns.site[block]])].filter((text) => text);
    if (header.streams.length > 1) parts.push(header.streams[columns.stream[block]]);
    return parts.join(", ") || "—";
  }
}
