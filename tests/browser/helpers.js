// Questions that the browser tests ask a page, from inside it.
"use strict";
window.checks = (() => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const brush = canvas.getContext("2d", { willReadFrequently: true });
  const seen = new Map();

  // Any CSS colour as [r, g, b, a], 0 to 255 and 0 to 1.
  const colour = (text) => {
    if (!seen.has(text)) {
      brush.clearRect(0, 0, 1, 1);
      brush.fillStyle = "#000";
      brush.fillStyle = text;
      brush.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = brush.getImageData(0, 0, 1, 1).data;
      seen.set(text, [r, g, b, a / 255]);
    }
    return seen.get(text);
  };
  const over = (top, below) =>
    [0, 1, 2].map((k) => top[k] * top[3] + below[k] * (1 - top[3])).concat(1);
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((value) => {
      const c = value / 255;
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const COLOURS = /(?:rgba?|hsla?|oklch|oklab|lab|lch|color|color-mix)\([^()]*(?:\([^()]*\)[^()]*)*\)/g;

  // Every colour that may lie behind an element's text: fills, and each colour of a gradient.
  const behind = (element) => {
    if (element.__behind) return element.__behind;
    const style = getComputedStyle(element);
    const below =
      element === document.documentElement
        ? [colour("#ffffff")] // the page has to paint its own ground
        : behind(element.parentElement);
    const fill = colour(style.backgroundColor);
    let layers = fill[3] === 0 ? below : below.map((b) => over(fill, b));
    if (style.backgroundImage !== "none") {
      const drawn = (style.backgroundImage.match(COLOURS) ?? []).map(colour);
      layers = layers.flatMap((layer) => [layer, ...drawn.map((d) => over(d, layer))]);
    }
    element.__behind = layers;
    return layers;
  };
  const opacityOf = (element) => {
    if (element === null) return 1;
    element.__opacity ??= Number(getComputedStyle(element).opacity) * opacityOf(element.parentElement);
    return element.__opacity;
  };
  const forget = () => {
    for (const element of document.querySelectorAll("*")) {
      delete element.__behind;
      delete element.__opacity;
    }
  };

  const place = (element) => {
    const name = element.id ? `#${element.id}` : element.classList.length ? `.${[...element.classList].join(".")}` : "";
    const text = (element.getAttribute("aria-label") ?? element.textContent ?? "").trim();
    return `${element.tagName.toLowerCase()}${name} "${text.replace(/\s+/g, " ").slice(0, 40)}"`;
  };
  const visible = (element) =>
    element.checkVisibility({ opacityProperty: true, visibilityProperty: true }) &&
    element.getClientRects().length > 0;

  const lowContrast = (least) => {
    forget();
    const found = new Map();
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const element = walker.currentNode.parentElement;
      if (!walker.currentNode.data.trim() || !element || /^(SCRIPT|STYLE|TEMPLATE|NOSCRIPT)$/.test(element.tagName)) continue;
      if (element.closest(":disabled, option") || !visible(element)) continue;
      const style = getComputedStyle(element);
      const ink = colour(style.color);
      const opacity = opacityOf(element);
      const worst = Math.min(
        ...behind(element).map((back) => ratio(over([ink[0], ink[1], ink[2], ink[3] * opacity], back), back)));
      if (worst < least) {
        const key = `${place(element)} ${style.color} on ${behind(element).map((b) => b.slice(0, 3).map(Math.round))}`;
        found.set(key, `${worst.toFixed(2)}: ${key}`);
      }
    }
    forget();
    return [...found.values()].slice(0, 20);
  };

  const clipped = (element) => {
    for (let at = element.parentElement; at && at !== document.body; at = at.parentElement) {
      if (getComputedStyle(at).overflowX !== "visible") return true;
    }
    return false;
  };
  const overflow = () => {
    const width = document.documentElement.clientWidth;
    const wide = Math.max(document.documentElement.scrollWidth, document.body.scrollWidth);
    if (wide <= width) return [];
    const guilty = [...document.body.querySelectorAll("*")].filter(
      (element) => visible(element) && element.getBoundingClientRect().right > width + 0.5 && !clipped(element));
    return [`${wide} > ${width}`, ...guilty.slice(0, 10).map(place)];
  };

  const CONTROLS = "a[href], button, select, input, textarea, summary, [tabindex]:not([tabindex='-1'])";
  const unnamed = () =>
    [...document.querySelectorAll(CONTROLS)]
      .filter((element) => visible(element))
      .filter((element) => {
        const by = (element.getAttribute("aria-labelledby") ?? "").split(/\s+/).filter(Boolean);
        const words = [
          element.getAttribute("aria-label"), element.textContent, element.getAttribute("title"),
          ...by.map((id) => document.getElementById(id)?.textContent),
        ];
        if (/^(SELECT|INPUT|TEXTAREA)$/.test(element.tagName)) {
          return !element.getAttribute("aria-label") && !by.length && ![...(element.labels ?? [])].some((label) => label.textContent.trim());
        }
        return !words.some((word) => (word ?? "").trim());
      })
      .map(place);

  // -- the keyboard ------------------------------------------------------------------------------

  let count = 0;
  const ids = new WeakMap();
  const rest = new WeakMap();
  const LOOK = ["outlineStyle", "outlineWidth", "outlineColor", "boxShadow", "backgroundColor", "borderColor", "textDecorationLine"];
  const lookOf = (element) => {
    const style = getComputedStyle(element);
    return LOOK.map((name) => style[name]).join("|");
  };
  const startWalk = () => {
    document.activeElement?.blur?.();
    window.getSelection()?.removeAllRanges();
    window.scrollTo(0, 0);
    for (const element of document.querySelectorAll(CONTROLS)) rest.set(element, lookOf(element));
  };
  const focused = () => {
    const element = document.activeElement;
    if (!element || element === document.body || element === document.documentElement) return null;
    if (!ids.has(element)) ids.set(element, ++count);
    const box = element.getBoundingClientRect();
    return {
      id: ids.get(element),
      place: place(element),
      tag: element.tagName.toLowerCase(),
      token: element.closest("[data-token]") !== null,
      shown: lookOf(element) !== rest.get(element),
      inside: box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth,
    };
  };
  // Controls that Tab ought to reach: every visible one; tokens share one stop.
  const reachable = () =>
    [...document.querySelectorAll(CONTROLS)]
      .filter((element) => visible(element) && !element.disabled && element.tabIndex >= 0)
      .map((element) => {
        if (!ids.has(element)) ids.set(element, ++count);
        return { id: ids.get(element), place: place(element) };
      });

  // Shown texts of a column of the first table that has it.
  const column = (name) => {
    for (const table of document.querySelectorAll("table")) {
      const heads = [...table.querySelectorAll("thead th")].map((th) => th.innerText.trim());
      const at = heads.indexOf(name);
      if (at >= 0) return [...table.tBodies[0].rows].map((row) => row.cells[at].textContent);
    }
    return [];
  };
  const isDark = () => luminance(behind(document.body)[0].slice(0, 3)) < 0.2;

  // -- the token view ----------------------------------------------------------------------------

  const tokens = () =>
    [...document.querySelectorAll("[data-token]")].sort((a, b) => a.dataset.token - b.dataset.token);
  const tokenTexts = () => tokens().map((element) => element.textContent);
  const tokenText = () => tokenTexts().join("");
  const tokenBoxes = () =>
    tokens().map((element) => {
      const rects = [...element.getClientRects()].filter((rect) => rect.width > 0);
      const first = rects[0] ?? element.getBoundingClientRect();
      return {
        row: Number(element.dataset.token),
        top: first.top + scrollY,
        rects: rects.map(({ left, right, top }) => ({ left, right, top })),
        width: rects.reduce((sum, rect) => sum + rect.width, 0),
      };
    });
  const panel = () => {
    const box = document.querySelector(".token-panel");
    const texts = (name) => Object.fromEntries(
      [...box.querySelectorAll(`[data-${name}]`)].map((cell) => [cell.dataset[name], cell.textContent]));
    return { token: box.dataset.row, fields: texts("field"), channels: texts("channel") };
  };
  const panelInView = () => {
    const box = document.querySelector(".token-panel").getBoundingClientRect();
    return box.height > 20 && box.top < innerHeight - 20 && box.bottom > 20;
  };
  // How each token is painted, apart from its text.
  const PAINT = ["backgroundColor", "backgroundImage", "textDecorationLine", "textDecorationStyle",
    "borderBottomStyle", "borderBottomColor", "boxShadow"];
  const tokenLooks = () =>
    tokens().map((element) => {
      const style = getComputedStyle(element);
      return PAINT.map((name) => style[name]).join("|");
    });
  // Marks for what cannot be seen that a line end tears apart.
  const tornMarks = () =>
    [...document.querySelectorAll(".tv-mark")].filter((mark) => mark.getClientRects().length > 1)
      .map((mark) => mark.textContent);
  // Milliseconds from a changed control to the next frame, for every option of every control.
  const recolour = async () => {
    const took = [];
    for (const control of document.querySelectorAll(".token-view select")) {
      for (const option of [...control.options].slice(0, 6)) {
        const start = performance.now();
        control.value = option.value;
        control.dispatchEvent(new Event("input", { bubbles: true }));
        control.dispatchEvent(new Event("change", { bubbles: true }));
        document.querySelector(".token-view").getBoundingClientRect(); // style and layout
        took.push(performance.now() - start);
        await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
      }
    }
    return took;
  };

  const firstPaint = () => performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? NaN;
  const ready = () => performance.getEntriesByName("token-view-ready").at(-1)?.startTime ?? NaN;

  return {
    column, firstPaint, focused, isDark: () => { forget(); return isDark(); }, lowContrast, overflow, panel,
    panelInView, reachable, ready, recolour, startWalk, tokenBoxes, tokenLooks, tokenText, tokenTexts,
    tornMarks, unnamed,
  };
})();
