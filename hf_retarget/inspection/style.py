"""Colours and style sheets of the picture and the page, for light and dark screens."""

from __future__ import annotations

from hf_retarget.inspection.roles import Role

_LIGHT = {
    "bg": "#ffffff", "band": "#f6f7f9", "text": "#1f2430", "muted": "#6b7280", "line": "#9aa3b2", "pin": "#8b93a1",
    "stream0": "#2563eb", "stream1": "#0891b2", "stream2": "#4f46e5", "stream3": "#0f766e",
    "inner0": "#ea580c", "inner1": "#b7791f", "inner2": "#c2410c", "inner3": "#a16207",
    "segment0": "#15803d", "segment1": "#4d7c0f", "segment2": "#059669", "segment3": "#65a30d",
    "head0": "#6d28d9", "head1": "#a855f7", "head2": "#d946ef", "head3": "#8b5cf6",
    "gain0": "#94a3b8", "gain1": "#f59e0b", "gain2": "#ea580c", "gain3": "#c026d3", "gain4": "#4f46e5",
    "box": "#f3ecff", "warn": "#c81e1e",
}  # fmt: skip
_DARK = {
    "bg": "#14171c", "band": "#1a1e25", "text": "#e6e9ef", "muted": "#939cab", "line": "#667085", "pin": "#7d8694",
    "stream0": "#60a5fa", "stream1": "#22d3ee", "stream2": "#818cf8", "stream3": "#2dd4bf",
    "inner0": "#fb923c", "inner1": "#eab308", "inner2": "#f97316", "inner3": "#facc15",
    "segment0": "#4ade80", "segment1": "#a3e635", "segment2": "#34d399", "segment3": "#84cc16",
    "head0": "#a78bfa", "head1": "#c084fc", "head2": "#e879f9", "head3": "#8b7bf0",
    "gain0": "#64748b", "gain1": "#b45309", "gain2": "#fb923c", "gain3": "#e879f9", "gain4": "#a5b4fc",
    "box": "#271f3a", "warn": "#f87171",
}  # fmt: skip

_SHADES = 4
_FAMILY = {Role.STREAM: "stream", Role.INNER: "inner", Role.SEGMENT: "segment"}


def colour(role: Role, shade: int) -> str:
    """The CSS colour of a group: blue for streams, warm for inner groups, green for segments, violet for heads.

    Example:
        >>> colour(Role.STREAM, 5)
        'var(--stream1)'
    """
    return f"var(--{_FAMILY.get(role, 'head')}{shade % _SHADES})"


def gain_colour(gain: float | None) -> str:
    """The CSS colour of a gain between 0 and 1: four steps, and gray for none.

    Example:
        >>> gain_colour(None), gain_colour(0.05), gain_colour(0.9)
        ('var(--gain0)', 'var(--gain1)', 'var(--gain4)')
    """
    return f"var(--gain{0 if gain is None else 1 + sum(gain >= limit for limit in GAINS)})"


GAINS = (0.1, 0.25, 0.5)
"""Where one colour of a gain ends and the next begins."""


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


COLOURS = f"""
:root {{ color-scheme: light dark; {_variables(_LIGHT)} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(_DARK)} }} }}
"""

PICTURE = """
.graph { background: var(--bg); font: 12px/1 ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace; }
.graph text { fill: var(--text); dominant-baseline: central; }
.graph .title { font: 600 18px system-ui, sans-serif; }
.graph .words { font: 13px system-ui, sans-serif; }
.graph .head { font: 600 11px system-ui, sans-serif; fill: var(--muted); letter-spacing: .04em; }
.graph .muted { fill: var(--muted); }
.graph .small { font-size: 10.5px; }
.graph .band { fill: var(--band); }
.graph .back { fill: var(--bg); }
.graph .box { fill: var(--box); stroke: var(--head1); stroke-opacity: .45; }
.graph .lead { stroke: var(--line); stroke-width: 1.4; fill: none; }
.graph .tip { fill: var(--line); }
.graph .halo { stroke: var(--bg); fill: none; }
.graph .halo.boxed { stroke: var(--box); }
.graph .reach { stroke: transparent; stroke-width: 13; fill: none; }
.graph .lane { stroke: var(--c); fill: none; stroke-linecap: round; }
.graph .write, .graph .touch { fill: var(--c); }
.graph .read { fill: var(--bg); stroke: var(--c); stroke-width: 2.2; }
.graph .loop { fill: none; stroke: var(--c); stroke-width: 1.6; }
.graph .chip { fill: var(--c); fill-opacity: .14; stroke: var(--c); stroke-opacity: .55; }
.graph .pin { fill: var(--pin); }
.graph .pin.warn { fill: var(--warn); }
.graph .group, .graph .row text, .graph .start, .graph .leads { transition: opacity .12s; }
.graph .group:hover .lane { filter: brightness(1.15) saturate(1.4); }
"""

PAGE = """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem clamp(.8rem, 3vw, 2.5rem) 4rem; max-width: 74rem; background: var(--bg);
  color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p { max-width: 70ch; margin: .4rem 0; }
.muted, footer { color: var(--muted); }
.facts { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0; padding: 0; list-style: none; }
.facts li { background: var(--band); border-radius: .6rem; padding: .5rem .9rem; }
.facts b { display: block; font-size: 1.25rem; }
.legend { list-style: none; margin: .6rem 0; padding: 0; font-size: .93rem; }
.legend li { display: flex; gap: .8rem; align-items: center; margin: .15rem 0; }
.legend svg { flex: none; }
.wide { overflow-x: auto; border: 1px solid color-mix(in srgb, var(--line) 40%, transparent); border-radius: .6rem; }
.wide > svg { display: block; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th { text-align: left; color: var(--muted); font-weight: 600; white-space: nowrap; }
th, td { padding: .35rem .8rem; vertical-align: top; border-top: 1px solid var(--band); }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.name { font: .82rem/1.8 ui-monospace, Menlo, "DejaVu Sans Mono", monospace; white-space: nowrap; }
footer { margin-top: 2.5rem; }
td details div { font: .78rem ui-monospace, Menlo, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.swatch { display: inline-block; width: .75em; height: .75em; margin-right: .5em; border-radius: 50%;
  background: var(--c); }
.warn { color: var(--warn); }
tr[data-g] { cursor: pointer; }
tr.hit td { background: var(--band); }
.picking .graph .group:not(.hit), .picking .graph .start:not(.hit), .picking .graph .leads:not(.hit) { opacity: .12; }
.picking .graph .row:not(.hit) text { opacity: .3; }
"""

# Hovering shows a group, a click or tap keeps it until the next one.
SCRIPT = """
(() => {
  let kept = null;
  const marked = document.querySelectorAll('[data-g], [data-gs]');
  const show = (group) => {
    document.body.classList.toggle('picking', group !== null);
    for (const node of marked) {
      const own = node.dataset.g ?? node.dataset.gs;
      node.classList.toggle('hit', group !== null && own.split(' ').includes(group));
    }
  };
  const groupOf = (event) => event.target.closest?.('[data-g]')?.dataset.g ?? null;
  document.addEventListener('mouseover', (event) => { const group = groupOf(event); show(group ?? kept); });
  document.addEventListener('click', (event) => {
    if (event.target.closest('summary')) return;
    const group = groupOf(event);
    kept = group === kept ? null : group;
    show(kept);
  });
  document.addEventListener('keydown', (event) => { if (event.key === 'Escape') { kept = null; show(null); } });
})();
"""
