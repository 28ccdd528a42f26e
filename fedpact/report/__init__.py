"""What people look at: plots, tables, the HTML report of finished runs, and the progress bar of a running one."""

from fedpact.report.html import Claim, write_report
from fedpact.report.metrics import held_out_text, summary_table
from fedpact.report.plots import boxes, curves, lines_over, panels
from fedpact.report.progress import Progress
from fedpact.report.tables import format_value, html_table, text_table
from fedpact.report.view import HistoryView, RunView

__all__ = [
    "Claim",
    "HistoryView",
    "Progress",
    "RunView",
    "boxes",
    "curves",
    "format_value",
    "held_out_text",
    "html_table",
    "lines_over",
    "panels",
    "summary_table",
    "text_table",
    "write_report",
]
