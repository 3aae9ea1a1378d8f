"use strict";
// The rows: all text goes into the page as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const HUES = 7;
  const TRAINED = 1, IN_PART = 2, SPECIAL = 4, CORRUPTED = 8, BYTES = 16;
  const CLASSES = [[TRAINED, "trained"], [IN_PART, "part"], [SPECIAL, "special"], [CORRUPTED, "corrupted"], [BYTES, "bytes"]];
  const RULES = {
    causal: "causal",
    prefix: "bidirectional in the prefix, then causal",
    bidirectional: "bidirectional",
    block_diffusion: "block diffusion: noised blocks attend to themselves and to earlier clean blocks",
  };
  const several = (n, thing) => `${n.toLocaleString("en")} ${thing}${n === 1 ? "" : "s"}`;
  const count = (n) => n.toLocaleString("en");
  const panel = byId("panel");
  const narrow = matchMedia("(max-width: 960px)");
  let shown = data.rows, at = 0, segment = 0, pointer = "";

  function make(tag, name, text) {
    const element = document.createElement(tag);
    if (name) element.className = name;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  // Text

  function fill(box, part) {
    let slot = part.first, line = null;
    for (const run of part.runs) {
      if (run.gap) {
        box.append(make("div", "gap", `… ${several(run.gap, "token")} left out …`));
        slot += run.gap;
        line = null;
        continue;
      }
      run.t.forEach((text, i) => {
        const flags = parseInt(run.f[i], 32), ids = [].concat(run.i[i]);
        const classes = CLASSES.filter(([bit]) => flags & bit).map(([, name]) => name);
        if (part.name === "original") classes.splice(0, classes.length, ...classes.filter((name) => name !== "trained"));
        const says = `token ${ids.join(", ")}${part.first < 0 ? "" : `, slot ${count(slot)}`}${classes.length ? `: ${classes.join(", ")}` : ""}`;
        for (const piece of text.split(/(?<=↵)/)) {
          if (!line) box.append(line = make("div", "line"));
          const token = make("span", ["tok", ...classes].join(" "));
          for (const some of piece.split(/([↵⇥⇤]+)/)) {
            if (some) token.append(/[↵⇥⇤]/.test(some) ? make("span", "control", some) : some);
          }
          token.says = says;
          line.append(token);
          if (piece.endsWith("↵")) line = null;
        }
        slot += ids.length;
      });
    }
    // beside each further line that a line of the text takes; more than it can take, the style sheet shows what fits
    for (const each of box.querySelectorAll(".line")) each.dataset.wraps = `\n${"↳\n".repeat(each.textContent.length / 8)}`;
  }

  function sideOf(part, number, before = "") {
    const side = make("div", part.name === "original" ? "side original" : "side");
    side.append(make("h4", "", part.name === "original" ? "original text of the segment" : `${before}${part.name} · ${several(part.count, "slot")}`));
    const box = make("div", "text");
    box.tabIndex = 0;
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", `segment ${number}, ${part.name}`);
    fill(box, part);
    side.append(box);
    return side;
  }

  function point(target) {
    const token = target.closest(".tok");
    if (token) panel.querySelector(".token").textContent = token.says;
  }

  function articleOf(own, i) {
    const article = make("article", `h${i % HUES}`);
    const heading = make("h3"), button = make("button");
    button.type = "button";
    button.append(make("span", "number", String(own.number)), make("span", "", own.task));
    const objective = own.objective === own.task ? "" : `${own.objective} · `;
    button.append(make("small", "", `${objective}${several(own.slots, "slot")} · ${count(own.trained)} trained`));
    button.setAttribute("aria-controls", "panel");
    for (const event of ["focus", "click"]) button.addEventListener(event, () => pick(i));
    article.addEventListener("mousemove", (event) => {
      const place = `${event.screenX} ${event.screenY}`;
      if (place === pointer) return; // the page moved, not the pointer
      pointer = place;
      if (!narrow.matches) choose(i);
      point(event.target);
    });
    article.addEventListener("click", (event) => {
      if (!event.target.closest(".tok")) return;
      pick(i);
      point(event.target);
    });
    heading.append(button);
    const sides = make("div", "sides");
    for (const part of own.parts) sides.append(sideOf(part, own.number));
    if (own.original) sides.append(sideOf(own.original, own.number));
    else if (own.why) sides.append(make("p", "", own.why));
    article.append(heading, sides);
    return article;
  }

  function drawAnew({ row, epoch, segments }) {
    const stored = data.rows.find((other) => other.row === row).segments;
    segments.slice(0, stored.length).forEach((own, i) => {
      const article = make("article", `h${i % HUES}`), heading = make("h3"), sides = make("div", "sides beside");
      heading.append(make("span", "number", String(own.number)), ` ${stored[i].task}`);
      for (const [name, parts] of [["stored", stored[i].parts], [`epoch ${epoch}`, own.parts]]) {
        const side = make("div");
        for (const part of parts) side.append(sideOf(part, `${own.number}, ${name}`, `${name}: `));
        sides.append(side);
      }
      article.append(heading, sides);
      byId("anew").append(article);
    });
  }

  // The header of a segment: the one that is pointed at or chosen, else the one that is being read

  const TOP = 112; // pixels below the controls, where the card begins
  let still = 0;

  function pick(i) {
    still = performance.now() + 1000; // what is chosen is scrolled to, and stays chosen
    panel.setAttribute("aria-live", "polite");
    choose(i);
  }

  function follow() {
    const segments = byId("segments"), box = segments.getBoundingClientRect();
    if (narrow.matches || performance.now() < still || box.bottom < TOP || box.top > innerHeight) return;
    // where one reads: at the top of the window when the segments begin there, at its end when they end there
    const room = innerHeight - TOP, through = (TOP - box.top) / Math.max(box.height - room, box.height / 2);
    const reading = TOP + room * Math.min(Math.max(through, 0), 1);
    panel.setAttribute("aria-live", "off");
    choose(Math.max([...segments.children].findLastIndex((each) => each.getBoundingClientRect().top <= reading), 0));
  }

  function choose(i) {
    const own = shown[at].segments?.[i];
    if (!own) return;
    const changed = segment !== i || !panel.firstChild;
    segment = i;
    if (changed) {
      const list = make("dl");
      const facts = [
        ["task", own.task], ["objective", own.objective], ["source", own.source], ["file", own.file],
        ["document at", count(own.document)],
        ["tokens", own.tokens ? `${count(own.start)} … ${count(own.start + own.tokens - 1)} (${count(own.tokens)})` : "none"],
        ["slots", `${count(own.begin)} … ${count(own.begin + own.slots - 1)} (${count(own.slots)})`],
        ["prefix", own.prefix < 0 ? "another attention pattern" : count(own.prefix)],
        ["attention", RULES[own.rule] || own.rule],
        ["trained", `${count(own.trained)} (${(100 * own.trained / own.slots).toFixed(1)} %)`],
        ["noise level", own.noise ? own.noise.toPrecision(4) : "none"], ["loss weight", String(Number(own.loss_weight.toPrecision(5)))],
        ["key", own.key], ["pass", String(own.repeat)], ["from source", own.rebuilt],
      ];
      if (own.padding) facts.splice(7, 0, ["padding after", count(own.padding)]);
      for (const [name, value] of facts) list.append(make("dt", "", name), make("dd", "", value));
      panel.replaceChildren(make("h4", "", `Segment ${own.number}`), list, make("p", "token", ""));
    }
    document.querySelectorAll("#segments article").forEach((article, k) => {
      article.classList.toggle("chosen", k === i);
      if (k === i && narrow.matches) article.insertBefore(panel, article.children[1]);
    });
    document.querySelectorAll("#strip button").forEach((button, k) => {
      button.classList.toggle("chosen", k === i);
      button.setAttribute("aria-pressed", String(k === i));
    });
    drawMasks();
  }

  // The mask

  function rectanglesOf([begin, end, prefix, blocks]) {
    // blocks: the length of a block, or where each block begins, counted from `begin`. Returns
    // [[top, left, bottom, right]] of what is allowed, and ["stairs"] for the causal triangle
    if (prefix >= 0) return { boxes: prefix > 0 ? [[begin, begin, begin + prefix, begin + prefix]] : [], stairs: prefix < end - begin };
    const half = (end - begin) / 2, boxes = [];
    const length = Math.ceil(half / blocks);
    const starts = Array.isArray(blocks) ? blocks : Array.from({ length }, (_, i) => i * blocks);
    for (const [i, low] of starts.entries()) {
      const high = i + 1 < starts.length ? starts[i + 1] : half, noised = begin, clean = begin + half;
      boxes.push([noised + low, noised + low, noised + high, noised + high]);
      if (low) boxes.push([noised + low, clean, noised + high, clean + low]);
      boxes.push([clean + low, clean, clean + high, clean + high]);
    }
    return { boxes, stairs: false };
  }

  function drawMask(canvas, bounds, from, to, chosen) {
    const style = getComputedStyle(document.documentElement), context = canvas.getContext("2d");
    const size = canvas.width, scale = size / Math.max(to - from, 1);
    context.clearRect(0, 0, size, size);
    bounds.forEach((own, i) => {
      const [begin, end] = own;
      if (begin >= to || end <= from) return;
      context.fillStyle = style.getPropertyValue(`--hue-${i % HUES}`);
      const { boxes, stairs } = rectanglesOf(own);
      for (const [top, left, bottom, right] of boxes) {
        context.fillRect((left - from) * scale, (top - from) * scale, Math.max((right - left) * scale, 0.5), Math.max((bottom - top) * scale, 0.5));
      }
      if (stairs) {
        const low = (begin - from) * scale, high = (end - from) * scale, step = Math.min(scale, high - low);
        context.beginPath();
        if (end - begin <= 64) {
          for (let q = begin; q < end; q++) context.rect(low, (q - from) * scale, (q + 1 - begin) * scale, scale);
        } else {
          context.moveTo(low, low);
          context.lineTo(Math.min(low + step, high), low);
          context.lineTo(high, high);
          context.lineTo(low, high);
        }
        context.fill();
      }
      if (i === chosen) {
        context.strokeStyle = style.getPropertyValue("--ink");
        context.lineWidth = 3;
        context.strokeRect((begin - from) * scale, (begin - from) * scale, (end - begin) * scale, (end - begin) * scale);
      }
    });
  }

  function drawMasks() {
    const row = shown[at], bounds = row && row.bounds;
    if (!bounds || !bounds.length) return;
    const kinds = row.segments.slice(0, 12).map((own) => `segment ${own.number}: ${RULES[own.rule] || own.rule}`).join("; ");
    byId("row-mask").setAttribute("aria-label", `Attention mask of the row: ${several(row.count, "segment")}, no segment attends to another; ${kinds}`);
    drawMask(byId("row-mask"), bounds, 0, data.length, segment);
    const own = row.segments[segment], [begin, end] = bounds[segment];
    byId("segment-mask").setAttribute("aria-label", `Attention mask of segment ${own.number}: ${RULES[own.rule] || own.rule}, prefix ${own.prefix}`);
    byId("segment-mask-says").textContent = `Attention, segment ${own.number}`;
    drawMask(byId("segment-mask"), bounds, begin, end, -1);
  }

  // The row

  function show(i, remembers) {
    at = Math.max(0, Math.min(i, shown.length - 1));
    segment = 0;
    const row = shown[at], place = byId("segments"), strip = byId("strip");
    document.querySelector("aside").append(panel);
    panel.replaceChildren();
    byId("number").value = row.row;
    byId("status").textContent = `${count(at + 1)} of the ${several(shown.length, "row")} in this report`;
    byId("previous").disabled = at === 0;
    byId("next").disabled = at === shown.length - 1;
    document.querySelector("aside").hidden = !row.segments || !row.segments.length;
    strip.replaceChildren();
    if (row.unreadable) {
      byId("facts").textContent = `Row ${count(row.row)} of ${row.shard} cannot be read.`;
      place.replaceChildren(make("article", "unreadable", row.unreadable));
    } else {
      byId("facts").textContent =
        `Row ${count(row.row)} · ${row.shard} row ${count(row.row_in_shard)} · ${count(data.length)} slots: ${count(row.slots)} in ` +
        `${several(row.count, "segment")}, ${count(row.padding)} padding · ${count(row.trained)} trained`;
      let end = 0;
      row.segments.forEach((own, k) => {
        const button = make("button", `h${k % HUES}`, String(own.number));
        button.type = "button";
        button.title = `segment ${own.number}: ${own.task}, ${several(own.slots, "slot")}`;
        button.setAttribute("aria-label", button.title);
        button.style.flexGrow = own.slots;
        button.addEventListener("click", () => {
          pick(k);
          place.children[k].querySelector("button").focus();
        });
        strip.append(button);
        end = own.begin + own.slots + own.padding;
      });
      const more = row.count - row.segments.length;
      if (more) {
        const rest = make("span", "more", `${count(more)} more`);
        rest.style.flexGrow = data.length - row.padding - end;
        strip.append(rest);
      }
      const empty = make("span");
      empty.style.flexGrow = more ? row.padding : data.length - end;
      strip.append(empty);
      place.replaceChildren(...row.segments.map(articleOf));
      if (more) {
        place.append(make("p", "note", `… and ${several(more, "more segment")}, left out to keep this page small; packprep inspect --row ${row.row} --json has all.`));
      }
      choose(0);
    }
    follow();
    if (remembers) history.replaceState(null, "", `#row=${row.row}`);
  }

  function nearest(number) {
    let best = 0;
    shown.forEach((row, i) => {
      if (Math.abs(row.row - number) < Math.abs(shown[best].row - number)) best = i;
    });
    show(best, true);
    if (shown[at].row !== number) byId("status").textContent = `row ${count(number)} is not among the ${count(shown.length)} in this report; this is the nearest`;
  }

  function keep(task) {
    const now = shown[at].row;
    shown = task === "" ? data.rows : data.rows.filter((row) => row.tasks.includes(task));
    nearest(now);
    byId("status").textContent = `${count(at + 1)} of the ${several(shown.length, "row")} in this report`;
  }

  function fromHash() {
    const found = /^#row=(\d{1,15})$/.exec(location.hash);
    if (found) {
      if (shown !== data.rows && !shown.some((row) => row.row === Number(found[1]))) {
        shown = data.rows;
        byId("task").value = "";
      }
      nearest(Number(found[1]));
      byId("rows").scrollIntoView();
    }
    return Boolean(found);
  }

  for (const figure of document.querySelectorAll(".charts figure")) {
    const says = figure.querySelector("figcaption span"), note = says.textContent;
    figure.addEventListener("pointerover", (event) => {
      const bin = event.target.closest(".bin");
      says.textContent = bin ? bin.dataset.says : note;
    });
    figure.addEventListener("pointerleave", () => { says.textContent = note; });
  }

  if (!data.rows.length) return;
  if (data.anew) drawAnew(data.anew);
  byId("viewer").hidden = false;
  byId("number").max = data.total - 1;
  const names = [...new Set(data.rows.flatMap((row) => row.tasks))];
  names.sort((a, b) => data.tasks.indexOf(a) - data.tasks.indexOf(b));
  const all = make("option", "", `all (${count(data.rows.length)})`);
  all.value = "";
  byId("task").append(all);
  for (const name of names) {
    const option = make("option", "", `${name} (${count(data.rows.filter((row) => row.tasks.includes(name)).length)})`);
    option.value = name;
    byId("task").append(option);
  }
  byId("previous").addEventListener("click", () => show(at - 1, true));
  byId("next").addEventListener("click", () => show(at + 1, true));
  byId("number").addEventListener("change", (event) => nearest(Math.trunc(Number(event.target.value)) || 0));
  byId("task").addEventListener("change", (event) => keep(event.target.value));
  addEventListener("hashchange", fromHash);
  let waits = 0;
  addEventListener("scroll", () => {
    cancelAnimationFrame(waits);
    waits = requestAnimationFrame(follow);
  }, { passive: true });
  addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (event.target.closest && event.target.closest("input, select, .scroll")) return;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      event.preventDefault();
      const to = at + (event.key === "ArrowLeft" ? -1 : 1);
      if (to >= 0 && to < shown.length) show(to, true);
    }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMasks);
  if (!fromHash()) show(Math.max(data.rows.findIndex((row) => row.row === data.first), 0), false);
})();
