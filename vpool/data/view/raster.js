// The memory map: rectangles into pixels, by the share of each pixel that they cover.  A canvas takes milliseconds for
// thousands of rectangles; this takes them for hundreds of thousands, and knows what is under the pointer.

class Raster {
  constructor(width, height) {
    this.width = width;
    this.height = height;
    this.owner = new Int32Array(width * height).fill(-1); // the rectangle that covers most of a pixel
    this.most = new Float32Array(width * height); // how much of it that is
    this.cover = new Float32Array(width * height); // how much all of them cover
    this.ground = new Float32Array(width * height); // how much is reserved
    this.lined = new Uint8Array(width * height); // where a border would show
  }

  /** Cover a rectangle, in pixels with fractions.  `number` is its own; without one it is ground. */
  fill(left, right, top, bottom, number) {
    const { width, height } = this;
    left = Math.max(0, left);
    top = Math.max(0, top);
    right = Math.min(width, right);
    bottom = Math.min(height, bottom);
    if (!(right > left && bottom > top)) return;
    const lined = number >= 0 && right - left > 3 && bottom - top > 3 ? 1 : 0;
    const lastRow = Math.ceil(bottom);
    const lastColumn = Math.ceil(right);
    for (let row = Math.floor(top); row < lastRow; row++) {
      const high = Math.min(bottom, row + 1) - Math.max(top, row);
      const begin = row * width;
      for (let column = Math.floor(left); column < lastColumn; column++) {
        const part = high * (Math.min(right, column + 1) - Math.max(left, column));
        const at = begin + column;
        if (number < 0) {
          this.ground[at] += part;
          continue;
        }
        this.cover[at] += part;
        if (part > this.most[at]) {
          this.most[at] = part;
          this.owner[at] = number;
          this.lined[at] = lined;
        }
      }
    }
  }

  /** As an image.  `colourOf` has [red, green, blue] of a rectangle's number; page and ground likewise. */
  image(colourOf, page, ground) {
    const image = new ImageData(this.width, this.height);
    const pixels = image.data;
    const { owner, cover, lined, width } = this;
    for (let at = 0; at < owner.length; at++) {
      const held = Math.min(1, this.ground[at]);
      const taken = Math.min(1, cover[at]);
      const own = owner[at];
      const colour = own >= 0 ? colourOf(own) : ground;
      let edge = 1;
      if (lined[at] && ((at >= width && owner[at - width] !== own) || (at % width && owner[at - 1] !== own))) edge = 0.55;
      const share = taken * edge;
      for (let part = 0; part < 3; part++) {
        const under = page[part] + (ground[part] - page[part]) * held;
        pixels[4 * at + part] = under + (colour[part] - under) * share;
      }
      pixels[4 * at + 3] = 255;
    }
    return image;
  }
}

/** [red, green, blue] of "#rrggbb". */
const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

/** From one colour to another in so many. */
function ramp(from, to, count) {
  const [a, b] = [rgb(from), rgb(to)];
  return Array.from({ length: count }, (_, i) => a.map((part, k) => Math.round(part + ((b[k] - part) * i) / (count - 1))));
}

const DISTINCT = ["#4e79a7", "#e0904a", "#5f9e6e", "#b5657a", "#8575b0", "#c9a93b", "#4fa3a5", "#a07a5f", "#d08db3", "#7c9a3f"];
const REST = "#9aa3ab";

/** The ways to colour blocks: groups, which have names and colours, and the group of a block. */
function colourings(model, dark) {
  const { stream, tag, site, size } = model.columns;
  const tiers = dark ? ramp("#d6ecff", "#31587c", 6) : ramp("#12304f", "#93b9d9", 6);
  const found = { size: { label: "size", names: TIER_NAMES, colours: tiers, groupOf: (block) => model.tierOf(block) } };
  if (model.header.kind === "trace") {
    const spans = [1 / 1000, 1 / 100, 1 / 10, 1];
    found.life = {
      label: "lifetime",
      names: ["up to 0.1 % of the run", "up to 1 %", "up to 10 %", "longer", "to the end"],
      colours: dark ? ramp("#39434c", "#f0b860", 5) : ramp("#d9dcd8", "#8a4b08", 5),
      groupOf: (block) => {
        const life = model.columns.life[block];
        if (!life) return 4;
        return Math.min(3, spans.findIndex((share) => life <= share * model.events));
      },
    };
  } else {
    found.state = { label: "state", names: ["live"], colours: [rgb(dark ? "#6eb0ec" : "#2a6aa8")], groupOf: () => 0 };
  }
  const named = (label, values, names) => {
    if (!names.some((name, i) => i && name)) return;
    const totals = new Float64Array(names.length);
    for (let i = 0; i < model.count; i++) totals[values[i]] += size[i] * (model.columns.life?.[i] || 1);
    const order = [...totals.keys()].filter((i) => totals[i] && names[i]).sort((a, b) => totals[b] - totals[a]);
    const place = new Uint8Array(names.length).fill(DISTINCT.length);
    order.slice(0, DISTINCT.length).forEach((i, at) => (place[i] = at));
    const shown = order.slice(0, DISTINCT.length).map((i) => names[i]);
    while (shown.length < DISTINCT.length) shown.push(null);
    found[label] = {
      label,
      names: [...shown, order.length > DISTINCT.length || (!names[0] && totals[0]) ? "other" : null],
      colours: [...DISTINCT, REST].map(rgb),
      groupOf: (block) => place[values[block]],
    };
  };
  named("tag", tag, model.header.tags);
  named("site", site, model.header.sites);
  named("stream", stream, model.header.streams);
  return found;
}
