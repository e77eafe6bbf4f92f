// Puts it together: what is chosen, pointed at, and pressed.

const byId = (id) => document.getElementById(id);

class Page {
  constructor(header, columns) {
    this.trace = header.kind === "trace";
    this.model = this.trace ? new TraceModel(header, columns) : new SnapshotModel(header, columns);
    this.charts = new Charts(byId("stage"), byId("base"), byId("over"), this.model);
    this.tables = new Tables(this.model, {
      toSegment: (segment) => this.toSegment(segment),
      toBlock: (block) => this.toBlock(block),
    });
    this.timings = {};
    this.theme(window.matchMedia("(prefers-color-scheme: dark)").matches);
    this.say(header);
    this.charts.draw();
    this.timings.firstMap = performance.now();
    this.listen();
    if (this.trace) this.choose(header.peakEvent);
    else this.tables.show((this.now = this.model.at()));
    this.timings.ready = performance.now();
  }

  say(header) {
    const { model } = this;
    const about = [];
    if (this.trace) {
      about.push(plural(model.events, "event"), plural(model.count, "allocation"));
      if (model.timed) about.push(timeText(model.duration));
      if (model.marks.length) about.push(plural(model.marks.length, "step"));
      about.push(header.placement);
    } else {
      about.push(`snapshot of pool ${header.pool}`, plural(model.count, "block"), plural(header.segmentAddresses.length, "segment"));
      about.push(new Date(header.taken * 1000).toLocaleString());
    }
    byId("about").textContent = about.join(" · ");
    byId("notes").replaceChildren(...header.notes.map((note) => element("p", {}, `Note: ${note}.`)), element("p", {}, `vpool ${header.version}`));
    byId("axis-label").hidden = !this.trace || !model.timed;
    byId("axis").value = this.charts.axis;
    byId("moment-controls").hidden = !this.trace;
    const keys = this.trace
      ? [["click", "choose a moment"], ["wheel", "zoom time"], ["⇧ wheel", "zoom addresses"], ["drag", "move"], ["← →", "event"],
          ["⇧ ← →", "1 %"], ["[ ]", "step"], ["P", "peak"], ["+ −", "zoom"], ["0", "whole map"]]
      : [["wheel", "zoom"], ["⇧ wheel", "zoom segments"], ["drag", "move"], ["+ −", "zoom"], ["0", "whole map"]];
    byId("keys").replaceChildren(...keys.flatMap(([key, does]) => [element("kbd", {}, key), ` ${does}   `]));
    byId("moment-title").textContent = this.trace ? "" : "Now";
    byId("moment").max = Math.max(0, (model.events ?? 1) - 1);
    const steps = this.trace && model.marks.length > 0;
    byId("step-back").disabled = byId("step-on").disabled = !steps;
  }

  theme(dark) {
    this.dark = dark;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    this.colourings = colourings(this.model, dark);
    const before = byId("colour").value;
    const names = Object.keys(this.colourings);
    byId("colour").replaceChildren(...names.map((name) => element("option", { value: name }, this.colourings[name].label)));
    const first = ["tag", "site"].find((name) => names.includes(name)) ?? (this.trace ? "size" : "state");
    this.colour(names.includes(before) ? before : first);
  }

  colour(name) {
    byId("colour").value = name;
    const colouring = (this.charts.colouring = this.colourings[name]);
    const items = colouring.names.flatMap((text, group) => {
      if (text === null) return [];
      const [red, green, blue] = colouring.colours[group];
      return [element("li", { title: text }, element("i", { class: "swatch", style: `background:rgb(${red} ${green} ${blue})` }), element("span", {}, text))];
    });
    const fills = [["reserved, free", "--reserved"]];
    if (!this.trace) fills.push(["pending", "--pending"]);
    if (this.trace) {
      for (const [text, colour] of [["reserved", "--held"], ["allocated", "--allocated"], ["requested", "--requested"]]) {
        items.push(element("li", {}, element("i", { class: "swatch", style: `background:var(${colour});height:3px` }), element("span", {}, text)));
      }
    }
    for (const [text, colour] of fills) {
      items.push(element("li", {}, element("i", { class: "swatch", style: `background:var(${colour})` }), element("span", {}, text)));
    }
    byId("legend").replaceChildren(...items);
  }

  /** Show the tables of the moment after an event. */
  choose(event) {
    const { model, charts } = this;
    const begun = performance.now();
    if (!model.events) {
      byId("moment-title").textContent = "No events";
      this.tables.show(model.at(-1));
      return;
    }
    const chosen = Math.max(0, Math.min(model.events - 1, Math.round(event)));
    this.now = model.at(chosen);
    charts.moment = chosen;
    byId("moment").value = chosen;
    byId("moment-title").textContent = `After event ${countText(chosen)}`;
    const where = [];
    if (model.timed) where.push(timeText(model.columns.time[chosen]));
    if (model.marks.length) where.push(model.stepOf(chosen) < 0 ? "before the first step" : `step ${model.stepOf(chosen)}`);
    if (chosen === model.header.peakEvent) where.push("the most is live");
    byId("moment-where").textContent = where.join(" · ");
    byId("moment").setAttribute("aria-valuetext", [`event ${chosen}`, ...where].join(", "));
    this.tables.show(this.now);
    charts.drawOver();
    this.timings.choose = performance.now() - begun;
    document.documentElement.dataset.event = chosen;
  }

  step(by) {
    const { marks } = this.model;
    if (!marks.length) return;
    const now = this.model.stepOf(this.charts.moment);
    const index = by < 0 && now >= 0 && marks[now].event < this.charts.moment ? now : now + by;
    this.choose(marks[Math.max(0, Math.min(marks.length - 1, index))].event);
  }

  toSegment(segment) {
    const { charts } = this;
    const { left, right } = charts.view;
    const [low, high] = this.trace ? [segment.begin, segment.begin + segment.nbytes] : [segment.index, segment.index + 1];
    const pad = this.trace ? (high - low) * 0.04 : 2;
    charts.show(left, right, low - pad, high + pad);
    this.redraw();
    byId("stage").scrollIntoView({ block: "nearest" });
  }

  toBlock(block) {
    const { charts } = this;
    charts.chosen = charts.chosen === block ? -1 : block;
    const { segment, offset, size } = this.model.columns;
    const [low, high] = this.trace ? [offset[block], offset[block] + size[block]] : [segment[block], segment[block] + 1];
    const { view } = charts;
    if (high < view.low || low > view.high) charts.show(view.left, view.right, low - (high - low) * 2, high + (high - low) * 2);
    this.redraw();
    byId("stage").scrollIntoView({ block: "nearest" });
  }

  /** Draw anew with the next frame, once however often it is asked for. */
  redraw() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      this.charts.draw();
    });
  }

  zoom(by) {
    const { view } = this.charts;
    const middle = this.trace && this.charts.moment !== null ? this.charts.across(this.charts.moment) : (view.left + view.right) / 2;
    const about = middle > view.left && middle < view.right ? middle : (view.left + view.right) / 2;
    this.charts.zoom(by, 1, about, (view.low + view.high) / 2);
    this.redraw();
  }

  reset() {
    this.charts.reset();
    this.redraw();
  }

  listen() {
    const stage = byId("stage");
    const { charts } = this;
    let drag = null;
    const at = (event) => {
      const box = stage.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    stage.addEventListener("wheel", (event) => {
      event.preventDefault();
      const place = charts.locate(...at(event));
      const by = Math.exp(Math.max(-1, Math.min(1, (event.deltaY || event.deltaX) / 300)));
      charts.zoom(event.shiftKey ? 1 : by, event.shiftKey ? by : 1, place.x, place.y);
      this.redraw();
    }, { passive: false });
    stage.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      drag = { from: at(event), view: { ...charts.view }, moved: false };
      stage.setPointerCapture(event.pointerId);
    });
    stage.addEventListener("pointermove", (event) => {
      const [x, y] = at(event);
      if (drag && (drag.moved || Math.hypot(x - drag.from[0], y - drag.from[1]) > 4)) {
        drag.moved = true;
        const { map } = charts.layout();
        const { left, right, low, high } = drag.view;
        const byX = ((drag.from[0] - x) / map.width) * (right - left);
        const byY = ((y - drag.from[1]) / map.height) * (high - low) * (this.trace ? 1 : -1);
        charts.show(left + byX, right + byX, low + byY, high + byY);
        this.redraw();
      }
      this.point(x, y);
    });
    stage.addEventListener("pointerup", (event) => {
      const place = charts.locate(...at(event));
      if (drag && !drag.moved && this.trace && place.panel) this.choose(place.event);
      drag = null;
    });
    stage.addEventListener("pointerleave", () => this.point(-1, -1));
    stage.addEventListener("dblclick", () => this.reset());
    stage.addEventListener("keydown", (event) => this.press(event));
    byId("moment").addEventListener("input", (event) => this.choose(Number(event.target.value)));
    byId("to-peak").addEventListener("click", () => this.choose(this.model.header.peakEvent));
    byId("step-back").addEventListener("click", () => this.step(-1));
    byId("step-on").addEventListener("click", () => this.step(1));
    byId("zoom-in").addEventListener("click", () => this.zoom(0.5));
    byId("zoom-out").addEventListener("click", () => this.zoom(2));
    byId("zoom-reset").addEventListener("click", () => this.reset());
    byId("theme").addEventListener("click", () => {
      this.theme(!this.dark);
      this.redraw();
    });
    byId("colour").addEventListener("change", (event) => {
      this.colour(event.target.value);
      this.redraw();
    });
    byId("axis").addEventListener("change", (event) => {
      charts.setAxis(event.target.value);
      this.redraw();
    });
    new ResizeObserver(() => this.redraw()).observe(stage);
  }

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { charts, model } = this;
    const far = event.shiftKey ? Math.max(1, Math.round(model.events / 100)) : 1;
    const { low, high } = charts.view;
    const up = ((high - low) / 8) * (this.trace ? 1 : -1);
    const actions = {
      ArrowLeft: () => this.trace && this.choose(charts.moment - far),
      ArrowRight: () => this.trace && this.choose(charts.moment + far),
      ArrowUp: () => charts.show(charts.view.left, charts.view.right, low + up, high + up),
      ArrowDown: () => charts.show(charts.view.left, charts.view.right, low - up, high - up),
      Home: () => this.trace && this.choose(0),
      End: () => this.trace && this.choose(model.events - 1),
      "[": () => this.step(-1),
      "]": () => this.step(1),
      p: () => this.trace && this.choose(model.header.peakEvent),
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.reset(),
    };
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action) return;
    event.preventDefault();
    action();
    this.redraw();
  }

  /** Show what is under the pointer; nothing outside the panels. */
  point(x, y) {
    const { charts } = this;
    const tip = byId("tip");
    const place = x < 0 ? { block: -1 } : charts.locate(x, y);
    charts.pointed = place.block;
    charts.hover = place.panel && this.trace ? x : undefined;
    charts.drawOver();
    const rows = place.panel ? this.told(place) : null;
    tip.hidden = !rows;
    if (!rows) return;
    const table = element("table", {}, ...rows.rows.map(([name, text]) => element("tr", {}, element("td", {}, name), element("td", {}, text))));
    tip.replaceChildren(element("b", {}, rows.title), table);
    const stage = byId("stage");
    const right = x + 18 + tip.offsetWidth > stage.clientWidth;
    tip.style.left = `${Math.max(0, right ? x - 14 - tip.offsetWidth : x + 14)}px`;
    tip.style.top = `${Math.max(0, Math.min(stage.clientHeight - tip.offsetHeight, y + 12))}px`;
  }

  told({ panel, event, block, y }) {
    const { model } = this;
    if (panel === "map") return block >= 0 ? this.toldOfBlock(block) : this.toldOfNothing(event, y);
    const rows = [
      ["reserved", bytesText(model.reserved[event])],
      ["allocated", bytesText(model.allocated[event])],
      ["requested", bytesText(model.requested[event])],
    ];
    return { title: this.when(event), rows };
  }

  when(event) {
    const parts = [`event ${countText(event)}`];
    if (this.model.timed) parts.push(timeText(this.model.columns.time[event]));
    if (this.model.stepOf(event) >= 0) parts.push(`step ${this.model.stepOf(event)}`);
    return parts.join(", ");
  }

  toldOfNothing(event, y) {
    if (!this.trace) return null;
    const span = this.model.spans.find((one) => one.begin <= y && y < one.begin + one.nbytes && one.birth <= event && one.death > event);
    if (!span) return { title: "not reserved", rows: [["at", this.when(event)]] };
    return {
      title: "free",
      rows: [["at", this.when(event)], ["address", this.model.addressOf(Math.floor(y))],
        ["segment", `${bytesText(span.nbytes * this.model.unit)} at ${this.model.addressOf(span.begin)}`]],
    };
  }

  toldOfBlock(block) {
    const { model } = this;
    const { size, requested, stream, tag, site, state, birth, life, time, age } = model.columns;
    const { tags, sites, streams } = model.header;
    const rows = [["address", model.blockAddress(block)]];
    if (this.trace || state[block] === LIVE) rows.push(["requested", `${bytesText(requested[block])} (${countText(requested[block])} B)`]);
    if (this.trace) {
      const death = model.death[block];
      rows.push(["from", this.when(birth[block])], ["until", life[block] ? this.when(death) : "the end"]);
      if (model.timed && life[block]) rows.push(["lived", timeText(time[death] - time[birth[block]])]);
    } else {
      rows.push(["segment", model.header.segmentAddresses[model.columns.segment[block]]]);
      if (age[block]) rows.push(["age", timeText(age[block] - 1)]);
    }
    if (tags[tag[block]]) rows.push(["tag", tags[tag[block]]]);
    if (sites[site[block]]) rows.push(["site", sites[site[block]]]);
    if (streams.length > 1) rows.push(["stream", streams[stream[block]].replace("stream ", "")]);
    const kind = this.trace ? "block" : ["live block", "free", "pending", "unmapped"][state[block]];
    return { title: `${kind} of ${bytesText(size[block] * model.unit)}`, rows };
  }
}

unpacked(byId("data"))
  .then(({ header, columns }) => {
    window.vpoolPage = new Page(header, columns);
    document.documentElement.dataset.ready = "yes";
  })
  .catch((reason) => {
    byId("failed").textContent = `This page cannot show its data: ${reason.message}`;
    byId("failed").hidden = false;
    byId("about").textContent = "";
    document.documentElement.dataset.ready = "failed";
    console.error(reason);
  });
