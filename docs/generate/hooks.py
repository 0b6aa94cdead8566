"""What the site makes of the code: the methods' pages, their reference, the reproduced tables, formulas."""

import json
import re
import sys
from html import escape, unescape
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent.parent
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
TAG = re.compile(r"\\tag\{(.*?)\}")
PICTURE = re.compile(r"\((?:\.\./)+papers/(\w+)/pictures/([\w-]+)\.png\)")


def on_config(config):
    """Every page under methods/ is listed, whoever wrote it; the papers, which are not installed, are found."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    pages = [f"methods/{path.name}" for path in sorted((ROOT / "docs" / "methods").glob("*.md"))]
    for entry in config["nav"]:
        if "Methods" in entry:
            entry["Methods"] = pages
    return config


def on_page_markdown(markdown, page, config, files):
    """Fill in what is generated."""
    if "<!-- reproduced tables -->" in markdown:
        markdown = markdown.replace("<!-- reproduced tables -->", reproduced())
    if "<!-- methods reference -->" in markdown:
        markdown = markdown.replace("<!-- methods reference -->", methods_reference())
    if "<!-- patient differences -->" in markdown:
        markdown = markdown.replace("<!-- patient differences -->", patient_differences())
    # On GitHub pictures lie beside their papers, on the site beside the pages.
    return PICTURE.sub(
        lambda link: f"({'../' * page.file.src_uri.count('/')}pictures/{link[1]}/{link[2]}.png)", markdown
    )


def on_page_content(html, page, config, files):
    """Formulas as MathML, which browsers show without a script."""
    return FORMULA.sub(lambda match: formula(unescape(match[2]), block=match[1] == "div"), html)


def formula(latex: str, *, block: bool) -> str:
    """One formula; `\\tag{3}` numbers it and makes it a target of links (#eq-3)."""
    from latex2mathml.converter import convert

    tag = TAG.search(latex)
    mathml = convert(TAG.sub("", latex).strip(), display="block" if block else "inline")
    if not block:
        return mathml
    if tag is None:
        return f'<div class="equation">{mathml}</div>'
    link = f'<a class="number" href="#eq-{tag[1]}">({tag[1]})</a>'
    return f'<div class="equation" id="eq-{tag[1]}">{mathml}{link}</div>'


def on_files(files, config):
    """The papers' pictures become part of the site."""
    for path in sorted((ROOT / "papers").glob("*/pictures/*.png")):
        name = f"pictures/{path.parts[-3]}/{path.name}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def methods_reference() -> str:
    """Every method's class once, with the verbs that it has beside `fit` and `build`."""
    import dubito

    more = {dubito.DeepEnsemble: ["from_networks"], dubito.Laplace: ["around"]}
    kinds = dict.fromkeys(type(method) for method in dubito.methods().values())
    parts = []
    for kind in (*kinds, dubito.HMC, dubito.PBP):
        members = more.get(kind) or "false"
        parts.append(f"::: {kind.__module__}.{kind.__name__}\n    options: {{members: {members}}}")
    return "\n\n".join(parts)


def patient_differences() -> str:
    """What papers/rank1/derive.py wrote."""
    found = json.loads((ROOT / "papers" / "rank1" / "derived" / "patients.json").read_text())
    if not found["differences"]:
        return "No two methods have all their runs yet."
    lines = ["| first | second | metric | first − second | 95 % interval |", "|---|---|---|---:|---:|"]
    for one in found["differences"]:
        interval = f"{one['lower']:+.4f} to {one['upper']:+.4f}"
        words = (one["first"], one["second"], one["metric"], f"{one['difference']:+.4f}", interval)
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines)


def reproduced() -> str:
    """Every table that was run, our numbers beside the paper's."""
    from papers.runner import Results, judged, rows, tables

    results = Results()
    parts = []
    for table in tables().values():
        titles = {metric.name: metric.title for metric in table.metrics}
        for scale in table.scales:
            cells = table.experiment.scales[scale].cells
            found = [row for row in rows(table, scale, results, cells) if row.ours is not None]
            if not found:
                continue
            lines = [
                f"## {table.heading(scale)}",
                "",
                f"{table.paper}. The paper's ±: {table.plus_minus}.",
                "",
            ]
            lines += [
                "| data | method | metric | ours | runs | paper | verdict |",
                "|---|---|---|---:|---:|---:|---|",
            ]
            for row in found:
                ours, paper = number(row.ours, row.ours_se), number(row.paper, row.paper_se)
                cell = (row.data, row.method, titles[row.metric], ours, row.n, paper, row.verdict or "")
                lines.append("| " + " | ".join(escape(str(value)) for value in cell) + " |")
            claims = [each for each in judged(table, scale, results, cells) if each.n]
            lines += [""] + [
                f"- {escape(each.claim.text)} ({each.data}): **{each.verdict}**" for each in claims
            ]
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def number(value, error) -> str:
    """A number with its standard error."""
    if value is None:
        return ""
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"
