"""What the tables of a report share."""

from lineartime.experiments.report_data import QualityReport, QualitySetting, SystemRow
from lineartime.markdown import markdown_table

NOT_THERE = "-"


def settings_with_results(report: QualityReport) -> list[QualitySetting]:
    """The settings of which anything has run, each with the systems that have."""
    found = [QualitySetting({**setting, "rows": list(filter(_has_begun, setting["rows"]))}) for setting in report["settings"]]
    return [setting for setting in found if setting["rows"]]


def _has_begun(row: SystemRow) -> bool:
    tried = [cell for grid in row["grid"].values() for cell in grid.values()]
    return any(state != "missing" for state in [*tried, *(run["state"] for run in row["runs"])])


def table(columns: dict[str, list[str]], text: int = 1) -> str:
    """A Markdown table without its empty columns; the first `text` columns are on the left, the others on the right."""
    kept = {name: cells for name, cells in columns.items() if any(cell != NOT_THERE for cell in cells)}
    return markdown_table(list(kept), zip(*kept.values(), strict=True), left=text).rstrip("\n")
