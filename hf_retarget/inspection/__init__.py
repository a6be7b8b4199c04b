"""Inspection of a permutation graph, as a table, a picture, a page or JSON."""

from hf_retarget.inspection.picture import draw_fit, draw_page, draw_picture
from hf_retarget.inspection.summary import Summary, print_summary, summarise
