"""The HTML page of one or two runs: one file that loads nothing from anywhere."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from lrmoe.errors import ConfigError, require_extra
from lrmoe.report.data import Run
from lrmoe.report.heat import controls
from lrmoe.report.sections import Section, sections_of
from lrmoe.report.words import verdict

_BREAK = re.compile(r"(?<=[A-Za-z0-9])[_./](?=[A-Za-z_])")  # where the name of a figure may break on a phone
_JOINED = re.compile(
    r"[-+]?\d[\d.,]*%?(?: (?:s|ms|[KMGT]?i?B)\b)?(?: \+- \d[\d.,e-]*%?)?"
)  # a number, its unit, its error
__all__ = ["check_installed", "render", "verdict", "write"]


def check_installed() -> None:
    """Raise MissingExtraError now if a page could not be rendered later."""
    require_extra("jinja2", "report")
    require_extra("plotly.offline", "report")


def render(runs: Sequence[Run]) -> str:
    """The page of one run, or of two side by side.

    Raises:
        ConfigError: no run, more than two, or two that cannot stand side by side.
        MissingExtraError: jinja2 or plotly is not installed.
    """
    if not 1 <= len(runs) <= 2:
        raise ConfigError(f"runs: {len(runs)} given; a report shows one or two")
    jinja2, plotly = require_extra("jinja2", "report"), require_extra("plotly.offline", "report")
    env = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    sections = sections_of(runs)
    env.filters["breakable"] = lambda text: env.filters["safe"](_BREAK.sub(r"\g<0><wbr>", html.escape(text)))
    env.filters["joined"] = lambda text: env.filters["safe"](_JOINED.sub(_whole, html.escape(text)))
    # Markup is text of this package or escaped by _script_json; everything that a run names goes through autoescape.
    return str(
        env.from_string(_asset("report.html.j2")).render(
            title=" and ".join(section.title for section in sections),
            sections=sections,
            controls=controls,
            css=env.filters["safe"](_asset("report.css")),
            js=env.filters["safe"](_asset("report.js")),
            plotly=env.filters["safe"](plotly.get_plotlyjs()),
            plots_json=env.filters["safe"](_script_json(_drawn(sections))),
        )
    )


def _whole(found: re.Match[str]) -> str:
    return f'<span class="whole">{found[0]}</span>' if " " in found[0] else found[0]


def write(runs: Sequence[Run], path: Path) -> Path:
    """Render the page and write it to `path`."""
    path.write_text(render(runs), encoding="utf-8")
    return path


def _asset(name: str) -> str:
    return (resources.files("lrmoe.report") / "templates" / name).read_text(encoding="utf-8")


def _drawn(sections: Sequence[Section]) -> dict[str, Any]:
    return {
        f"{section.anchor}-{plot.name}": {
            "data": list(plot.traces),
            "layout": dict(plot.layout),
            **({} if plot.frames is None else {"frames": dict(plot.frames)}),
        }
        for section in sections
        for plot in section.plots
    }


def _script_json(value: Any) -> str:
    """JSON that may stand inside a script element: no "<", ">" or "&", and null where a number is not finite.

    Eight digits of a number are more than a plot can show.
    """
    text = json.dumps(_finite(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.8g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
