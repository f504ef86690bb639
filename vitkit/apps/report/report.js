"use strict";
// What every report's page does: parts that follow a score threshold, and cells that open their images.
const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
const dataOf = part => JSON.parse(part.querySelector("script.data").textContent);
const color = label => `hsl(${(7 + label * 137.5) % 360} 85% 45%)`;

// The matches of the predictions from a score on: nothing is matched here, since no prediction affects better ones.
function match(image, threshold) {
  const crowd = new Set(image.crowd), taken = new Set(image.crowd), pairs = [], wrong = [], missed = [];
  image.matched.forEach((t, p) => {
    if (image.scores[p] < threshold || crowd.has(t)) return;
    if (t < 0) return wrong.push(p);
    taken.add(t);
    pairs.push([p, t]);
  });
  image.labels.forEach((_, t) => { if (!taken.has(t)) missed.push(t); });
  return { pairs, wrong, missed };
}

function confusions(data, threshold) {
  const nothing = data.classes.length, cells = new Map();
  const add = (truth, predicted, image, p, t) => {
    const key = truth * (nothing + 1) + predicted;
    if (!cells.has(key)) cells.set(key, []);
    cells.get(key).push({ image, p, t });
  };
  for (const image of data.images) {
    const { pairs, wrong, missed } = match(image, threshold);
    for (const [p, t] of pairs) add(image.labels[t], image.predicted[p], image, p, t);
    for (const p of wrong) add(nothing, image.predicted[p], image, p, null);
    for (const t of missed) add(image.labels[t], nothing, image, null, t);
  }
  return cells;
}

function load(image) {
  image.loaded ??= new Promise(done => {
    const loaded = new Image();
    loaded.onload = () => done(loaded);
    loaded.src = image.url;
  });
  return image.loaded;
}

function outline(pen, box, polygons, scale, area) {
  if (!polygons) return pen.strokeRect((box[0] - area[0]) * scale, (box[1] - area[1]) * scale, box[2] * scale, box[3] * scale);
  for (const points of polygons) {
    pen.beginPath();
    for (let k = 0; k < points.length; k += 2)
      pen.lineTo((points[k] - area[0]) * scale, (points[k + 1] - area[1]) * scale);
    pen.closePath();
    pen.stroke();
  }
}

// Draws an area [x, y, width, height] of an image with the objects and predictions of those numbers, others in gray.
async function draw(canvas, data, image, area, side, truths, predictions, others = []) {
  const scale = Math.min(side / Math.max(area[2], area[3]), 6);
  canvas.width = Math.max(1, Math.round(area[2] * scale));
  canvas.height = Math.max(1, Math.round(area[3] * scale));
  const loaded = await load(image), pen = canvas.getContext("2d"), ratio = loaded.width / image.size[0];
  pen.drawImage(loaded, area[0] * ratio, area[1] * ratio, area[2] * ratio, area[3] * ratio, 0, 0, canvas.width, canvas.height);
  pen.lineWidth = 1;
  pen.strokeStyle = "rgba(255, 255, 255, .7)";
  for (const t of others) outline(pen, image.boxes[t], null, scale, area);
  pen.lineWidth = 2;
  for (const p of predictions) {
    const box = image.predicted_boxes[p];
    pen.strokeStyle = color(image.predicted[p]);
    outline(pen, box, image.predicted_masks?.[p], scale, area);
    label(pen, `${data.classes[image.predicted[p]]} ${image.scores[p].toFixed(2)}`, box, scale, area, color(image.predicted[p]));
  }
  for (const t of truths) {
    for (const [dash, stroke] of [[[], "#000"], [[5, 4], "#fff"]]) {  // seen on dark and on light
      pen.setLineDash(dash);
      pen.strokeStyle = stroke;
      outline(pen, image.boxes[t], image.masks?.[t], scale, area);
    }
    if (!predictions.length) label(pen, data.classes[image.labels[t]], image.boxes[t], scale, area, "#333");
  }
}

function label(pen, text, box, scale, area, background) {
  pen.font = "11px system-ui, sans-serif";
  const width = pen.measureText(text).width + 4;
  const x = Math.max(0, Math.min((box[0] - area[0]) * scale, pen.canvas.width - width));
  const y = Math.max(12, (box[1] - area[1]) * scale);
  pen.fillStyle = background;
  pen.fillRect(x, y - 12, width, 13);
  pen.fillStyle = "#fff";
  pen.fillText(text, x + 2, y - 2);
}

function around(image, boxes, share = 0.4) {
  const x0 = Math.min(...boxes.map(b => b[0])), y0 = Math.min(...boxes.map(b => b[1]));
  const x1 = Math.max(...boxes.map(b => b[0] + b[2])), y1 = Math.max(...boxes.map(b => b[1] + b[3]));
  const margin = Math.max(12, share * Math.max(x1 - x0, y1 - y0)), [width, height] = image.size;
  const left = Math.max(0, x0 - margin), top = Math.max(0, y0 - margin);
  return [left, top, Math.max(1, Math.min(width, x1 + margin) - left), Math.max(1, Math.min(height, y1 + margin) - top)];
}

function detection(part) {
  const data = dataOf(part), $ = selector => document.querySelector(`.${part.dataset.group} ${selector}`);
  const nothing = data.classes.length, nameOf = k => k === nothing ? "(nothing)" : data.classes[k];
  const slider = $(".threshold"), curve = $(".curve"), marker = $(".marker"), most = 40;
  let cells, threshold;
  curve.append(...data.curves.names.map((name, k) => make("option", { value: k, textContent: name })));

  function openCrops(truth, predicted) {
    const list = cells.get(truth * (nothing + 1) + predicted) || [], seen = list.filter(item => item.image.url);
    const verb = truth === predicted ? `${nameOf(truth)}, correct` : predicted === nothing ? `${nameOf(truth)} missed`
      : truth === nothing ? `${nameOf(predicted)}, no object` : `${nameOf(truth)} taken for ${nameOf(predicted)}`;
    const less = seen.length > most || seen.length < list.length ? `; ${Math.min(seen.length, most)} shown` : "";
    $("dialog h3").textContent = `${verb}: ${list.length} from score ${threshold.toFixed(2)}${less}`;
    seen.sort((a, b) => (b.image.scores[b.p] || 0) - (a.image.scores[a.p] || 0));
    $("dialog .gallery").replaceChildren(...seen.slice(0, most).map(({ image, p, t }) => {
      const canvas = make("canvas"), boxes = [];
      if (p !== null) boxes.push(image.predicted_boxes[p]);
      if (t !== null) boxes.push(image.boxes[t]);
      draw(canvas, data, image, around(image, boxes), 220, t === null ? [] : [t], p === null ? [] : [p]);
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `${verb}, in ${image.name}`);
      return make("figure", {}, canvas, make("figcaption", { textContent: image.name }));
    }));
    $("dialog").showModal();
  }

  function cellButton(truth, predicted, total) {
    const count = (cells.get(truth * (nothing + 1) + predicted) || []).length;
    if (!count) return make("td", { textContent: "" });
    const strength = total ? count / total : 0, right = truth === predicted;
    const button = make("button", { type: "button", textContent: count, onclick: () => openCrops(truth, predicted) });
    button.style.background = right ? `rgba(20, 110, 60, ${0.1 + 0.5 * strength})` : `rgba(190, 40, 40, ${0.08 + 0.6 * strength})`;
    button.setAttribute("aria-label", `true ${nameOf(truth)}, predicted ${nameOf(predicted)}: ${count}`);
    return make("td", {}, button);
  }

  function showMatrix() {
    cells = confusions(data, threshold);
    const shown = [...data.in_matrix, nothing], totals = new Map();
    for (const [key, list] of cells) {
      const truth = Math.floor(key / (nothing + 1));
      totals.set(truth, (totals.get(truth) || 0) + list.length);
    }
    const header = name => make("th", { scope: "col", textContent: name });
    const head = make("tr", {}, header("true \\ predicted"), ...shown.map(k => header(nameOf(k))));
    $(".confusion.live").replaceChildren(make("thead", {}, head), make("tbody", {}, ...shown.map(truth =>
      make("tr", {}, make("th", { scope: "row", textContent: nameOf(truth) }),
        ...shown.map(predicted => truth === nothing && predicted === nothing ? make("td") : cellButton(truth, predicted, totals.get(truth)))))));
    if (shown.length === nothing + 1) return;
    const wrong = [...cells].map(([key, list]) => [Math.floor(key / (nothing + 1)), key % (nothing + 1), list.length])
      .filter(([truth, predicted]) => truth !== predicted).sort((a, b) => b[2] - a[2]).slice(0, 20);
    $(".frequent").replaceChildren(
      make("p", { className: "note", textContent: `${data.in_matrix.length} of ${nothing} classes, those with the most confusions. The most frequent confusions of all:` }),
      ...wrong.map(([truth, predicted, count]) => make("button", {
        type: "button", textContent: `${count}: ${nameOf(truth)} → ${nameOf(predicted)}`, onclick: () => openCrops(truth, predicted) })));
  }

  function showNumbers() {
    const k = Math.round(threshold * 100), row = data.curves.values[curve.value || 0]?.[k];
    $(".chosen").textContent = threshold.toFixed(2);
    if (!row) return;
    const [truePositives, falsePositives] = row.slice(9), objects = data.curves.objects[curve.value || 0];
    const tile = (name, value, low, high) => make("div", {}, make("small", { textContent: name }),
      make("b", { textContent: value.toFixed(3) }), make("small", { textContent: `${low.toFixed(3)} to ${high.toFixed(3)}` }));
    const count = (name, value) => make("div", {}, make("small", { textContent: name }), make("b", { textContent: value }));
    // A metric's value, low and high ends are stored for precision, recall and F1 in turn.
    const tiles = ["precision", "recall", "F1"].map((name, m) => tile(name, ...row.slice(3 * m, 3 * m + 3)));
    $(".tiles").replaceChildren(...tiles, count("true positives", truePositives),
      count("false positives", falsePositives), count("missed", objects - truePositives));
    const x = 46 + threshold * (420 - 46 - 12);
    marker.setAttribute("x1", x);
    marker.setAttribute("x2", x);
  }

  function showImages() {
    for (const [selector, indices] of [[".lowest", data.lowest], [".highest", data.highest]]) {
      const gallery = $(selector);
      if (!gallery) continue;
      gallery.replaceChildren(...indices.map(index => {
        const image = data.images[index], all = [0, 0, ...image.size], { pairs, wrong, missed } = match(image, threshold);
        const right = pairs.filter(([p, t]) => image.predicted[p] === image.labels[t]).length;
        const truths = image.labels.map((_, t) => t), predictions = image.scores.map((_, p) => p).filter(p => image.scores[p] >= threshold);
        const panel = (name, t, p) => {
          const canvas = make("canvas");
          draw(canvas, data, image, all, 480, t, p);
          canvas.setAttribute("role", "img");
          canvas.setAttribute("aria-label", `${name} of ${image.name}`);
          return make("div", {}, make("span", { textContent: name }), canvas);
        };
        const text = `${image.name}: ${right} correct, ${pairs.length - right} of a wrong class, ${wrong.length} without an object, ${missed.length} missed`;
        return make("figure", {}, make("div", { className: "pair" }, panel("truth", truths, []), panel("prediction", [], predictions)),
          make("figcaption", { textContent: text }));
      }));
    }
  }

  let waiting = 0;
  function show(value) {
    threshold = value;
    slider.value = Math.round(100 * value);
    showNumbers();
    // Images follow once the slider rests.
    clearTimeout(waiting);
    waiting = setTimeout(() => { showMatrix(); showImages(); }, 60);
  }
  slider.min = Math.round(100 * data.min_score);
  slider.addEventListener("input", () => show(slider.value / 100));
  curve.addEventListener("change", showNumbers);
  $(".best").addEventListener("click", () => show(data.best));
  show(Math.max(data.best, data.min_score));
}

// A matrix with a fixed list of images for each cell.
function cellImages(part) {
  const data = dataOf(part), dialog = part.querySelector("dialog");
  for (const button of part.querySelectorAll("button[data-cell]")) button.addEventListener("click", () => {
    const cell = data.cells[button.dataset.cell] || [];
    dialog.querySelector("h3").textContent = `${button.getAttribute("aria-label")}${cell.length ? "" : "; this file has no image of it"}`;
    dialog.querySelector(".gallery").replaceChildren(...cell.map(([number, text]) =>
      make("figure", {}, make("img", { src: data.urls[number], alt: text }), make("figcaption", { textContent: text }))));
    dialog.showModal();
  });
}

// Suspicious labels, one after the other: accepted ones are exported as a list of corrections.
function labelErrors(part) {
  const data = dataOf(part), $ = selector => part.querySelector(selector), verdicts = new Map();
  let current = 0;
  const cards = data.errors.map((error, k) => {
    const image = data.images[error.image], canvas = make("canvas"), boxes = [];
    if (error.object !== null) boxes.push(image.boxes[error.object]);
    if (error.predicted !== null) boxes.push(image.predicted_boxes[error.predicted]);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", error.text);
    const others = image.labels.map((_, t) => t).filter(t => t !== error.object);
    const paint = () => draw(canvas, data, image, around(image, boxes, 1), 340, error.object === null ? [] : [error.object],
      error.predicted === null ? [] : [error.predicted], others);
    const button = (verdict, text) => make("button", { type: "button", textContent: text, onclick: () => judge(k, verdict) });
    const figure = make("figure", { tabIndex: -1 }, canvas, make("figcaption", { textContent: `${k + 1}. ${error.text}` }),
      make("div", { className: "controls" }, button(true, "accept (a)"), button(false, "reject (r)")));
    return { figure, paint, painted: false };
  });
  const seen = new IntersectionObserver(entries => entries.forEach(entry => {
    const card = cards.find(each => each.figure === entry.target);
    if (entry.isIntersecting && !card.painted) { card.painted = true; card.paint(); }
  }), { rootMargin: "400px" });
  const shown = () => cards.map((_, k) => k).filter(k => !cards[k].figure.hidden);

  function go(k) {
    current = k;
    cards[k].figure.focus();
  }
  function step(by) {
    const list = shown(), next = list[Math.min(list.length - 1, Math.max(0, list.indexOf(current) + by))];
    if (next !== undefined) go(next);
  }
  function judge(k, verdict) {
    verdicts.set(k, verdict);
    cards[k].figure.className = verdict ? "accepted" : "rejected";
    count();
    current = k;
    step(1);
  }
  function count() {
    const accepted = [...verdicts.values()].filter(Boolean).length;
    $(".count").textContent = `${accepted} accepted, ${verdicts.size - accepted} rejected, ${cards.length - verdicts.size} open`;
  }
  part.addEventListener("keydown", event => {
    const at = cards.findIndex(card => card.figure.contains(event.target));
    if (at < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    current = at;
    const keys = { a: () => judge(at, true), r: () => judge(at, false), ArrowRight: () => step(1), ArrowLeft: () => step(-1) };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  $(".kind").addEventListener("change", event => cards.forEach((card, k) => {
    card.figure.hidden = event.target.value !== "" && data.errors[k].kind !== event.target.value;
  }));
  $(".begin").addEventListener("click", () => step(0));
  $(".export").addEventListener("click", () => {
    const list = data.corrections.filter((_, k) => verdicts.get(k));
    const url = URL.createObjectURL(new Blob([JSON.stringify(list, null, 1)], { type: "application/json" }));
    make("a", { href: url, download: "corrections.json" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  });
  $(".gallery").replaceChildren(...cards.map(card => card.figure));
  cards.forEach(card => seen.observe(card.figure));
  count();
}

document.querySelectorAll(".label-errors").forEach(labelErrors);
document.querySelectorAll(".detection").forEach(detection);
document.querySelectorAll(".cell-images").forEach(cellImages);
