"use strict";
// Numbers under the pointer, and the chosen horizontal axis kept when the page is read again. The page is whole without it.
(() => {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  const few = (v) => (v === null ? "–" : Math.abs(v) >= 1e4 || (v !== 0 && Math.abs(v) < 1e-3) ? v.toExponential(3) : String(+v.toPrecision(5)));
  const show = (event, words) => {
    tip.textContent = words;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 12 : event.clientX + 16;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.max(4, Math.min(event.clientY + 12, innerHeight - box.height - 4)) + "px";
  };
  const hide = () => {
    tip.hidden = true;
    document.querySelectorAll(".cross").forEach((each) => each.remove());
  };
  const nearest = (places, wanted) => {
    let low = 0, high = places.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (places[middle] < wanted) low = middle + 1; else high = middle;
    }
    return low > 0 && wanted - places[low - 1] < places[low] - wanted ? low - 1 : low;
  };
  for (const figure of document.querySelectorAll("figure.chart")) {
    const script = figure.querySelector("script");
    if (!script) continue;
    const content = JSON.parse(script.textContent);
    const words = content.share ? (v) => (v === null ? "–" : (100 * v).toFixed(1) + "%") : few;
    for (const area of figure.querySelectorAll(".area")) {
      const axis = area.dataset.axis;
      area.addEventListener("pointermove", (event) => {
        const box = area.getBoundingClientRect();
        const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
        const lines = [];
        let place = null;
        for (const series of content.series) {
          const places = series.x[axis];
          if (!places || !places.length) continue;
          const at = nearest(places, share * content.axes[axis].high);
          place = place === null ? places[at] : place;
          const range = series.low ? "  (" + words(series.low[at]) + " to " + words(series.high[at]) + ")" : "";
          lines.push(series.name + "  " + words(series.y[at]) + range);
        }
        const name = axis === "step" ? "step " + Math.round(place) : few(place) + " " + content.axes[axis].name;
        show(event, [name, ...lines].join("\n"));
        document.querySelectorAll(".cross").forEach((each) => each.remove());
        for (const other of document.querySelectorAll('.area[data-axis="' + axis + '"]')) {
          const cross = document.createElement("i");
          cross.className = "cross";
          cross.style.left = 100 * share + "%";
          other.append(cross);
        }
      });
      area.addEventListener("pointerleave", hide);
    }
  }
  const anchors = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
  const value = (colour) => {
    let best = 0, least = Infinity;
    for (let i = 0; i <= 253; i++) {
      const place = (i / 253) * 4, a = Math.min(3, Math.floor(place)), t = place - a;
      let distance = 0;
      for (let c = 0; c < 3; c++) distance += (anchors[a][c] + t * (anchors[a + 1][c] - anchors[a][c]) - colour[c]) ** 2;
      if (distance < least) [best, least] = [i / 253, distance];
    }
    return best;
  };
  for (const map of document.querySelectorAll(".map")) {
    const image = map.querySelector("img");
    const { low, high, log, first, last, rows } = map.dataset;
    const units = rows.split("\n");
    let pixels = null;
    image.addEventListener("pointermove", (event) => {
      const width = image.naturalWidth, height = image.naturalHeight;
      if (!pixels) {
        const canvas = document.createElement("canvas");
        [canvas.width, canvas.height] = [width, height];
        const context = canvas.getContext("2d");
        context.drawImage(image, 0, 0);
        pixels = context.getImageData(0, 0, width, height).data;
      }
      const box = image.getBoundingClientRect();
      const column = Math.min(width - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * width)));
      const row = Math.min(height - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * height)));
      const at = 4 * (row * width + column);
      const share = value([pixels[at], pixels[at + 1], pixels[at + 2]]);
      const found = log ? low * (high / low) ** share : +low + share * (high - low);
      const step = Math.round(+first + ((column + 0.5) / width) * (last - first));
      show(event, units[row] + "\nabout step " + step + "\n" + (pixels[at + 3] ? "about " + (+found).toPrecision(3) : "nothing measured"));
    });
    image.addEventListener("pointerleave", hide);
  }
  const chosen = document.getElementById(location.hash.slice(1));
  if (chosen && chosen.name === "x") chosen.checked = true;
  for (const radio of document.querySelectorAll('body > input[name="x"]')) {
    radio.addEventListener("change", () => history.replaceState(null, "", "#" + radio.id));
  }
})();
