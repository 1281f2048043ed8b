"""The style sheet of the panels, every rule confined to `.wb`.

Colours are JupyterLab's own variables, so that every theme fits; elsewhere VS Code's or plain ones take their place.
"""

from __future__ import annotations

__all__ = ["STATE_COLOURS", "styled"]

_GOOD = "var(--jp-success-color1, #2e7d32)"
_BAD = "var(--jp-error-color1, #d32f2f)"
_WARN = "var(--jp-warn-color1, #c77700)"
_BUSY = "var(--jp-brand-color1, #1976d2)"

STATE_COLOURS = {
    "succeeded": _GOOD,
    "failed": _BAD,
    "lost": _BAD,
    "cancelled": _WARN,
    "queued": "var(--jp-ui-font-color3, #888)",
}
"""The colour of a run's state; any other state is busy."""

_CSS = f"""
.wb {{ --wb-busy: {_BUSY}; --wb-good: {_GOOD}; --wb-bad: {_BAD}; --wb-warn: {_WARN};
  --wb-line: var(--jp-border-color2, #8884); --wb-soft: var(--jp-layout-color2, #8881);
  --wb-quiet: var(--jp-ui-font-color2, var(--vscode-descriptionForeground, #777));
  color: var(--jp-ui-font-color1, var(--vscode-editor-foreground, inherit));
  font-family: var(--jp-ui-font-family, sans-serif); font-size: 13px; line-height: 1.45;
  max-width: 1100px; overflow-wrap: anywhere; }}
.wb * {{ box-sizing: border-box; }}
.wb.wb-full {{ max-width: none; }}
.wb-head {{ display: flex; flex-wrap: wrap; gap: 2px 16px; align-items: baseline; }}
.wb-head b {{ font-weight: 600; }}
.wb-pill {{ color: #fff; background: var(--wb-state); border-radius: 9px; padding: 1px 10px; font-weight: 600; }}
.wb-quiet, .wb-name {{ color: var(--wb-quiet); }}
.wb-bar {{ position: relative; height: 20px; margin: 6px 0 2px; border-radius: 4px; background: var(--wb-soft);
  overflow: hidden; }}
.wb-bar > div {{ height: 100%; background: var(--wb-state); opacity: .55; }}
.wb-bar > span {{ position: absolute; inset: 0; text-align: center; line-height: 20px; font-size: 12px;
  font-variant-numeric: tabular-nums; white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }}
.wb-hint {{ color: var(--wb-warn); font-weight: 600; }}
.wb-figures {{ display: flex; flex-wrap: wrap; gap: 6px 24px; margin: 8px 0 4px; }}
.wb-figures > div {{ min-width: 64px; }}
.wb-figures .wb-name {{ font-size: 11px; }}
.wb-figures .wb-value {{ font-size: 15px; font-variant-numeric: tabular-nums; }}
.wb-plots {{ display: flex; flex-wrap: wrap; gap: 4px 20px; }}
.wb-plots > div {{ flex: 1 1 340px; max-width: 540px; min-width: 0; }}
.wb-plots > div:empty {{ display: none; }}
.wb-plots .wb-name {{ font-size: 11px; }}
.wb svg.wb-plot {{ display: block; width: 100%; height: auto; max-width: none; stroke-linejoin: round; }}
.wb-card {{ border: 1px solid var(--wb-bad); border-left-width: 5px; border-radius: 4px; padding: 8px 12px;
  margin: 8px 0; }}
.wb .wb-card h4 {{ color: var(--wb-bad); font-size: 15px; font-weight: 600; margin: 0 0 2px;
  padding: 0; }}
.wb-said {{ font-family: var(--jp-code-font-family, monospace); margin: 6px 0; white-space: pre-wrap; }}
.wb-sizes span {{ margin-right: 16px; }}
.wb ol {{ margin: 2px 0 6px; padding-left: 24px; }}
.wb ul {{ margin: 2px 0; padding-left: 18px; }}
.wb-receipt {{ border: 1px solid var(--wb-line); border-left: 5px solid var(--wb-state); border-radius: 4px;
  padding: 6px 12px; margin: 8px 0; }}
.wb details {{ margin: 4px 0; }}
.wb-more {{ display: flex; flex-wrap: wrap; gap: 0 20px; }}
.wb-more > details[open] {{ flex: 1 1 100%; }}
.wb summary {{ cursor: pointer; color: var(--wb-quiet); }}
.wb.wb pre {{ font-family: var(--jp-code-font-family, monospace); font-size: 12px; line-height: 1.4; margin: 2px 0;
  padding: 6px 8px; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 300px; overflow-y: auto;
  background: var(--wb-soft); color: inherit; border-radius: 4px; }}
.wb-log {{ display: flex; flex-direction: column-reverse; max-height: 300px; overflow-y: auto; }}
.wb.wb .wb-log pre {{ max-height: none; overflow: visible; flex: none; }}
.wb-wide {{ overflow-x: auto; margin: 4px 0 8px; }}
.wb.wb .wb-checks {{ border-collapse: separate; border-spacing: 0; margin: 0; table-layout: auto; font-size: 13px; }}
.wb-checks caption {{ caption-side: top; text-align: left; font-weight: 600; padding: 2px 0 6px; color: inherit;
  white-space: nowrap; }}
.wb.wb .wb-checks :is(th, td) {{ text-align: left; vertical-align: top; padding: 3px 14px 3px 6px; white-space: nowrap;
  border-bottom: 1px solid var(--wb-line); max-width: none; }}
.wb.wb .wb-checks tr, .wb.wb .wb-checks tr:hover {{ background: none; }}
.wb.wb .wb-checks :is(th, td):first-child {{ position: sticky; left: 0; color: var(--wb-quiet); font-weight: 400;
  background: var(--jp-layout-color0, var(--vscode-editor-background, Canvas)); }}
.wb-checks th span {{ display: block; color: var(--wb-quiet); font-weight: 400; font-size: 11px; }}
.wb-unknown {{ color: var(--wb-quiet); }}
.wb-good i {{ color: var(--wb-good); }}
.wb-warning, .wb-bad {{ font-weight: 600; }}
.wb-warning {{ color: var(--wb-warn); }}
.wb-bad {{ color: var(--wb-bad); }}
.wb-checks i, .wb-todo i {{ font-style: normal; display: inline-block; width: 1.1em; font-weight: 600; }}
.wb-todo {{ border: 1px solid var(--wb-line); border-left: 5px solid var(--wb-todo); border-radius: 4px;
  padding: 2px 12px; margin: 8px 0; }}
.wb-todo > div {{ padding: 5px 0 5px 1.1em; text-indent: -1.1em; }}
.wb-todo > div + div {{ border-top: 1px solid var(--wb-line); }}
.wb-todo > div > div, .wb-todo i {{ text-indent: 0; }}
.wb-who {{ display: inline-block; min-width: 3.2em; padding-right: 10px; color: var(--wb-busy); user-select: none; }}
"""


def styled(content: str, state: str = "", *, full: bool = False) -> str:
    """Put HTML into the frame that the style sheet speaks of, the sheet with it."""
    return f"<style>{_CSS}</style>{framed(content, state, full=full)}"


def framed(content: str, state: str = "", *, full: bool = False) -> str:
    """Do the same without the sheet, for a page that has it."""
    colour = STATE_COLOURS.get(state, _BUSY)
    return f'<div class="wb{" wb-full" if full else ""}" style="--wb-state: {colour}">{content}</div>'
