"use strict";
(() => {
  // Light and dark: what the system prefers until the switch is used. Nothing is stored.
  const theme = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : system.matches;
  };
  const label = () => {
    theme.textContent = isDark() ? "Light" : "Dark";
    theme.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
  };
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    label();
  });
  system.addEventListener("change", label);
  label();
  theme.hidden = false;
})();
(() => {
  // Tables: the packed CSV is the table; rows in the markup are rounded text of its beginning.
  if (typeof DecompressionStream === "undefined") return;
  const MINUS = "\u2212";
  const STEP = 2000; // rows added at once
  const order = new Intl.Collator("en", { numeric: true });

  const unpack = async (base64) => {
    const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  };

  // Records of a CSV (RFC 4180): quoted fields may hold commas, line ends and doubled quotes.
  const parse = (text) => {
    const records = [];
    let record = [];
    const field = /("(?:[^"]|"")*"|[^,\n]*)(,|\n|$)/y;
    while (field.lastIndex < text.length) {
      const [, value, end] = field.exec(text);
      record.push(value[0] === '"' ? value.slice(1, -1).replaceAll('""', '"') : value);
      if (end !== ",") {
        records.push(record);
        record = [];
      }
    }
    return records;
  };

  const unseen = /[\u0000-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;
  const written = (character) => {
    const number = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    return character === "\n" ? "\u23ce" : `\u2039U+${number}\u203a`;
  };
  const number = (text) => ({ inf: Infinity, "-inf": -Infinity })[text] ?? Number(text);
  const shown = (text, column) => {
    if (text === "") return "";
    if (column.kind === "bool") return text === "True" ? "yes" : "no";
    if (column.kind === "text") return text.replace(unseen, written);
    const value = number(text);
    if (column.decimals === undefined || !isFinite(value)) return text.replaceAll("-", MINUS);
    return (text[0] === "-" ? MINUS : "") + Math.abs(value).toFixed(column.decimals);
  };

  const enhance = (details) => {
    const body = details.querySelector("tbody");
    const tools = details.querySelector(".tools");
    const status = tools.querySelector("[role=status]");
    const packed = details.querySelector(".packed");
    const headers = [...details.querySelectorAll("thead th")];
    const columns = headers.map((header) => ({
      kind: header.className,
      index: Number(header.dataset.index),
      decimals: header.dataset.decimals && Number(header.dataset.decimals),
    }));
    const total = Number(tools.dataset.rows);
    const rows = [...body.rows]; // by number in the table; those not yet made are missing
    let visible = rows.length;
    let ranking = null; // numbers of rows in the order shown; null is the order of the table
    let records = null;

    const load = async () => {
      records ??= parse(new TextDecoder().decode(await unpack(packed.textContent))).slice(1);
      return records;
    };
    const row = (number_) => {
      if (!rows[number_]) {
        const made = document.createElement("tr");
        for (const column of columns) {
          const cell = made.insertCell();
          cell.className = column.kind;
          cell.textContent = shown(records[number_][column.index], column);
        }
        rows[number_] = made;
      }
      return rows[number_];
    };
    const draw = () => {
      const numbers = ranking ?? Array.from({ length: total }, (_, number_) => number_);
      body.replaceChildren(...numbers.slice(0, visible).map(row));
      more.hidden = visible >= total;
      status.textContent = more.hidden ? "" :
        `Shown: the first ${visible.toLocaleString("en")} of ${total.toLocaleString("en")} rows.`;
    };
    const sort = async (header, column) => {
      const before = header.getAttribute("aria-sort");
      const next = { ascending: "descending", descending: null }[before];
      const direction = before === null ? "ascending" : next;
      await load();
      for (const other of headers) other.removeAttribute("aria-sort");
      if (direction === null) ranking = null;
      else {
        header.setAttribute("aria-sort", direction);
        ranking = ranked(column, direction === "ascending" ? 1 : -1);
      }
      draw();
    };
    const ranked = (column, sign) => {
      const texts = records.map((record) => record[column.index]);
      const isText = column.kind !== "number";
      const values = isText ? texts : texts.map(number);
      const compare = isText ? order.compare : (one, other) =>
        one < other ? -1 : one > other ? 1 : 0;
      const missing = (k) => texts[k] === "";
      return texts.map((_, k) => k).sort((one, other) =>
        missing(one) - missing(other) || sign * compare(values[one], values[other]) || one - other
      );
    };
    const button = (text, action) => {
      const made = document.createElement("button");
      made.type = "button";
      made.textContent = text;
      made.addEventListener("click", action);
      return made;
    };

    headers.forEach((header, k) => {
      header.replaceChildren(button(header.textContent, () => sort(header, columns[k])));
    });
    const more = button("Show more rows", async () => {
      await load();
      visible = Math.min(total, visible + STEP);
      draw();
    });
    more.hidden = visible >= total;
    const download = button(`Download ${tools.dataset.csv} (${tools.dataset.size})`, async () => {
      const csv = new Blob([await unpack(packed.textContent)], { type: "text/csv" });
      const link = document.createElement("a");
      link.href = URL.createObjectURL(csv);
      link.download = tools.dataset.csv;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000); // after the browser has read it
    });
    download.dataset.download = tools.dataset.csv;
    tools.prepend(download, more);
  };

  document.querySelectorAll("details.table").forEach(enhance);
})();
