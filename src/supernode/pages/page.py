"""What does a report look like? The frame of the page and its style sheet, light and dark."""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
"""To be filled with `title`, `style` and `body`; the policy keeps the page from loading or running anything."""

# Series and parts: Paul Tol's "bright" scheme, told apart with any colour vision.
STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1a1a1a; --faint: #667; --rule: #dde;
  --c1: #3b6ea5; --c2: #a8326f; --c3: #8a7a12; --c4: #1f7a33; --c5: #b5433f; --c6: #7a7f87; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --ink: #e8e8ea; --faint: #a0a4ad; --rule: #343842;
  --c1: #7fb2e5; --c2: #e58abb; --c3: #d6c65a; --c4: #74c784; --c5: #f0908b; --c6: #a3a8b1; } }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 880px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { margin: 0; font-size: 26px; overflow-wrap: anywhere; }
h2 { margin: 40px 0 12px; font-size: 18px; }
header p { margin: 4px 0; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); gap: 12px 20px; margin: 20px 0 0; }
dt, figcaption, summary { color: var(--faint); font-size: 13px; }
dd { margin: 0; font-size: 19px; font-variant-numeric: tabular-nums; }
figure { margin: 0; }
svg { display: block; width: 100%; height: auto; font-size: 12px; fill: var(--ink); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: 12px 0; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top;
  overflow-wrap: anywhere; }
th { color: var(--faint); font-weight: 500; font-size: 13px; }
pre { padding: 12px; border: 1px solid var(--rule); overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
.grid { stroke: var(--rule); fill: none; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.s1 { stroke: var(--c1); }
.s2 { stroke: var(--c2); stroke-dasharray: 7 4; }
circle.s2 { fill: var(--c2); stroke: none; }
.level { stroke: var(--c6); stroke-width: 1.6; stroke-dasharray: 2 4; fill: none; }
.mark { stroke: var(--c5); stroke-dasharray: 3 3; fill: none; }
.flag { fill: var(--c5); }
.hollow { fill: none; stroke: var(--c1); stroke-width: 1.5; }
.solid { fill: var(--c1); }
.part { stroke: var(--paper); stroke-width: 1.5; }
.p1 { fill: var(--c1); } .p2 { fill: var(--c5); } .p3 { fill: var(--c3); }
.p4 { fill: var(--c4); } .p5 { fill: var(--c2); } .p6 { fill: var(--c6); }
.on { fill: var(--paper); font-weight: 600; }
"""
