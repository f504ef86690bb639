const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id), canvas = $("canvas"), pen = canvas.getContext("2d");
const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));
const count = axis => axis.grid ? axis.grid[0] * axis.grid[1] : axis.labels.length;
for (const layer of data.layers) {
  layer.levels = bytes(layer.levels);
  layer.largest = new Float32Array(bytes(layer.largest).buffer);
}
let layer = data.layers[data.layers.length - 1], head = 0, row = 0, held = false;
const image = new Image(), heat = document.createElement("canvas");

function color(t) {  // dark purple, red, yellow
  const stops = [[20, 11, 53], [187, 55, 84], [249, 142, 9], [252, 255, 164]];
  const x = t * 3, i = Math.min(2, Math.floor(x));
  return stops[i].map((c, k) => Math.round(c + (stops[i + 1][k] - c) * (x - i)));
}
function middle([height, width], i) {  // of a cell, in the image's pixels
  const [y, x] = layer.covered, [left, top] = [i % width, Math.floor(i / width)];
  return "(" + Math.round((left + .5) / width * x * data.width / data.scale) + ", " +
    Math.round((top + .5) / height * y * data.height / data.scale) + ")";
}
function weights() {
  const size = count(layer.columns), start = (head * count(layer.rows) + row) * size;
  return layer.levels.subarray(start, start + size);
}
function draw() {
  const levels = weights(), largest = layer.largest[head * count(layer.rows) + row];
  let best = 0;
  levels.forEach((level, i) => { if (level > levels[best]) best = i; });
  let source, target;
  if (layer.rows.grid) source = "location " + middle(layer.rows.grid, row);
  else source = layer.rows.labels[row];
  if (layer.columns.grid) target = "location " + middle(layer.columns.grid, best);
  else target = layer.columns.labels[best];
  $("text").textContent = layer.name + ", " + layer.heads[head] + ": " + source + " attends most to " + target +
    ", with " + largest.toFixed(3) + (held ? " (held: click again to release)" : "");
  for (const [i, span] of [...$("rows").children].entries()) span.className = i === row ? "on" : "";
  for (const [i, span] of [...$("columns").children].entries())
    span.style.background = "rgba(249, 142, 9, " + levels[i] / 255 * largest + ")";
  if (canvas.hidden) return;
  pen.filter = "grayscale(1) brightness(.8)";
  pen.drawImage(image, 0, 0);
  pen.filter = "none";
  if (layer.columns.grid) {
    const [height, width] = layer.columns.grid;
    heat.width = width; heat.height = height;
    const map = heat.getContext("2d"), pixels = map.createImageData(width, height);
    levels.forEach((level, i) => pixels.data.set([...color(level / 255), 30 + level * .7], 4 * i));
    map.putImageData(pixels, 0, 0);
    pen.drawImage(heat, 0, 0, data.width * layer.covered[1], data.height * layer.covered[0]);
  }
  pen.lineWidth = 2;
  pen.strokeStyle = "#00ff9c";
  if (layer.rows.grid) {
    const [height, width] = layer.rows.grid;
    const w = data.width * layer.covered[1] / width, h = data.height * layer.covered[0] / height;
    pen.strokeRect(row % width * w, Math.floor(row / width) * h, w, h);
  } else if (layer.boxes.length) {
    const [x0, y0, x1, y1] = layer.boxes[row].map(x => x * data.scale);
    pen.strokeRect(x0, y0, x1 - x0, y1 - y0);
  }
}
function buttons(id, names, chosen, choose) {
  $(id).replaceChildren(...names.map((name, i) => {
    const button = document.createElement("button");
    button.textContent = name;
    button.className = i === chosen ? "on" : "";
    for (const event of ["mouseenter", "click"]) button.addEventListener(event, () => choose(i, event === "click"));
    return button;
  }));
}
function spans(id, axis, choose) {
  $(id).replaceChildren(...(axis.labels || []).map((label, i) => {
    const span = document.createElement("span");
    span.textContent = label;
    for (const event of choose ? ["mouseenter", "click"] : [])
      span.addEventListener(event, () => choose(i, event === "click"));
    return span;
  }));
}
function point(i, isClick) {
  if (isClick) held = !held;
  if (isClick || !held) { row = i; draw(); }
}
function showHeads() {
  buttons("heads", layer.heads, head, i => {
    head = i;
    [...$("heads").children].forEach((button, k) => { button.className = k === head ? "on" : ""; });
    draw();
  });
}
function show(i, isClick) {
  if (!isClick) return;
  layer = data.layers[i];
  head = Math.min(head, layer.heads.length - 1);
  row = Math.min(row, count(layer.rows) - 1);
  buttons("layers", data.layers.map(l => l.name), i, show);
  showHeads();
  spans("rows", layer.rows, point);
  spans("columns", layer.columns);
  canvas.hidden = !data.image || !(layer.rows.grid || layer.columns.grid || layer.boxes.length);
  draw();
}
function at(event) {
  if (!layer.rows.grid) return null;
  const [height, width] = layer.rows.grid, box = canvas.getBoundingClientRect();
  const x = Math.floor((event.clientX - box.left) / box.width / layer.covered[1] * width);
  const y = Math.floor((event.clientY - box.top) / box.height / layer.covered[0] * height);
  return x < 0 || y < 0 || x >= width || y >= height ? null : y * width + x;
}
for (const event of ["mousemove", "click"]) canvas.addEventListener(event, e => {
  const i = at(e);
  if (i !== null) point(i, event === "click");
});
canvas.width = data.width; canvas.height = data.height;
image.onload = () => show(data.layers.length - 1, true);
if (data.image) image.src = data.image; else show(data.layers.length - 1, true);
