"""The report as one HTML file without anything external, and the same in Markdown."""

from __future__ import annotations

import hashlib
import html
from base64 import b64encode
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path

from common.batch import meanings, write_whole
from common.commands.report.sections import WORDS, Section, Table, conclusion, conditions, results_table, sections
from common.commands.report.study import Study, read_study
from common.serving import colours
from common.tables import markdown

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src '{hash}'; base-uri 'none';
  form-action 'none'">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style>
</head>
"""
_MEANINGS = ("accuracy", "tpf", "canvas", "effective", "tps", "this_start", "latency_s", "step")
_RESULTS = "Results"


def write_report(results: Path, html_path: Path, markdown_path: Path) -> None:
    """Write both pages of what lies in a folder. Raises ConfigError for a folder without results, and a full disk."""
    study = read_study(results)
    write_whole(html_path, html_page(study))
    write_whole(markdown_path, markdown_page(study))


def html_page(study: Study) -> str:
    """Return the conclusion, a picture for each section that has one, then the table of all points."""
    style = colours() + files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    digest = f"sha256-{b64encode(hashlib.sha256(style.encode()).digest()).decode()}"
    found = sections(study)
    body = [
        f"<h1>{_text(study.title)}</h1>",
        f"<p><strong>{_text(conclusion(study))}</strong></p>",
        *_muted([WORDS, _facts(study), *conditions(study.measured)]),
        *(f'<section class="bad">{_text(sentence)}</section>' for sentence in _problems(study)),
        '<div class="pictures">',
        *(_figure(section) for section in found if not section.absent),
        "</div>",
        *_muted(f"{section.title}: {section.absent}" for section in found if section.absent),
        f"<section><h2>{_RESULTS}</h2>{_table(_RESULTS, results_table(study))}",
        *_muted(meanings(_MEANINGS)),
        "</section>",
    ]
    head = _HEAD.format(hash=digest, title=_text(f"LoPA: {study.title}"), style=style)
    return f"{head}<body>\n<main>\n" + "\n".join(body) + "\n</main>\n</body>\n</html>\n"


def markdown_page(study: Study) -> str:
    """The tables, with their conditions."""
    parts = [f"# {_plain(study.title)}", f"**{_plain(conclusion(study))}**"]
    parts += map(_plain, [WORDS, _facts(study), *conditions(study.measured)])
    parts += [f"**{_plain(text)}**" for text in _problems(study)]
    parts += [f"## {_RESULTS}", markdown(*results_table(study)), *_list(meanings(_MEANINGS))]
    for section in sections(study):
        parts += [f"## {section.title}", _plain(section.meaning)]
        parts += [section.absent] if section.absent else []
        parts += [markdown(*section.table)] if section.table is not None else []
        parts += _list(section.conditions)
    return "\n\n".join(part for part in parts if part) + "\n"


def _facts(study: Study) -> str:
    done, names = len(study.measured), ", ".join(series.name for series in study.series)
    num_benches = len(study.benches)
    benches = f"; {num_benches} bench{'es' if num_benches > 1 else ''}" if num_benches else ""
    return f"{done} of {len(study.points)} points measured{f' ({names})' if len(study.series) > 1 else ''}{benches}"


def _problems(study: Study) -> list[str]:
    """Say what is not as it should be: nothing is left out in silence."""
    failed = [f"{point.number} {point.name}: {point.error}" for point in study.points if point.status == "failed"]
    waiting = [f"{point.number} {point.name}" for point in study.points if point.status in ("waiting", "running")]
    refused = [
        f"{point.number} {point.name}: {found['errors']} of {found['finished'] + found['errors']} requests were refused"
        for point, found in ((point, point.metrics["requests"]) for point in study.points if point.metrics is not None)
        if found["errors"]
    ]
    return [
        *([f"Failed: {'; '.join(failed)}"] if failed else []),
        *([f"Not decoded yet: {', '.join(waiting)}"] if waiting else []),
        *refused,
        *([f"Cannot be read: {', '.join(study.unread)}"] if study.unread else []),
    ]


def _figure(section: Section) -> str:
    title = _text(section.title)
    legend = "".join(f'<li><i class="{style}"></i>{_text(name)}</li>' for style, name in section.legend)
    caption = "".join(f"<p>{_text(line)}</p>" for line in (section.meaning, *section.conditions))
    table = "" if section.table is None else f"<summary>Table: {title}</summary>{_table(section.title, section.table)}"
    return (
        f'<figure><h2>{title}</h2>{section.picture}<ul class="legend">{legend}</ul><figcaption>{caption}</figcaption>'
        f"{table and f'<details>{table}</details>'}</figure>"
    )


def _table(title: str, table: Table) -> str:
    headings, rows = table
    names = {place for place, heading in enumerate(headings) if heading in ("setting", "curve")}

    def cells(kind: str, values: Sequence[str]) -> str:
        tagged = (
            f"<{kind}{' class=name' if place in names else ''}>{_text(value)}</{kind}>"
            for place, value in enumerate(values)
        )
        return f"<tr>{''.join(tagged)}</tr>"

    body = "".join(cells("td", row) for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(title)}">'
        f"<table><thead>{cells('th scope=col', headings)}</thead><tbody>{body}</tbody></table></div>"
    )


def _muted(lines: Iterable[str]) -> list[str]:
    return [f'<p class="muted">{_text(line)}</p>' for line in lines]


def _list(lines: Sequence[str]) -> list[str]:
    return ["\n".join(f"* {_plain(line)}" for line in lines)] if lines else []


def _plain(text: str) -> str:
    """One line, that Markdown takes for text."""
    return " ".join(text.split()).replace("<", "&lt;")


def _text(text: str) -> str:
    return html.escape(text, quote=True)
