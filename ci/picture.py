"""Used by ci/picture: writes an SVG of a terminal in which the command of the argument has printed the standard input."""
import html
import sys

COLUMNS, WIDTH, HEIGHT, MARGIN = 132, 7.23, 17, 16
STYLE = "text { font: 12px ui-monospace, Menlo, Consolas, monospace; white-space: pre; fill: #d7dce1 } .prompt { fill: #7ee787 }"

lines = [line[:COLUMNS] for line in sys.stdin.read().splitlines()]
width, height = round(COLUMNS * WIDTH) + 2 * MARGIN, (len(lines) + 1) * HEIGHT + 2 * MARGIN
print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">')
print(f"<title>{html.escape(sys.argv[1])}</title><style>{STYLE}</style>")
print(f'<rect width="{width}" height="{height}" rx="8" fill="#14171a"/>')
for row, line in enumerate(["$ " + sys.argv[1], *lines]):
    kind = ' class="prompt"' if row == 0 else ""
    print(f'<text{kind} x="{MARGIN}" y="{MARGIN + 12 + row * HEIGHT}">{html.escape(line)}</text>')
print("</svg>")
