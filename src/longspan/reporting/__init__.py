"""One HTML page that shows runs, and results of `plan`, `bench` and `drill`."""

from longspan.reporting.data import ResultData, RunData, read_input, read_run
from longspan.reporting.page import Live, page_data, render

__all__ = ["Live", "ResultData", "RunData", "page_data", "read_input", "read_run", "render"]
