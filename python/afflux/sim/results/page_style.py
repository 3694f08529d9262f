"""The style sheet of report.html."""

STYLE = """
:root {
  color-scheme: light dark;
  --back: #ffffff; --text: #1c2024; --soft: #5a636c; --rule: #dfe3e7; --panel: #f5f7f9;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b8538d; --c4: #b57d00; --c5: #2c8fc9; --c6: #1c2024;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #15181b; --text: #e6e9ec; --soft: #a0a9b2; --rule: #343a40; --panel: #1e2226;
    --c0: #4ba3e3; --c1: #f0803c; --c2: #2fc79b; --c3: #e08fbd; --c4: #e9b949; --c5: #8ccaf2; --c6: #e6e9ec;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 16px; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.5rem; margin: .5rem 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--rule); }
p { margin: .4rem 0 .8rem; max-width: 75ch; }
.soft, figcaption .unit, .legend { color: var(--soft); }
.scroll { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--rule); text-align: right; vertical-align: top; }
td { white-space: nowrap; }
thead th { border-bottom: 2px solid var(--rule); vertical-align: bottom; overflow-wrap: anywhere; min-width: 5.5rem; }
th:first-child { position: sticky; left: 0; background: var(--back); }
tbody th { text-align: left; font-weight: 500; min-width: 11rem; }
table.text tbody th { min-width: 6rem; }
thead th:first-child { text-align: left; }
table.text td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
table.text thead th { text-align: left; }
code { font: .85em/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 12px; }
figure { margin: 0; padding: 10px; background: var(--panel); border-radius: 6px; max-width: 500px; }
figcaption { font-weight: 600; font-size: .9rem; margin-bottom: 2px; }
figcaption .unit { display: block; font-weight: 400; font-size: .8rem; }
svg.chart { display: block; width: 100%; height: auto; }
svg text { font-size: 12.5px; fill: var(--soft); }
svg .grid { stroke: var(--rule); stroke-width: .7; }
svg .axis { stroke: var(--soft); stroke-width: 1; }
svg .level { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 3; }
svg .line { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; }
svg .band { fill: var(--c); opacity: .16; }
svg .bar, svg .dot { fill: var(--c); }
svg .zero { stroke: var(--soft); stroke-dasharray: 2 2; }
svg .whisker { stroke: var(--c0); stroke-width: 2; }
svg .mean { fill: var(--c0); }
svg.interval { vertical-align: middle; }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.c4 { --c: var(--c4); } .c5 { --c: var(--c5); } .c6 { --c: var(--c6); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: .4rem 0 .8rem; padding: 0; list-style: none;
  font-size: .9rem; }
.legend li { overflow-wrap: anywhere; }
.legend svg { vertical-align: middle; margin-right: .35rem; }
@media (max-width: 600px) {
  body { padding: 10px; font-size: 14px; }
  th, td { padding: .3rem .45rem; }
  tbody th { min-width: 7.5rem; overflow-wrap: anywhere; }
  .legend { gap: .1rem .9rem; }
}
@media print { body { max-width: none; } figure { break-inside: avoid; } }
"""
