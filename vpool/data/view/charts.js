// Curves, fragmentation and the map on one canvas, and what is chosen or pointed at on another above it.

const FONT = '12px system-ui, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif';
const MARGIN = { left: 74, right: 10, top: 18, bottom: 24, gap: 26 };

class Charts {
  constructor(stage, base, over, model) {
    Object.assign(this, { stage, base, over, model });
    this.trace = model.header.kind === "trace";
    this.axis = "events"; // every event is as wide, where a run's time may be idle for the most part
    this.moment = null;
    this.reset();
  }

  // Where things are.  Across is time, an event's number, or for a snapshot units from the start of a segment.

  get end() {
    if (!this.trace) return Math.max(1, this.model.width);
    return this.axis === "time" ? this.model.duration * 1.0005 || 1 : Math.max(1, this.model.events);
  }

  get high() {
    return Math.max(this.trace ? 1 : 8, this.model.height); // rows of few segments would be too high
  }

  reset() {
    this.view = { left: 0, right: this.end, low: 0, high: this.high };
  }

  setAxis(axis) {
    const keep = [this.view.left, this.view.right].map((x) => this.eventAt(x));
    this.axis = axis;
    this.view.left = keep[0] <= 0 ? 0 : this.across(keep[0]);
    this.view.right = keep[1] >= this.model.events - 1 ? this.end : Math.max(this.across(keep[1]), this.view.left + this.least());
  }

  across(event) {
    if (this.axis === "events") return event;
    return event >= this.model.events ? this.end : this.model.columns.time[Math.max(0, event)];
  }

  /** The last event that is not after a place. */
  eventAt(x) {
    const event = this.axis === "events" ? Math.floor(x) : above(this.model.columns.time, x) - 1;
    return Math.max(0, Math.min(this.model.events - 1, event));
  }

  least() {
    return this.axis === "time" && this.trace ? Math.min(this.end, 5) : Math.min(this.end, 8);
  }

  layout() {
    const { clientWidth, clientHeight } = this.stage;
    const left = MARGIN.left;
    const width = Math.max(10, clientWidth - left - MARGIN.right);
    const bottom = clientHeight - MARGIN.bottom;
    const panel = (top, height) => ({ left, top, width, height, right: left + width, bottom: top + height });
    if (!this.trace) return { map: panel(MARGIN.top, bottom - MARGIN.top) };
    const curves = panel(MARGIN.top, Math.round(clientHeight * 0.24));
    const fragmentation = panel(curves.bottom + MARGIN.gap, Math.round(clientHeight * 0.09));
    const top = fragmentation.bottom + MARGIN.gap;
    return { curves, fragmentation, map: panel(top, bottom - top) };
  }

  toX(x, panel) {
    return panel.left + ((x - this.view.left) / (this.view.right - this.view.left)) * panel.width;
  }

  fromX(px, panel) {
    return this.view.left + ((px - panel.left) / panel.width) * (this.view.right - this.view.left);
  }

  /** Addresses rise upwards; the segments of a snapshot follow each other downwards. */
  toY(y, panel) {
    const part = (y - this.view.low) / (this.view.high - this.view.low);
    return panel.top + (this.trace ? 1 - part : part) * panel.height;
  }

  fromY(py, panel) {
    const part = (py - panel.top) / panel.height;
    return this.view.low + (this.trace ? 1 - part : part) * (this.view.high - this.view.low);
  }

  /** Zoom across and up by factors about a place of the map, and keep within it. */
  zoom(byX, byY, x, y) {
    const { left, right, low, high } = this.view;
    this.show(x - (x - left) * byX, x + (right - x) * byX, y - (y - low) * byY, y + (high - y) * byY);
  }

  show(left, right, low, high) {
    const within = (from, to, end, least) => {
      const span = Math.min(end, Math.max(least, to - from));
      const middle = (from + to) / 2;
      const begin = Math.max(0, Math.min(end - span, middle - span / 2));
      return [begin, begin + span];
    };
    const [a, b] = within(left, right, this.end, this.least());
    const [c, d] = within(low, high, this.high, this.trace ? Math.min(this.high, 4) : 1);
    this.view = { left: a, right: b, low: c, high: d };
  }

  // Drawing.

  colours() {
    const style = getComputedStyle(document.documentElement);
    return new Proxy({}, { get: (_, name) => style.getPropertyValue(`--${name}`).trim() });
  }

  prepare(canvas) {
    const scale = Math.min(2, window.devicePixelRatio || 1);
    const { clientWidth, clientHeight } = this.stage;
    canvas.width = Math.round(clientWidth * scale);
    canvas.height = Math.round(clientHeight * scale);
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.font = FONT;
    context.textBaseline = "middle";
    this.scale = scale;
    return context;
  }

  draw() {
    const context = this.prepare(this.base);
    const colours = this.colours();
    const panels = this.layout();
    if (this.trace) {
      this.drawCurves(context, colours, panels.curves);
      this.drawFragmentation(context, colours, panels.fragmentation);
    }
    this.drawMap(context, colours, panels.map);
    this.drawAcross(context, colours, panels);
    this.drawOver();
  }

  title(context, colours, panel, text) {
    context.fillStyle = colours.muted;
    context.textAlign = "left";
    context.fillText(text, panel.left, panel.top - 9);
  }

  /** Lines and labels for values up the side of a panel. */
  scaleUp(context, colours, panel, values, yOf, textOf) {
    context.textAlign = "right";
    for (const value of values) {
      const y = Math.round(yOf(value)) + 0.5;
      context.fillStyle = colours.grid;
      context.fillRect(panel.left, y - 0.5, panel.width, 1);
      context.fillStyle = colours.muted;
      context.fillText(textOf(value), panel.left - 8, Math.max(panel.top + 4, Math.min(panel.bottom - 4, y)));
    }
  }

  /** For each pixel across, the first and the last event that it shows. */
  columnsOf(panel) {
    const count = Math.max(1, Math.round(panel.width));
    const bounds = new Int32Array(count + 1);
    for (let i = 0; i <= count; i++) bounds[i] = this.eventAt(this.fromX(panel.left + (i * panel.width) / count, panel));
    return bounds;
  }

  drawCurves(context, colours, panel) {
    const { reserved, allocated, requested } = this.model;
    const bounds = this.columnsOf(panel);
    let top = 1;
    for (const values of [reserved, allocated]) {
      for (let i = bounds[0]; i <= bounds[bounds.length - 1] && i < values.length; i++) if (values[i] > top) top = values[i];
    }
    top *= 1.06;
    const toY = (value) => panel.bottom - (value / top) * panel.height;
    const { values, step } = byteTicks(0, top, 5);
    this.title(context, colours, panel, "memory");
    const path = (series, closed) => {
      context.beginPath();
      if (closed) context.moveTo(panel.left, panel.bottom);
      for (let i = 0; i + 1 < bounds.length; i++) {
        // The highest within a pixel, so that no peak is lost.
        let most = series[bounds[i]];
        for (let event = bounds[i] + 1; event < bounds[i + 1]; event++) if (series[event] > most) most = series[event];
        const x = panel.left + (i * panel.width) / (bounds.length - 1);
        context.lineTo(x, toY(most));
        context.lineTo(x + panel.width / (bounds.length - 1), toY(most));
      }
      if (closed) context.lineTo(panel.right, panel.bottom);
    };
    if (this.model.events) {
      path(reserved, true);
      context.fillStyle = colours.reserved;
      context.fill();
    }
    this.scaleUp(context, colours, panel, values, toY, (value) => axisBytes(value, step, top));
    if (!this.model.events) return;
    context.lineWidth = 1.25;
    for (const [series, colour] of [[reserved, colours.held], [allocated, colours.allocated], [requested, colours.requested]]) {
      path(series, false);
      context.strokeStyle = colour;
      context.stroke();
    }
    context.fillStyle = colours.bad;
    for (const [event] of this.model.header.failures) {
      const x = this.toX(this.across(event), panel);
      if (x >= panel.left - 1 && x <= panel.right + 1) {
        context.fillRect(x - 1, panel.top, 2, panel.height);
        context.textAlign = x > panel.right - 120 ? "right" : "left";
        context.fillText("out of memory", x + (x > panel.right - 120 ? -5 : 5), panel.top + 8);
      }
    }
  }

  drawFragmentation(context, colours, panel) {
    const { sampleEvent, sampleLargest } = this.model.columns;
    const toY = (share) => panel.bottom - share * panel.height;
    this.title(context, colours, panel, "external fragmentation: 1 − largest free range / free");
    this.scaleUp(context, colours, panel, [0, 0.5, 1], toY, (share) => `${100 * share} %`);
    context.save();
    context.beginPath();
    context.rect(panel.left, panel.top - 1, panel.width, panel.height + 2);
    context.clip();
    context.beginPath();
    for (let i = 0; i < sampleEvent.length; i++) {
      const event = sampleEvent[i];
      const free = this.model.reserved[event] - this.model.allocated[event];
      const share = free > 0 ? 1 - sampleLargest[i] / free : 0;
      context.lineTo(this.toX(this.across(event), panel), toY(share));
    }
    context.strokeStyle = colours.fragmentation;
    context.lineWidth = 1.25;
    context.stroke();
    context.restore();
  }

  drawMap(context, colours, panel) {
    const { model, scale, view } = this;
    const raster = new Raster(Math.round(panel.width * scale), Math.round(panel.height * scale));
    const perX = raster.width / (view.right - view.left);
    const perY = raster.height / (view.high - view.low);
    const x = (value) => (value - view.left) * perX;
    const y = this.trace ? (value) => (view.high - value) * perY : (value) => (value - view.low) * perY;
    const { offset, size, segment, state } = model.columns;
    if (this.trace) {
      for (const { birth, death, begin, nbytes } of model.spans) {
        raster.fill(x(birth ? this.across(birth) : 0), x(this.across(death)), y(begin + nbytes), y(begin), -1);
      }
      const { birth } = model.columns;
      const first = this.eventAt(view.left);
      const last = this.eventAt(view.right);
      for (let i = 0; i < model.count && birth[i] <= last; i++) {
        if (model.death[i] < first || !size[i] || offset[i] > view.high || offset[i] + size[i] < view.low) continue;
        raster.fill(x(this.across(birth[i])), x(this.across(model.death[i])), y(offset[i] + size[i]), y(offset[i]), i);
      }
    } else {
      const pad = 0.06; // of a row, above and below
      for (let i = 0; i < model.count; i++) {
        if (state[i] === UNMAPPED || segment[i] + 1 < view.low || segment[i] > view.high) continue;
        const place = [x(offset[i]), x(offset[i] + size[i]), y(segment[i] + pad), y(segment[i] + 1 - pad)];
        raster.fill(...place, -1);
        if (state[i] !== FREE) raster.fill(...place, i);
      }
    }
    this.raster = raster;
    const { groupOf, colours: paint } = this.colouring;
    const pending = rgb(colours.pending);
    const colourOf = (block) => (state?.[block] === PENDING ? pending : paint[groupOf(block)]);
    const image = raster.image(colourOf, rgb(colours.panel), rgb(colours.reserved));
    context.putImageData(image, Math.round(panel.left * scale), Math.round(panel.top * scale));
    context.strokeStyle = colours.line;
    context.lineWidth = 1;
    context.strokeRect(panel.left - 0.5, panel.top - 0.5, panel.width + 1, panel.height + 1);
    this.drawUp(context, colours, panel);
  }

  /** What is up the side of the map. */
  drawUp(context, colours, panel) {
    const { view, model } = this;
    if (!this.trace) {
      this.title(context, colours, panel, "segments: address, and their blocks from the first byte to the last");
      context.textAlign = "right";
      context.fillStyle = colours.muted;
      context.font = '11px ui-monospace, "DejaVu Sans Mono", monospace';
      const every = Math.max(1, Math.ceil(((view.high - view.low) * 15) / panel.height));
      for (let row = Math.ceil(view.low); row < Math.min(model.height, view.high); row += every) {
        const y = this.toY(row + 0.5, panel);
        if (y < panel.top || y > panel.bottom) continue;
        const address = model.header.segmentAddresses[row];
        context.fillText(address.length > 9 ? `…${address.slice(-8)}` : address, panel.left - 8, y);
      }
      context.font = FONT;
      return;
    }
    this.title(context, colours, panel, "address space, ranges one above the other");
    const unit = model.unit;
    const { values, step } = byteTicks(view.low * unit, view.high * unit, 7);
    context.textAlign = "right";
    for (const value of values) {
      const y = this.toY(value / unit, panel);
      context.fillStyle = colours.muted;
      context.fillText(axisBytes(value, step, view.high * unit), panel.left - 8, Math.max(panel.top + 4, Math.min(panel.bottom - 4, y)));
      context.fillRect(panel.left - 5, Math.round(y), 4, 1);
    }
    const bounds = model.header.ranges.map((range) => range[1]).filter((at) => at > view.low && at < view.high);
    if (bounds.length > 60) return;
    context.fillStyle = colours.page;
    for (const at of bounds) context.fillRect(panel.left, Math.round(this.toY(at, panel)), panel.width, 1);
  }

  /** What is along the bottom, and where steps begin. */
  drawAcross(context, colours, panels) {
    const { map } = panels;
    const { left, right } = this.view;
    const most = Math.max(2, Math.floor(map.width / 110));
    const bytes = !this.trace;
    const unit = this.model.unit;
    const { values, step } = bytes ? byteTicks(left * unit, right * unit, most) : ticks(left, right, most, this.axis === "events" ? 1 : 0);
    context.textAlign = "center";
    for (const value of values) {
      const x = this.toX(bytes ? value / unit : value, map);
      context.fillStyle = colours.muted;
      context.fillRect(Math.round(x), map.bottom + 1, 1, 4);
      let text = bytes ? axisBytes(value, step, right * unit) : axisCount(value, step);
      if (this.axis === "time" && this.trace) text = axisTime(value, step);
      const half = context.measureText(text).width / 2;
      context.fillText(text, Math.max(map.left + half - 6, Math.min(map.right - half, x)), map.bottom + 14);
    }
    if (!this.trace) return;
    const seen = this.model.marks.map((mark, index) => ({ index, x: this.toX(this.axis === "time" ? mark.us : mark.event, map) }))
      .filter(({ x }) => x >= map.left && x <= map.right);
    const dense = seen.length > map.width / 8;
    let last = -Infinity;
    for (const { index, x } of seen) {
      const labelled = x - last > 58 && x > map.left + 60; // the title of the panel is there
      context.globalAlpha = dense ? 0.18 : 0.45;
      context.fillStyle = colours.muted;
      for (const panel of [panels.curves, panels.fragmentation]) context.fillRect(Math.round(x), panel.top, 1, panel.height);
      context.globalAlpha = 1;
      if (!labelled || x > map.right - 44) continue;
      last = x;
      context.textAlign = "left";
      context.fillText(`step ${index}`, x - 1, panels.curves.top - 9);
    }
  }

  drawOver() {
    const context = this.prepare(this.over);
    const colours = this.colours();
    const panels = this.layout();
    context.lineWidth = 2;
    for (const block of [this.pointed, this.chosen]) {
      if (block === undefined || block < 0) continue;
      const box = this.boxOf(block, panels.map);
      context.strokeStyle = colours.ink;
      context.strokeRect(box.left, box.top, Math.max(1, box.right - box.left), Math.max(1, box.bottom - box.top));
    }
    if (!this.trace) return;
    const line = (x, colour, width) => {
      if (x < panels.map.left - 1 || x > panels.map.right + 1) return;
      context.fillStyle = colour;
      context.fillRect(x - width / 2, panels.curves.top, width, panels.map.bottom - panels.curves.top);
    };
    if (this.hover !== undefined) line(this.hover, colours.muted, 1);
    if (this.moment === null) return;
    const x = this.toX(this.across(this.moment), panels.map);
    line(x, colours.accent, 1.5);
    if (x < panels.map.left - 1 || x > panels.map.right + 1) return;
    context.beginPath();
    context.moveTo(x - 6, panels.curves.top - 7);
    context.lineTo(x + 6, panels.curves.top - 7);
    context.lineTo(x, panels.curves.top + 2);
    context.fill();
  }

  boxOf(block, panel) {
    const { offset, size, segment, birth } = this.model.columns;
    const clip = (value, from, to) => Math.max(from, Math.min(to, value));
    const [left, right] = this.trace
      ? [this.across(birth[block]), this.across(this.model.death[block])]
      : [offset[block], offset[block] + size[block]];
    const [low, high] = this.trace ? [offset[block] + size[block], offset[block]] : [segment[block] + 0.06, segment[block] + 0.94];
    return {
      left: clip(this.toX(left, panel), panel.left, panel.right),
      right: clip(this.toX(right, panel), panel.left, panel.right),
      top: clip(this.toY(low, panel), panel.top, panel.bottom),
      bottom: clip(this.toY(high, panel), panel.top, panel.bottom),
    };
  }

  /** What is at a place of the stage: the panel, the event, and the block; -1 for none. */
  locate(px, py) {
    const panels = this.layout();
    const name = Object.keys(panels).find((one) => py >= panels[one].top && py < panels[one].bottom);
    const { map } = panels;
    const x = this.fromX(Math.max(map.left, Math.min(map.right, px)), map);
    const inside = px >= map.left && px < map.right;
    let block = -1;
    if (name === "map" && inside && this.raster) {
      const column = Math.floor((px - map.left) * this.scale);
      const row = Math.floor((py - map.top) * this.scale);
      block = this.raster.owner[Math.min(this.raster.height - 1, row) * this.raster.width + Math.min(this.raster.width - 1, column)];
    }
    return { panel: inside ? name : undefined, x, y: this.fromY(py, map), event: this.trace ? this.eventAt(x) : 0, block };
  }
}
