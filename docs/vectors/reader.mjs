// Reads certified vectors, computes attention in double precision from their plain arrays, and says how far off it is.
//
//   node reader.mjs refattn/conformance/vectors/*.json
//
// One line per file: vectors read, values compared, largest error. The exit code is 1 if any value is off by more than
// a rough tolerance, or NaN or infinite in another place than it should be. Nothing but JSON is read, and no mask code
// is needed: "visible" says what every query sees. Vectors with rotary options are turned first.

import { readFileSync } from "node:fs";
import { basename } from "node:path";

const TOLERANCE = 1e-11; // relative to the largest value or logit of a vector; refattn's own bounds are sharper
const DIGITS = { bfloat16: 4, float32: 8, float64: 16 };

// ---- the format ----------------------------------------------------------------------------------------------------

function number(bits, dtype = "float64") {
  if (bits.length !== DIGITS[dtype]) throw new Error(`${bits} is no ${dtype}`);
  const view = new DataView(new ArrayBuffer(8));
  view.setBigUint64(0, BigInt(`0x${bits.padEnd(16, "0")}`)); // a bfloat16 is the upper half of a float32
  return dtype === "float64" ? view.getFloat64(0) : view.getFloat32(0);
}

function array({ dtype, shape, bits }) {
  const words = bits === "" ? [] : bits.split(" ");
  const values = dtype === "bool" ? [...words.join("")].map((one) => one === "1") : words.map((w) => number(w, dtype));
  if (values.length !== size(shape)) throw new Error(`${values.length} values for the shape ${shape}`);
  return { shape, values };
}

const size = (shape) => shape.reduce((product, n) => product * n, 1);

// The place of an index in an array that broadcasts to it, aligned on the right.
function offset(shape, index) {
  let at = 0;
  shape.forEach((n, axis) => {
    at = at * n + (n === 1 ? 0 : index[index.length - shape.length + axis]);
  });
  return at;
}

function* indices(shape) {
  for (let i = 0; i < size(shape); i++) {
    const index = [];
    for (let axis = shape.length - 1, rest = i; axis >= 0; axis--) {
      index.unshift(rest % shape[axis]);
      rest = Math.floor(rest / shape[axis]);
    }
    yield index;
  }
}

// ---- attention -----------------------------------------------------------------------------------------------------

// One row of q, k or v, with its pairs turned by position * base^(-2i/width) where a vector asks for it.
function row(x, index, turn, positions) {
  const width = x.shape.at(-1);
  const start = offset(x.shape.slice(0, -1), index) * width;
  const out = x.values.slice(start, start + width);
  if (!turn) return out;
  const own = Array.isArray(positions[0]) ? positions[index[0]] : positions;
  const turned = turn.width ?? width;
  for (let i = 0; i < turned / 2; i++) {
    const [a, b] = turn.style === "half" ? [i, i + turned / 2] : [2 * i, 2 * i + 1];
    const angle = own[index.at(-1)] * number(turn.base) ** ((-2 * i) / turned);
    const [first, second] = [out[a], out[b]];
    out[a] = first * Math.cos(angle) - second * Math.sin(angle);
    out[b] = second * Math.cos(angle) + first * Math.sin(angle);
  }
  return out;
}

// Output, log-sum-exp and weights, flat, by definition: one query row after the other.
function attention(vector) {
  const { options } = vector;
  const [q, k, v, visible] = [vector.q, vector.k, vector.v, vector.visible].map(array);
  const single = q.shape.length === 2;
  if (single) for (const x of [q, k, v, visible]) x.shape = [1, ...x.shape];
  const [dK, dV, keys, kvHeads] = [q.shape.at(-1), v.shape.at(-1), k.shape.at(-2), k.shape.at(-3)];
  const scale = options.scale ? number(options.scale) : dK ? 1 / Math.sqrt(dK) : 1;
  const cap = options.softcap && number(options.softcap);
  const bias = options.bias && array(options.bias.values);
  const sinks = options.sinks && array(options.sinks);
  const result = { output: [], lse: [], weights: [], largest: 1 };

  for (const index of indices(visible.shape.slice(0, -1))) {
    const [batch, head, i] = [index.slice(0, -2), index.at(-2), index.at(-1)];
    const kvHead = Math.floor(head / (q.shape.at(-3) / kvHeads));
    const query = row(q, index, options.rotary, options.rotary?.q_positions);
    const logits = [];
    for (let j = 0; j < keys; j++) {
      if (!visible.values[offset(visible.shape, [...index, j])]) {
        logits.push(-Infinity);
        continue;
      }
      const key = row(k, [...batch, kvHead, j], options.rotary, options.rotary?.k_positions);
      let score = query.reduce((sum, x, c) => sum + x * key[c], 0) * scale;
      if (cap) score = cap * Math.tanh(score / cap);
      if (bias) score += bias.values[offset(bias.shape, [...batch, head, i, j])];
      // A key that is not finite makes its logit NaN, and an infinite logit its row.
      logits.push(key.every(Number.isFinite) && score < Infinity ? score : NaN);
    }
    const seen = logits.map((_, j) => visible.values[offset(visible.shape, [...index, j])]);
    let sink = sinks ? sinks.values[sinks.values.length === 1 ? 0 : head] : -Infinity;
    if (sink === Infinity) sink = NaN;
    const peak = Math.max(sink, ...logits); // NaN if any of them is
    const grown = logits.map((x, j) => (seen[j] ? Math.exp(x - peak) : Number.isNaN(peak) ? NaN : 0));
    const total = grown.reduce((sum, x) => sum + x, sink === -Infinity ? 0 : Math.exp(sink - peak));
    const weights = grown.map((x) => (total === 0 ? 0 : x / total));
    const values = logits.map((_, j) => row(v, [...batch, kvHead, j]));
    result.weights.push(...weights);
    result.lse.push(peak === -Infinity ? -Infinity : peak + Math.log(total));
    for (let c = 0; c < dV; c++) {
      // A visible NaN or infinity decides its element whatever its weight; what is hidden takes no part.
      const special = values.flatMap((x, j) => (seen[j] && !Number.isFinite(x[c]) ? [x[c]] : []));
      const sum = grown.reduce((s, x, j) => (seen[j] && Number.isFinite(values[j][c]) ? s + x * values[j][c] : s), 0);
      const mean = total === 0 ? 0 : sum / total;
      result.output.push(special.length ? special.reduce((s, x) => s + x) + mean * 0 : Number.isNaN(peak) ? NaN : mean);
    }
    for (const x of [peak, ...values.filter((_, j) => seen[j]).flat()]) {
      if (Number.isFinite(x)) result.largest = Math.max(result.largest, Math.abs(x));
    }
  }
  return result;
}

// ---- gradients -----------------------------------------------------------------------------------------------------

// The derivatives of the sum of grad_output times the output, flat, from the weights of `attention`. Hidden pairs add
// nothing, whatever they hold.
function gradients(vector, weights) {
  const { options } = vector;
  const [q, k, v, visible, given] = [vector.q, vector.k, vector.v, vector.visible, vector.grad_output].map(array);
  if (q.shape.length === 2) for (const x of [q, k, v, visible, given]) x.shape = [1, ...x.shape];
  const [dK, keys] = [q.shape.at(-1), k.shape.at(-2)];
  const scale = options.scale ? number(options.scale) : 1 / Math.sqrt(dK);
  const cap = options.softcap && number(options.softcap);
  const term = options.bias?.terms?.[0];
  const bias = options.bias && array(term ? term.table : options.bias.values);
  const sinks = options.sinks && array(options.sinks);
  const found = { q: q.values.map(() => 0), k: k.values.map(() => 0), v: v.values.map(() => 0) };
  if (bias) found.bias = bias.values.map(() => 0);
  if (sinks) found.sinks = sinks.values.map(() => 0);
  const start = (x, index) => offset(x.shape.slice(0, -1), index) * x.shape.at(-1);
  const times = (x, a, y, b, n) => Array.from({ length: n }, (_, c) => x[a + c] * y[b + c]).reduce((s, t) => s + t, 0);

  for (const index of indices(visible.shape.slice(0, -1))) {
    const [batch, head, i] = [index.slice(0, -2), index.at(-2), index.at(-1)];
    const kvHead = Math.floor(head / (q.shape.at(-3) / k.shape.at(-3)));
    const [atQ, atG, width] = [start(q, index), start(given, index), given.shape.at(-1)];
    const seen = [...Array(keys).keys()].filter((j) => visible.values[offset(visible.shape, [...index, j])]);
    const weight = (j) => weights[offset(visible.shape, [...index, j])];
    const product = (j) => times(given.values, atG, v.values, start(v, [...batch, kvHead, j]), width);
    const ofRow = seen.reduce((sum, j) => sum + weight(j) * product(j), 0);
    for (const j of seen) {
      const [atK, atV] = [start(k, [...batch, kvHead, j]), start(v, [...batch, kvHead, j])];
      const logit = weight(j) * (product(j) - ofRow);
      const score = times(q.values, atQ, k.values, atK, dK) * scale;
      const slope = (cap ? 1 - Math.tanh(score / cap) ** 2 : 1) * scale * logit;
      for (let c = 0; c < dK; c++) {
        found.q[atQ + c] += slope * k.values[atK + c];
        found.k[atK + c] += slope * q.values[atQ + c];
      }
      for (let c = 0; c < width; c++) found.v[atV + c] += weight(j) * given.values[atG + c];
      if (term) {
        const reach = (bias.shape.at(-1) - 1) / 2;
        const distance = j + (options.k_start ?? 0) - i - (options.q_start ?? 0);
        found.bias[offset(bias.shape, [head, Math.max(-reach, Math.min(reach, distance)) + reach])] += logit;
      } else if (bias) found.bias[offset(bias.shape, [...index, j])] += logit;
    }
    const share = 1 - seen.reduce((sum, j) => sum + weight(j), 0);
    if (sinks && seen.length) found.sinks[head] -= share * ofRow;
  }
  return found;
}

// ---- comparison ----------------------------------------------------------------------------------------------------

function error(actual, expected) {
  if (Object.is(actual, expected) || actual === expected) return 0;
  return Number.isFinite(actual) && Number.isFinite(expected) ? Math.abs(actual - expected) : Infinity;
}

let failed = false;
for (const file of process.argv.slice(2)) {
  const data = JSON.parse(readFileSync(file, "utf8"));
  if (!data.vectors) continue; // the manifest and the schema
  let [compared, worst] = [0, 0];
  for (const vector of data.vectors) {
    const result = attention(vector);
    const proven = { output: vector.expected.output, lse: vector.expected.lse, weights: vector.expected.weights };
    if (vector.grad_output) {
      for (const [name, values] of Object.entries(gradients(vector, result.weights))) {
        result[`gradient of ${name}`] = values;
        proven[`gradient of ${name}`] = vector.expected.gradients[name];
      }
    }
    for (const name of Object.keys(proven)) {
      const expected = array(proven[name]).values;
      if (result[name].length !== expected.length) throw new Error(`${vector.name}: ${name} has another shape`);
      result[name].forEach((actual, i) => {
        const off = error(actual, expected[i]) / result.largest;
        if (off > TOLERANCE) {
          failed = true;
          console.log(`${vector.name}: ${name} ${i} is ${actual}, expected ${expected[i]} [${vector.clauses[0]}]`);
        }
        [compared, worst] = [compared + 1, Math.max(worst, off)];
      });
    }
  }
  const read = `${data.vectors.length} vectors, ${compared} values`;
  console.log(`${basename(file)}: ${read}, largest error ${worst.toExponential(1)}`);
}
process.exitCode = failed ? 1 : 0;
