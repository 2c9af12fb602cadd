// Draws the charts of a Longspan report with BokehJS. The data is in <script id="data">; a page
// that is served live fetches it again whenever the server sends an event.
"use strict";
(() => {
  const COLOURS = 8;
  const page = { data: JSON.parse(document.getElementById("data").textContent), charts: new Map() };
  const view = {
    axis: page.data.axes[0] || "step",
    smoothing: 0.6,
    log_x: false,
    log_y: false,
  };
  const AXES = { step: "steps", tokens: "tokens", time: "time" };

  // ---- small helpers

  function element(name, attributes = {}, ...children) {
    const found = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (value === true) found.setAttribute(key, "");
      else if (value !== false && value != null) found.setAttribute(key, value);
    }
    found.append(...children); // strings become text, never markup
    return found;
  }

  function css(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function number(value) {
    if (value == null || !Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (size >= 1e15 || (size > 0 && size < 1e-3)) return value.toExponential(2);
    const digits = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 1 ? 3 : 4;
    return value.toLocaleString("en-US", { maximumFractionDigits: digits });
  }

  // ---- x axis

  const TIMES = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

  function time_unit() {
    let longest = 0;
    for (const places of page.data.positions) {
      const times = places.time || [];
      if (times.length) longest = Math.max(longest, times[times.length - 1] || 0);
    }
    return TIMES.find(([seconds]) => longest >= 2 * seconds) || TIMES[3];
  }

  function xs_of(chart, series) {
    const places = page.data.positions[series.x];
    const axis = chart.axis ? "own" : view.axis;
    const scale = axis === "time" ? 1 / time_unit()[0] : 1;
    const found = places[axis];
    return found && found.map((x) => (x == null ? NaN : x * scale));
  }

  function x_title(chart) {
    if (chart.axis) return chart.axis.replaceAll("_", " ");
    if (view.axis !== "time") return AXES[view.axis];
    return `${page.data.has_clock ? "wall time" : "training time"} in ${time_unit()[1]}`;
  }

  // ---- curves

  function smoothed(values, weight) {
    // An exponential moving average without the bias to its start, over finite values.
    let total = 0, norm = 0;
    return values.map((value) => {
      if (!Number.isFinite(value)) return NaN;
      total = weight * total + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return total / norm;
    });
  }

  function positive(values, is_log) {
    return is_log ? values.map((v) => (v > 0 ? v : NaN)) : values;
  }

  function columns(chart, series) {
    const log_y = is_log_y(chart), log_x = is_log_x(chart);
    const read = (values) => positive(values.map((v) => (v == null ? NaN : v)), log_y);
    if (series.style === "level") {
      const xs = chart.series.filter((s) => s.style !== "level")
        .flatMap((s) => xs_of(chart, s) || []).filter(Number.isFinite);
      let low = Infinity, high = -Infinity;
      for (const x of xs) { low = Math.min(low, x); high = Math.max(high, x); }
      const y = read([series.y[0], series.y[0]]);
      return { x: [low, high], y, line: y };
    }
    const xs = xs_of(chart, series);
    if (!xs) return null;
    const x = positive(xs, log_x), y = read(series.y);
    const weight = smooths(chart, series) ? view.smoothing : 0;
    const found = { x, y, line: weight > 0 ? smoothed(y, weight) : y };
    if (series.low) {
      found.low = read(series.low);
      found.high = read(series.high);
    }
    return found;
  }

  // Beside the training loss of its run, which has the same colour.
  const is_dashed = (series) =>
    series.style === "points" && page.data.runs.length > 1 && series.run != null;
  const smooths = (chart, series) => chart.is_smoothed && series.style === "line";
  // Ticks of a logarithmic axis: the values themselves if they are few, else 1, 2, 5, 10, …
  function log_ticks(values, may_be_values) {
    const distinct = [...new Set(values)];
    if (may_be_values && distinct.length <= 12) return distinct;
    const ticks = [], low = Math.min(...values), high = Math.max(...values);
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const digit of [1, 2, 5]) ticks.push(digit * 10 ** power);
    return ticks.filter((tick) => tick >= low * 0.8 && tick <= high * 1.25);
  }

  const is_log_x = (chart) => (chart.axis ? Boolean(chart.is_log) : view.log_x);
  const is_log_y = (chart) => (chart.axis ? Boolean(chart.is_log) : view.log_y);

  // ---- one chart

  class Chart {
    constructor(chart, section) {
      this.chart = chart;
      this.hidden = new Set();
      this.plot_box = element("div", { class: "plot" });
      this.legend = element("div", { class: "legend" });
      this.where = element("span", { class: "where", "aria-live": "polite" });
      this.figure = element("figure", { class: "chart", id: `chart-${chart.id}`, tabindex: "0" },
        element("figcaption", {}, element("b", {}, chart.title),
          element("span", { class: "unit" }, chart.unit), this.where),
        this.legend, this.plot_box);
      if (chart.note) this.figure.append(element("p", { class: "note" }, chart.note));
      section.append(this.figure);
      this.figure.addEventListener("keydown", (event) => this.key(event));
      this.figure.addEventListener("blur", () => this.leave());
      observer.observe(this.figure);
    }

    colour(index) {
      // By run, if each run has one curve here and perhaps others of another style.
      const all = this.chart.series, series = all[index];
      const lines = new Set(all.filter((s) => s.style === "line").map((s) => s.label));
      const by_run = page.data.runs.length > 1 && series.run != null && lines.size < 2;
      const slot = by_run ? series.run : index;
      return css(`--c${slot % COLOURS}`);
    }

    name(series) {
      const many = page.data.runs.length > 1 && series.run != null;
      const single = this.chart.series.every((s) => s.label === this.chart.series[0].label);
      if (!many) return series.label;
      const run = page.data.runs[series.run].name;
      return single ? run : `${run} · ${series.label}`;
    }

    draw() {
      const { chart } = this, log_x = is_log_x(chart), log_y = is_log_y(chart);
      const plot = Bokeh.Plotting.figure({
        height: chart.id === "loss" ? 300 : 240,
        sizing_mode: "stretch_width",
        toolbar_location: null,
        tools: matchMedia("(pointer: coarse)").matches
          ? [] : [new Bokeh.BoxZoomTool({ dimensions: "width" })],
        x_axis_type: log_x ? "log" : "linear",
        y_axis_type: log_y ? "log" : "linear",
        background_fill_color: null,
        border_fill_color: null,
        outline_line_color: null,
        min_border_left: 56,
        min_border_right: 12,
        min_border_top: 6,
        lod_threshold: null,
      });
      const text = css("--muted"), grid = css("--grid");
      for (const axis of [...plot.xaxes, ...plot.yaxes]) {
        axis.setv({
          axis_line_color: null,
          major_tick_line_color: null,
          minor_tick_line_color: null,
          major_label_text_color: text,
          major_label_text_font_size: "11px",
          major_label_text_font: "system-ui, sans-serif",
          axis_label_text_color: text,
          axis_label_text_font_size: "11px",
          axis_label_text_font: "system-ui, sans-serif",
          axis_label_text_font_style: "normal",
        });
      }
      for (const line of [...plot.xgrids, ...plot.ygrids]) line.grid_line_color = grid;
      for (const line of plot.xgrids) line.grid_line_color = null;
      const [xaxis] = plot.xaxes, [yaxis] = plot.yaxes;
      xaxis.axis_label = x_title(chart);
      if (!log_x) {
        xaxis.ticker.desired_num_ticks = 5;
        const format = view.axis === "tokens" && !chart.axis ? "0.[0]a" : "0,0.[00]";
        xaxis.formatter = new Bokeh.NumeralTickFormatter({ format });
      }
      if (!log_y) {
        yaxis.ticker.desired_num_ticks = 5;
        yaxis.formatter = new Bokeh.BasicTickFormatter({ use_scientific: false });
        if (chart.series.every((s) => s.style === "dots")) yaxis.ticker.min_interval = 1;
        const top = Math.max(...chart.series.flatMap((s) => s.y).filter((y) => y != null).slice(0, 5000));
        if (top >= 10000) yaxis.formatter = new Bokeh.NumeralTickFormatter({ format: "0.[0]a" });
      }
      if (chart.axis && chart.is_log) {
        const shown = chart.series.map((series) => columns(chart, series)).filter(Boolean);
        for (const [axis, name] of [[xaxis, "x"], [yaxis, "y"]]) {
          const values = shown.flatMap((data) => Array.from(data[name])).filter((v) => v > 0);
          axis.ticker = new Bokeh.FixedTicker({ ticks: log_ticks(values, name === "x") });
          axis.formatter = new Bokeh.NumeralTickFormatter({ format: "0,0.[000]" });
        }
        for (const line of plot.ygrids) line.ticker = yaxis.ticker;
      }
      // A curve that stays at one value is drawn in the middle, not in a range of 2 around it.
      const level = Math.abs(last(chart.series[0].y) || 0);
      plot.y_range.default_span = log_y ? 2 : level || 1;
      this.sources = [];
      this.renderers = [];
      chart.series.forEach((series, index) => {
        const data = columns(chart, series), colour = this.colour(index), parts = [];
        if (!data) {
          this.sources.push(null);
          this.renderers.push(parts);
          return;
        }
        const source = new Bokeh.ColumnDataSource({ data });
        const x = { field: "x" };
        if (data.low) {
          parts.push(plot.varea(x, { field: "low" }, { field: "high" },
            { source, fill_color: colour, fill_alpha: 0.22 }));
        }
        if (smooths(chart, series) && series.per_point === 1) {
          parts.push(plot.line(x, { field: "y" },
            { source, line_color: colour, line_alpha: 0.3, line_width: 1 }));
        }
        const dash = { dotted: [2, 4], level: [6, 4], points: [6, 3] }[series.style] || [];
        const dashed = series.style === "points" && !is_dashed(series) ? [] : dash;
        if (series.style !== "dots") {
          parts.push(plot.line(x, { field: "line" },
            { source, line_color: colour, line_width: 2, line_dash: dashed, line_join: "round" }));
        }
        if (["points", "dots"].includes(series.style) || (series.y.length === 1 && series.style !== "level")) {
          parts.push(plot.scatter(x, { field: "y" },
            { source, size: 5, fill_color: colour, line_color: null }));
        }
        for (const part of parts) part.visible = !this.hidden.has(index);
        this.sources.push(source);
        this.renderers.push(parts);
      });
      this.cursor = new Bokeh.Span({
        dimension: "height", location: null, line_color: text, line_width: 1, line_alpha: 0.6,
      });
      plot.add_layout(this.cursor);
      plot.on_event("mousemove", (event) => this.move(event.x));
      plot.on_event("tap", (event) => this.move(event.x));
      plot.on_event("mouseleave", () => this.leave());
      plot.on_event("doubletap", () => this.draw());
      this.plot_box.replaceChildren();
      this.draw_legend();
      this.figure.setAttribute("aria-label", this.words());
      return Bokeh.Plotting.show(plot, this.plot_box).then(() => {
        this.figure.dataset.drawn = String(chart.series.length);
      });
    }

    words() {
      const parts = this.chart.series.map((s) => `${this.name(s)} ${number(last(s.y))}`);
      return `${this.chart.title}: ${parts.join(", ")}. Arrow keys move along the curves.`;
    }

    draw_legend() {
      this.values = [];
      this.legend.replaceChildren(...this.chart.series.map((series, index) => {
        const value = element("span", { class: "value" }, number(last(series.y)));
        this.values.push(value);
        const style = is_dashed(series) ? "dashed" : series.style;
        const swatch = element("i", { class: `swatch ${style}` });
        swatch.style.color = this.colour(index);
        const button = element("button",
          { type: "button", class: "key", "aria-pressed": String(!this.hidden.has(index)) },
          swatch, this.name(series), value);
        button.addEventListener("click", () => {
          const is_shown = this.hidden.delete(index);
          if (!is_shown) this.hidden.add(index);
          button.setAttribute("aria-pressed", String(is_shown));
          for (const part of this.renderers[index] || []) part.visible = is_shown;
        });
        return button;
      }));
    }

    // The values of all curves at the points nearest to x.
    move(x) {
      if (!Number.isFinite(x)) return;
      this.at = x;
      this.cursor.location = x;
      this.where.textContent = `${x_title(this.chart).split(" in ")[0]} ${number(x)}`;
      this.chart.series.forEach((series, index) => {
        const source = this.sources[index];
        if (!source) return;
        this.values[index].textContent = number(source.data.y[nearest(source.data.x, x)]);
      });
    }

    leave() {
      this.at = undefined;
      if (!this.cursor) return;
      this.cursor.location = null;
      this.where.textContent = "";
      this.chart.series.forEach((s, index) => {
        this.values[index].textContent = number(last(s.y));
      });
    }

    key(event) {
      const source = this.sources && this.sources.find((s) => s);
      if (event.target !== this.figure || !source) return;
      const x = source.data.x, end = x.length - 1;
      const index = this.at === undefined ? end : nearest(x, this.at);
      const stride = Math.max(1, Math.round(x.length / 50));
      const to = { ArrowLeft: index - stride, ArrowRight: index + stride, Home: 0, End: end };
      if (event.key === "Escape") this.leave();
      else if (event.key in to) this.move(x[Math.min(end, Math.max(0, to[event.key]))]);
      else return;
      event.preventDefault();
    }

    update(chart) {
      const labels = (c) => c.series.map((s) => `${s.run} ${s.label} ${s.low === null}`).join();
      const is_same = labels(chart) === labels(this.chart);
      this.chart = chart;
      if (!this.sources) return;
      if (!is_same) {
        this.draw();
        return;
      }
      chart.series.forEach((series, index) => {
        if (this.sources[index]) this.sources[index].data = columns(chart, series);
      });
      this.leave();
      this.figure.setAttribute("aria-label", this.words());
    }
  }

  function last(values) {
    for (let i = values.length - 1; i >= 0; i--) if (values[i] != null) return values[i];
    return null;
  }

  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] > x) high = middle;
      else low = middle;
    }
    return Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
  }

  // Charts are drawn when they come near the window, so that many of them delay nothing.
  const observer = new IntersectionObserver(async (entries) => {
    const draws = [];
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      observer.unobserve(entry.target);
      const found = [...page.charts.values()].find((c) => c.figure === entry.target);
      if (found) draws.push(found.draw());
    }
    await Promise.all(draws);
    // Milliseconds from the start of loading until the first charts stood.
    document.documentElement.dataset.ready ||= String(Math.round(performance.now()));
  }, { rootMargin: "800px" });

  addEventListener("beforeprint", () => {
    for (const chart of page.charts.values()) if (!chart.sources) chart.draw();
  });

  function redraw() {
    for (const chart of page.charts.values()) if (chart.sources) chart.draw();
  }

  function place_charts() {
    for (const chart of page.data.charts) {
      const known = page.charts.get(chart.id);
      const section = document.querySelector(`#${CSS.escape(chart.section)} > .charts`);
      if (known) known.update(chart);
      else if (section) page.charts.set(chart.id, new Chart(chart, section));
    }
    const note = document.getElementById("binned");
    if (note) note.hidden = !page.data.is_binned;
  }

  // ---- controls

  function choice(title, options, value, on_change) {
    const group = element("fieldset", { class: "choice" }, element("legend", {}, title));
    for (const [key, text] of options) {
      const input = element("input",
        { type: "radio", name: title, value: key, checked: key === value });
      input.addEventListener("change", () => on_change(key));
      group.append(element("label", {}, input, element("span", {}, text)));
    }
    return group;
  }

  function check(title, key) {
    const input = element("input", { type: "checkbox" });
    input.addEventListener("change", () => {
      view[key] = input.checked;
      redraw();
    });
    return element("label", { class: "check" }, input, title);
  }

  function controls() {
    const box = document.getElementById("controls");
    if (page.data.runs.length) {
      const slider = element("input", {
        type: "range", min: "0", max: "99", value: String(100 * view.smoothing), id: "smoothing",
      });
      const shown = element("output", { for: "smoothing" }, `${100 * view.smoothing}%`);
      slider.addEventListener("input", () => {
        view.smoothing = Number(slider.value) / 100;
        shown.textContent = `${slider.value}%`;
        for (const chart of page.charts.values()) chart.update(chart.chart);
      });
      box.append(
        choice("Against", page.data.axes.map((axis) => [axis, AXES[axis]]), view.axis, (axis) => {
          view.axis = axis;
          redraw();
        }),
        element("label", { class: "slider" }, "Smoothing", slider, shown),
        element("span", { class: "checks" }, check("log x", "log_x"), check("log y", "log_y")));
    }
    box.append(element("span", { class: "live", id: "live", role: "status" }),
      choice("Theme", [["auto", "auto"], ["light", "light"], ["dark", "dark"]], "auto", (theme) => {
        if (theme === "auto") delete document.documentElement.dataset.theme;
        else document.documentElement.dataset.theme = theme;
        redraw();
      }));
    box.hidden = false;
    const curves = document.querySelector("#curves > .body");
    if (curves) {
      curves.append(element("p", { class: "note", id: "binned", hidden: true },
        "Long curves are drawn in bins of consecutive lines: the line is the mean of a bin, the " +
        "band its minimum and maximum."));
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  }

  // ---- live

  function show_sections(sections) {
    for (const [id, section] of Object.entries(sections)) {
      const body = document.querySelector(`#${CSS.escape(id)} > .body`);
      if (!body || body.dataset.html === section.html) continue;
      const open = [...body.querySelectorAll("details")].map((d) => d.open);
      body.dataset.html = section.html;
      const note = body.querySelector("#binned");
      body.innerHTML = section.html; // escaped where it was built; the CSP runs no script of it
      body.querySelectorAll("details").forEach((d, i) => { if (i in open) d.open = open[i]; });
      if (note) body.append(note);
    }
  }

  function listen() {
    const { events, data } = document.body.dataset;
    if (!events) return;
    const status = document.getElementById("live");
    const source = new EventSource(events);
    let is_fetching = false, is_stale = false;
    async function refresh() {
      if (is_fetching) {
        is_stale = true;
        return;
      }
      is_fetching = true;
      try {
        const answer = await fetch(data);
        if (!answer.ok) throw new Error(String(answer.status));
        page.data = await answer.json();
        show_sections(page.data.sections);
        place_charts();
        status.textContent = "live";
        status.dataset.state = "live";
      } catch {
        lost();
      }
      is_fetching = false;
      if (is_stale) {
        is_stale = false;
        refresh();
      }
    }
    function lost() {
      status.textContent = "connection lost";
      status.dataset.state = "lost";
    }
    source.onmessage = refresh;
    source.onopen = () => { status.textContent = "live"; status.dataset.state = "live"; };
    source.onerror = lost;
  }

  controls();
  place_charts();
  listen();
  if (!page.charts.size) document.documentElement.dataset.ready = "0";
})();
