"""Reports: charts, and HTML pages that work without a network."""

from hf_retarget.report.chart import Chart, Drawing
from hf_retarget.report.page import render
from hf_retarget.report.report import Report, compose_report
