// The data of the page: base64, zlib, a header and columns of planes.  See vpool.packing, which packs them.

/** Bytes of a base64 text. */
function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

async function inflated(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** One column: a Uint32Array, or a Float64Array where numbers need more than 32 bits. */
function columnOf(planes, { length, width, rising }) {
  const wide = width > 4 || rising;
  const values = wide ? new Float64Array(length) : new Uint32Array(length);
  let scale = 1;
  for (let plane = 0; plane < width; plane++) {
    const begin = plane * length;
    if (wide) for (let i = 0; i < length; i++) values[i] += planes[begin + i] * scale;
    else for (let i = 0; i < length; i++) values[i] |= planes[begin + i] << (8 * plane);
    scale *= 256;
  }
  if (rising) for (let i = 1; i < length; i++) values[i] += values[i - 1];
  return values;
}

/** The header, and the columns by name. */
async function unpacked(element) {
  const raw = await inflated(bytesOf(element.textContent));
  element.remove();
  const size = new DataView(raw.buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(raw.subarray(4, 4 + size)));
  const columns = {};
  let at = 4 + size;
  for (const column of header.columns) {
    const bytes = column.length * column.width;
    columns[column.name] = columnOf(raw.subarray(at, at + bytes), column);
    at += bytes;
  }
  return { header, columns };
}
