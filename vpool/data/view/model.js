// What there is, and what it comes to at a moment.  The rules are those of vpool.moments and vpool.report.

const TIERS = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, Infinity];
const TIER_NAMES = ["up to 64 KiB", "up to 256 KiB", "up to 1 MiB", "up to 4 MiB", "up to 16 MiB", "above 16 MiB"];
const LIVE = 0, FREE = 1, PENDING = 2, UNMAPPED = 3;

/** The first place in values, which never fall, that holds more than a value. */
function above(values, value) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (values[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The order of whole numbers below 2**48, by radix: a million takes some tens of milliseconds. */
function orderOf(values) {
  let order = new Uint32Array(values.length).map((_, i) => i);
  let other = new Uint32Array(values.length);
  const most = values.reduce((a, b) => Math.max(a, b), 0);
  for (let scale = 1; scale <= most; scale *= 65536) {
    const counts = new Uint32Array(65537);
    const digit = (i) => Math.floor(values[i] / scale) % 65536;
    for (let i = 0; i < values.length; i++) counts[digit(i) + 1]++;
    for (let i = 0; i < 65536; i++) counts[i + 1] += counts[i];
    for (const i of order) other[counts[digit(i)]++] = i;
    [order, other] = [other, order];
  }
  return order;
}

/** The first so many of some items, in order, without sorting all of them. */
function firstOf(items, most, compare) {
  const found = [];
  for (const item of items) {
    if (found.length === most && compare(item, found[most - 1]) >= 0) continue;
    let place = found.length;
    while (place && compare(item, found[place - 1]) < 0) place--;
    found.splice(place, 0, item);
    if (found.length > most) found.pop();
  }
  return found;
}

/** Sums by name of what is live, the most bytes first. */
class Sums {
  constructor(names) {
    this.names = names;
    this.rows = new Map();
  }

  add(key, allocated, requested) {
    let row = this.rows.get(key);
    if (!row) this.rows.set(key, (row = { key, blocks: 0, allocated: 0, requested: 0 }));
    row.blocks++;
    row.allocated += allocated;
    row.requested += requested;
  }

  get count() {
    return this.rows.size;
  }

  /** The first so many. */
  top(most) {
    const rows = firstOf(this.rows.values(), most, (a, b) => b.allocated - a.allocated || a.key - b.key);
    for (const row of rows) row.name = this.names ? this.names[row.key] : row.key;
    return rows;
  }
}

/** What is there at one moment: totals, groups, and segments with what pins them. */
class Moment {
  constructor(model, segments) {
    this.model = model;
    this.segments = segments; // {index, address, begin, nbytes}, by address; begin and nbytes in units
    this.allocated = this.requested = this.free = this.pending = this.unmapped = 0;
    this.liveBlocks = this.largestFree = 0;
    this.tags = new Sums(model.header.tags);
    this.sites = new Sums(model.header.sites);
    this.streams = new Sums(model.header.streams);
    this.sizes = new Sums(null);
    this.tiers = TIERS.map((_, i) => ({ key: i, name: TIER_NAMES[i], blocks: 0, allocated: 0, requested: 0 }));
    for (const segment of segments) Object.assign(segment, { live: 0, blocks: 0, free: 0, largest: 0, pending: 0, held: [] });
  }

  live(block, segment) {
    const { size, requested, stream, tag, site } = this.model.columns;
    const nbytes = size[block] * this.model.unit;
    this.liveBlocks++;
    this.allocated += nbytes;
    this.requested += requested[block];
    this.tags.add(tag[block], nbytes, requested[block]);
    this.sites.add(site[block], nbytes, requested[block]);
    this.streams.add(stream[block], nbytes, requested[block]);
    this.sizes.add(requested[block], nbytes, requested[block]);
    const tier = this.tiers[this.model.tierOf(block)];
    tier.blocks++;
    tier.allocated += nbytes;
    tier.requested += requested[block];
    if (segment) {
      segment.live += nbytes;
      segment.blocks++;
      segment.held.push(block);
    }
  }

  /** The largest blocks, so many. */
  largest(most) {
    const { size } = this.model.columns;
    return firstOf(this.segments.flatMap((segment) => firstOf(segment.held, most, (a, b) => size[b] - size[a])), most, (a, b) => size[b] - size[a]);
  }

  gap(segment, units) {
    const nbytes = units * this.model.unit;
    this.free += nbytes;
    segment.free += nbytes;
    segment.largest = Math.max(segment.largest, nbytes);
    this.largestFree = Math.max(this.largestFree, nbytes);
  }

  get external() {
    return this.free ? 1 - this.largestFree / this.free : 0;
  }

  get internal() {
    return this.allocated ? 1 - this.requested / this.allocated : 0;
  }

  get utilization() {
    return this.reserved ? this.allocated / this.reserved : 0;
  }

  /** Segments that hold free memory and cannot go back, for what is live in them; the most free bytes first. */
  pinned() {
    return this.segments.filter((one) => one.blocks && one.free).sort((a, b) => b.free - a.free || a.live - b.live);
  }
}

class Model {
  constructor(header, columns) {
    this.header = header;
    this.columns = columns;
    this.unit = header.unit;
    this.count = columns.size.length;
  }

  /** Which tier of a report's size classes a block is of. */
  tierOf(block) {
    const nbytes = this.columns.size[block] * this.unit;
    let tier = 0;
    while (nbytes > TIERS[tier]) tier++;
    return tier;
  }
}

class TraceModel extends Model {
  constructor(header, columns) {
    super(header, columns);
    this.events = header.events;
    const { birth, life, size, requested, time } = columns;
    this.death = new Float64Array(this.count);
    const allocated = (this.allocated = new Float64Array(this.events));
    const asked = (this.requested = new Float64Array(this.events));
    for (let i = 0; i < this.count; i++) {
      const nbytes = size[i] * this.unit;
      this.death[i] = life[i] ? birth[i] + life[i] : this.events;
      allocated[birth[i]] += nbytes;
      asked[birth[i]] += requested[i];
      if (life[i]) {
        allocated[this.death[i]] -= nbytes;
        asked[this.death[i]] -= requested[i];
      }
    }
    for (let i = 1; i < this.events; i++) {
      allocated[i] += allocated[i - 1];
      asked[i] += asked[i - 1];
    }
    this.duration = this.events ? time[this.events - 1] : 0;
    this.marks = header.marks.map((us) => ({ us, event: us > 0 ? above(time, us - 1) : 0 }));
    this.reserve();
    this.timed = this.duration > 0;
  }

  /** Reserved bytes after each event, and how long each segment was there. */
  reserve() {
    const { segmentEvent, segmentOffset, segmentSize, segmentLeft } = this.columns;
    this.reserved = new Float64Array(this.events);
    this.spans = [];
    const there = new Map();
    for (let i = 0; i < segmentEvent.length; i++) {
      // What came before an event is there after it, and not after the one before; what came behind the last, never.
      const at = segmentEvent[i];
      if (at < this.events) this.reserved[at] += (segmentLeft[i] ? -1 : 1) * segmentSize[i] * this.unit;
      if (segmentLeft[i]) {
        const span = there.get(segmentOffset[i]);
        if (span) span.death = at;
        there.delete(segmentOffset[i]);
      } else {
        const span = { birth: at, death: this.events, begin: segmentOffset[i], nbytes: segmentSize[i] };
        there.set(segmentOffset[i], span);
        this.spans.push(span);
      }
    }
    for (let i = 1; i < this.events; i++) this.reserved[i] += this.reserved[i - 1];
    this.height = this.header.ranges.length ? this.header.ranges[this.header.ranges.length - 1][2] : 0;
  }

  addressOf(offset) {
    const range = this.header.ranges.findLast((one) => one[1] <= offset) ?? ["0x0", 0, 0];
    return `0x${(BigInt(range[0]) + BigInt(offset - range[1]) * BigInt(this.unit)).toString(16)}`;
  }

  blockAddress(block) {
    return this.addressOf(this.columns.offset[block]);
  }

  stepOf(event) {
    let step = -1;
    while (step + 1 < this.marks.length && this.marks[step + 1].event <= event) step++;
    return step;
  }

  /** Everything after an event: O(allocations). */
  at(event) {
    const { birth, offset, size } = this.columns;
    const segments = this.spans
      .filter((span) => span.birth <= event && span.death > event)
      .sort((a, b) => a.begin - b.begin)
      .map((span, index) => ({ index, begin: span.begin, nbytes: span.nbytes, address: this.addressOf(span.begin) }));
    const moment = new Moment(this, segments);
    moment.event = event;
    moment.reserved = this.events ? this.reserved[event] : 0;
    this.byOffset ??= orderOf(offset);
    let place = 0;
    let end = segments.length ? segments[0].begin : 0;
    const stop = () => segments[place].begin + segments[place].nbytes;
    const close = (until) => {
      const least = Math.min(until, stop());
      if (least > end) moment.gap(segments[place], least - end);
    };
    for (const block of this.byOffset) {
      if (birth[block] > event || this.death[block] <= event || !size[block]) continue; // a report has none without bytes
      while (place + 1 < segments.length && segments[place + 1].begin <= offset[block]) {
        close(Infinity);
        end = segments[++place].begin;
      }
      if (segments.length) close(offset[block]);
      const within = segments.length && offset[block] >= segments[place].begin && offset[block] + size[block] <= stop();
      if (within) moment.live(block, segments[place]);
      else moment.unmapped += size[block] * this.unit;  // suspended
      end = Math.max(end, offset[block] + size[block]);
    }
    for (; place < segments.length; place++) {
      close(Infinity);
      if (place + 1 < segments.length) end = segments[place + 1].begin;
    }
    return moment;
  }
}

class SnapshotModel extends Model {
  constructor(header, columns) {
    super(header, columns);
    this.height = columns.segmentSize.length;
    this.width = columns.segmentExtent.reduce((a, b) => Math.max(a, b), 0);
  }

  blockAddress(block) {
    const base = BigInt(this.header.segmentAddresses[this.columns.segment[block]]);
    return `0x${(base + BigInt(this.columns.offset[block]) * BigInt(this.unit)).toString(16)}`;
  }

  at() {
    const { segment, size, state, segmentSize } = this.columns;
    const segments = this.header.segmentAddresses.map((address, index) => ({
      index, address, begin: index, nbytes: segmentSize[index],
    }));
    const moment = new Moment(this, segments);
    moment.reserved = this.header.reserved;
    let run = 0; // of free blocks side by side, which streams have yet to merge
    for (let block = 0; block < this.count; block++) {
      const mine = segments[segment[block]];
      const nbytes = size[block] * this.unit;
      if (state[block] === FREE) {
        run += size[block];
        if (block + 1 < this.count && state[block + 1] === FREE && segment[block + 1] === segment[block]) continue;
        moment.gap(mine, run);
        run = 0;
      } else if (state[block] === LIVE) moment.live(block, mine);
      else if (state[block] === PENDING) {
        moment.pending += nbytes;
        mine.pending += nbytes;
      } else moment.unmapped += nbytes;
    }
    return moment;
  }
}
