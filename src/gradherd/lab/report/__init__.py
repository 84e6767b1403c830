"""Reports: records of runs become comparisons, verdicts, an HTML page and the evidence page.

Reads records and results only; nothing here touches a tensor.
"""
