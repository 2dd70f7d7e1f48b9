"use strict";
(() => {
  const { unpacked, written, rangeOf, shadeOf, LEAST, PREFIX, ZERO, NONE } = tokenNumbers;
  const LOSSES = { nll: "Loss", nll_intervened: "Loss, intervened", dnll: "Change in loss" };
  // Losses have long tails: beyond this share of the tokens everything has the last shade.
  const TAIL = 0.99;

  // -- elements ------------------------------------------------------------------------------------

  const element = (tag, classes, text) => {
    const made = document.createElement(tag);
    if (classes) made.className = classes;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const unique = (values) => [...new Set(values)];
  const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
  const percent = (part, whole) => {
    const share = (100 * part) / whole;
    return share > 0 && share < 0.1 ? "under 0.1\u00a0%" : `${share.toFixed(share < 10 ? 1 : 0)}\u00a0%`;
  };

  class TokenView {
    constructor(root) {
      this.root = root;
      this.data = JSON.parse(root.querySelector(".tv-data").textContent);
      this.text = root.querySelector(".tv-text");
      this.tokens = [...this.text.querySelectorAll("[data-token]")];
      this.own = this.tokens.map((token) => token.className);
      this.shade = this.tokens.map(() => "");
      this.panel = root.querySelector(".token-panel");
      this.table = root.querySelector(".tv-values");
      this.controls = {};
      for (const control of root.querySelectorAll("[name]")) this.controls[control.name] = control;
      this.ranges = new Map();
      this.at = 0; // the token that Tab reaches
      this.chosen = null; // the token that was tapped or walked to
      this.panel.hidden = false; // first, since what is hidden cannot be scrolled
      this.unpack();
      this.listen();
      this.offerQuantities();
      for (const part of [".tv-controls", ".tv-rounded"]) root.querySelector(part).hidden = false;
      if (this.tokens.length) this.tokens[0].tabIndex = 0;
      this.show(null);
      performance.mark("token-view-ready");
    }

    unpack() {
      const { channels, values, width, losses } = this.data;
      const n = this.tokens.length;
      const all = unpacked(values, width);
      let used = 0;
      for (const channel of channels) {
        const moves = !("constant" in channel);
        channel.values = moves
          ? all.subarray(used, used + n)
          : new Float32Array(n).fill(channel.constant ?? NaN);
        if (moves) used += n;
      }
      this.losses = Object.fromEntries(
        Object.entries(losses).map(([name, packed]) => [name, unpacked(packed, 4)]));
      this.byId = new Map(channels.map((channel) => [channel.id, channel]));
    }

    listen() {
      const { colour, layer, head, source, shared } = this.controls;
      colour.addEventListener("change", () => this.offerChannels());
      layer.addEventListener("change", () => this.offer("head"));
      head.addEventListener("change", () => this.offer("source"));
      source.addEventListener("change", () => this.paint());
      shared.addEventListener("change", () => this.paint());
      const token = (event) => event.target.closest("[data-token]");
      const index = (found) => Number(found.dataset.token);
      this.text.addEventListener("pointerover", (event) => {
        if (event.pointerType === "mouse" && token(event)) this.show(index(token(event)));
      });
      this.text.addEventListener("pointerleave", () => this.show(this.chosen));
      this.text.addEventListener("click", (event) => {
        const found = token(event);
        if (found && index(found) === this.chosen && !this.arrived) this.choose(null);
        else if (found) this.walkTo(index(found));
        this.arrived = false;
      });
      this.text.addEventListener("focusin", (event) => {
        if (token(event)) this.choose(index(token(event)));
      });
      this.text.addEventListener("keydown", (event) => this.press(event));
      this.table.addEventListener("click", (event) => {
        const cell = event.target.closest("[data-channel]");
        if (cell) this.colourBy(this.byId.get(cell.dataset.channel));
      });
    }

    // -- what to colour by -------------------------------------------------------------------------

    offerQuantities() {
      const { channels, losses, category } = this.data;
      const { colour } = this.controls;
      for (const kind of unique(channels.map((channel) => channel.kind))) {
        colour.add(new Option(capital(kind), `channel:${kind}`));
      }
      for (const [name, label] of Object.entries(LOSSES)) {
        if (name in losses) colour.add(new Option(label, name));
      }
      if (category.names.length) colour.add(new Option("Category", "category"));
      this.offerChannels();
    }

    get kind() {
      const { value } = this.controls.colour;
      return value.startsWith("channel:") ? value.slice("channel:".length) : null;
    }

    // The channels of the kind in question; of another quantity, those that the panel shows.
    get family() {
      const { channels } = this.data;
      const kind = this.kind ?? this.lastKind ?? channels[0]?.kind;
      return channels.filter((channel) => channel.kind === kind);
    }

    offerChannels() {
      if (this.kind !== null && this.kind !== this.lastKind) {
        this.lastKind = this.kind;
        this.colourBy(this.liveliest());
        return;
      }
      for (const name of ["layer", "head", "source", "shared"]) {
        this.controls[name].parentElement.hidden = this.kind === null;
      }
      if (this.kind === null) this.refresh();
      else this.offer("layer");
    }

    // The channel that differs most between tokens: a view of it says most at first sight.
    liveliest() {
      const spread = (channel) => {
        const { low, high } = this.range(channel);
        const zeros = channel.values.includes(0);
        return (zeros ? Math.max(high, 0) - Math.min(low, 0) : high - low) || 0;
      };
      const moving = this.family.filter((channel) => !("constant" in channel));
      return (moving.length ? moving : this.family).reduce(
        (best, channel) => (spread(channel) > spread(best) ? channel : best));
    }

    colourBy(channel) {
      this.controls.colour.value = `channel:${channel.kind}`;
      this.lastKind = channel.kind;
      for (const name of ["layer", "head", "source", "shared"]) {
        this.controls[name].parentElement.hidden = false;
      }
      this.wish = { layer: channel.site, head: String(channel.head ?? ""), source: channel.source ?? "" };
      this.offer("layer");
    }

    // Fill a list and those that depend on it; what was chosen stays chosen where it still exists.
    offer(name) {
      const { layer, head, source } = this.controls;
      const steps = {
        layer: [() => true, (c) => c.site, (c) => this.place(c)],
        head: [(c) => c.site === layer.value, (c) => String(c.head ?? ""), (c) => String(c.head ?? "")],
        source: [
          (c) => c.site === layer.value && String(c.head ?? "") === head.value,
          (c) => c.source ?? "", (c) => c.source ?? "",
        ],
      };
      const names = Object.keys(steps);
      for (const step of names.slice(names.indexOf(name))) {
        const [fits, value, label] = steps[step];
        const list = this.controls[step];
        const before = this.wish?.[step] ?? list.value;
        const options = new Map(this.family.filter(fits).map((c) => [value(c), label(c)]));
        list.replaceChildren(...[...options].map(([key, text]) => new Option(text, key)));
        if (options.has(before)) list.value = before;
        list.parentElement.hidden = options.size < 2 && step !== "layer";
      }
      this.wish = null;
      this.refresh();
    }

    get channel() {
      if (this.kind === null) return null;
      const { layer, head, source } = this.controls;
      return this.family.find(
        (c) => c.site === layer.value && String(c.head ?? "") === head.value
          && (c.source ?? "") === source.value) ?? null;
    }

    // -- names -------------------------------------------------------------------------------------

    // Where a channel is, without what all channels of its kind share.
    place(channel, layer = "layer ") {
      if (channel.sublayer === "out") return "output";
      const among = this.data.channels.filter((c) => c.kind === channel.kind && c.sublayer !== "out");
      const differing = ["sublayer", "role"]
        .filter((name) => unique(among.map((c) => c[name])).length > 1)
        .map((name) => channel[name])
        .filter((word) => word !== "shared");
      return [layer + channel.layer, ...differing].join(" ");
    }

    // Head and source of a channel, as far as its kind has several.
    ways(channel, source = channel.source) {
      const family = this.data.channels.filter((c) => c.kind === channel.kind);
      const several = (name) => unique(family.map((c) => c[name])).length > 1;
      const head = channel.head !== null && several("head") ? `head ${channel.head}` : "";
      return [head, source && several("source") ? source : ""].filter(Boolean).join(", ");
    }

    // The row of each channel in the table. A site has one partial sum at most, of whatever
    // sublayers: those of all sites share a row.
    lanes(family) {
      const word = (channel) => (channel.source ?? "").split(" ")[0];
      const places = family.map((c) => `${c.site}|${c.head}|${word(c)}`);
      const twice = new Set(
        family.filter((_, k) => places.indexOf(places[k]) !== k).map(word));
      return new Map(
        family.map((c) => [c, this.ways(c, twice.has(word(c)) ? c.source : word(c))]));
    }

    get title() {
      const { channel } = this;
      if (channel === null) return this.controls.colour.selectedOptions[0]?.textContent ?? "";
      return [capital(channel.kind), this.place(channel), this.ways(channel)].filter(Boolean).join(", ");
    }

    // -- painting ----------------------------------------------------------------------------------

    range(channel, shared = this.controls.shared.checked) {
      const key = shared ? `all of ${channel.kind}` : channel.id;
      if (!this.ranges.has(key)) {
        const all = shared ? this.data.channels.filter((c) => c.kind === channel.kind) : [channel];
        this.ranges.set(key, rangeOf(all.map((c) => c.values)));
      }
      return this.ranges.get(key);
    }

    paint() {
      performance.mark("recolour-start");
      const { shades, category } = this.data;
      const { channel } = this;
      const { value } = this.controls.colour;
      let shade;
      if (value === "category") {
        shade = (i) => `${PREFIX}k${category.codes[i] % shades.kinds}`;
        this.legendOfKinds();
      } else {
        const values = channel ? channel.values : this.losses[value];
        const range = channel ? this.range(channel) : rangeOf([values], TAIL);
        shade = (i) => shadeOf(values[i], range, shades);
        this.legendOfNumbers(values, range);
      }
      for (let i = 0; i < this.tokens.length; i++) {
        const wanted = shade(i);
        if (wanted === this.shade[i]) continue;
        this.shade[i] = wanted;
        this.tokens[i].className = `${this.own[i]} ${wanted}`;
      }
      this.show(this.shown);
      performance.measure("recolour", "recolour-start");
    }

    legend(...children) {
      const title = element("span", "tv-title", this.title);
      this.root.querySelector(".token-legend").replaceChildren(title, ...children);
    }

    item(shade, text) {
      const item = element("span", "tv-item");
      item.append(element("span", `tv-chip ${shade}`), text);
      return item;
    }

    legendOfKinds() {
      const { category, shades } = this.data;
      const n = this.tokens.length;
      this.legend(...category.names.map((name, code) => {
        const count = category.codes.filter((c) => c === code).length;
        return this.item(`${PREFIX}k${code % shades.kinds}`, `${name} (${percent(count, n)})`);
      }));
    }

    legendOfNumbers(values, range) {
      const { shades } = this.data;
      const bar = element("span", "tv-bar");
      const [letter, count] = range.signed ? ["s", shades.signed] : ["a", shades.amounts];
      const flat = range.low === range.high;
      for (let k = flat ? count - 1 : 0; k < count; k++) bar.append(element("span", `${PREFIX}${letter}${k}`));
      const [below, above] = [range.capped && range.signed ? "\u2264 " : "", range.capped ? "\u2265 " : ""];
      const scale = element("span", "tv-item");
      if (flat) scale.append(bar, written(range.high));
      else scale.append(below + written(range.low), bar, above + written(range.high));
      const zeros = values.filter((value) => value === 0).length;
      const gaps = values.filter(Number.isNaN).length;
      const n = values.length;
      const children = range.high === 0 ? [] : [scale];
      if (zeros) children.push(this.item(ZERO, `exactly 0 (${percent(zeros, n)})`));
      if (gaps) children.push(this.item(NONE, `no value (${percent(gaps, n)})`));
      this.legend(...children);
    }

    // -- the panel ---------------------------------------------------------------------------------

    refresh() {
      const kind = this.family[0]?.kind ?? null;
      if (kind !== this.tableOf) this.rebuild();
      this.tableOf = kind;
      this.paint();
      this.reveal();
    }

    // The table of values: a column a site, a row a head or source.
    rebuild() {
      const { family } = this;
      const sites = unique(family.map((c) => c.site));
      const laneOf = this.lanes(family);
      const lanes = unique(laneOf.values());
      const cells = new Map(family.map((c) => [`${c.site}|${laneOf.get(c)}`, c]));
      const first = new Map(family.map((c) => [c.site, c]));
      const top = element("tr");
      top.append(element("th", "text", lanes.length > 1 ? "" : "layer"));
      for (const site of sites) {
        const name = element("th", "", this.place(first.get(site), "L"));
        name.scope = "col";
        top.append(name);
      }
      const body = element("tbody");
      this.cells = [];
      for (const lane of lanes) {
        const row = element("tr");
        const name = element("th", "text", lane || "value");
        name.scope = "row";
        row.append(name);
        for (const site of sites) {
          const cell = element("td");
          const channel = cells.get(`${site}|${lane}`);
          if (channel) {
            cell.dataset.channel = channel.id;
            cell.title = [this.place(channel), this.ways(channel)].filter(Boolean).join(", ");
            this.cells.push([cell, channel]);
          }
          row.append(cell);
        }
        body.append(row);
      }
      const head = element("thead");
      head.append(top);
      this.table.replaceChildren(head, body);
      this.root.querySelector(".tv-scroll").hidden = !family.length;
    }

    // Scroll the table, and nothing else, to the channel in question.
    reveal() {
      const cell = this.table.querySelector(".tv-current");
      if (cell === null) return;
      const frame = this.table.parentElement;
      const [inner, outer] = [cell.getBoundingClientRect(), frame.getBoundingClientRect()];
      const named = cell.parentElement.cells[0].offsetWidth;
      const heading = this.table.tHead.offsetHeight;
      if (inner.right > outer.right) frame.scrollLeft += inner.right - outer.right + inner.width;
      if (inner.left < outer.left + named) frame.scrollLeft -= outer.left + named - inner.left;
      if (inner.bottom > outer.bottom) frame.scrollTop += inner.bottom - outer.bottom + inner.height;
      if (inner.top < outer.top + heading) frame.scrollTop -= outer.top + heading - inner.top;
    }

    // Everything about the i-th token; null is the mean over all.
    show(i) {
      if (this.shown !== null && this.shown !== undefined) this.tokens[this.shown].removeAttribute("data-shown");
      this.shown = i ?? null;
      if (this.shown === null) delete this.panel.dataset.row;
      else {
        this.tokens[i].dataset.shown = "";
        this.panel.dataset.row = String(i);
      }
      const { position, token_id: id, category, upos, means, shades } = this.data;
      const here = this.shown !== null;
      const coded = (list) => list.names[list.codes[i]] ?? "";
      const facts = {
        document: here ? this.tokens[i].closest("[role=group]").getAttribute("aria-label") : "\u2013",
        position: here ? String(position[i]) : "\u2013",
        token_id: here ? String(id[i]) : "\u2013",
        category: here ? coded(category) : "\u2013",
        upos: here ? coded(upos) : "",
      };
      for (const name of Object.keys(this.losses)) {
        facts[name] = written(here ? this.losses[name][i] : means[name]);
      }
      for (const [name, text] of Object.entries(facts)) {
        const field = this.panel.querySelector(`[data-field="${name}"]`);
        if (field) field.textContent = text;
      }
      const shown = here ? [...this.tokens[i].childNodes].map((node) => node.cloneNode(true)) : ["mean over tokens"];
      this.panel.querySelector('[data-field="token"]').replaceChildren(...shown);
      const { channel } = this;
      for (const [cell, of] of this.cells) {
        const value = here ? of.values[i] : of.mean ?? NaN;
        cell.textContent = written(value, LEAST);
        cell.className = shadeOf(value, this.range(of, true), shades) + (of === channel ? " tv-current" : "");
      }
      this.say(i);
    }

    // One line, which a screen reader reads out, about what the colours show.
    say(i) {
      const { channel } = this;
      const { value } = this.controls.colour;
      const here = this.shown !== null;
      const { category, means } = this.data;
      const number = channel
        ? (here ? channel.values[i] : channel.mean)
        : (here ? this.losses[value]?.[i] : means[value]);
      const text = value === "category"
        ? (here ? category.names[category.codes[i]] : `${category.names.length} kinds`)
        : written(number ?? NaN, channel ? LEAST : 0);
      this.panel.querySelector(".tv-said").textContent = `${this.title}: ${text}`;
    }

    // -- choosing a token --------------------------------------------------------------------------

    choose(i) {
      if (this.chosen !== null) this.tokens[this.chosen].removeAttribute("aria-selected");
      this.arrived = i !== this.chosen;
      this.chosen = i;
      if (i !== null) {
        this.tokens[i].setAttribute("aria-selected", "true");
        this.tokens[i].tabIndex = 0;
        // Without its tabindex a token loses the focus, so the old one keeps it until here.
        if (i !== this.at) this.tokens[this.at].removeAttribute("tabindex");
        this.at = i;
      }
      this.show(i);
    }

    walkTo(i) {
      this.tokens[i].tabIndex = 0;
      this.tokens[i].focus();
      this.choose(i);
    }

    press(event) {
      if (event.altKey || event.ctrlKey || event.metaKey) return;
      const last = this.tokens.length - 1;
      const to = {
        ArrowRight: () => Math.min(last, this.at + 1),
        ArrowLeft: () => Math.max(0, this.at - 1),
        ArrowDown: () => this.beside(1),
        ArrowUp: () => this.beside(-1),
        Home: () => 0,
        End: () => last,
        Enter: () => this.at,
        " ": () => this.at,
      }[event.key];
      if (event.key === "Escape") this.choose(null);
      else if (to) this.walkTo(to());
      else return;
      event.preventDefault();
    }

    // The token of the next (1) or previous (-1) line that is nearest across.
    beside(step) {
      const middle = (box) => (box.left + box.right) / 2;
      const from = this.tokens[this.at].getClientRects()[0];
      let [best, line] = [this.at, null];
      for (let k = this.at + step; k >= 0 && k < this.tokens.length; k += step) {
        const box = this.tokens[k].getClientRects()[0];
        if (!box || step * (box.top - from.top) < from.height / 2) continue;
        line ??= box.top;
        if (Math.abs(box.top - line) > from.height / 2) break;
        const nearer = Math.abs(middle(box) - middle(from))
          < Math.abs(middle(this.tokens[best].getClientRects()[0]) - middle(from));
        if (best === this.at || nearer) best = k;
      }
      return best;
    }
  }

  for (const root of document.querySelectorAll(".token-view")) new TokenView(root);
})();
