// Runs Perfetto's trace processor, as the page ui.perfetto.dev does it, in node:
//
//     node perfetto.js FOLDER TRACE QUERY...
//
// FOLDER has engine_bundle.js and trace_processor.wasm. Prints the rows of each query as one line of JSON.
"use strict";
const fs = require("fs"), path = require("path"), vm = require("vm");
const node = process, [folder, trace, ...queries] = node.argv.slice(2);

// ---- protocol buffers: fields of numbers (0), of eight bytes (1) and of bytes (2) ------------------------------------
const varint = (n) => (n < 128 ? [n] : [(n % 128) | 128, ...varint(Math.floor(n / 128))]);
const field = (number, value) => typeof value === "number"
  ? Buffer.from([...varint(number * 8), ...varint(value)])
  : Buffer.concat([Buffer.from([...varint(number * 8 + 2), ...varint(value.length)]), value]);
const message = (...fields) => Buffer.concat(fields);

function* varints(data) {
  for (let n = 0n, shift = 0n, i = 0; i < data.length; i++) {
    n |= BigInt(data[i] & 127) << shift;
    shift += 7n;
    if (data[i] < 128) { yield [Number(BigInt.asIntN(64, n)), i + 1]; n = shift = 0n; }
  }
}
function* fields(data) {
  while (data.length) {
    const [[tag, n]] = varints(data);
    let value, rest = data.subarray(n);
    if (tag % 8 === 0) { const [[number, m]] = varints(rest); value = number; rest = rest.subarray(m); }
    else if (tag % 8 === 1) { value = rest.subarray(0, 8); rest = rest.subarray(8); }
    else { const [[size, m]] = varints(rest); value = rest.subarray(m, m + size); rest = rest.subarray(m + size); }
    yield [Math.floor(tag / 8), value];
    data = rest;
  }
}

// ---- the engine, in what it takes for a web worker ---------------------------------------------------------------------
Object.assign(globalThis, {
  self: globalThis, WorkerGlobalScope() {}, location: { href: "https://localhost/engine_bundle.js" },
  XMLHttpRequest: class {
    open(_, name) { this.name = path.basename(name); }
    send() { this.response = new Uint8Array(fs.readFileSync(path.join(folder, this.name))).buffer; }
  },
});
delete globalThis.process; // otherwise the engine behaves as in node
console.log = () => {};
vm.runInThisContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"));

const [APPEND, FINALIZE, QUERY] = [1, 2, 3];
let sequence = 0, rows = [], names = [], done, faults = "";
function reply(bytes) {
  for (const [, rpc] of fields(Buffer.from(bytes)))
    for (const [number, value] of fields(rpc)) {
      if (number === 5) faults += value.toString();  // fatal
      if (number === 201 || number === 202) for (const [n, text] of fields(value)) if (n === 2) faults += text.toString();
      if (number === 203) take(value);
    }
  done();
}
function take(result) {
  for (const [number, value] of fields(result)) {
    if (number === 1) names.push(value.toString());
    if (number === 2) faults += value.toString();
    if (number !== 3) continue;
    const parts = { 1: [], 2: [], 3: [], 5: [] };
    for (const [n, part] of fields(value)) if (n in parts) parts[n] = part;
    const kinds = [...parts[1]], ints = [...varints(parts[2])].map(([n]) => n);
    const texts = Buffer.from(parts[5]).toString().split("\0"), floats = Buffer.from(parts[3]);
    let at = 0;
    const cells = kinds.map((kind) => kind === 2 ? ints.shift() : kind === 4 ? texts.shift()
      : kind === 3 ? floats.readDoubleLE(8 * at++) : null);
    while (cells.length) rows.push(cells.splice(0, names.length));
  }
}
function call(kind, ...more) {
  return new Promise((resolve) => {
    done = resolve;
    port.onmessage({ data: new Uint8Array(field(1, message(field(1, ++sequence), field(2, kind), ...more))) });
  });
}
const port = { postMessage: reply };
(async () => {
  globalThis.onmessage({ data: port });
  await new Promise((resolve) => setTimeout(resolve, 100)); // it takes up its work in a later turn of the loop
  await call(APPEND, field(101, fs.readFileSync(trace)));
  await call(FINALIZE);
  for (const query of queries) {
    rows = []; names = [];
    await call(QUERY, field(103, field(1, Buffer.from(query))));
    node.stdout.write(JSON.stringify(rows) + "\n");
  }
  if (faults) node.stderr.write(faults + "\n");
  node.exit(faults ? 1 : 0);
})();
