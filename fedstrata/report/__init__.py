"""The report: charts, tables and the page, made from run folders alone."""

from fedstrata.report.charts import skew_chart
from fedstrata.report.export import write_chart
from fedstrata.report.layer_picture import write_layer_picture
from fedstrata.report.opening import read_runs
from fedstrata.report.page import write_report
from fedstrata.report.paper_figures import FiguresAsked, write_figures
from fedstrata.report.reading import Run, read_run
from fedstrata.report.terminal import rich_table

__all__ = [
    "FiguresAsked",
    "Run",
    "read_run",
    "read_runs",
    "rich_table",
    "skew_chart",
    "write_chart",
    "write_figures",
    "write_layer_picture",
    "write_report",
]
